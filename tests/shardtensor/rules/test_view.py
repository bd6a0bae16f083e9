"""Views: reshapes carry cuts of any dim, over one or two mesh axes; what only renames dims moves nothing."""

from __future__ import annotations

from random import Random

import pytest
import torch
import torch.nn.functional as F

from shardtensor.comm import comm_trace
from shardtensor.errors import OpError
from shardtensor.registry import strict
from shardtensor.spec import Cut
from shardtensor.testing import assert_same_as_plain, assert_spec_matches_block, shard

SIZES = [(5, 3), (4, 0), (5, 1, 2), (0, 3, 3)]


def values(*shape, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64).to(dtype)


def compare(ranks, table, x, cuts, mesh, *, free=False):
    """Every function of the table on x, sharded and plain; with ``free``, the forward must not communicate."""

    def check(mesh):
        for name, function in table.items():

            def run(x, function=function):
                with strict(), comm_trace() as trace:
                    result = function(x)
                assert not (free and trace.sent), str(trace)
                return result

            try:
                with strict():
                    assert_same_as_plain(run, [x], mesh, [cuts])
            except Exception as error:
                raise AssertionError(f"{name}, cuts {cuts}: {error}") from error

    ranks.run(check, mesh=mesh)


# Functions of x [B, S, 12] that move nothing, S cut.
FREE = {
    "flatten batch": lambda x: x.flatten(0, 1),
    "flatten batch and back": lambda x: x.flatten(0, 1).unflatten(0, (x.shape[0], x.shape[1])),
    "flat rows through a row-wise op and back": lambda x: x.flatten(0, 1).sin().view(x.shape[0], x.shape[1], 4, 3),
    "merge with channels": lambda x: x.flatten(1, 2),
    "merge all": lambda x: x.reshape(-1),
    "merge all and back": lambda x: x.reshape(-1).view(x.shape),
    "heads": lambda x: x.view(x.shape[0], x.shape[1], 3, 4),
    "heads first": lambda x: x.view(x.shape[0], x.shape[1], 3, 4).transpose(1, 2).flatten(0, 1),
    "heads back": lambda x: x.unflatten(-1, (3, 4)).transpose(1, 2).contiguous().transpose(1, 2).reshape(x.shape),
    "new dims of one": lambda x: x[:, None, :, None].squeeze(3).squeeze(1),
    "unsqueeze": lambda x: x.unsqueeze(0).unsqueeze(-1),
    "squeeze all": lambda x: x.unsqueeze(0).squeeze(),
    "squeeze dims": lambda x: x.unsqueeze(0).unsqueeze(2).squeeze((0, 2)),
    "squeeze a dim that is long": lambda x: x.squeeze(1),
    "permute": lambda x: x.permute(2, 0, 1),
    "movedim": lambda x: x.movedim(1, 0),
    "swapaxes": lambda x: x.swapaxes(0, 2),
    "mT": lambda x: x.mT,
    "t": lambda x: x.flatten(0, 1).t(),
    "expand": lambda x: x.unsqueeze(1).expand(-1, 3, -1, -1),
    "expand in front": lambda x: x.expand(2, *x.shape),
    "broadcast_to": lambda x: x.broadcast_to(2, *x.shape),
    "contiguous": lambda x: x.transpose(1, 2).contiguous(),
    "clone": lambda x: x.transpose(1, 2).clone(),
    "channels last": lambda x: x[None].contiguous(memory_format=torch.channels_last),
    "view_as": lambda x: x.flatten(0, 1).view_as(x),
    "channels first": lambda x: x.transpose(1, 2).reshape(x.shape[0] * x.shape[2], x.shape[1]),
    "detach": lambda x: x + x.detach(),
    "complex": lambda x: torch.view_as_real(torch.view_as_complex(x.unflatten(2, (6, 2))) * 2j),
    "narrow channels, then flatten": lambda x: x[..., 2:5].flatten(0, 1),
    "gaps closed by an op": lambda x: (x[..., ::2] * 2).view(-1, 6),
    "numpy-like": lambda x: x.ravel().view_as(x).moveaxis(0, 2),
    "unflatten batch": lambda x: x.unflatten(0, (1, -1)),
    "diagonal of other dims": lambda x: x[..., :3].unsqueeze(1).expand(-1, 3, -1, -1).diagonal(0, 1, 3),
    "as_strided of itself": lambda x: x.as_strided(x.size(), x.stride()),
}


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("batch", [1, 2])
def test_cut_sequence(ranks, batch, sizes):
    compare(ranks, FREE, values(batch, sum(sizes), 12), {0: (1, sizes)}, (len(sizes),), free=True)


# Functions of x [2, 6, H, W] (torch's images), H or W or both cut.
IMAGES = {
    "pixels": lambda x: x.flatten(2, 3),
    "tokens": lambda x: x.flatten(2).transpose(1, 2),
    "tokens and back": lambda x: x.flatten(2).transpose(1, 2).sin().transpose(1, 2).unflatten(2, x.shape[2:]),
    "merge batch and channels": lambda x: x.view(12, *x.shape[2:]),
    "groups of channels": lambda x: x.view(2, 3, -1),
    "groups and back": lambda x: x.view(2, 3, -1).cos().view(x.shape),
    "pixels first": lambda x: x.permute(0, 2, 3, 1).reshape(-1, 6),
    "all in one": lambda x: x.reshape(-1),
    "batch and rows": lambda x: x.transpose(1, 2).flatten(0, 1),
}


@pytest.mark.parametrize("cut", [(2, (3, 5)), (3, (1, 4)), (2, (5, 0, 3)), (3, (2, 2, 1)), (1, (4, 2)), (0, (1, 1))])
def test_images(ranks, cut):
    compare(ranks, IMAGES, values(2, 6, 8, 5), {0: cut}, (len(cut[1]),), free=True)


@pytest.mark.parametrize("cuts", [((2, (3, 5)), (3, (4, 1))), ((3, (3, 2)), (2, (8, 0))), ((0, (1, 1)), (2, (5, 3)))])
def test_images_cut_twice(ranks, cuts):
    compare(ranks, IMAGES, values(2, 6, 8, 5), dict(enumerate(cuts)), (2, 2), free=True)


# Functions of x [2, 28, 6], whose edges need not fit the new dims: rows move first.
RECUT = {
    "as_strided": lambda x: x.mT.as_strided((3, 5, 4), (60, 6, 7), 5),
    "rows in fours": lambda x: x.view(2, 7, 4, 6),
    "rows in sevens": lambda x: x.unflatten(1, (4, 7)).transpose(1, 2),
    "rows as batch": lambda x: x.view(8, 7, 6),
    "one long dim": lambda x: x.unflatten(1, (2, 14)),
    "across groups": lambda x: x.reshape(3, 112),
    "patches": lambda x: x.view(2, 7, 4, 3, 2).permute(0, 1, 3, 2, 4).flatten(3),
}


@pytest.mark.parametrize("cut", [(1, (13, 15)), (1, (12, 16)), (1, (9, 9, 10)), (1, (27, 1)), (2, (1, 5)), (0, (0, 2))])
def test_edges_that_do_not_fit_move(ranks, cut):
    compare(ranks, RECUT, values(2, 28, 6), {0: cut}, (len(cut[1]),))


def test_cut_goes_to_the_nearest_edge(ranks):
    def check(mesh):
        x = shard(values(2, 28, 6), mesh, {0: (1, (13, 15))})
        assert x.view(2, 7, 4, 6)._spec.layout == (Cut(1, (3, 4)),)
        assert x.flatten(0, 1)._spec.layout == (Cut(0, (13, 15), 2),)
        assert x.flatten(0, 1).view(2, 28, 3, 2)._spec.layout == (Cut(1, (13, 15)),)
        assert x.flatten(1)._spec.layout == (Cut(1, (78, 90)),)

    ranks.run(check, mesh=(2,))


# Dims of length 1 that are cut, and tensors without elements.
THIN = {
    "squeeze a cut dim": lambda x: x.squeeze(1),
    "flatten": lambda x: x.flatten(),
    "flatten and back": lambda x: x.flatten().view(x.shape),
    "expand a cut dim": lambda x: x.expand(-1, 4, -1),
    "flatten behind": lambda x: x.flatten(1),
}


@pytest.mark.parametrize("shape", [(3, 1, 4), (1, 1, 2), (2, 1, 0)])
@pytest.mark.parametrize("sizes", [(1, 0), (0, 1, 0)])
def test_cut_dim_of_length_one(ranks, shape, sizes):
    compare(ranks, THIN, values(*shape), {0: (1, sizes)}, (len(sizes),))


def test_no_rows(ranks):
    table = {name: FREE[name] for name in ("flatten batch", "merge with channels", "heads", "permute", "contiguous")}
    compare(ranks, table, values(2, 0, 12), {0: (1, (0, 0))}, (2,))


def test_expanded_gradients_stay_small(ranks):
    """``sum().backward()`` sends an expanded gradient through the views; no rank may store it whole."""

    def check(mesh):
        x = shard(values(2, 8, 12), mesh, {0: (1, (5, 3))}, requires_grad=True)
        seen = []
        middle = x.flatten(0, 1)
        middle.register_hook(seen.append)
        middle.view(2, 8, 3, 4).transpose(1, 2).mean().backward()
        for grad in (*seen, x.grad):
            assert grad._local_tensor.untyped_storage().nbytes() <= x._local_tensor.numel() * 8
        torch.testing.assert_close(x.grad.full_tensor(), torch.full((2, 8, 12), 1 / 192, dtype=torch.float64))

    ranks.run(check, mesh=(2,))


def test_pending_sums_stay_pending(ranks):
    def check(mesh):
        x = values(8, 6)
        product = shard(x, mesh, {0: (0, (5, 3))}).t() @ shard(x, mesh, {0: (0, (5, 3))})
        with strict(), comm_trace() as trace:
            found = product.view(3, 2, 6).permute(2, 0, 1).unsqueeze(0)[..., 1]
        assert not trace.sent
        torch.testing.assert_close(found.full_tensor(), (x.t() @ x).view(3, 2, 6).permute(2, 0, 1).unsqueeze(0)[..., 1])

    ranks.run(check, mesh=(2,))


def test_layouts_of_one_shape_that_differ(ranks):
    """T15: change shape, stride and dtype of an uneven tensor, one after the other."""

    def chain(x):
        y = x.permute(0, 2, 1).flatten(0, 1).to(torch.bfloat16).to(torch.float64)
        y = torch.cat([y, y * 2], 1).softmax(0)
        return y.unflatten(0, (2, 6))[:, ::2].contiguous().flatten()

    ranks.same_as_plain(chain, values(2, 8, 6), dim=1, sizes=(5, 3))


@pytest.mark.parametrize("sizes", [(4, 3), (3, 0, 4)])
def test_attention_with_tokens_that_do_not_divide(ranks, sizes):
    """T28."""
    attention = torch.nn.MultiheadAttention(12, 3, batch_first=True, dtype=torch.float64)
    inputs = [values(2, 7, 12)] * 3
    ranks.same_as_plain(attention, *inputs, dim=1, sizes=sizes, kwargs={"need_weights": False})
    weight = values(12, 5)
    ranks.same_as_plain(lambda x, w: x @ w, values(2, 7, 12), weight, cuts=[(1, sizes), None])


def test_writing_through_views(ranks):
    def write(x):
        y = x * 1
        y.view(2, 8, 3, 4)[..., 1] = 0
        y.permute(1, 0, 2)[2:4].mul_(3)
        y.flatten(0, 1).add_(1)
        y[:, 5:].unsqueeze(0).sub_(y[:, :3])
        return y

    ranks.same_as_plain(write, values(2, 8, 12), dim=1, sizes=(5, 3))


def test_dims_renamed_in_place(ranks):
    def rename(x):
        y = x * 2
        y.unsqueeze_(-1).transpose_(0, 1)
        y = y.sin()
        y.squeeze_()
        return y.squeeze_(0)

    ranks.same_as_plain(rename, values(2, 8, 12), dim=1, sizes=(5, 3))
    ranks.same_as_plain(lambda x: (2 * x).squeeze_(1), values(2, 1, 12), dim=1, sizes=(1, 0))
    ranks.same_as_plain(lambda x: (2 * x).t_(), values(7, 12), dim=0, sizes=(5, 2))


def test_writing_to_a_view_that_moved_is_refused(ranks):
    def check(mesh):
        x = shard(values(2, 28, 6), mesh, {0: (1, (13, 15))})
        with pytest.raises(OpError, match="in-place write to a view"):
            x.view(2, 7, 4, 6).add_(1)
        with pytest.raises(OpError, match="in-place write to a view"):
            x[:, 3].zero_()
        with pytest.raises(OpError, match="cannot be changed in place"):
            x.resize_(28, 12)
        with pytest.raises(ValueError, match="does not hold"):
            x.view(2, 5, -1)
        x.view(2, 7, 4, 6).clone().add_(1)
        F.relu(x.reshape(2, 7, 4, 6) * 1, inplace=True)

    ranks.run(check, mesh=(2,))


def _random_case(random, axes):
    """A shape, a cut a mesh axis, and another shape of as many elements."""
    primes = [random.choice((1, 2, 2, 3, 3, 4, 5)) for _ in range(random.randint(2, 5))]

    def grouped():
        shape, at = [], 0
        while at < len(primes):
            stop = random.randint(at + 1, len(primes))
            shape.append(torch.Size(primes[at:stop]).numel())
            at = stop
        return shape

    shape = grouped()
    random.shuffle(primes)
    dims = random.sample(range(len(shape)), min(len(axes), len(shape)))
    cuts = {}
    for axis, dim in enumerate(dims):
        edges = sorted(random.randint(0, shape[dim]) for _ in range(axes[axis] - 1))
        cuts[axis] = (dim, tuple(b - a for a, b in zip([0, *edges], [*edges, shape[dim]], strict=True)))
    return shape, cuts, grouped(), grouped()


@pytest.mark.parametrize("axes", [(2,), (3,), (2, 2)])
def test_random_reshapes(ranks, axes):
    """Any reshape of any cut tensor, and a second one of the result: same elements, blocks as the spec says."""

    def check(mesh):
        random = Random(17)
        for _ in range(300):
            shape, cuts, first, second = _random_case(random, axes)
            x = torch.arange(torch.Size(shape).numel()).view(shape)
            with strict():
                y = shard(x, mesh, cuts).reshape(first)
                z = (y + 0).reshape(second)
            for mine, right in ((y, x.reshape(first)), (z, x.reshape(second))):
                assert_spec_matches_block(mine, f"{shape} cut {cuts} -> {first} -> {second}")
                assert torch.equal(mine.full_tensor(), right), (shape, cuts, first, second)

    ranks.run(check, mesh=axes)


@pytest.mark.parametrize("cut", [(1, (5, 3)), (2, (5, 7)), (2, (4, 8))])
def test_views_of_another_dtype(ranks, cut):
    def read(x):
        y = x.detach()
        return y.view(torch.int64), y.view(torch.float32), y.float().view(torch.float64), y.view(torch.complex128).real

    ranks.same_as_plain(read, values(2, 8, 12), cuts=[cut])

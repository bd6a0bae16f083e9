"""Slices, rows by number, masks, element-wise addressing, along cut and uncut dims; no rank holds a whole."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from shardtensor.comm import add_rows, comm_trace, group_of, take_rows
from shardtensor.registry import strict
from shardtensor.spec import Cut
from shardtensor.testing import assert_same_as_plain, shard

SIZES = [(5, 3), (4, 0, 4), (2, 5, 1)]


def values(*shape, seed=3):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def numbers(length, *shape, seed=4):
    return torch.randint(length, shape, generator=torch.Generator().manual_seed(seed))


def compare(ranks, table, x, cuts, mesh, *, free=False):
    """Every (function, other input) of the table on x, sharded and plain; ``free``: the forward sends nothing."""

    def check(mesh):
        for name, row in table.items():
            function, other = row if isinstance(row, tuple) else (lambda x, _, function=row: function(x), None)

            def run(x, other, function=function):
                with strict(), comm_trace() as trace:
                    result = function(x, other)
                assert not (free and trace.sent), str(trace)
                return result

            try:
                with strict():
                    assert_same_as_plain(run, [x, other], mesh, [cuts, None])
            except Exception as error:
                raise AssertionError(f"{name}, cuts {cuts}: {error}") from error

    ranks.run(check, mesh=mesh)


FREE = {
    "slice": lambda x: x[:, 1:6],
    "slice with step": lambda x: x[:, 1:7:3],
    "slice to nothing": lambda x: x[:, 5:5],
    "negative": lambda x: x[:, -3:-1],
    "beyond the end": lambda x: x[:, 6:100],
    "batch and channels": lambda x: x[0, :, ::2],
    "ellipsis": lambda x: x[..., None, 1],
    "narrow": lambda x: x.narrow(1, 2, 4),
    "select another dim": lambda x: x.select(2, 1) * x[..., -1],
    "chunk": lambda x: x.chunk(3, 1)[1],
    "split": lambda x: x.split([3, 4, 1], 1)[2],
    "index another dim": (lambda x, i: x[:, :, i], torch.tensor([2, 0, 0])),
    "index_select another dim": (lambda x, i: x.index_select(0, i), torch.tensor([1, 0, 1])),
    "mask another dim": (lambda x, i: x[:, :, i], torch.tensor([True, False, True])),
    "gather another dim": (lambda x, i: x.gather(2, i), numbers(3, 2, 8, 2)),
    "sort another dim": lambda x: x.sort(2)[0],
    "topk another dim": lambda x: x.topk(2, -1)[0],
    "cumsum of another dim": lambda x: x.cumsum(2).cumsum(0),
    "flip of another dim": lambda x: x.flip(0, 2),
    "roll of another dim": lambda x: x.roll((1, 2), (0, 2)),
    "triangles": lambda x: x.tril(-1) + x.mT.triu(1).mT,
    "repeat": lambda x: x.repeat(2, 3, 1),
    "tile": lambda x: x.tile(2, 1, 1, 2),
    "repeat_interleave": lambda x: x.repeat_interleave(2, 1),
    "bucketize": (lambda x, i: torch.bucketize(x.detach(), i), torch.tensor([-0.5, 0.0, 0.5], dtype=torch.float64)),
    "isin": (lambda x, i: torch.isin((x.detach() * 2).long(), i), torch.tensor([0, 1])),
    "windows of another dim": lambda x: x.unfold(2, 2, 1),
    "select_scatter": (lambda x, y: x.select_scatter(y, 2, 1), values(2, 8)),
    "slice_scatter": (lambda x, y: x.slice_scatter(y, 1, 2, 6), values(2, 4, 3)),
    "new_zeros": lambda x: x.new_zeros(2, 8, 5) + x.new_full((2, 8, 5), 3.0) * x.new_ones(8, 1) + x[..., :1],
    "zeros_like": lambda x: torch.zeros_like(x) + torch.ones_like(x, memory_format=torch.contiguous_format) * x,
}

ROWS = {
    "select": lambda x: x[:, 3] * x[:, 4],
    "select the last": lambda x: x[0, -1],
    "neighbours": lambda x: x[:, 1:6] - x[:, 2:7],
    "index_select": (lambda x, i: x.index_select(1, i), numbers(8, 9)),
    "index": (lambda x, i: x[:, i], numbers(8, 9)),
    "index of two dims": (lambda x, i: x[:, i - 4], numbers(8, 3, 3)),
    "index and select": (lambda x, i: x[1, i], numbers(8, 9)),
    "index 0-dim": (lambda x, i: x[:, i], torch.tensor(3)),
    "few": (lambda x, i: x[:, i], torch.tensor([6])),
    "none": (lambda x, i: x[:, i], torch.tensor([], dtype=torch.long)),
    "pairs": (lambda x, i: x[i % 2, i], numbers(8, 9)),
    "pairs around a dim": (lambda x, i: x[i % 2, :, i % 3], numbers(8, 9)),
    "pairs behind": (lambda x, i: x[:, i, i % 3], numbers(8, 9)),
    "outer pairs": (lambda x, i: x[:, i[:, None], i[None] % 3], numbers(8, 4)),
    "mask of all dims": lambda x: x[x > 0],
    "mask of rows": (lambda x, m: x[:, m], values(8) > 0),
    "mask of the last dims": (lambda x, m: x[:, m], values(8, 3) > 0),
    "mask and index": (lambda x, m: x[m, 1:], values(2, 8) > 0),
    "masked_select": (lambda x, m: x.masked_select(m), values(8, 3) > 0),
    "masked_scatter": lambda x: x.masked_scatter(x > 0, x * 2),
    "masked_fill": lambda x: x.masked_fill(x > 0, 2.0),
    "nonzero": lambda x: (x > 0).nonzero(),
    "gather": (lambda x, i: x.gather(1, i), numbers(8, 2, 8, 3)),
    "gather fewer": (lambda x, i: x.gather(1, i), numbers(8, 2, 5, 3)),
    "take_along_dim": lambda x: x.take_along_dim(x.argsort(1), 1) + x.take_along_dim(x.argsort(2), 2),
    "scatter_add": (lambda x, i: torch.zeros_like(x).scatter_add(1, i, x), numbers(8, 2, 8, 3)),
    "scatter_add to another dim": (lambda x, i: x.scatter_add(2, i, x * x), numbers(3, 2, 8, 3)),
    "scatter_add to plain": (
        lambda x, i: torch.zeros(2, 4, 3, dtype=x.dtype).scatter_add(1, i, x),
        numbers(4, 2, 8, 3),
    ),
    "scatter": (lambda x, i: x.scatter(1, i, 5.0), torch.tensor([[[3, 1, 7]], [[0, 1, 2]]])),
    "scatter source": (lambda x, i: x.scatter(1, i, x[:, :1] * 2), torch.tensor([[[3, 1, 7]], [[0, 1, 2]]])),
    "scatter_reduce": (lambda x, i: x.detach().scatter_reduce(1, i, x.detach(), "amax"), numbers(8, 2, 8, 3)),
    "index_add": (lambda x, i: x.index_add(1, i, x), numbers(8, 8)),
    "index_add to another dim": (lambda x, i: x.index_add(2, i, x, alpha=2), torch.tensor([1, 1, 0])),
    "index_put, adding": (lambda x, i: x.index_put((i % 2, i), x[0, :1, 0], accumulate=True), numbers(8, 9)),
    "index_put": (lambda x, i: x.index_put((i % 2, i), x.new_tensor(3.0)), numbers(8, 9)),
    "sort": lambda x: x.sort(1)[0],
    "topk": lambda x: x.topk(2, 1)[0],
    "kthvalue": lambda x: x.kthvalue(2, 2)[0] * x.kthvalue(3, 1)[0].sum(),
    "cumsum": lambda x: x.cumsum(1),
    "cumprod": lambda x: x.cumprod(1),
    "cummax": lambda x: x.cummax(1)[0],
    "logcumsumexp": lambda x: x.logcumsumexp(1),
    "flip": lambda x: x.flip(1),
    "flip all": lambda x: x.flip(0, 1, 2),
    "roll": lambda x: x.roll(3, 1) * x.roll(-13, 1),
    "roll twice": lambda x: x.roll((-3, 1), (1, 2)),
    "roll all": lambda x: x.roll(5),
    "windows": lambda x: x.unfold(1, 3, 1),
    "windows apart": lambda x: x.unfold(1, 2, 3).sin(),
    "one_hot": lambda x: F.one_hot((x * 3).long().abs()),
    "rot90": lambda x: x.rot90(1, (1, 2)) * 2,
    "rot90 back": lambda x: x.rot90(-1, (0, 1)) + x.rot90(6, (1, 0)).rot90(1, (0, 1)),
    "index_fill": (lambda x, i: x.index_fill(1, i, 3.0) * x.index_fill(2, i % 3, 2.0), torch.tensor([1, 7, 3])),
    "index_copy": (lambda x, i: x.index_copy(1, i, x[:, :3] * 2), torch.tensor([1, 7, 3])),
    "take": (lambda x, i: x.take(i), numbers(48, 4, 5)),
    "put": (lambda x, i: x.put(i, x[0, :, 0] * 2), torch.tensor([3, 40, 17, 0, 1, 5, 22, 47])),
    "put, adding": (lambda x, i: x.put(i, x[0, :, 0] * 2, accumulate=True), numbers(48, 8)),
    "searchsorted": (
        lambda x, i: torch.searchsorted(i, x.detach()),
        torch.tensor([-0.5, 0.0, 0.5], dtype=torch.float64),
    ),
    "diagonal": lambda x: x.diagonal(0, 1, 2),
    "unbind": lambda x: x.unbind(1)[3] * x.unbind(0)[1][2],
    "embedding": (lambda x, w: F.embedding((x.detach() * 3).long().abs(), w, padding_idx=2), values(10, 4)),
    "rows of a plain table": (lambda x, w: w[(x.detach() * 3).long().abs()], values(10, 4)),
    "embedding by frequency": (
        lambda x, w: F.embedding((x.detach() > 0).long(), w, scale_grad_by_freq=True),
        values(2, 4),
    ),
}


@pytest.mark.parametrize("sizes", SIZES)
def test_without_exchange(ranks, sizes):
    compare(ranks, FREE, values(2, 8, 3), {0: (1, sizes)}, (len(sizes),), free=True)


@pytest.mark.parametrize("sizes", SIZES)
def test_along_the_cut(ranks, sizes):
    compare(ranks, ROWS, values(2, 8, 3), {0: (1, sizes)}, (len(sizes),))


@pytest.mark.parametrize("cuts", [{0: (1, (5, 3)), 1: (2, (1, 2))}, {0: (0, (1, 1)), 1: (1, (0, 8))}])
def test_cut_twice(ranks, cuts):
    compare(ranks, FREE | ROWS, values(2, 8, 3), cuts, (2, 2))


def test_flattened_rows(ranks):
    """Rows of [B * S, C] with S cut: the layout with an outer factor."""
    table = {name: ROWS[name] for name in ("sort", "cumsum", "flip", "roll", "windows")}
    table = {name: lambda x, f=f: f(x.flatten(0, 1)[None]) for name, f in table.items()}
    table["rows"] = (lambda x, i: x.flatten(0, 1)[i], numbers(16, 9))
    table["slice"] = lambda x: x.flatten(0, 1)[3:12]
    table["mask"] = lambda x: (lambda y: y[y[:, 0] > 0])(x.flatten(0, 1))
    compare(ranks, table, values(2, 8, 3), {0: (1, (5, 3))}, (2,))


def test_searchsorted_in_several_lists(ranks):
    lists = values(2, 8, 3).sort(-1)[0]
    ranks.same_as_plain(
        lambda a, v: torch.searchsorted(a.detach(), v.detach(), right=True), lists, values(2, 8, 4), dim=1, sizes=(5, 3)
    )


def test_assignment(ranks):
    def assign(x, mask, at):
        y = x * 1
        y[mask] = 2.0
        y[:, 2:4] = x[:, 1:3]
        y[:, 5] = 1.0
        y[0] = y[1]
        y[:, -1] = x[:, 0] * 3
        y[1, 2] = x[0, 3]
        y[:, 4, 1:] = x[:, 4, :1]
        y[0, at] = x[1, at]
        y[:, at, 2] += 1
        y[None, ..., 6, :] = 5
        y[..., 0] *= 2
        return y

    inputs = [values(2, 8, 3), values(2, 8, 3) > 0, torch.tensor([1, 7, 3])]
    for sizes in SIZES:
        ranks.same_as_plain(assign, *inputs, cuts=[(1, sizes), None, None])
    ranks.same_as_plain(assign, *inputs, cuts=[(1, (5, 3)), (1, (5, 3)), None])


def test_in_place(ranks):
    def write(x, at, where):
        y = x * 1
        y.index_add_(1, at, x[:, :3])
        y.scatter_add_(1, where, x * 2)
        y.scatter_(2, where[..., :1] % 3, 7.0)
        y.index_put_((at % 2, at), x[0, :1, 0], accumulate=True)
        y.masked_fill_(y > 5, 5.0)
        y.masked_scatter_(y < -1, x * 3)
        y.tril_(3)
        plain = torch.zeros(2, 3, dtype=x.dtype)
        plain += x.detach()[:, 3]
        plain[0] = x.detach()[1, 7]
        return y, plain

    inputs = [values(2, 8, 3), torch.tensor([1, 7, 3]), numbers(8, 2, 8, 3)]
    for sizes in SIZES:
        ranks.same_as_plain(write, *inputs, cuts=[(1, sizes), None, None])


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("parts", [(6, 3, 2), (0, 4, 7)])
def test_index_that_is_cut(ranks, sizes, parts):
    """T19: tensor and index cut differently, numbers repeated, gradients included."""
    parts = parts if len(sizes) == 3 else (parts[0], parts[1] + parts[2])

    def check(mesh):
        x, at = values(2, 8, 3), numbers(8, 11)
        full = x.clone().requires_grad_()
        sharded = shard(x, mesh, {0: (1, sizes)}, requires_grad=True)
        index = shard(at, mesh, {0: (0, parts)})
        for take in (lambda x, i: x.index_select(1, i), lambda x, i: x[:, i]):
            expected, found = take(full, at), take(sharded, index)
            assert found._spec.layout == (Cut(1, parts),)
            torch.testing.assert_close(found.full_tensor(), expected)
            weights = values(2, 11, 3, seed=5)
            for leaf, result in ((full, expected), (sharded, found)):
                leaf.grad = None
                (result * weights).sum().backward()
            torch.testing.assert_close(sharded.grad.full_tensor(), full.grad)

    ranks.run(check, mesh=(len(sizes),))


def test_rows_are_sent_not_tensors(ranks):
    """T19: bytes sent by index_select along the cut dim, forward and backward, are those of the rows asked for."""

    def check(mesh):
        x = shard(values(4000, 16), mesh, {0: (0, (1500, 1000, 1500))}, requires_grad=True)
        at = numbers(4000, 30)
        with comm_trace() as forward:
            rows = x.index_select(0, at)
        with comm_trace() as backward:
            rows.sum().backward()
        limit = 30 * 16 * 8
        assert forward.total_bytes <= limit, str(forward)
        assert backward.total_bytes <= limit + 64, str(backward)
        assert x.grad._spec.layout == x._spec.layout
        return forward.total_bytes, x.grad._local_tensor.untyped_storage().nbytes()

    for sent, held in ranks.run(check, mesh=(3,)):
        assert sent > 0
        assert held <= 1500 * 16 * 8


def test_gradients_of_parts_are_never_whole(ranks):
    """Backward formulas make zeros of the whole shape; they must come out in the tensor's layout."""
    parts = {
        "slice": lambda x, i: x[:, 2:5],
        "slice of another dim": lambda x, i: x[..., 1:],
        "select": lambda x, i: x[:, 6],
        "select of another dim": lambda x, i: x[1],
        "index": lambda x, i: x[:, i],
        "pairs": lambda x, i: x[i % 2, i],
        "gather": lambda x, i: x.gather(1, i.view(1, -1, 1).expand(2, -1, 3)),
        "mask": lambda x, i: x[x > 0],
        "topk": lambda x, i: x.topk(2, 2)[0],
        "windows": lambda x, i: x.unfold(1, 3, 2),
        "written part": lambda x, i: _written(x),
    }

    def check(mesh):
        for name, part in parts.items():
            x = shard(values(2, 8, 3), mesh, {0: (1, (5, 3))}, requires_grad=True)
            y = x * 1
            seen = []
            torch.Tensor.register_hook(y, seen.append)
            part(y, numbers(8, 4)).sum().backward()
            assert x.grad._spec.layout == x._spec.layout, name
            stored = seen[0]._local_tensor.untyped_storage().nbytes()
            # A scatter spills what belongs elsewhere to one more row.
            assert stored <= (x._local_tensor.numel() + 2 * 3) * 8, f"{name}: gradient of {stored} bytes on one rank"

    def _written(x):
        y = x * 1
        y[:, 1:3] = 0
        return y

    ranks.run(check, mesh=(2,))


def test_errors_on_all_ranks(ranks):
    def check(mesh):
        x = shard(values(2, 8, 3), mesh, {0: (1, (5, 3))})
        with pytest.raises(IndexError):
            x[:, 8]
        with pytest.raises(IndexError):
            x.index_select(1, torch.tensor([3, 8]))
        with pytest.raises(IndexError):
            x.index_select(1, shard(torch.tensor([3, 1, 8]), mesh, {0: (0, (2, 1))}))
        with pytest.raises(IndexError):
            x[torch.tensor([0]), torch.tensor([9])]
        with pytest.raises(IndexError):
            x.gather(1, torch.full((2, 1, 3), 8))
        with pytest.raises(RuntimeError, match="one_hot"):
            F.one_hot((x * 0 - 1).long())

    ranks.run(check, mesh=(2,))


@pytest.mark.parametrize("sizes", [(5, 3), (8, 0), (5, 1, 2), (0, 8, 0)])
@pytest.mark.parametrize("shared", [True, False])
def test_rows_exchange_and_its_adjoint(ranks, sizes, shared):
    parts = (4, 0, 5)[: len(sizes)]

    def check(mesh):
        group, rank = group_of(mesh, 0), mesh.get_local_rank()
        whole, at = values(2, 8, 3), numbers(8, sum(parts))
        block = whole.split(sizes, 1)[rank]
        index = at if shared else at.split(parts)[rank]
        rows = take_rows(block, 1, sizes, index, parts, group, shared=shared)
        assert torch.equal(rows, whole[:, at].split(parts, 1)[rank])
        y = values(2, sum(parts), 3, seed=7)
        back = add_rows(y.split(parts, 1)[rank], 1, sizes, index, parts, group, shared=shared)
        expected = torch.zeros_like(whole).index_add_(1, at, y)
        torch.testing.assert_close(back, expected.split(sizes, 1)[rank])
        return (rows * y.split(parts, 1)[rank]).sum().item(), (back * block).sum().item()

    found = ranks.run(check, mesh=(len(sizes),))
    assert abs(sum(left for left, _ in found) - sum(right for _, right in found)) < 1e-10


def test_float32(ranks):
    table = {name: ROWS[name] for name in ("index", "gather", "cumsum", "scatter_add", "roll")}
    compare(ranks, table, values(2, 8, 3).float(), {0: (1, (5, 1, 2))}, (3,))

"""Tensors enter and leave: from_local, to_local, full_tensor, DTensor; ranks that disagree all raise and none hangs."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import DTensor

from shardtensor import LayoutError, RankDisagreementError, Replicate, Shard, ShardTensor, ShardTensorSpec
from shardtensor.spec import Cut, Partial
from shardtensor.tensor import wrap
from shardtensor.testing import assert_close, assert_spec_matches_block, shard

WHOLE = torch.randn(9, 4, 6, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


def chunks(sizes, mesh, dim=0):
    return WHOLE.split(sizes, dim)[mesh.get_local_rank()].clone()


@pytest.mark.parametrize("sizes", [(5, 4), (9, 0), (0, 9), (4, 0, 5), (2, 6, 1)])
def test_infer(ranks, sizes):
    def check(mesh):
        x = ShardTensor.from_local(chunks(sizes, mesh), mesh, [Shard(-3)])
        assert x.shape == WHOLE.shape
        assert x.placements == (Shard(0),)
        assert x.device_mesh == mesh
        assert x._spec.layout == (Cut(0, sizes),)
        assert x.offsets(0) == sum(sizes[: mesh.get_local_rank()])
        assert x.offsets() == [x.offsets(0)]
        assert_close(x.full_tensor(), WHOLE, "values")
        assert_close(x.to_local(), chunks(sizes, mesh), "block")

    ranks.run(check, mesh=(len(sizes),))


def test_infer_on_a_2d_mesh(ranks):
    rows, columns = (5, 4), (1, 5)

    def check(mesh):
        i, j = mesh.get_coordinate()
        local = WHOLE.split(rows, 0)[i].split(columns, 2)[j]
        x = ShardTensor.from_local(local, mesh, [Shard(0), Shard(2)])
        assert x._spec.layout == (Cut(0, rows), Cut(2, columns))
        assert_close(x.full_tensor(), WHOLE, "values")
        assert x.offsets() == [5 * i, j]
        told = {axis: x._spec.sharding_shapes(axis) for axis in (0, 1)}
        again = ShardTensor.from_local(local, mesh, [Shard(0), Shard(2)], sharding_shapes=told)
        assert again._spec == x._spec
        y = ShardTensor.from_local(local, mesh, [Shard(0), Shard(2)])
        one_axis = ShardTensor.from_local(WHOLE.split(columns, 2)[j], mesh, [Replicate(), Shard(2)])
        assert_close((y + one_axis).full_tensor(), WHOLE + WHOLE, "sum of two layouts")

    ranks.run(check, mesh=(2, 2))


def test_chunk_needs_no_communication(ranks):
    def check(mesh):
        sizes = [part.shape[1] for part in WHOLE.chunk(3, 1)]
        local = WHOLE.split([*sizes, *[0] * (3 - len(sizes))], 1)[mesh.get_local_rank()]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("shardtensor.infer.gather_facts", None)
            x = ShardTensor.from_local(local, mesh, [Shard(1)], sharding_shapes="chunk", global_shape=WHOLE.shape)
        assert x._spec.layout == (Cut(1, (2, 2, 0)),)
        assert_close(x.full_tensor(), WHOLE, "values")
        with pytest.raises(LayoutError, match="needs global_shape"):
            ShardTensor.from_local(local, mesh, [Shard(1)], sharding_shapes="chunk")
        with pytest.raises(LayoutError, match=r"torch.chunk of \(9, 9, 6\) gives it \(9, 3, 6\)"):
            ShardTensor.from_local(local, mesh, [Shard(1)], sharding_shapes="chunk", global_shape=(9, 9, 6))

    ranks.run(check, mesh=(3,))


def test_explicit_shapes(ranks):
    def check(mesh):
        local = chunks((2, 0, 7), mesh)
        told = {0: [(2, 4, 6), (0, 4, 6), (7, 4, 6)]}
        x = ShardTensor.from_local(local, mesh, [Shard(0)], sharding_shapes=told)
        assert_close(x.full_tensor(), WHOLE, "values")
        wrong = {0: [(3, 4, 6), (0, 4, 6), (6, 4, 6)]}
        with pytest.raises(RankDisagreementError, match="was told"):
            ShardTensor.from_local(local, mesh, [Shard(0)], sharding_shapes=wrong)
        with pytest.raises(LayoutError, match="mesh axis 1"):
            ShardTensor.from_local(local, mesh, [Shard(0)], sharding_shapes={1: told[0]})

    ranks.run(check, mesh=(3,))


# Every rank calls from_local with what stands at its place; every rank must raise.
DISAGREE = {
    "shapes by hand": (  # T13
        [((4, 2), {0: [(4, 2), (3, 2)]}), ((3, 2), {0: [(3, 2), (4, 2)]})],
        "was told",
    ),
    "one rank is not told": ([((4, 2), {0: [(4, 2), (3, 2)]}), ((4, 2), "infer")], "was told"),
    "another dim": ([((4, 2), "infer"), ((4, 3), "infer")], "do not join"),
    "number of dims": ([((4, 2), "infer"), ((4,), "infer")], "number of dims"),
}


@pytest.mark.parametrize(("said", "message"), DISAGREE.values(), ids=DISAGREE)
def test_ranks_that_disagree_all_raise(ranks, said, message):
    def check(mesh):
        shape, shapes = said[mesh.get_local_rank()]
        with pytest.raises(RankDisagreementError, match=message):
            ShardTensor.from_local(torch.zeros(shape), mesh, [Shard(0)], sharding_shapes=shapes)
        x = ShardTensor.from_local(torch.ones(2), mesh, [Shard(0)])  # the ranks are still in step
        assert x.full_tensor().sum() == 4

    ranks.run(check, mesh=(2,))


def test_dtypes_and_placements_that_disagree(ranks):
    def check(mesh):
        first = mesh.get_local_rank() == 0
        with pytest.raises(RankDisagreementError, match=r"different dtype.*float32.*float64"):
            ShardTensor.from_local(torch.zeros(3, dtype=torch.float32 if first else torch.float64), mesh, [Shard(0)])
        with pytest.raises(RankDisagreementError, match="different placements"):
            ShardTensor.from_local(torch.zeros(3), mesh, [Shard(0)] if first else [Replicate()])
        with pytest.raises(RankDisagreementError, match="do not join"):
            ShardTensor.from_local(torch.zeros(3 if first else 4), mesh, [Replicate()])

    ranks.run(check, mesh=(2,))


def test_arguments_that_mean_nothing(ranks):
    def check(mesh):
        local = torch.zeros(3, 2)
        for placements, message in (
            ([Shard(2)], "a tensor with 2 dims does not have"),
            ([Shard(-3)], "a tensor with 2 dims does not have"),
            ([Shard(0), Shard(1)], "2 placements"),
            ([], "0 placements"),
            (["rows"], "not supported"),
        ):
            with pytest.raises(LayoutError, match=message):
                ShardTensor.from_local(local, mesh, placements)
        with pytest.raises(LayoutError, match="use 'infer', 'chunk'"):
            ShardTensor.from_local(local, mesh, [Shard(0)], sharding_shapes="guess")
        with pytest.raises(LayoutError, match="no device mesh"):
            ShardTensor.from_local(local, None, [Shard(0)])
        with mesh:
            assert ShardTensor.from_local(local, placements=[Shard(0)]).shape == (6, 2)
        assert ShardTensor.from_local(local, mesh).placements == (Replicate(),)

    ranks.run(check, mesh=(2,))


def test_one_dim_along_two_axes_is_refused(ranks):
    def check(mesh):
        with pytest.raises(LayoutError, match="cut one dim along two mesh axes"):
            ShardTensor.from_local(torch.zeros(3, 2), mesh, [Shard(0), Shard(-2)])

    ranks.run(check, mesh=(2, 2))


def test_gradients_flow_back_to_the_block(ranks):
    def check(mesh):
        local = chunks((2, 7), mesh).requires_grad_()
        x = ShardTensor.from_local(local, mesh, [Shard(0)])
        weight = torch.arange(9.0, dtype=torch.float64).view(9, 1, 1)
        # The gradient reaches from_local laid out otherwise, and once as a plain tensor.
        ((x * 3).redistribute(placements=[Shard(2)]).full_tensor() * weight).sum().backward()
        assert type(local.grad) is torch.Tensor
        assert_close(local.grad, (3 * weight).expand(9, 4, 6).split((2, 7))[mesh.get_local_rank()], "gradient")

    ranks.run(check, mesh=(2,))


def test_gradients_of_contributions(ranks):
    def check(mesh):
        for op, scale in (("sum", 1.0), ("avg", 1 / 3)):
            local = torch.full((2,), float(mesh.get_local_rank()), requires_grad=True)
            x = ShardTensor.from_local(local, mesh, [Partial(op)])
            assert x.full_tensor().tolist() == ([3.0, 3.0] if op == "sum" else [1.0, 1.0])
            (x * torch.tensor([2.0, 5.0])).sum().backward()
            assert_close(local.grad, scale * torch.tensor([2.0, 5.0]), op)
        with pytest.raises(LayoutError, match="max"):
            ShardTensor.from_local(torch.ones(2, requires_grad=True), mesh, [Partial("max")])

    ranks.run(check, mesh=(3,))


def test_permuted_blocks_keep_their_order_in_memory(ranks):
    def check(mesh):
        first = mesh.get_local_rank() == 0
        images = torch.randn(2, 3, 8, 5).split((7, 1), 2)[mesh.get_local_rank()]
        x = ShardTensor.from_local(images.contiguous(memory_format=torch.channels_last), mesh, [Shard(2)])
        assert x.is_contiguous(memory_format=torch.channels_last)
        # One rank alone in another order is brought to that of the largest block, and gets its gradient.
        mixed = images if first else images.contiguous(memory_format=torch.channels_last)
        leaf = mixed.detach().clone(memory_format=torch.preserve_format).requires_grad_()
        x = ShardTensor.from_local(leaf, mesh, [Shard(2)])
        assert x.is_contiguous()
        assert x._local_tensor.is_contiguous()
        x.sum().backward()
        assert leaf.grad.shape == images.shape
        sliced = torch.randn(6, 8)[:, ::2]  # with gaps: what the spec says has none
        x = ShardTensor.from_local(sliced, mesh, [Shard(0)])
        assert x._local_tensor.is_contiguous()
        assert_close(x.to_local(), sliced, "values")

    ranks.run(check, mesh=(2,))


def test_to_local_and_its_gradient(ranks):
    def check(mesh):
        rank = mesh.get_local_rank()
        x = shard(WHOLE, mesh, {0: (0, (6, 3))}, requires_grad=True)
        assert x.detach().to_local() is not None
        (x.to_local() * (rank + 1)).sum().backward()
        assert x.grad._spec.layout == x._spec.layout
        expected = torch.cat([torch.ones(6, 4, 6), 2 * torch.ones(3, 4, 6)]).double()
        assert_close(x.grad.full_tensor(), expected, "shards")

        y = shard(WHOLE, mesh, {}, requires_grad=True)
        (y.to_local() * 3).sum().backward()  # the same on all ranks
        assert_close(y.grad.full_tensor(), torch.full_like(WHOLE, 3), "replicated")

        y.grad = None
        (y.to_local(grad_placements=[Partial()]) * (rank + 1)).sum().backward()  # contributions: 1 + 2
        assert y.grad.placements == (Replicate(),)
        assert_close(y.grad.full_tensor(), torch.full_like(WHOLE, 3), "contributions")

        x.grad = None
        x.full_tensor(grad_placements=[Partial()]).mul(rank + 1).sum().backward()
        assert_close(x.grad.full_tensor(), torch.full_like(WHOLE, 3), "full_tensor of contributions")
        assert x.grad._spec.layout == x._spec.layout

        with torch.no_grad():
            assert x.to_local() is x._local_tensor

    ranks.run(check, mesh=(2,))


def test_the_gradient_of_a_gradient_crosses_the_boundary(ranks):
    def check(mesh):
        x = shard(WHOLE, mesh, {0: (0, (6, 3))}, requires_grad=True)
        y = x.redistribute(placements=[Shard(1)]).full_tensor()
        (g,) = torch.autograd.grad((y**3).sum(), x, create_graph=True)
        (g**2).sum().backward()
        assert_close(x.grad.full_tensor(), 36 * WHOLE**3, "d/dx of (3 x^2)^2")

    ranks.run(check, mesh=(2,))


def test_dtensors_come_and_go(ranks):
    def check(mesh):
        x = shard(WHOLE, mesh, {0: (0, (6, 2, 1))}, requires_grad=True)
        d = x.to_dtensor()
        assert isinstance(d, DTensor)
        assert d.placements == (Shard(0),)
        assert d._local_tensor.shape == (3, 4, 6)
        assert torch.equal(d.full_tensor(), WHOLE)
        back = ShardTensor.from_dtensor(d * 2)
        assert_spec_matches_block(back, "from_dtensor")
        assert back._spec.layout == (Cut(0, (3, 3, 3)),)
        (back * WHOLE.sum(0)).sum().backward()
        assert x.grad._spec.layout == x._spec.layout
        assert_close(x.grad.full_tensor(), (2 * WHOLE.sum(0)).expand_as(WHOLE), "gradient")

        leaf = DTensor.from_local(torch.ones(2, 3), mesh, [Replicate()]).requires_grad_()
        (ShardTensor.from_dtensor(leaf) * torch.arange(3.0)).sum().backward()
        assert isinstance(leaf.grad, DTensor)
        assert_close(leaf.grad.full_tensor(), torch.arange(3.0).expand(2, 3), "gradient of a DTensor")

    ranks.run(check, mesh=(3,))


def test_a_dtensor_with_an_empty_shard(ranks):
    def check(mesh):
        from torch.distributed.tensor import distribute_tensor

        d = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])
        x = ShardTensor.from_dtensor(d)
        assert x._spec.layout == (Cut(0, (2, 2, 0)),)
        assert x.full_tensor().tolist() == [0.0, 1.0, 2.0, 3.0]
        assert x.redistribute(placements=[Replicate()]).to_local().shape == (4,)
        assert x.view(2, 2).redistribute(placements=[Shard(1)]).full_tensor().tolist() == [[0.0, 1.0], [2.0, 3.0]]

    ranks.run(check, mesh=(3,))


def test_fewer_rows_than_ranks(ranks):  # T12
    def check(mesh):
        x = shard(torch.arange(4.0), mesh, {})
        y = x.redistribute(placements=[Shard(0)])
        assert y._spec.layout == (Cut(0, (2, 2, 0)),)
        z = shard(torch.arange(8.0).view(4, 2), mesh, {0: (0, (4, 0, 0))}).redistribute(placements=[Shard(1)])
        assert z._spec.layout == (Cut(1, (1, 1, 0)),)
        assert z.full_tensor().flatten().tolist() == list(range(8))

    ranks.run(check, mesh=(3,))


def test_a_promise_of_torch_is_waited_for(ranks):
    def check(mesh):
        import torch.distributed._functional_collectives as fc

        pending = fc.all_reduce(torch.ones(3), "sum", mesh)
        d = DTensor.from_local(torch.ones(3), mesh, [Replicate()], run_check=False)
        d._local_tensor = pending
        x = ShardTensor.from_dtensor(d)
        assert type(x._local_tensor) is torch.Tensor
        assert x.to_local().tolist() == [2.0, 2.0, 2.0]

    ranks.run(check, mesh=(2,))


def test_constructed_by_hand(ranks):
    def check(mesh):
        spec = ShardTensorSpec.of(mesh, (Cut(0, (2, 1)),), (3, 2), torch.float32)
        local = torch.ones(spec.local_shape)
        x = ShardTensor(local, spec, requires_grad=True)
        assert x.requires_grad
        assert x.is_leaf
        (x.redistribute(placements=[Replicate()]) * 2).sum().backward()
        assert x.grad._spec.layout == spec.layout
        assert wrap(local, spec)._spec is spec
        assert wrap(local.double(), spec).dtype == torch.float64

    ranks.run(check, mesh=(2,))

"""From every layout to every other, forward and backward, on uneven and empty blocks, against rows picked by hand."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from shardtensor import LayoutError, Replicate, Shard, ShardTensorSpec, comm_trace
from shardtensor.redistribute import redistribute_local
from shardtensor.spec import Cut, Partial, replicate
from shardtensor.tensor import wrap
from shardtensor.testing import assert_close, assert_spec_matches_block, shard

SHAPE = (12, 7, 6)


def block_of(whole, layout, at):
    """The block of the rank at coordinate ``at``, straight from the definition of a cut."""
    for dim, length in enumerate(whole.shape):
        rows = range(length)
        for axis, entry in enumerate(layout):
            if isinstance(entry, Cut) and entry.dim == dim:
                start = sum(entry.sizes[: at[axis]])
                inside = range(start, start + entry.sizes[at[axis]])
                rows = [row for row in rows if row % sum(entry.sizes) in inside]
        whole = whole.index_select(dim, torch.tensor(list(rows), dtype=torch.int64))
    return whole


REDUCE = {
    "sum": lambda parts: parts.sum(0),
    "avg": lambda parts: parts.mean(0),
    "max": lambda parts: parts.amax(0),
    "min": lambda parts: parts.amin(0),
    "product": lambda parts: parts.prod(0),
}


def contributions(layout, mesh_shape):
    """What every rank contributes where reductions are pending, whole over the cuts, by coordinate; and the result."""
    generator = torch.Generator().manual_seed(3)
    parts = torch.randn((*mesh_shape, *SHAPE), generator=generator, dtype=torch.float64)
    for axis, entry in enumerate(layout):
        if not isinstance(entry, Partial):  # the same on all ranks of this axis
            parts = parts.select(axis, 0).unsqueeze(axis).expand_as(parts)
    whole = parts
    for entry in layout:
        whole = REDUCE[entry.reduce_op](whole) if isinstance(entry, Partial) else whole[0]
    return parts, whole


def check_pairs(mesh, layouts):
    """Every pair of layouts: values, and the gradient, which goes back in the first layout."""
    at = tuple(mesh.get_coordinate())
    cotangent = torch.randn(SHAPE, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    for have, want in product(layouts, layouts):
        name = f"{have} -> {want}"
        parts, whole = contributions(have, tuple(mesh.shape))
        spec = ShardTensorSpec.of(mesh, have, SHAPE, torch.float64)
        x = wrap(block_of(parts[at], have, at), spec)
        moved = redistribute_local(x._local_tensor, spec, want)
        pending = [axis for axis, entry in enumerate(want) if isinstance(entry, Partial)]
        if pending:  # no single right contribution: what they reduce to must be right
            total = redistribute_local(moved, spec.with_layout(want), replicate(mesh.ndim))
            assert_close(total, whole, name, 1e-12)
            continue
        assert_close(moved, block_of(whole, want, at), name, 1e-12)
        x.requires_grad_()
        y = x._with_layout(want)
        assert_spec_matches_block(y, name)
        assert y._spec.layout == want
        (y * shard_like(cotangent, y)).sum().backward()
        assert x.grad._spec.layout == spec.resolved_layout, name
        assert_close(x.grad._local_tensor, block_of(cotangent, spec.resolved_layout, at), f"gradient of {name}", 1e-12)


def shard_like(whole, tensor):
    spec = tensor._spec
    return wrap(block_of(whole, spec.layout, spec.coordinate), spec)


PENDING = [Partial(op) for op in ("sum", "avg", "max", "min")]


@pytest.mark.parametrize("ops", [PENDING[:2], PENDING[2:]], ids=["sum, avg", "max, min"])
@pytest.mark.parametrize(
    "sizes",
    [
        [(5, 7), (9, 3), (12, 0), (4, 3), (0, 7), (1, 5)],
        [(5, 1, 6), (4, 4, 4), (0, 12, 0), (2, 5, 0), (3, 3, 1), (0, 0, 6)],
    ],
    ids=["2 ranks", "3 ranks"],
)
def test_every_pair_on_a_1d_mesh(ranks, sizes, ops):
    layouts = [(Cut(0, s),) for s in sizes[:3]] + [(Cut(1, s),) for s in sizes[3:5]] + [(Cut(2, sizes[5]),)]
    layouts += [(Replicate(),), *((op,) for op in ops)]
    ranks.run(check_pairs, layouts, mesh=(len(sizes[0]),))


def test_every_pair_with_an_outer_factor(ranks):
    # 12 = 4 x 3 = 3 x 4 = 2 x 6
    layouts = [(Cut(0, (1, 2), 4),), (Cut(0, (4, 0), 3),), (Cut(0, (5, 1), 2),), (Cut(0, (5, 7)),), (Cut(1, (4, 3)),)]
    layouts += [(Cut(2, (1, 1), 3),), (Replicate(),), (Partial("sum"),)]
    ranks.run(check_pairs, layouts, mesh=(2,))


def test_every_pair_on_a_2d_mesh(ranks):
    layouts = [
        (Replicate(), Replicate()),
        (Cut(0, (5, 7)), Replicate()),
        (Replicate(), Cut(0, (12, 0))),
        (Cut(0, (4, 8)), Cut(1, (3, 4))),
        (Cut(1, (7, 0)), Cut(0, (1, 11))),
        (Cut(2, (5, 1)), Cut(1, (2, 5))),
        (Partial("sum"), Cut(2, (2, 4))),
        (Cut(1, (2, 5)), Partial("avg")),
        (Partial("sum"), Partial("sum")),
        (Partial("max"), Replicate()),
        (Cut(0, (8, 4)), Cut(0, (1, 3), 3)),  # both cut one dim, as after a flatten
        (Cut(0, (1, 3), 3), Cut(0, (4, 8))),
    ]
    ranks.run(check_pairs, layouts, mesh=(2, 2))


def test_the_product_of_contributions(ranks):
    def check(mesh):
        layout = (Partial("product"),)
        parts, whole = contributions(layout, (3,))
        spec = ShardTensorSpec.of(mesh, layout, SHAPE, torch.float64)
        block = parts[mesh.get_local_rank()]
        assert_close(redistribute_local(block, spec, (Replicate(),)), whole, "product")
        cut = (Cut(1, (2, 0, 5)),)
        assert_close(redistribute_local(block, spec, cut), block_of(whole, cut, spec.coordinate), "product to cut")
        with pytest.raises(LayoutError, match="product"):
            redistribute_local(whole, spec.replicated(), layout)

    ranks.run(check, mesh=(3,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.int64, torch.bool])
def test_every_dtype_moves(ranks, dtype):
    def check(mesh):
        whole = (torch.arange(7 * 6).view(7, 6) % 5).to(dtype)
        x = shard(whole, mesh, {0: (0, (4, 0, 3))})
        for placements in ([Shard(1)], [Replicate()], [Shard(0)]):
            y = x.redistribute(placements=placements)
            assert_close(y.full_tensor(), whole, str(placements))
        if dtype.is_complex:
            conj = x.conj().redistribute(placements=[Shard(1)])
            assert_close(conj.full_tensor().resolve_conj(), whole.conj().resolve_conj(), "conj")

    ranks.run(check, mesh=(3,))


def test_to_sizes_the_caller_names(ranks):
    def check(mesh):
        whole = torch.randn(12, 7, dtype=torch.float64)
        x = shard(whole, mesh, {0: (0, (4, 4, 4))}, requires_grad=True)
        y = x.redistribute(sizes={0: (1, 9, 2)})
        assert y.placements == (Shard(0),)
        assert y._spec.layout == (Cut(0, (1, 9, 2)),)
        assert_close(y.full_tensor(), whole, "values")
        z = y.redistribute(placements=[Shard(-1)], sizes={0: (0, 7, 0)})
        assert z._spec.layout == (Cut(1, (0, 7, 0)),)
        (z.redistribute(placements=[Replicate()]) * whole).sum().backward()
        assert x.grad._spec.layout == x._spec.layout
        assert_close(x.grad.full_tensor(), whole, "gradient")
        assert x.redistribute(placements=[Shard(1)])._spec.layout == (Cut(1, (3, 3, 1)),)  # torch.chunk
        assert y.redistribute(placements=[Shard(0)]) is y  # nothing to do: the sizes stay

    ranks.run(check, mesh=(3,))


WRONG = [
    ({"placements": [Partial()]}, "cannot redistribute to Partial"),
    ({}, "needs placements"),
    ({"placements": [Shard(2)]}, "Shard(dim=2) names a dim"),
    ({"placements": [Shard(0), Shard(1)]}, "2 placements"),
    ({"sizes": {0: (7, 4)}}, "hold 11 rows along dim 0, but the tensor (12, 7) has 12"),
    ({"sizes": {0: (12,)}}, "give one size >= 0 per rank"),
    ({"sizes": {0: (13, -1)}}, "give one size >= 0 per rank"),
    ({"placements": [Replicate()], "sizes": {0: (5, 7)}}, "sizes name mesh axis 0"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG, ids=[message for _, message in WRONG])
def test_wrong_targets_say_so(ranks, arguments, message):
    def check(mesh):
        x = shard(torch.ones(12, 7), mesh, {0: (0, (5, 7))})
        with pytest.raises(LayoutError) as caught:
            x.redistribute(**arguments)
        assert message in str(caught.value)

    ranks.run(check, mesh=(2,))


def test_another_mesh_is_refused(ranks):
    def check(mesh):
        x = shard(torch.ones(12, 7), mesh, {0: (0, (5, 7))})
        assert x.redistribute(mesh, [Shard(1)]).placements == (Shard(1),)
        with pytest.raises(LayoutError, match="keeps the mesh"):
            x.redistribute(DeviceMesh("cpu", [[0], [1]]), [Shard(1), Replicate()])

    ranks.run(check, mesh=(2,))


def test_bytes_of_a_resize_are_the_rows_that_move(ranks):
    def check(mesh):
        x = shard(torch.ones(12, 5, dtype=torch.float32), mesh, {0: (0, (4, 4, 4))})
        with comm_trace() as trace:
            x.redistribute(sizes={0: (5, 3, 4)})
        # Row 4 goes from rank 1 to rank 0; nothing else.
        assert trace.total_bytes == (5 * 4 if mesh.get_local_rank() == 1 else 0)
        with comm_trace() as trace:
            x._with_layout((Replicate(),))._with_layout((Cut(1, (2, 2, 1)),))
        assert trace.counts() == {"all_gather": 1}  # a slice of what is whole costs nothing

    ranks.run(check, mesh=(3,))


def test_a_block_cut_from_a_whole_lets_the_whole_go(ranks):
    def check(mesh):
        x = shard(torch.ones(12, 5), mesh, {})
        y = x.redistribute(placements=[Shard(0)])
        assert y._local_tensor.untyped_storage().nbytes() == y._local_tensor.numel() * 4
        y.mul_(2)
        assert x.full_tensor().sum() == 60

    ranks.run(check, mesh=(2,))

"""Specs: every rank's extents, offsets and local shapes, against rows picked by hand; equality, copies, errors."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from shardtensor import LayoutError, Shard, ShardTensorSpec
from shardtensor.spec import Cut, Partial, Replicate, chunk_sizes, contiguous_stride, even_sizes


def test_chunk_sizes_are_those_of_torch_chunk():
    for length in range(12):
        for parts in range(1, 6):
            chunks = [len(chunk) for chunk in torch.arange(length).chunk(parts)] if length else []
            assert chunk_sizes(length, parts) == tuple(chunks + [0] * (parts - len(chunks)))


def test_even_sizes_differ_by_one_row_at_most():
    assert even_sizes(721, 4) == (181, 180, 180, 180)
    assert even_sizes(2, 3) == (1, 1, 0)
    for length in range(20):
        sizes = even_sizes(length, 6)
        assert sum(sizes) == length
        assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("shape", [(), (3,), (2, 0, 3), (4, 1, 5)])
def test_contiguous_stride_is_torch_own(shape):
    assert contiguous_stride(shape) == torch.empty(shape).stride()


# Layouts of a [2, 63, 5] tensor on a 2 x 2 mesh.
LAYOUTS = {
    "rows": (Cut(1, (35, 28)), Replicate()),
    "two dims": (Cut(1, (40, 23)), Cut(2, (5, 0))),
    "second axis": (Replicate(), Cut(2, (1, 4))),
    "outer": (Cut(1, (3, 4), outer=9), Replicate()),
    "nested": (Cut(1, (35, 28)), Cut(1, (3, 4), outer=9)),
    "nested, inner first": (Cut(1, (3, 4), outer=9), Cut(1, (35, 28))),
    "pending": (Partial("sum"), Cut(1, (63, 0))),
}


def rows_of(layout, dim, length, at):
    """The rows of a dim that the rank at coordinate ``at`` holds, straight from the definition of a cut."""
    rows = range(length)
    for axis, entry in enumerate(layout):
        if isinstance(entry, Cut) and entry.dim == dim:
            start = sum(entry.sizes[: at[axis]])
            inside = range(start, start + entry.sizes[at[axis]])
            rows = [row for row in rows if row % sum(entry.sizes) in inside]
    return list(rows)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_local_shapes_on_a_2d_mesh(ranks, layout):
    shape = (2, 63, 5)
    expected = {
        (i, j): tuple(len(rows_of(layout, dim, shape[dim], (i, j))) for dim in range(3)) for i in (0, 1) for j in (0, 1)
    }

    def check(mesh):
        spec = ShardTensorSpec.of(mesh, layout, shape, torch.float32)
        here = tuple(mesh.get_coordinate())
        assert spec.coordinate == here
        assert {at: tuple(spec.shape_at(at)) for at in expected} == expected
        assert tuple(spec.local_shape) == expected[here]
        for axis, cut in spec.cuts:
            found = spec.sharding_shapes(axis)
            assert found == tuple(expected[(*here[:axis], rank, *here[axis + 1 :])] for rank in (0, 1))
            local = spec.local_cut(axis)
            assert local.outer * local.sizes[here[axis]] == spec.local_shape[cut.dim]
            assert spec.offsets(axis) == sum(cut.sizes[: here[axis]])
        assert set(spec.sharding_shapes()) == {axis for axis, _ in spec.cuts}
        assert len(spec.offsets()) == 2

    ranks.run(check, mesh=(2, 2))


def test_local_cut_places_the_rows_of_a_block(ranks):
    layout = LAYOUTS["nested"]

    def check(mesh):
        spec = ShardTensorSpec.of(mesh, tuple(Cut(0, e.sizes, e.outer) for e in layout), (63,), torch.float32)
        here = spec.coordinate
        mine = rows_of(spec.layout, 0, 63, here)
        for axis in (0, 1):
            # Without this axis' cut the block would hold `wider`; the local cut must pick `mine` from it.
            wider = rows_of([e if i != axis else Replicate() for i, e in enumerate(spec.layout)], 0, 63, here)
            cut = spec.local_cut(axis)
            start = sum(cut.sizes[: here[axis]])
            picked = (
                torch.tensor(wider).view(cut.outer, -1)[:, start : start + cut.sizes[here[axis]]].flatten().tolist()
            )
            assert picked == mine

    ranks.run(check, mesh=(2, 2))


def test_placements_and_meta(ranks):
    def check(mesh):
        spec = ShardTensorSpec.of(mesh, (Cut(1, (3, 1, 0)),), (2, 4), torch.float64)
        assert spec.placements == (Shard(1),)
        assert spec.tensor_meta == (torch.Size([2, 4]), (4, 1), torch.float64)
        assert spec.dtype == torch.float64
        assert (spec.axis_of(1), spec.axis_of(0), spec.axes_of(1)) == (0, None, (0,))
        assert spec.cut_of(1).sizes == (3, 1, 0)
        assert spec.cut_of(0) is None
        assert spec.with_dtype(torch.float32).dtype == torch.float32
        assert spec.with_dtype(torch.float64) is spec
        assert spec.replicated().placements == (Replicate(),)
        pending = spec.with_layout((Partial("sum"),))
        assert pending.resolved_layout == (Replicate(),)
        assert spec.resolved_layout is spec.layout

    ranks.run(check, mesh=(3,))


def test_expanded_and_dense_strides(ranks):
    def check(mesh):
        def spec(shape, stride):
            return ShardTensorSpec.of(mesh, (Replicate(),), shape, torch.float32, stride)

        assert spec((4, 3), (3, 1)).is_plain
        assert spec((4, 3), (1, 4)).is_plain
        assert spec((4, 3), (0, 1)).broadcast_dims == (0,)
        assert not spec((4, 3), (0, 1)).is_plain
        assert spec((1, 3), (0, 1)).broadcast_dims == ()

    ranks.run(check, mesh=(1,))


def test_equality_hash_and_copies(ranks):
    def check(mesh):
        def make(sizes=(3, 1), dtype=torch.float32):
            return ShardTensorSpec.of(mesh, (Cut(1, sizes),), (2, 4), dtype)

        assert make() == make()
        assert hash(make()) == hash(make())
        assert {make(): 1}[make()] == 1
        assert make() != make((2, 2))
        assert make() != make(dtype=torch.float64)
        assert make() != make().replicated()
        spec = make()
        assert copy.deepcopy(spec) == spec
        restored = pickle.loads(pickle.dumps(spec))
        assert restored == spec
        assert hash(restored) == hash(spec)
        assert restored.local_shape == spec.local_shape

    ranks.run(check, mesh=(2,))


WRONG = [
    ((Cut(0, (4, 3)),), (8, 2), "shards (4, 3) hold 7 rows along dim 0, but the tensor (8, 2) has 8"),
    ((Cut(0, (2, 1), outer=2),), (8, 2), "shards (2, 1) x 2 hold 6 rows along dim 0"),
    ((Cut(2, (4, 4)),), (8, 2), "cuts dim 2, but the tensor (8, 2) has 2 dims"),
    ((Cut(0, (4, 2, 2)),), (8, 2), "sizes (4, 2, 2) for mesh axis 0 of 2 ranks"),
    ((Cut(0, (9, -1)),), (8, 2), "give one size >= 0 per rank"),
    ((Replicate(), Replicate()), (8, 2), "a layout of 2 entries"),
]


@pytest.mark.parametrize(("layout", "shape", "message"), WRONG, ids=[message for *_, message in WRONG])
def test_a_layout_that_does_not_fit_says_so(ranks, layout, shape, message):
    def check(mesh):
        with pytest.raises(LayoutError) as caught:
            ShardTensorSpec.of(mesh, layout, shape, torch.float32)
        assert message in str(caught.value)

    ranks.run(check, mesh=(2,))


def test_asking_for_what_is_not_cut(ranks):
    def check(mesh):
        spec = ShardTensorSpec.of(mesh, (Replicate(),), (4,), torch.float32)
        assert spec.sharding_shapes() == {}
        with pytest.raises(LayoutError, match="mesh axis 0 does not cut"):
            spec.sharding_shapes(0)

    ranks.run(check, mesh=(2,))


def test_a_rank_outside_the_mesh_is_told(ranks):
    def check(mesh):
        from torch.distributed.device_mesh import DeviceMesh

        one = DeviceMesh("cpu", [1])
        spec = ShardTensorSpec.of(one, (Replicate(),), (4,), torch.float32)
        if mesh.get_local_rank() == 1:
            assert spec.local_shape == (4,)
        else:
            with pytest.raises(LayoutError, match="not part of"):
                _ = spec.local_shape

    ranks.run(check, mesh=(2,))

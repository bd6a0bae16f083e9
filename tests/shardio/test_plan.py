"""Plans against brute force: what numpy takes with wrapped indices, and which chunks those indices lie in."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardio.box import Span
from shardio.errors import DimensionError, HaloError, PartitionError
from shardio.partition import Cut, Partition, even
from shardio.plan import Plan, RankPlan, plan
from shardio.source import Layout

DIMS = ("time", "lat", "lon")


def make_layout(shape: tuple[int, ...], chunks: tuple[int, ...], block: int = 0) -> Layout:
    return Layout(DIMS[-len(shape) :], shape, chunks, 4, block)


def execute(rank: RankPlan, array: np.ndarray) -> np.ndarray:
    """What a reader does, with whole chunks."""
    buffer = np.full(rank.shape, -1, dtype=array.dtype)
    for part in rank.parts():
        first = [at * size for at, size in zip(part.chunk, rank.layout.chunks, strict=True)]
        chunk = array[tuple(slice(at, at + size) for at, size in zip(first, rank.layout.chunks, strict=True))]
        for runs in itertools.product(*part.runs):
            source = tuple(
                slice(run.source - at, run.source - at + run.size) for run, at in zip(runs, first, strict=True)
            )
            dest = tuple(slice(run.dest, run.dest + run.size) for run in runs)
            assert (buffer[dest] == -1).all()
            buffer[dest] = chunk[source]
    return buffer


def rows_by_hand(owned: Span, halo: tuple[int, int], size: int, periodic: bool) -> np.ndarray:
    rows = np.arange(owned.start - halo[0], owned.stop + halo[1]) if owned.size else np.arange(0)
    return rows if periodic else rows[(rows >= 0) & (rows < size)]


@st.composite
def problems(draw: st.DrawFn) -> tuple[Layout, Partition, dict[str, tuple[int, int]], tuple[str, ...], int]:
    shape = tuple(draw(st.integers(1, 12)) for _ in range(3))
    chunks = tuple(draw(st.integers(1, 14)) for _ in range(3))
    cuts = []
    ranks = draw(st.sampled_from([(1,), (2,), (3,), (5,), (8,), (1, 2), (2, 2), (2, 3), (4, 2)]))
    for dim, parts in zip(draw(st.permutations(DIMS[1:])), ranks, strict=False):
        size = shape[DIMS.index(dim)]
        bounds = sorted(draw(st.lists(st.integers(0, size), min_size=parts - 1, max_size=parts - 1)))
        sizes = tuple(stop - start for start, stop in itertools.pairwise([0, *bounds, size]))
        cuts.append(Cut(dim, f"axis_{dim}", sizes))
    halo = {
        dim: (draw(st.integers(0, shape[at])), draw(st.integers(0, shape[at])))
        for at, dim in enumerate(DIMS)
        if draw(st.booleans())
    }
    periodic = tuple(dim for dim in DIMS if draw(st.booleans()))
    return make_layout(shape, chunks), Partition(tuple(cuts)), halo, periodic, draw(st.integers(0, 2**31))


@settings(max_examples=150, deadline=None)
@given(problems())
def test_against_numpy_take(
    problem: tuple[Layout, Partition, dict[str, tuple[int, int]], tuple[str, ...], int],
) -> None:
    layout, partition, halo, periodic, seed = problem
    array = np.random.default_rng(seed).permutation(math.prod(layout.shape)).reshape(layout.shape)
    planned = plan(partition, layout, halo=halo, periodic=periodic)
    taken = np.zeros(layout.shape, dtype=int)
    readers: dict[tuple[int, ...], set[int]] = {}
    for rank in range(partition.ranks):
        mine = planned[rank]
        spans = partition.spans(rank)
        expected, chunks = array, []
        for at, (dim, size) in enumerate(zip(layout.dims, layout.shape, strict=True)):
            owned = spans.get(dim, Span(0, size))
            rows = rows_by_hand(owned, halo.get(dim, (0, 0)), size, dim in periodic)
            expected = np.take(expected, rows, axis=at, mode="wrap")
            chunks.append(sorted(set((rows % size // layout.chunks[at]).tolist())))
            low = min(halo.get(dim, (0, 0))[0], owned.start) if dim not in periodic else halo.get(dim, (0, 0))[0]
            assert mine.dims[at].halo[0] == (low if owned.size else 0)
        np.testing.assert_array_equal(execute(mine, array), expected)
        assert list(mine.chunks) == list(itertools.product(*chunks))
        assert mine.chunk_count == len(mine.chunks)
        assert mine.bytes_fetched == len(mine.chunks) * math.prod(layout.chunks) * 4
        assert mine.bytes_needed == expected.size * 4
        interior = expected[tuple(span.slice() for span in mine.interior)]
        own = array[tuple(spans.get(d, Span(0, n)).slice() for d, n in zip(layout.dims, layout.shape, strict=True))]
        if interior.size:
            np.testing.assert_array_equal(interior, own)
        assert sum(math.prod(span.size for span in box) for box in mine.boxes) == expected.size
        taken[tuple(spans.get(d, Span(0, n)).slice() for d, n in zip(layout.dims, layout.shape, strict=True))] += 1
        for chunk in mine.chunks:
            readers.setdefault(chunk, set()).add(rank)
    assert (taken == 1).all()
    assert {chunk: set(ranks) for chunk, ranks in planned.readers().items()} == readers
    assert planned.bytes_fetched == sum(mine.bytes_fetched for mine in planned.ranks)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_index_against_numpy(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.integers(1, 9)) for _ in range(3))
    layout = make_layout(shape, tuple(data.draw(st.integers(1, 5)) for _ in range(3)))
    array = np.arange(math.prod(shape)).reshape(shape)
    partition = Partition((Cut("lat", "domain", even(shape[1], min(2, shape[1]))),))
    row = st.integers(-shape[0], shape[0] - 1)
    edge = st.none() | st.integers(-12, 12)
    step = st.sampled_from([None, 1, 2, -1, -3])
    index = data.draw(row | st.lists(row, max_size=6) | st.builds(slice, edge, edge, step))
    for rank in range(partition.ranks):
        mine = plan(partition, layout, index={"time": index})[rank]
        lat = partition.spans(rank)["lat"].slice()
        expected = array[index][..., lat, :]
        assert mine.result_shape == expected.shape
        np.testing.assert_array_equal(execute(mine, array).reshape(expected.shape), expected)
        assert mine == plan(partition, layout)[rank].at({"time": index})


def test_box_across_zero_degrees() -> None:
    """lon 0..359.75, -2.5..0.5: a window that runs over the end, cut over two ranks, with a halo that goes on."""
    lon = np.arange(0, 360, 0.25)
    layout = Layout(("lon",), (1440,), (720,), 4)
    partition = Partition((Cut("lon", "domain", even(13, 2), start=1430),))
    planned = plan(partition, layout, halo=2, periodic=("lon",))
    degrees = [execute(planned[rank], lon) for rank in (0, 1)]
    np.testing.assert_array_equal((degrees[0] + 180) % 360 - 180, np.arange(-3, -0.25, 0.25))
    np.testing.assert_array_equal((degrees[1] + 180) % 360 - 180, np.arange(-1.25, 1.25, 0.25))
    assert planned[0].chunk_count == 1
    assert len(planned[1].boxes) == 2


def test_halo_of_a_window_is_real_data() -> None:
    layout = Layout(("lat",), (10,), (10,), 4)
    mine = plan(Partition((Cut("lat", "domain", (3,), start=4),)), layout, halo=(2, 9))[0]
    np.testing.assert_array_equal(execute(mine, np.arange(10)), np.arange(2, 10))
    assert mine.dims[0].halo == (2, 3)


def test_long_dims_that_are_indexed_cost_nothing() -> None:
    """A million time steps: the plan of one step must not list the chunks of all."""
    layout = Layout(DIMS, (10**6, 721, 1440), (1, 721, 1440), 4)
    partition = Partition((Cut("lat", "domain", even(721, 4)),))
    mine = plan(partition, layout)[2].at({"time": 999_999})
    assert mine.chunks == ((999_999, 0, 0),)
    assert mine.bytes_fetched == 721 * 1440 * 4
    assert "pieces" not in vars(plan(partition, layout)[2].dims[0])


def test_contiguous_storage_fetches_what_it_needs() -> None:
    layout = make_layout((4, 10, 6), (4, 10, 6), block=1)
    planned = plan(Partition((Cut("lat", "domain", (7, 3)),)), layout, halo=1, index={"time": 0})
    assert planned.bytes_fetched == planned.bytes_needed == (8 + 4) * 6 * 4
    assert planned.amplification == 1.0


def test_prints_a_table() -> None:
    planned = plan(Partition((Cut("lat", "domain", (2, 1)),)), make_layout((3, 3), (3, 3)), halo=1)
    lines = str(planned).splitlines()
    assert lines[0].split() == ["rank", "lat", "chunks", "needed", "fetched", "amplification"]
    assert lines[1].split() == ["0", "0:2", "+0/1", "1", "0.000", "MB", "0.000", "MB", "1.00"]
    assert len(lines) == 3


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"halo": 11}, HaloError, "each side must be 0 to 10"),
        ({"halo": (-1, 0)}, HaloError, "each side must be 0 to 10"),
        ({"halo": {"level": 1}}, DimensionError, "halo names dim 'level'"),
        ({"periodic": ("level",)}, DimensionError, "periodic names dim 'level'"),
        ({"index": {"level": 1}}, DimensionError, "index names dim 'level'"),
        ({"index": {"time": 4}}, DimensionError, "index 4 is out of range along dim 'time': it has 4 rows"),
        ({"index": {"lat": 4}}, DimensionError, "is cut or has a halo"),
        ({"partition": Partition((Cut("lev", "domain", (5, 5)),))}, PartitionError, "'lev' is cut"),
        ({"partition": Partition((Cut("lat", "domain", (5, 6)),))}, PartitionError, "has 10 rows"),
        ({"partition": Partition((Cut("lat", "domain", (5,), start=6),))}, PartitionError, "rows 6 to 11 are cut"),
    ],
)
def test_bad_arguments_name_the_way_out(arguments: dict[str, object], error: type[Exception], message: str) -> None:
    good = {"partition": Partition((Cut("lat", "domain", (5, 5)),)), "layout": make_layout((4, 10, 6), (1, 10, 6))}
    with pytest.raises(error, match=message):
        plan(**{**good, **arguments})  # type: ignore[arg-type]


def test_no_cut_is_one_rank_that_owns_all() -> None:
    planned = plan(Partition(()), make_layout((4, 10), (2, 3)))
    assert isinstance(planned, Plan)
    assert planned[0].shape == (4, 10)
    assert planned[0].chunk_count == 8

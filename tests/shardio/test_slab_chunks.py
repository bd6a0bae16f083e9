"""The rule that chooses chunks for slabs: what it promises of waste and bytes, over meshes and halos."""

import math

import pytest

from shardio.partition import make_partition
from shardio.plan import plan
from shardio.slab_chunks import LEAST_BYTES, MOST_BYTES, SHARD_BYTES, WASTE, named, sharded, slab_chunks
from shardio.source import Layout

DIMS = ("time", "level", "lat", "lon")


def layout(*shape: int, chunks: tuple[int, ...] | None = None) -> Layout:
    dims = DIMS if len(shape) == 4 else ("time", "lat", "lon")
    return Layout(dims, shape, chunks or shape, 4)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("shape", [(100, 20, 721, 1440), (100, 721, 1440), (100, 13, 1024, 1792), (100, 64, 128)])
def test_no_rank_reads_much_more_than_it_needs(shape: tuple[int, ...], ranks: int) -> None:
    stored = layout(*shape)
    partition = make_partition({"lat": "d"}, sizes={"lat": shape[-2]}, ranks={"d": ranks})
    chunks = slab_chunks(stored, partition, halo=3, time="time")
    assert chunks[0] == (2 if shape[-1] == 128 else 1)  # 32 KiB a step
    assert chunks[-1] == shape[-1]
    nbytes = math.prod(chunks) * 4
    assert nbytes <= MOST_BYTES
    planned = plan(partition, layout(*shape, chunks=chunks), halo=3, index={"time": [5]})
    small = nbytes < 3 * LEAST_BYTES or nbytes > MOST_BYTES / 1.1  # no room for fewer, or for more, rows in a chunk
    assert small or max(rank.amplification for rank in planned.ranks) <= WASTE
    assert nbytes >= LEAST_BYTES


def test_two_cut_dims_around_the_globe() -> None:
    stored = layout(10, 13, 721, 1440)
    partition = make_partition({"lat": "a", "lon": "b"}, sizes={"lat": 721, "lon": 1440}, ranks={"a": 2, "b": 2})
    chunks = slab_chunks(stored, partition, halo=3, periodic=("lon",), time="time")
    planned = plan(partition, layout(10, 13, 721, 1440, chunks=chunks), halo=3, periodic=("lon",), index={"time": [0]})
    assert max(rank.amplification for rank in planned.ranks) <= WASTE**2
    assert math.prod(chunks) * 4 >= LEAST_BYTES


def test_very_large_rows_are_divided_by_level() -> None:
    stored = layout(2, 500, 8, 100_000)
    partition = make_partition({"lat": "d"}, sizes={"lat": 8}, ranks={"d": 8})
    chunks = slab_chunks(stored, partition, halo=1, time="time")
    assert math.prod(chunks) * 4 <= MOST_BYTES
    assert chunks == (1, MOST_BYTES // 400_000, 1, 100_000)


def test_coordinates_stay_whole() -> None:
    partition = make_partition({"lat": "d"}, sizes={"lat": 721}, ranks={"d": 2})
    assert slab_chunks(Layout(("time",), (90_000,), (1,), 8), partition, time="time") == (90_000,)
    assert slab_chunks(Layout((), (), (), 8), partition) == ()
    assert slab_chunks(Layout(("n",), (10**9,), (1,), 8), partition) == (MOST_BYTES // 8,)
    assert slab_chunks(Layout(("time",), (0,), (1,), 8), partition, time="time") == (1,)


def test_shards_hold_whole_time_steps() -> None:
    small = sharded(layout(1000, 721, 1440), (1, 56, 1440), "time")
    assert small.shards == (SHARD_BYTES // (13 * 56 * 1440 * 4), 13 * 56, 1440)
    large = sharded(layout(1000, 40, 721, 1440), (1, 40, 56, 1440), "time")
    assert large.shards == (1, 40, 13 * 56, 1440)
    for found in (small, large):
        assert all(shard % chunk == 0 for shard, chunk in zip(found.unit, found.chunks, strict=True))
    assert sharded(layout(1, 64, 128), (1, 64, 128), "time").shards is None


def test_named_extents() -> None:
    assert named(layout(10, 721, 1440), (1, 56, 1440), {"time": 4, "lat": -1, "lon": 9999}) == (4, 721, 1440)

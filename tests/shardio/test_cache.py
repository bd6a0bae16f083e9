"""The cache of decoded rows: right values, each chunk decoded once where it fits, the farthest use dropped first."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from shardio.box import Box, Span, shape_of, slices
from shardio.cache import NEVER, RowCache, Upcoming
from shardio.cached import CachedSource
from shardio.errors import CorruptChunkError
from shardio.source import Source

ROWS, HEIGHT, WIDTH = 64, 6, 5
ROW_BYTES = HEIGHT * WIDTH * 4


class Counted(Source):
    """An array in memory that notes the rows of every read; `broken` makes reads fail, `hold` makes them wait."""

    def __init__(self, chunk: int, dims: tuple[str, ...] = ("time", "y", "x")) -> None:
        values = np.arange(ROWS * HEIGHT * WIDTH, dtype="f4").reshape(ROWS, HEIGHT, WIDTH)
        self.axis = dims.index("time")
        self.values = np.moveaxis(values, 0, self.axis)
        shape = self.values.shape
        chunks = tuple(chunk if dim == "time" else size for dim, size in zip(dims, shape, strict=True))
        super().__init__("v", dims=dims, shape=shape, chunks=chunks, dtype=self.values.dtype, attrs={})
        self.reads: list[tuple[int, int]] = []
        self.broken = False
        self.hold: threading.Event | None = None

    def read_into(self, box: Box, out: np.ndarray[Any, Any]) -> None:
        self.reads.append(tuple(box[self.axis]))
        if self.hold is not None:
            assert self.hold.wait(10)
        if self.broken:
            raise CorruptChunkError("broken")
        out[...] = self.values[slices(box)]


WHOLE = Span(0, HEIGHT)


def _row(source: Counted, row: int, rows: Span = WHOLE) -> Box:
    spans = {"time": Span(row, row + 1), "y": rows, "x": Span(0, WIDTH)}
    return tuple(spans[dim] for dim in source.dims)


def _read(cached: CachedSource, box: Box) -> None:
    out = np.full(shape_of(box), np.nan, dtype="f4")
    cached.read_into(box, out)
    np.testing.assert_array_equal(out, cached.source.values[slices(box)])


@pytest.mark.parametrize("dims", [("time", "y", "x"), ("y", "time", "x"), ("y", "x", "time")])
def test_in_sequence_every_chunk_is_decoded_once(dims):
    source = Counted(16, dims)
    cached = CachedSource(source, "time", RowCache(16 * ROW_BYTES), 0)
    cached.cache.expect([[row, row + 1] for row in range(ROWS - 1)])
    for row in range(ROWS - 1):
        cached.cache.begin()
        _read(cached, _row(source, row))
        _read(cached, _row(source, row + 1))
    assert source.reads == [(0, 16), (16, 32), (32, 48), (48, 64)]
    assert cached.cache.stats.misses == 4
    assert cached.cache.stats.hits == 2 * 63 - 4
    assert cached.cache.stats.bytes_held <= 16 * ROW_BYTES


def test_a_read_over_several_chunks_and_rows():
    source = Counted(16)
    cached = CachedSource(source, "time", RowCache(1 << 20), 0)
    for box in (
        (Span(5, 60), Span(1, 4), Span(0, 5)),
        (Span(0, 64), Span(2, 3), Span(1, 5)),
        (Span(3, 3), *_row(source, 0)[1:]),
    ):
        _read(cached, box)
    reads = len(source.reads)
    _read(cached, (Span(15, 17), Span(2, 4), Span(3, 4)))  # inside of what is held
    assert len(source.reads) == reads


@pytest.mark.parametrize("budget", [0, 1, 3, 10, 40, 64])
@pytest.mark.parametrize("chunk", [7, 64])
def test_any_budget_gives_right_values_and_is_kept(budget, chunk):
    random = np.random.default_rng(budget)
    source = Counted(chunk)
    cached = CachedSource(source, "time", RowCache(budget * ROW_BYTES), 0)
    batches = [random.integers(0, ROWS, size=3).tolist() for _ in range(80)]
    cached.cache.expect(batches)
    for batch in batches:
        cached.cache.begin()
        for row in batch:
            _read(cached, _row(source, row))
            assert cached.cache.stats.bytes_held <= budget * ROW_BYTES
            assert cached.cache.stats.bytes_held == sum(entry.data.nbytes for entry in cached.cache._all())
    if budget == 0:
        assert cached.cache.stats.hits == 0


def test_what_is_needed_last_goes_first():
    """Two rows fit, of six that are each a chunk of their own: the two with the nearest next use stay."""
    source = Counted(1)
    cached = CachedSource(source, "time", RowCache(2 * ROW_BYTES), 0)
    order = [0, 1, 2, 0, 1, 3, 0, 1, 2, 3]
    cached.cache.expect([[row] for row in order])
    for row in order:
        cached.cache.begin()
        _read(cached, _row(source, row))
    # The least that any choice can do (Belady); the one used longest ago going first would decode eight times.
    assert [read[0] for read in source.reads] == [0, 1, 2, 3, 2, 3]


def test_shuffled_reading_decodes_far_less_than_without():
    random = np.random.default_rng(0)
    source = Counted(16)
    cached = CachedSource(source, "time", RowCache(16 * ROW_BYTES), 0)
    order = [[row] for row in random.permutation(ROWS).tolist()]
    cached.cache.expect(order)
    for (row,) in order:
        cached.cache.begin()
        _read(cached, _row(source, row))
    assert len(source.reads) < ROWS / 2  # a quarter of the rows fits


def test_what_is_not_needed_again_is_read_straight():
    source = Counted(16)
    cached = CachedSource(source, "time", RowCache(1 << 20), 0)
    cached.cache.expect([[3], [20]])
    for row in (3, 20):
        cached.cache.begin()
        _read(cached, _row(source, row))
    assert source.reads == [(3, 4), (20, 21)]
    assert cached.cache.stats.bytes_held == 0


def test_a_batch_that_reads_a_row_twice_decodes_it_once():
    source = Counted(16)
    cached = CachedSource(source, "time", RowCache(1 << 20), 0)
    cached.cache.expect([[3, 4, 4, 5]])
    cached.cache.begin()
    for row in (3, 4, 4, 5):
        _read(cached, _row(source, row))
    assert source.reads == [(3, 5), (5, 6)]


def test_without_a_known_order_the_longest_unused_goes():
    source = Counted(1)
    cached = CachedSource(source, "time", RowCache(2 * ROW_BYTES), 0)
    for row in (0, 1, 0, 2, 0, 1):
        _read(cached, _row(source, row))
    assert [read[0] for read in source.reads] == [0, 1, 2, 1]


def test_threads_that_ask_for_the_same_row_decode_it_once():
    source = Counted(16)
    source.hold = threading.Event()
    cached = CachedSource(source, "time", RowCache(1 << 20), 0)
    with ThreadPoolExecutor(4) as pool:
        reads = [pool.submit(_read, cached, _row(source, row)) for row in (3, 3, 4, 5)]
        threading.Timer(0.05, source.hold.set).start()
        for read in reads:
            read.result(10)
    assert source.reads == [(0, 16)]


def test_many_threads_and_a_small_budget():
    source = Counted(16)
    cached = CachedSource(source, "time", RowCache(20 * ROW_BYTES), 0)
    random = np.random.default_rng(0)
    parts = [Span(0, 3), Span(3, 6), Span(0, 6)]
    tasks = [(int(random.integers(ROWS)), parts[int(random.integers(3))]) for _ in range(800)]
    with ThreadPoolExecutor(8) as pool:
        for read in [pool.submit(_read, cached, _row(source, row, part)) for row, part in tasks]:
            read.result(10)
    assert cached.cache.stats.bytes_held <= 20 * ROW_BYTES
    assert cached.cache._spare_bytes + cached.cache.stats.bytes_held <= 20 * ROW_BYTES
    assert cached.cache._scratch_bytes == 0


def test_an_error_reaches_all_who_asked_and_leaves_nothing():
    source = Counted(16)
    source.broken, source.hold = True, threading.Event()
    cached = CachedSource(source, "time", RowCache(1 << 20), 0)
    with ThreadPoolExecutor(3) as pool:
        reads = [pool.submit(_read, cached, _row(source, 3)) for _ in range(3)]
        threading.Timer(0.05, source.hold.set).start()
        for read in reads:
            with pytest.raises(CorruptChunkError):
                read.result(10)
    assert cached.cache.stats.bytes_held == 0
    source.broken = False
    _read(cached, _row(source, 3))


def test_arrays_do_not_mix_and_clear_forgets():
    cache = RowCache(1 << 20)
    sources = [Counted(16), Counted(16)]
    sources[1].values = -sources[1].values
    for number, source in enumerate(sources):
        _read(CachedSource(source, "time", cache, number), _row(source, 2))
    cache.clear()
    assert cache.stats.bytes_held == 0
    again = CachedSource(sources[0], "time", cache, 0)
    _read(again, _row(sources[0], 2))
    assert len(sources[0].reads) == 2


def test_due_is_the_next_batch_or_this_one_if_it_reads_the_row_twice():
    upcoming = Upcoming([[4, 5], [5, 6, 6], [4], []])
    assert [upcoming.due(row, 0) for row in (4, 5, 6, 7)] == [2, 1, 1, NEVER]
    assert [upcoming.due(row, 1) for row in (4, 5, 6)] == [2, NEVER, 1]
    assert Upcoming([]).due(0, 0) == NEVER

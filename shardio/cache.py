"""Decoded time steps kept in memory, for stores that hold many of them in one chunk; what is needed last goes first."""

from __future__ import annotations

import heapq
import math
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shardio.aligned import empty_bytes
from shardio.box import Box, shape_of

Array = np.ndarray[Any, np.dtype[Any]]

Rows = Sequence[int] | np.ndarray[Any, np.dtype[np.int64]]
"""Row numbers along the time dim."""
NEVER = math.inf
"""When a row is needed next that nobody will ask for again."""


class Upcoming:
    """Which rows of the time axis will be read, batch by batch.

    Args:
        rows: the rows of each batch, in reading order; a row that a batch reads twice is there twice.
    """

    def __init__(self, rows: Sequence[Rows]) -> None:
        flat = np.concatenate([np.asarray(batch, dtype=np.int64) for batch in rows] or [np.zeros(0, np.int64)])
        batches = np.repeat(np.arange(len(rows)), [len(batch) for batch in rows])
        order = np.argsort(flat, kind="stable")
        self._rows, self._batches = flat[order], batches[order]
        self.batches = rows

    def due(self, row: int, batch: int) -> float:
        """The batch that needs a row next while ``batch`` is read: itself, if it needs it several times."""
        low, high = np.searchsorted(self._rows, (row, row + 1))
        uses = self._batches[low:high]
        now, later = np.searchsorted(uses, (batch, batch + 1))
        if later - now > 1:
            return batch
        return float(uses[later]) if later < len(uses) else NEVER


@dataclass(eq=False)
class Entry:
    """One row of one array, or of a part of it.

    Attributes:
        source: number of the array.
        row: along the time dim.
        rest: the box along the other dims.
        data: the values; None until they are decoded.
        due: the batch that needs it next.
        users: threads that copy from it.
        failed: it could not be decoded.
        held: it is in the cache.
    """

    source: int
    row: int
    rest: Box
    data: Array
    due: float
    ready: bool = False
    failed: bool = False
    held: bool = True
    users: int = 0


@dataclass
class CacheStats:
    """What a cache has done, counted in rows (one time step of one array, or of a part of it).

    Attributes:
        hits: rows that were served from memory.
        misses: rows that had to be decoded.
        bytes_held: bytes of the rows in it now.
    """

    hits: int = 0
    misses: int = 0
    bytes_held: int = 0

    @property
    def hit_rate(self) -> float:
        """Share of the rows served from memory."""
        return self.hits / (self.hits + self.misses) if self.hits or self.misses else 0.0


@dataclass
class RowCache:
    """Rows of several arrays within a byte budget, for any number of threads.

    Without `expect` the row used longest ago goes first; with it the one whose next use is farthest, and what will
    not be used again is not kept at all.

    Attributes:
        max_bytes: budget of the rows kept; decoding rows that are then kept takes up to as much again while it runs.
        stats: hits, misses and bytes held.
    """

    max_bytes: int
    stats: CacheStats = field(default_factory=CacheStats)
    _rows: dict[int, dict[int, list[Entry]]] = field(default_factory=dict, repr=False)  # row -> array -> its parts
    _by_due: list[tuple[float, int, Entry]] = field(default_factory=list, repr=False)  # heap, farthest due on top
    _spare: dict[int, list[Array]] = field(default_factory=dict, repr=False)  # buffers to use again, by size
    _changed: threading.Condition = field(default_factory=threading.Condition, repr=False)
    _upcoming: Upcoming | None = field(default=None, repr=False)
    _batch: int = field(default=-1, repr=False)
    _serial: int = field(default=0, repr=False)
    _entries: int = field(default=0, repr=False)
    _spare_bytes: int = field(default=0, repr=False)
    _scratch: list[Array] = field(default_factory=list, repr=False)
    _scratch_bytes: int = field(default=0, repr=False)

    def expect(self, rows: Sequence[Rows] | None) -> None:
        """Say which rows the following batches will read, in order; None: unknown."""
        with self._changed:
            self._upcoming, self._batch = None if rows is None else Upcoming(rows), -1
            self._by_due.clear()
            for entry in self._all():
                self._set_due(entry)

    def begin(self) -> None:
        """The next of the batches expected is read now."""
        with self._changed:
            if self._upcoming is None:
                return
            read: Rows = self._upcoming.batches[self._batch] if 0 <= self._batch < len(self._upcoming.batches) else ()
            self._batch += 1
            for row in set(map(int, read)):
                for entry in [entry for parts in self._rows.get(row, {}).values() for entry in parts]:
                    self._set_due(entry)

    def clear(self) -> None:
        """Forget everything."""
        with self._changed:
            self._rows.clear()
            self._by_due.clear()
            self._spare.clear()
            self._scratch.clear()
            self._entries = self._spare_bytes = self._scratch_bytes = self.stats.bytes_held = 0

    # What CachedSource calls ----------------------------------------------------------------------------------------

    def look_up(
        self, source: int, rows: range, rest: Box, chunk: range, dtype: np.dtype[Any]
    ) -> tuple[list[Entry], list[int], list[Entry]]:
        """The entries that have or will have the rows asked for, the rows that none has, and entries for the caller.

        The caller decodes the rows that none has, fills the entries made for it, and calls `done` on them, whatever
        happens. Entries found are the caller's to copy from until it calls `release`.
        """
        with self._changed:
            found = [entry for row in rows if (entry := self._find(source, row, rest)) is not None]
            there = {entry.row for entry in found}
            absent = [row for row in rows if row not in there]
            for entry in found:
                entry.users += 1
                if self._upcoming is None:
                    self._set_due(entry)
            self.stats.hits += len(found)
            self.stats.misses += len(absent)
            return found, absent, self._admit(source, absent, rest, chunk, dtype) if absent else []

    def done(self, entries: Sequence[Entry], *, failed: bool) -> None:
        """Entries made by `look_up` are filled, or cannot be."""
        with self._changed:
            for entry in entries:
                entry.ready, entry.failed = not failed, failed
                if failed and entry.held:
                    self._drop(entry)
            self._changed.notify_all()

    def wait(self, entry: Entry) -> bool:
        """Wait until another thread has decoded an entry; False if it could not."""
        with self._changed:
            self._changed.wait_for(lambda: entry.ready or entry.failed)
            return entry.ready

    def release(self, entries: Sequence[Entry]) -> None:
        """The caller has copied from these entries."""
        with self._changed:
            for entry in entries:
                entry.users -= 1

    @contextmanager
    def scratch(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Iterator[Array]:
        """Memory to decode into; waits while others have so much that the budget would be passed."""
        nbytes = math.prod(shape) * dtype.itemsize
        with self._changed:
            self._changed.wait_for(lambda: not self._scratch_bytes or self._scratch_bytes + nbytes <= self.max_bytes)
            self._scratch_bytes += nbytes
            fitting = next((at for at, buffer in enumerate(self._scratch) if buffer.nbytes >= nbytes), None)
            buffer = None if fitting is None else self._scratch.pop(fitting)
            if buffer is None:
                self._scratch.clear()
        if buffer is None:
            buffer = empty_bytes(nbytes)
        try:
            yield buffer[:nbytes].view(dtype).reshape(shape)
        finally:
            with self._changed:
                self._scratch_bytes -= nbytes
                if sum(other.nbytes for other in self._scratch) + buffer.nbytes <= self.max_bytes:
                    self._scratch.append(buffer)
                self._changed.notify_all()

    # All below is called with the lock held -------------------------------------------------------------------------

    def _all(self) -> list[Entry]:
        return [entry for arrays in self._rows.values() for parts in arrays.values() for entry in parts]

    def _find(self, source: int, row: int, rest: Box) -> Entry | None:
        for entry in self._rows.get(row, {}).get(source, ()):
            if all(
                has.start <= want.start and want.stop <= has.stop for has, want in zip(entry.rest, rest, strict=True)
            ):
                return entry
        return None

    def _due(self, row: int) -> float:
        if self._upcoming is None:
            self._serial += 1
            return -self._serial
        return self._upcoming.due(row, max(0, self._batch))

    def _set_due(self, entry: Entry) -> None:
        entry.due = self._due(entry.row)
        self._serial += 1
        heapq.heappush(self._by_due, (-entry.due, self._serial, entry))
        if len(self._by_due) > 64 + 4 * self._entries:  # mostly outdated
            current = {item[2]: item for item in self._by_due if item[2].held and -item[0] == item[2].due}
            self._by_due = list(current.values())
            heapq.heapify(self._by_due)

    def _admit(self, source: int, absent: Sequence[int], rest: Box, chunk: range, dtype: np.dtype[Any]) -> list[Entry]:
        """Entries for those rows of a chunk that are worth keeping, room made for them."""
        shape = shape_of(rest)
        nbytes = math.prod(shape) * dtype.itemsize
        wanted = [(self._due(row), row) for row in chunk if self._find(source, row, rest) is None]
        made: list[Entry] = []
        low, high = min(absent), max(absent) + 1
        for due, row in sorted(wanted):
            hull = (min(low, row), max(high, row + 1))
            if due == NEVER or not self._make_room(nbytes, due):
                break
            if row not in range(low, high) and (hull[1] - hull[0]) * nbytes > self.max_bytes:
                continue
            low, high = hull
            entry = Entry(source, row, rest, self._buffer(nbytes).view(dtype).reshape(shape), due)
            self._rows.setdefault(row, {}).setdefault(source, []).append(entry)
            self._entries += 1
            self.stats.bytes_held += nbytes
            self._set_due(entry)
            made.append(entry)
        return made

    def _make_room(self, nbytes: int, due: float) -> bool:
        """Whether so many bytes fit once rows that are needed later than `due` are dropped."""
        while self.stats.bytes_held + nbytes > self.max_bytes:
            while self._by_due and not (self._by_due[0][2].held and -self._by_due[0][0] == self._by_due[0][2].due):
                heapq.heappop(self._by_due)
            if not self._by_due or self._by_due[0][2].due <= due:
                return False
            self._drop(heapq.heappop(self._by_due)[2])
        return True

    def _drop(self, entry: Entry) -> None:
        parts = self._rows[entry.row][entry.source]
        parts.remove(entry)
        if not parts:
            del self._rows[entry.row][entry.source]
            if not self._rows[entry.row]:
                del self._rows[entry.row]
        entry.held = False
        self._entries -= 1
        nbytes = entry.data.nbytes
        self.stats.bytes_held -= nbytes
        if entry.ready and not entry.users:  # nobody reads or writes it
            self._spare.setdefault(nbytes, []).append(entry.data)
            self._spare_bytes += nbytes

    def _buffer(self, nbytes: int) -> Array:
        spare = self._spare.get(nbytes)
        if spare:
            self._spare_bytes -= nbytes
            return spare.pop().reshape(-1).view(np.uint8)
        if self.stats.bytes_held + self._spare_bytes + nbytes > self.max_bytes:
            self._spare.clear()
            self._spare_bytes = 0
        return empty_bytes(nbytes)

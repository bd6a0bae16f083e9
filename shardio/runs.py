"""Rows of one dim as runs: stretches that lie together in the array and land together in the buffer."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, SupportsIndex, cast

from shardio.box import Span


class Run(NamedTuple):
    """Rows source..source+size of the array land at rows dest..dest+size of the buffer."""

    source: int
    dest: int
    size: int


class Piece(NamedTuple):
    """What one chunk (numbered along its dim) gives to the buffer."""

    chunk: int
    runs: tuple[Run, ...]


@dataclass(frozen=True)
class DimPlan:
    """What a rank reads along one dim.

    Attributes:
        dim: name.
        owned: rows that the rank owns, in the array; beyond its end where a periodic window runs over it.
        halo: rows read below and above the owned ones; less than asked at an edge that is not periodic.
        runs: the rows read, in the order of the buffer.
        chunk: rows per chunk.
        dropped: the dim was chosen by an int, so the result does not have it.
    """

    dim: str
    owned: Span
    halo: tuple[int, int]
    runs: tuple[Run, ...]
    chunk: int
    dropped: bool = False

    @property
    def extent(self) -> int:
        """Rows of the buffer: halo + owned + halo."""
        return sum(run.size for run in self.runs)

    @cached_property
    def pieces(self) -> tuple[Piece, ...]:
        """The runs, cut at chunk boundaries and grouped by chunk."""
        return by_chunk(self.runs, self.chunk)

    @cached_property
    def apart(self) -> tuple[Piece, ...]:
        """The same with one run a piece, for where any rows can be read alone: none are read between two runs."""
        return tuple(piece for run in self.runs for piece in by_chunk((run,), self.chunk))


def wrapped(start: int, stop: int, size: int) -> tuple[Run, ...]:
    """Rows start..stop of an endless repetition of an array of `size` rows."""
    runs, dest = [], 0
    while start + dest < stop:
        source = (start + dest) % size
        length = min(stop - start - dest, size - source)
        runs.append(Run(source, dest, length))
        dest += length
    return tuple(runs)


def selected(index: SupportsIndex | slice | Sequence[int], size: int) -> tuple[Run, ...]:
    """Rows chosen as numpy chooses them, out of `size`; those that follow each other make one run.

    Raises IndexError if a row is out of range.
    """
    rows: Sequence[int]
    if isinstance(index, slice):
        rows = range(size)[index]
    elif hasattr(index, "__index__"):  # as isinstance(index, SupportsIndex) says 20 times more slowly
        rows = [operator.index(cast("SupportsIndex", index))]
    else:
        rows = [operator.index(row) for row in index]
    runs: list[Run] = []
    for dest, row in enumerate(rows):
        if not -size <= row < size:
            raise IndexError(f"index {row} is out of range")
        row %= size
        if runs and row == runs[-1].source + runs[-1].size:
            runs[-1] = runs[-1]._replace(size=runs[-1].size + 1)
        else:
            runs.append(Run(row, dest, 1))
    return tuple(runs)


def by_chunk(runs: Sequence[Run], chunk: int) -> tuple[Piece, ...]:
    """Runs cut at chunk boundaries and grouped by chunk."""
    pieces: dict[int, list[Run]] = {}
    for source, dest, size in runs:
        done = 0
        while done < size:
            number = (source + done) // chunk
            length = min(size - done, (number + 1) * chunk - source - done)
            pieces.setdefault(number, []).append(Run(source + done, dest + done, length))
            done += length
    return tuple(Piece(number, tuple(pieces[number])) for number in sorted(pieces))

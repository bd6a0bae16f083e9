"""Cuts a rank's plan into reads: neighbouring chunks together, as many reads as there are threads to do them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from shardio.box import Box, Span
from shardio.plan import RankPlan
from shardio.runs import Piece, Run

MAX_BYTES = 32 << 20
"""Stored bytes that one read brings at most, unless a single chunk is larger; bounds the scratch of each thread."""


@dataclass(frozen=True)
class Task:
    """Chunks that are read by one call: along each dim, one piece, or several that continue each other."""

    pieces: tuple[tuple[Piece, ...], ...]

    @property
    def chunks(self) -> int:
        """Number of chunks."""
        return math.prod(map(len, self.pieces))

    @property
    def runs(self) -> tuple[tuple[Run, ...], ...]:
        """Along each dim, what the chunks give to the buffer."""
        return tuple(group[0].runs if len(group) == 1 else (_joined(group),) for group in self.pieces)

    @property
    def box(self) -> Box:
        """What is read, in the array: the smallest box around the runs."""
        return tuple(Span(min(r.source for r in runs), max(r.source + r.size for r in runs)) for runs in self.runs)

    @property
    def elements(self) -> int:
        """Elements that the chunks give to the buffer."""
        return math.prod(sum(run.size for run in runs) for runs in self.runs)

    def single_chunks(self) -> Iterator[Task]:
        """The same, chunk by chunk."""
        for chunk in itertools.product(*self.pieces):
            yield Task(tuple((piece,) for piece in chunk))

    def __str__(self) -> str:
        first = tuple(group[0].chunk for group in self.pieces)
        last = tuple(group[-1].chunk for group in self.pieces)
        return f"chunk {first}" if first == last else f"chunks {first} to {last}"


def cut(plan: RankPlan, wanted: int) -> list[Task]:
    """The reads of a plan, about `wanted` of them if it has that many chunks; every chunk is in one of them."""
    pieces = [dim.apart if plan.layout.partial else dim.pieces for dim in plan.dims]
    groups = [_neighbours(along, len(along)) for along in pieces]
    if not math.prod(map(len, groups)):
        return []
    longest = max(range(len(groups)), key=lambda at: max(map(len, groups[at])), default=None)
    if longest is not None:
        reads = math.prod(map(len, groups))
        nbytes = math.prod(plan.shape) * plan.layout.itemsize / reads
        parts = max(math.ceil(wanted / reads), math.ceil(nbytes / MAX_BYTES))
        groups[longest] = _neighbours(pieces[longest], math.ceil(max(map(len, groups[longest])) / parts))
    return [Task(pieces) for pieces in itertools.product(*groups)]


def _neighbours(pieces: Sequence[Piece], most: int) -> list[tuple[Piece, ...]]:
    """Pieces in groups that continue each other in the array and in the buffer, at most so many in one."""
    groups: list[list[Piece]] = []
    for piece in pieces:
        if groups and len(groups[-1]) < most and _continues(groups[-1][-1], piece):
            groups[-1].append(piece)
        else:
            groups.append([piece])
    return [tuple(group) for group in groups]


def _continues(one: Piece, next_one: Piece) -> bool:
    if len(one.runs) != 1 or len(next_one.runs) != 1:
        return False
    run, after = one.runs[0], next_one.runs[0]
    return after.source == run.source + run.size and after.dest == run.dest + run.size


def _joined(group: Sequence[Piece]) -> Run:
    first = group[0].runs[0]
    return Run(first.source, first.dest, sum(piece.runs[0].size for piece in group))

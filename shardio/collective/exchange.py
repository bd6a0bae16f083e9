"""The plans of all ranks -> who reads which chunk for whom, in which round. Pure: every rank makes the same by itself.

The piece that is read at once is a unit: one chunk, neighbouring small chunks together, or some rows of an array of
which any rows can be read alone. Each unit that any rank of the group needs has one owner. What only its owner needs
goes straight to where it belongs; the others are shared, in rounds of limited size.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from shardio.box import Box, Span, shape_of
from shardio.collective.segment import ALIGNED
from shardio.plan import RankPlan
from shardio.runs import Piece, Run, by_chunk
from shardio.source import Layout, chunks_under

SMALL = 1 << 20
"""Chunks of fewer bytes are read several at once."""
ROWS = 4 << 20
"""Bytes of a unit of an array of which any rows can be read alone."""

Runs = tuple[tuple[Run, ...], ...]


class Wanted(NamedTuple):
    """One array that all ranks want something of.

    Attributes:
        array: number of the array, the same whenever it is wanted.
        layout: how it is stored.
        parts: partition rank -> its plan, index applied.
        cut: names of the dims that are cut over ranks.
    """

    array: int
    layout: Layout
    parts: Mapping[int, RankPlan]
    cut: tuple[str, ...]


class Need(NamedTuple):
    """What one part of the partition needs of a unit, for one request (by its number)."""

    request: int
    part: int
    runs: Runs

    @property
    def elements(self) -> int:
        """Elements that it takes."""
        return math.prod(sum(run.size for run in along) for along in self.runs)


@dataclass(frozen=True)
class Unit:
    """What one rank reads at once.

    Attributes:
        array: number of the array.
        number: place in the grid of units.
        box: what is read: the smallest box around what all ranks need of it.
        nbytes: of the box, as stored values.
        chunks, decoded: chunks under the box, and bytes that reading it decodes.
        needs: who needs what of it.
        owner: member that reads it.
        alone: only the owner needs it, for one request: it is not shared.
        offset: where it lies in the owner's segment.
    """

    array: int
    number: tuple[int, ...]
    box: Box
    nbytes: int
    chunks: int
    decoded: int
    needs: tuple[Need, ...]
    owner: int = -1
    alone: bool = False
    offset: int = 0

    @property
    def key(self) -> tuple[int, tuple[int, ...]]:
        """What tells it from the other units of a batch."""
        return self.array, self.number

    @property
    def elements(self) -> int:
        """Elements of the box."""
        return math.prod(shape_of(self.box))

    def of(self, part: int) -> list[Need]:
        """What one part needs."""
        return [need for need in self.needs if need.part == part]

    def boxes(self, part: int) -> list[Box]:
        """The boxes that hold what one part needs, of which none meet: what is sent to another machine."""
        needs = self.of(part)
        spans = [_merged(run for need in needs for run in need.runs[at]) for at in range(len(self.box))]
        return list(itertools.product(*spans)) if needs else []


@dataclass(frozen=True)
class Exchange:
    """Who reads what.

    Attributes:
        alone: units that are not shared.
        rounds: units that are, round by round.
        sizes: bytes of each member's segment in each round [round][member].
    """

    alone: tuple[Unit, ...]
    rounds: tuple[tuple[Unit, ...], ...]
    sizes: tuple[tuple[int, ...], ...]

    @property
    def units(self) -> tuple[Unit, ...]:
        """All of them."""
        return (*self.alone, *itertools.chain.from_iterable(self.rounds))

    def decoded(self, member: int) -> int:
        """Bytes that a member decodes."""
        return sum(unit.decoded for unit in self.units if unit.owner == member)


def exchange(wanted: Sequence[Wanted], parts: Sequence[int], budget: int) -> Exchange:
    """Decide who reads what.

    Args:
        wanted: what the requests of one batch want, in their order.
        parts: part of the partition that each member of the group has.
        budget: bytes that a member's segment holds at most, unless one unit is larger.
    """
    found: dict[tuple[int, tuple[int, ...]], list[Need]] = {}
    layouts: dict[int, Layout] = {}
    sticky: dict[int, bool] = {}
    for array, requests in _by_array(wanted).items():
        layouts[array] = wanted[requests[0]].layout
        unit = unit_shape([wanted[request] for request in requests])
        sticky[array] = any(
            n > 1 and _selected(wanted[request], at) for request in requests for at, n in enumerate(unit)
        )
        for request in requests:
            for part, plan in wanted[request].parts.items():
                along = [_pieces(dim.runs, rows) for dim, rows in zip(plan.dims, unit, strict=True)]
                for pieces in itertools.product(*along):
                    number = tuple(piece.chunk for piece in pieces)
                    need = Need(request, part, tuple(piece.runs for piece in pieces))
                    found.setdefault((array, number), []).append(need)
    units = [_unit(array, number, needs, layouts[array]) for (array, number), needs in sorted(found.items())]
    return _dealt(units, {array for array, sticks in sticky.items() if sticks}, parts, budget)


def unit_shape(wanted: Sequence[Wanted]) -> tuple[int, ...]:
    """Extent of an array's units: its chunk, made larger or smaller where that costs nothing.

    Small chunks are joined along dims of which all requests want the same rows without a gap; not along dims with a
    selection, because other batches want other rows.
    """
    layout = wanted[0].layout
    unit = list(layout.chunks)
    selected = [any(_selected(want, at) for want in wanted) for at in range(len(unit))]
    if layout.partial:
        return _rows(layout, selected)
    for at in reversed(range(len(unit))):
        if selected[at]:
            if 0 < layout.block <= math.prod(unit[at + 1 :]) * layout.itemsize:  # a row can be decoded alone
                unit[at] = 1
            continue
        spans = [[plan.dims[at].runs for plan in want.parts.values()] for want in wanted]
        if any(other != spans[0] for other in spans[1:]) or len(_merged(itertools.chain(*spans[0]))) != 1:
            continue
        room = SMALL // (math.prod(unit) * layout.itemsize)
        if room > 1:
            unit[at] *= min(room, -(-layout.shape[at] // unit[at]))
    return tuple(unit)


def _rows(layout: Layout, selected: Sequence[bool]) -> tuple[int, ...]:
    """Units of an array without chunks: so many rows of it, as they follow each other in the file."""
    unit, left = [1] * len(layout.shape), max(1, ROWS // layout.itemsize)
    for at in reversed(range(len(unit))):
        if not selected[at]:
            unit[at] = max(1, min(layout.shape[at], left))
            left //= max(1, layout.shape[at])
    return tuple(unit)


def _selected(wanted: Wanted, at: int) -> bool:
    """Whether only some rows of a dim that is not cut are wanted, such as some times."""
    dim = next(iter(wanted.parts.values())).dims[at]
    return dim.dim not in wanted.cut and _merged(dim.runs) != [Span(0, wanted.layout.shape[at])]


def _unit(array: int, number: tuple[int, ...], needs: list[Need], layout: Layout) -> Unit:
    box = []
    for at in range(len(number)):
        runs = [run for need in needs for run in need.runs[at]]
        box.append(Span(min(run.source for run in runs), max(run.source + run.size for run in runs)))
    nbytes = math.prod(shape_of(tuple(box))) * layout.itemsize
    return Unit(array, number, tuple(box), nbytes, *_decoded(layout, tuple(box)), tuple(needs))


def _decoded(layout: Layout, box: Box) -> tuple[int, int]:
    """Chunks under a box, and bytes that are decoded to read it."""
    chunks = chunks_under(box, layout.chunks)
    if layout.partial:
        return chunks, math.prod(shape_of(box)) * layout.itemsize
    if not layout.block:
        return chunks, chunks * math.prod(layout.chunks) * layout.itemsize
    return chunks, sum(layout.decoded_bytes(within) for _, within in by_chunks(box, layout.chunks))


def by_chunks(box: Box, chunks: Sequence[int]) -> Iterator[tuple[tuple[int, ...], Box]]:
    """The chunks under a box: number, and what of the box lies in it, counted from its corner."""
    numbers = [range(span.start // n, -(-span.stop // n)) for span, n in zip(box, chunks, strict=True)]
    for number in itertools.product(*numbers):
        corner = [at * n for at, n in zip(number, chunks, strict=True)]
        yield (
            number,
            tuple(
                Span(max(span.start, first) - first, min(span.stop, first + n) - first)
                for span, first, n in zip(box, corner, chunks, strict=True)
            ),
        )


def _dealt(units: Sequence[Unit], sticky: set[int], parts: Sequence[int], budget: int) -> Exchange:
    """Give every unit an owner, and those that are shared a round and a place."""
    who = [[member for member, part in enumerate(parts) if any(part == need.part for need in u.needs)] for u in units]
    owners = _owners(units, sticky, who, len(parts))
    alone: list[Unit] = []
    shared: list[list[Unit]] = []
    sizes: list[list[int]] = []
    turn = [0] * len(parts)
    for unit, needing, owner in zip(units, who, owners, strict=True):
        if needing == [owner] and len(unit.needs) == 1:
            alone.append(replace(unit, owner=owner, alone=True))
            continue
        room = -(-unit.nbytes // ALIGNED) * ALIGNED
        if turn[owner] < len(sizes) and 0 < sizes[turn[owner]][owner] > budget - room:
            turn[owner] += 1
        if turn[owner] == len(sizes):
            shared.append([])
            sizes.append([0] * len(parts))
        shared[turn[owner]].append(replace(unit, owner=owner, offset=sizes[turn[owner]][owner]))
        sizes[turn[owner]][owner] += room
    return Exchange(tuple(alone), tuple(map(tuple, shared)), tuple(map(tuple, sizes)))


def _owners(units: Sequence[Unit], sticky: set[int], who: Sequence[list[int]], members: int) -> list[int]:
    """The member that reads each unit.

    Those whose chunk is read again for other batches always go to the same member. Of the rest, what one member needs
    alone goes to it up to its share; the others, large ones first, go to who has least so far, if possible one that
    needs them.
    """
    owners, load = [-1] * len(units), [0] * members
    share = sum(unit.decoded for unit in units) / members
    for at, (unit, needing) in enumerate(zip(units, who, strict=True)):
        if unit.array in sticky:
            owners[at] = needing[0] if len(needing) == 1 else (unit.array + sum(unit.number)) % members
        elif len(needing) == 1 and load[needing[0]] + unit.decoded <= share:
            owners[at] = needing[0]
        if owners[at] >= 0:
            load[owners[at]] += unit.decoded
    rest = sorted((at for at, owner in enumerate(owners) if owner < 0), key=lambda at: (-units[at].decoded, at))
    for at in rest:
        owners[at] = min(range(members), key=lambda member: (load[member], member not in who[at], member))
        load[owners[at]] += units[at].decoded
    return owners


def _by_array(wanted: Sequence[Wanted]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for request, want in enumerate(wanted):
        found.setdefault(want.array, []).append(request)
    return found


@lru_cache(4096)
def _pieces(runs: tuple[Run, ...], unit: int) -> tuple[Piece, ...]:
    return by_chunk(runs, unit)


def _merged(runs: Iterable[Run]) -> list[Span]:
    """The rows of runs as spans, ascending, of which none meet."""
    spans: list[Span] = []
    for start, stop in sorted((run.source, run.source + run.size) for run in runs):
        if spans and start <= spans[-1].stop:
            spans[-1] = Span(spans[-1].start, max(stop, spans[-1].stop))
        else:
            spans.append(Span(start, stop))
    return spans

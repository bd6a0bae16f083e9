"""Executes a plan together with the other ranks of a group: every chunk is read once, by one of them.

A batch is read in turns. In each, every rank reads its chunks of that turn into its shared memory, and copies what it
needs of those of the turn before, its own and the others'. A step between turns tells that all are done, or what went
wrong; so two pieces of memory a rank are enough, and an error of one is an error of all.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Self

import numpy as np

from shardio import cost
from shardio.box import Span, shape_of
from shardio.cached import CachedSource
from shardio.collective.exchange import Exchange, Need, Unit, Wanted, by_chunks, exchange
from shardio.collective.group import Group
from shardio.collective.memory import Memory
from shardio.collective.swap import MESSAGE, Pieces, swap
from shardio.cost import Choice
from shardio.errors import DimensionError, ReadError, ShardIOError
from shardio.read import OwnReader, ReadStats, Request, deliver, destination, named, room
from shardio.source import Layout, Source
from shardio.tasks import cut

Array = np.ndarray[Any, np.dtype[Any]]
LOG = logging.getLogger("shardio")
Job = Callable[[], None]
Key = tuple[int, tuple[int, ...]]

BUDGET = 64 << 20
"""Decoded bytes that a rank holds for the others at most, in each of two segments, unless one chunk is larger."""
PATIENCE_S = 10.0
"""How long a rank that could not exchange with another waits for the others, to tell which of them has ended."""


class CollectiveReader:
    """Reads for one rank of a group; all its ranks call it with as many requests, of the same arrays in the same order.

    Args:
        group: the ranks that share samples.
        auto: `choose` decides for each array whether it is read so, or by each rank for itself.
        threads: threads that read and decode; by default the cores this process may use.
        budget: see BUDGET.
        message: bytes of one message between machines.

    Attributes:
        stats: what this rank has read so far; what it took from other ranks is not in it.
        exchanged: bytes that it took from other ranks.
        own: names of the arrays that each rank reads for itself.
        modes: array -> how it is read and why, after `choose`.
    """

    def __init__(
        self,
        group: Group,
        *,
        auto: bool = False,
        threads: int | None = None,
        budget: int = BUDGET,
        message: int = MESSAGE,
    ) -> None:
        self.group, self.auto, self.budget, self.message = group, auto, budget, message
        self.stats = ReadStats()
        self.exchanged = 0
        self.own: frozenset[str] = frozenset()
        self.modes: dict[str, Choice] = {}
        self._reader = OwnReader(threads, self.stats)
        self._part = group.members[group.me].part
        self._parts = [member.part for member in group.members]
        self._near = [member for member in range(group.size) if group.near(member)]
        self._memory = Memory(group.tag(), group.me, self._near)
        self._sequence: int | None = None
        self._sources: list[Source] = []
        self._numbers: dict[int, int] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End the threads and give back the memory; the group stays."""
        self._reader.close()
        self._memory.forget()

    def choose(self, requests: Sequence[Request]) -> None:
        """With `auto`: decide for each array of these requests (of one sample) how it is read, all ranks together.

        Nothing is read into the requests. Takes about a second at most; what was chosen is in `modes` and in the log.
        """
        if not self.auto:
            self.modes = {request.source.name: Choice("collective", "as asked") for request in requests}
            return
        plans = [self.plan([request]) for request in requests]
        works = [
            cost.work(self._own_bytes(request), plan, self.group) for request, plan in zip(requests, plans, strict=True)
        ]
        rates = cost.measure_rates(self.group)
        kinds: dict[Layout, int] = {}  # arrays of the same layout are taken for equally fast
        for at, request in enumerate(requests):
            kinds.setdefault(request.source.layout, at)
        reads = [partial(self._sample, requests[at].source, plans[at]) for at in kinds.values()]
        decode = dict(zip(kinds, cost.measure_decoding(self.group, reads), strict=True))
        for request, work in zip(requests, works, strict=True):
            self.modes[request.source.name] = cost.choose(work, decode[request.source.layout], rates)
        self.own = frozenset(name for name, choice in self.modes.items() if choice.read == "own")
        if self.group.me == 0:
            for name, choice in self.modes.items():
                LOG.info("%s is read %s", name, choice)

    def _own_bytes(self, request: Request) -> list[int]:
        """Bytes that each member decodes when it reads for itself."""
        plans = request.plans
        return [0 if plans is None else plans[part].at(request.index).bytes_fetched for part in self._parts]

    def _sample(self, source: Source, plan: Exchange) -> int:
        """Read one unit of an array, if possible one that is this rank's; returns bytes decoded."""
        source = source.source if isinstance(source, CachedSource) else source
        units = [unit for unit in plan.units if unit.owner == self.group.me] or list(plan.units)
        if not units:
            return 0
        unit = units[self.group.me % len(units)]
        into = room(shape_of(unit.box), source.dtype)
        return source.read_counted(unit.box, into, self._reader.team).decoded

    def read_all(self, requests: Sequence[Request]) -> None:
        """Fill the buffers of several requests.

        Raises, on all ranks of the group in the same step, the error of any: MissingChunkError, CorruptChunkError,
        DecodeError, ... with the rank that met it; RankLostError, RankTimeoutError if a rank does not read along, and
        ReadCancelledError after `Group.cancel`.
        """
        try:
            if (
                self._sequence != self.group.sequence
            ):  # the last reads may have ended anywhere: meet before memory is used
                self._memory.forget()
                self.group.step()
                self._sequence = self.group.sequence
            self._read_all(requests)
        except BaseException:
            self._sequence = None
            self._memory.forget()
            raise

    def _read_all(self, requests: Sequence[Request]) -> None:
        plan, failed = Exchange((), (), ()), None
        shared = [request for request in requests if request.source.name not in self.own]
        jobs: list[Job] = []
        try:
            plan = self.plan(shared)
            wanted = -(-self._reader.team.threads // max(1, len(requests)))
            for request in requests:
                if request.source.name in self.own:
                    jobs += [partial(self._reader.fetch, request, task) for task in cut(request.plan, wanted)]
        except Exception as error:
            failed = error
        # The plan is the same on all ranks, so they all fail to make it, or none.
        spare = _spare(plan, self.group)
        alone = [unit for unit in plan.alone if unit.owner == self.group.me]
        copies: list[Job] = []
        patience: float | None = None
        for turn, units in enumerate(plan.rounds):
            if failed is None:
                failed = self._try(self._memory.turn, plan.sizes[turn])
            if failed is None:
                now = self._memory.now
                mine = [partial(self._read_shared, unit, now) for unit in units if unit.owner == self.group.me]
                failed = self._try(self._reader.team, [*mine, *copies, *self._alone(alone, spare[turn], shared)])
            self.group.agree(failed, timeout=patience)
            failed = self._try(self._memory.meet)
            pieces: dict[Key, Pieces] = {}
            if self.group.channel is not None:
                lost = self._try(self._swap, units, pieces)
                failed, patience = failed or lost, None if lost is None else min(PATIENCE_S, self.group.timeout)
            copies = self._copies(units, shared, pieces) if failed is None else []
        if failed is None:
            failed = self._try(self._reader.team, [*copies, *self._alone(alone, None, shared), *jobs])
        self.group.agree(failed, timeout=patience)
        self._memory.unname()
        self._reader.count(needed=sum(request.plan.bytes_needed for request in shared))

    def plan(self, requests: Sequence[Request]) -> Exchange:
        """Who reads what for these requests; the same on every rank."""
        wanted = []
        for request in requests:
            if request.plans is None:
                raise DimensionError(
                    f"the request for {request.source.name!r} has no plan of all ranks, which sharing chunks needs: "
                    f"pass Request(..., plans=, index=)"
                )
            parts = {part: request.plans[part].at(request.index) for part in sorted(set(self._parts))}
            wanted.append(
                Wanted(self._number(request.source), request.plan.layout, parts, request.plans.partition.dims)
            )
        return exchange(wanted, self._parts, self.budget)

    def _number(self, source: Source) -> int:
        """The number of an array, by when it was first asked for."""
        number = self._numbers.setdefault(id(source), len(self._sources))
        if number == len(self._sources):
            self._sources.append(source)  # held, so that its id stays its own
        return number

    # Reading and copying --------------------------------------------------------------------------------------------

    def _alone(self, units: list[Unit], nbytes: int | None, requests: Sequence[Request]) -> list[Job]:
        """Takes units that are read alone from a list, of so many decoded bytes (None: all); jobs that read them."""
        jobs: list[Job] = []
        while units and (nbytes is None or units[-1].decoded <= nbytes):
            unit = units.pop()
            nbytes = None if nbytes is None else nbytes - unit.decoded
            jobs.append(partial(self._read_alone, unit, requests))
        return jobs

    def _read_alone(self, unit: Unit, requests: Sequence[Request]) -> None:
        """Read what only this rank needs to where it belongs."""
        (need,) = unit.needs
        request = requests[need.request]
        direct = destination(request, need.runs)
        stored = room(shape_of(unit.box), request.source.dtype) if direct is None else direct
        self._read(unit, request.source, stored)
        if direct is None:
            deliver(request, need.runs, unit.box, stored)

    def _read_shared(self, unit: Unit, turn: int) -> None:
        self._read(unit, self._sources[unit.array], self._stored(unit, turn))

    def _stored(self, unit: Unit, turn: int) -> Array:
        """Where the values of a unit lie in its owner's segment."""
        dtype = self._sources[unit.array].dtype
        return self._memory.array(unit.owner, turn, unit.offset, dtype, shape_of(unit.box))

    def _read(self, unit: Unit, source: Source, into: Array) -> None:
        try:
            counted = source.read_counted(unit.box, into, self._reader.team)
        except ShardIOError:
            raise
        except Exception as error:  # codecs and file libraries raise errors of many kinds
            raise _bad_chunk(unit, source, error) from error
        self._reader.count(unit.chunks, counted=counted)

    def _copies(self, units: Sequence[Unit], requests: Sequence[Request], pieces: dict[Key, Pieces]) -> list[Job]:
        """Jobs that copy what this rank needs of a round's units."""
        jobs: list[Job] = []
        for unit in units:
            needs = unit.of(self._part)
            if not needs:
                continue
            found = pieces[unit.key] if unit.key in pieces else [(unit.box, self._stored(unit, self._memory.now))]
            jobs += [partial(_copy, requests[need.request], need, found) for need in needs]
            if unit.owner != self.group.me:
                self.exchanged += sum(need.elements for need in needs) * self._sources[unit.array].dtype.itemsize
        return jobs

    def _swap(self, units: Sequence[Unit], pieces: dict[Key, Pieces]) -> None:
        """What goes between machines."""
        now = self._memory.now
        try:
            pieces.update(
                swap(
                    self.group,
                    units,
                    lambda unit: self._stored(unit, now),
                    lambda array: self._sources[array].dtype,
                    message=self.message,
                )
            )
        except RuntimeError as error:
            raise ReadError(f"parts of chunks could not be exchanged with another machine: {error}") from error

    @staticmethod
    def _try(what: Callable[..., Any], *args: Any) -> Exception | None:
        """Do something that may fail on this rank alone; the next step tells the others."""
        try:
            what(*args)
        except Exception as error:
            return error
        return None


def _spare(plan: Exchange, group: Group) -> list[int]:
    """Bytes that this rank decodes less than the busiest in each round: it can read something alone meanwhile."""
    spare = []
    for units in plan.rounds:
        load = [0] * group.size
        for unit in units:
            load[unit.owner] += unit.decoded
        spare.append(max(load) - load[group.me])
    return spare


def _copy(request: Request, need: Need, pieces: Pieces) -> None:
    for box, stored in pieces:
        runs = tuple(
            tuple(run for run in along if span.start <= run.source and run.source + run.size <= span.stop)
            for along, span in zip(need.runs, box, strict=True)
        )
        if all(runs):
            deliver(request, runs, box, stored)


def _bad_chunk(unit: Unit, source: Source, error: Exception) -> ShardIOError:
    """The error that names the chunk that cannot be read."""
    for number, within in by_chunks(unit.box, source.chunks):
        corner = [at * size for at, size in zip(number, source.chunks, strict=True)]
        box = tuple(Span(first + a, first + z) for first, (a, z) in zip(corner, within, strict=True))
        try:
            source.read(box)
        except Exception as again:
            return named(again, f"chunk {number} of {source.name!r} (rows {[tuple(span) for span in box]})")
    return named(error, f"chunks from {number} of {source.name!r}")

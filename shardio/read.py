"""Executes a plan: the only place where files meet tensors. Here each rank reads what it needs for itself ("own").

A reader that shares the chunks of a domain group (collective) gets its own file and takes the same requests.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Any, Literal, Self, overload

import numpy as np
import torch

from shardio.box import Box, Span, shape_of, slices
from shardio.codecs.base import Counted, scratch
from shardio.decode import Decode
from shardio.errors import CorruptChunkError, DimensionError, MissingChunkError, ReadError, ShardIOError
from shardio.plan import Index, Plan, RankPlan
from shardio.runs import Run
from shardio.source import Source
from shardio.tasks import Task, cut
from shardio.team import Team, unpinned, usable_cores

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class Request:
    """One slab to read, and where it goes.

    Attributes:
        source: the array.
        plan: the rank's part of it, index applied.
        out: contiguous CPU tensor of `plan.result_shape`, any dtype that the values fit.
        valid: bool tensor of the same shape, becomes True where there is a value; None if not wanted.
        plans: the plan of all ranks, index not applied yet; a reader that shares chunks between ranks needs it.
        index: that index.
    """

    source: Source
    plan: RankPlan
    out: torch.Tensor
    valid: torch.Tensor | None = None
    plans: Plan | None = None
    index: Index = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, tensor in (("out", self.out), ("valid", self.valid)):
            if tensor is None:
                continue
            if tuple(tensor.shape) != self.plan.result_shape or tensor.device.type != "cpu":
                raise DimensionError(
                    f"{name} is {tuple(tensor.shape)} on {tensor.device}, but the plan of {self.source.name!r} gives "
                    f"{self.plan.result_shape} {self.plan.result_dims} on the CPU; pass a tensor of that shape"
                )


@dataclass
class ReadStats:
    """What a reader has read since it was made.

    Attributes:
        chunks: chunks decoded, wholly or in part (each part, where a layout can be read in parts).
        bytes_fetched: bytes decoded; of chunks read in parts, those of the parts.
        bytes_stored: bytes that came from the store to be decoded, as far as the format tells.
        bytes_needed: bytes of the slabs delivered, as stored values.
    """

    chunks: int = 0
    bytes_fetched: int = 0
    bytes_stored: int = 0
    bytes_needed: int = 0


@dataclass
class OwnReader:
    """Reads for one rank, several chunks at once on threads of its own; close it (or use `with`) when done.

    Attributes:
        threads: threads that read and decode; by default the cores this process may use, more for remote stores. 1
            reads in the caller's.
        stats: what was read so far.
        excuse: called with the request and the error for each chunk that is absent or corrupt; NaN is put in its place
            (False in the mask). None: the error is raised.
    """

    threads: int | None = None
    stats: ReadStats = field(default_factory=ReadStats)
    excuse: Callable[[Request, ShardIOError], None] | None = None
    team: Team = field(init=False, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False)

    def __post_init__(self) -> None:
        self.team = Team(self.threads)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End the threads; reading afterwards is an error."""
        self.team.close()

    def read_all(self, requests: Sequence[Request]) -> None:
        """Fill the buffers of several requests, all their chunks on the same threads.

        Raises the first error of any chunk (MissingChunkError, CorruptChunkError, DecodeError) once no thread writes
        to the buffers any more.
        """
        cores = self.team.threads if self.threads is not None else usable_cores()
        if self.threads is None:
            self.team.grow(max((request.source.requests for request in requests), default=1))
        jobs = []
        for request in requests:
            threads = cores if request.source.fetched_together else self.team.threads
            tasks = cut(request.plan, math.ceil(threads / len(requests)))
            jobs += [partial(self.fetch, request, task) for task in tasks]
        self.team(jobs)

    def fetch(self, request: Request, task: Task) -> None:
        """Read one of the tasks that `read_all` makes of a request."""
        source, box = request.source, task.box
        direct = destination(request, task.runs)
        stored = room(shape_of(box), source.dtype) if direct is None else direct
        try:
            counted = source.read_counted(box, stored, self.team)
        except Exception as error:  # codecs and file libraries raise errors of many kinds
            if isinstance(error, ShardIOError) and self.excuse is None:
                raise
            if task.chunks > 1:  # find the one that it is
                for single in task.single_chunks():
                    self.fetch(request, single)
                return
            known = named(error, f"{task} of {source.name!r} (rows {[tuple(span) for span in box]})")
            if self.excuse is None or not isinstance(known, (MissingChunkError, CorruptChunkError)):
                raise known from error
            self.excuse(request, known)
            blank(request, task.runs)
            return
        if direct is None:
            deliver(request, task.runs, box, stored)
        self.count(task.chunks, task.elements * source.dtype.itemsize, counted)

    def count(self, chunks: int = 0, needed: int = 0, counted: Counted | None = None) -> None:
        """Add to the stats; from any thread."""
        counted = counted or Counted()
        with self._lock:
            self.stats.chunks += chunks
            self.stats.bytes_needed += needed
            self.stats.bytes_fetched += counted.decoded
            self.stats.bytes_stored += counted.stored

    @overload
    def read(
        self,
        source: Source,
        plan: Plan | RankPlan,
        rank: int = 0,
        *,
        index: Index | None = None,
        out: torch.Tensor | None = None,
        dtype: torch.dtype = torch.float32,
        mask: Literal[False] = False,
    ) -> torch.Tensor: ...

    @overload
    def read(
        self,
        source: Source,
        plan: Plan | RankPlan,
        rank: int = 0,
        *,
        index: Index | None = None,
        out: torch.Tensor | None = None,
        dtype: torch.dtype = torch.float32,
        mask: Literal[True],
    ) -> tuple[torch.Tensor, torch.Tensor]: ...

    def read(
        self,
        source: Source,
        plan: Plan | RankPlan,
        rank: int = 0,
        *,
        index: Index | None = None,
        out: torch.Tensor | None = None,
        dtype: torch.dtype = torch.float32,
        mask: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Read one rank's slab with its halo, decoded.

        Args:
            source: the array.
            plan: made for `source.layout`; a Plan, of which `rank`'s part is read, or that part itself.
            rank: whose slab (unused if `plan` is one rank's).
            index: selection along uncut dims; an int drops the dim.
            out: where to put it, such as a pinned tensor; its dtype counts then.
            dtype: dtype of the result if `out` is None.
            mask: also return where there is a value (True) and where it is missing (False).

        Returns:
            A contiguous tensor of `RankPlan.result_shape`, and the mask if asked.

        Raises:
            MissingChunkError, CorruptChunkError, DecodeError, DimensionError.
        """
        mine = plan[rank] if isinstance(plan, Plan) else plan
        mine = mine.at(index) if index else mine
        if mine.layout != source.layout:
            raise DimensionError(
                f"the plan was made for {mine.layout}, but {source.name!r} is {source.layout}; plan each layout"
            )
        out = torch.empty(mine.result_shape, dtype=dtype) if out is None else out
        valid = torch.empty(mine.result_shape, dtype=torch.bool) if mask else None
        self.read_all([Request(source, mine, out, valid)])
        return out if valid is None else (out, valid)


def read(
    source: Source,
    plan: Plan | RankPlan,
    rank: int = 0,
    *,
    index: Index | None = None,
    out: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    threads: int | None = None,
) -> torch.Tensor:
    """Read one slab with a reader made for it; see OwnReader.read, which is for many."""
    with OwnReader(threads) as reader:
        return reader.read(source, plan, rank, index=index, out=out, dtype=dtype)


def room(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """An array of this thread to read to before decoding; it is used again."""
    if dtype.kind not in "iufcb":
        return np.empty(shape, dtype)
    return scratch("task", math.prod(shape) * dtype.itemsize).view(dtype).reshape(shape)


def destination(request: Request, runs: Sequence[tuple[Run, ...]]) -> Array | None:
    """Where the stored values of these runs can be read straight to; None if they must be decoded or are scattered."""
    source, out = request.source, request.out
    if source.decode != Decode() or request.valid is not None or out.dtype == torch.bfloat16:
        return None
    if any(len(along) != 1 for along in runs) or out.numpy().dtype != source.dtype:
        return None
    return out.numpy().reshape(request.plan.shape)[slices(tuple(_dest(along[0]) for along in runs))]


def named(error: Exception, what: str) -> ShardIOError:
    """The error that says what could not be read."""
    if isinstance(error, ShardIOError):
        return error
    text = f"{what} cannot be read: {type(error).__name__}: {error}"
    if isinstance(error, PermissionError):
        return ReadError(f"{text}; it may be there, but this user may not read it: grant that")
    return CorruptChunkError(f"{text}; check or rewrite that chunk")


def blank(request: Request, runs: Sequence[tuple[Run, ...]]) -> None:
    """Put NaN where runs go, and False in the mask."""
    if not request.out.is_floating_point():
        raise DimensionError(f"a bad chunk of {request.source.name!r} is NaN only in floats, not {request.out.dtype}")
    for part in itertools.product(*runs):
        dest = slices(tuple(map(_dest, part)))
        with unpinned():
            request.out.view(request.plan.shape)[dest] = torch.nan
        if request.valid is not None:
            request.valid.view(request.plan.shape)[dest] = False


def _dest(run: Run) -> Span:
    return Span(run.dest, run.dest + run.size)


def deliver(request: Request, runs: Sequence[tuple[Run, ...]], box: Box, stored: Array) -> None:
    """Decode runs, of which the stored values of a box were read, into the request's buffers."""
    shape = request.plan.shape
    out = request.out.view(shape)
    valid = None if request.valid is None else request.valid.numpy().reshape(shape)
    for part in itertools.product(*runs):
        source = tuple(Span(r.source - s.start, r.source - s.start + r.size) for r, s in zip(part, box, strict=True))
        dest = slices(tuple(map(_dest, part)))
        values = stored[slices(source)]
        mask = None if valid is None else valid[dest]
        if out.dtype == torch.bfloat16:  # unknown to numpy
            decoded = np.empty(values.shape, np.float32)
            request.source.decode.apply(values, decoded, mask)
            with unpinned():  # torch has threads of its own
                out[dest] = torch.from_numpy(decoded)
        else:
            request.source.decode.apply(values, out.numpy()[dest], mask)

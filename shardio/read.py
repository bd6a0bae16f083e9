"""Executes a plan: the only place where files meet tensors. Here each rank reads what it needs for itself ("own").

A reader that shares the chunks of a domain group (collective) gets its own file and takes the same requests.
"""

from __future__ import annotations

import itertools
import math
import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal, Self, overload

import numpy as np
import torch

from shardio.box import Box, Span, shape_of, shift, slices
from shardio.errors import CorruptChunkError, DimensionError, ShardIOError
from shardio.plan import ChunkPart, Index, Plan, RankPlan
from shardio.source import Source

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class Request:
    """One slab to read, and where it goes.

    Attributes:
        source: the array.
        plan: the rank's part of it, index applied.
        out: contiguous CPU tensor of `plan.result_shape`, any dtype that the values fit.
        valid: bool tensor of the same shape, becomes True where there is a value; None if not wanted.
    """

    source: Source
    plan: RankPlan
    out: torch.Tensor
    valid: torch.Tensor | None = None

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
        chunks: chunks decoded (parts of chunks, where a layout can be read in parts).
        bytes_fetched: bytes decoded, as stored values.
        bytes_needed: bytes of the slabs delivered, as stored values.
    """

    chunks: int = 0
    bytes_fetched: int = 0
    bytes_needed: int = 0


@dataclass
class OwnReader:
    """Reads for one rank, several chunks at once on threads of its own; close it (or use `with`) when done.

    Attributes:
        threads: threads that read and decode; by default the cores this process may use. 1 reads in the caller's.
        stats: what was read so far.
    """

    threads: int | None = None
    stats: ReadStats = field(default_factory=ReadStats)
    _pool: ThreadPoolExecutor | None = field(default=None, init=False, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False)

    def __post_init__(self) -> None:
        threads = usable_cores() if self.threads is None else self.threads
        if threads < 1:
            raise ValueError(f"threads={threads}; at least 1 is needed")
        if threads > 1:
            self._pool = ThreadPoolExecutor(threads, thread_name_prefix="shardio-read")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End the threads; reading afterwards is an error."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def read_all(self, requests: Sequence[Request]) -> None:
        """Fill the buffers of several requests, all their chunks on the same threads.

        Raises the first error of any chunk (MissingChunkError, CorruptChunkError, DecodeError) once no thread writes
        to the buffers any more.
        """
        tasks = [(request, part) for request in requests for part in _tasks(request)]
        if self._pool is None or len(tasks) <= 1:
            for request, part in tasks:
                self._fetch(request, part)
            return
        futures = [self._pool.submit(self._fetch, request, part) for request, part in tasks]
        _, pending = wait(futures, return_when=FIRST_EXCEPTION)
        for future in pending:
            future.cancel()
        wait(futures)
        for future in futures:
            if not future.cancelled():
                future.result()

    def _fetch(self, request: Request, part: ChunkPart) -> None:
        source = request.source
        box = tuple(Span(min(r.source for r in runs), max(r.source + r.size for r in runs)) for runs in part.runs)
        try:
            stored = np.empty(shape_of(box), dtype=source.dtype)
            source.read_into(box, stored)
        except ShardIOError:
            raise
        except Exception as error:
            raise CorruptChunkError(
                f"chunk {part.chunk} of {source.name!r} (rows {[tuple(span) for span in box]}) cannot be read: "
                f"{type(error).__name__}: {error}; check or rewrite that chunk"
            ) from error
        _deliver(request, part, box, stored)
        with self._lock:
            self.stats.chunks += 1
            self.stats.bytes_needed += _needed(part) * source.dtype.itemsize
            self.stats.bytes_fetched += source.dtype.itemsize * (
                _needed(part) if source.partial else math.prod(source.chunks)
            )

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


def usable_cores() -> int:
    """Cores that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1


def _tasks(request: Request) -> Iterator[ChunkPart]:
    """The plan's chunks; where any box can be read alone, its runs one by one instead."""
    for part in request.plan.parts():
        if not request.source.partial:
            yield part
            continue
        for runs in itertools.product(*part.runs):
            yield ChunkPart(part.chunk, tuple((run,) for run in runs))


def _needed(part: ChunkPart) -> int:
    """Elements that a chunk gives to the buffer."""
    return math.prod(sum(run.size for run in runs) for runs in part.runs)


def _deliver(request: Request, part: ChunkPart, box: Box, stored: Array) -> None:
    """Decode the parts of a chunk into the request's buffers."""
    shape = request.plan.shape
    out = request.out.numpy().reshape(shape)
    valid = None if request.valid is None else request.valid.numpy().reshape(shape)
    first = [-span.start for span in box]
    for runs in itertools.product(*part.runs):
        source = shift(tuple(Span(run.source, run.source + run.size) for run in runs), first)
        dest = slices(tuple(Span(run.dest, run.dest + run.size) for run in runs))
        request.source.decode.apply(stored[slices(source)], out[dest], None if valid is None else valid[dest])

"""Measures what the ranks of a mesh get: each is a process of this machine, and all read at once."""

from __future__ import annotations

import multiprocessing as mp
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardio.collective.group import Group
from shardio.collective.reader import CollectiveReader
from shardio.errors import ReadError
from shardio.plan import Plan
from shardio.read import OwnReader, Request
from shardio.source import Missing, Store, open_store

Mode = Literal["own", "collective"]
TIMEOUT_S = 300.0
"""Seconds that ranks wait for each other."""


@dataclass(frozen=True)
class Job:
    """What every rank is told.

    Attributes:
        source: path or URL of the store.
        missing, format: see open_store.
        plans: variable -> what the ranks of a group read of it, time not chosen yet.
        time: the time dim.
        rows: for each group of ranks, the time rows that it reads, one sample each.
        threads: reading threads of a rank.
        mode: each rank for itself, or the ranks of a group together.
        port: where the ranks meet.
    """

    source: str
    missing: Missing
    format: str | None
    plans: Mapping[str, Plan]
    time: str | None
    rows: Sequence[Sequence[int]]
    threads: int
    mode: Mode
    port: int

    @property
    def parts(self) -> int:
        """Ranks of a group."""
        return len(next(iter(self.plans.values())).ranks)


@dataclass(frozen=True)
class Measured:
    """What one rank measured.

    Attributes:
        rank, group, part: its number, its group, its number in the group.
        first, again: seconds of each sample, read for the first and for the second time.
        needed, decoded, stored: bytes of a sample on average: of the slab in the stored dtype, decoded for it by this
            rank, and fetched from the store for that (0 if the format does not tell).
    """

    rank: int
    group: int
    part: int
    first: tuple[float, ...]
    again: tuple[float, ...]
    needed: float
    decoded: float
    stored: float


def measure(
    source: str,
    plans: Mapping[str, Plan],
    rows: Sequence[Sequence[int]],
    *,
    time: str | None,
    mode: Mode = "own",
    threads: int = 1,
    missing: Missing = "raise",
    format: str | None = None,
) -> list[Measured]:
    """Start a process per rank, let all read the same number of samples at once, twice, and give what each measured.

    Args: see Job.

    Raises:
        ReadError: a rank died.
        Any error of reading, as a rank met it.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    job = Job(source, missing, format, plans, time, rows, threads, mode, port)
    context = _context()
    ranks: list[tuple[BaseProcess, Connection]] = []
    try:
        for rank in range(job.parts * len(rows)):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(job, rank, there), daemon=True)
            process.start()
            there.close()
            ranks.append((process, here))
        return [_answer(rank, *both) for rank, both in enumerate(ranks)]
    finally:
        for process, pipe in ranks:
            pipe.close()
            process.terminate()
            process.join()


def _context() -> Any:
    """How ranks start: where there is a fork server, it imports what they need once, in a process without threads."""
    if "forkserver" not in mp.get_all_start_methods():
        return mp.get_context("spawn")
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["shardio.bench"])
    return context


def _answer(rank: int, process: BaseProcess, pipe: Connection) -> Measured:
    wait([pipe, process.sentinel], TIMEOUT_S + 60)
    try:
        found = pipe.recv() if pipe.poll() else None
    except EOFError:
        found = None
    if isinstance(found, Measured):
        return found
    if isinstance(found, Exception):
        raise found
    raise ReadError(f"rank {rank} ended without an answer (exit code {process.exitcode}); was it killed for memory?")


def _serve(job: Job, rank: int, pipe: Connection) -> None:
    """One rank: join the others, read, answer."""
    torch.set_num_threads(1)
    try:
        world, limit = job.parts * len(job.rows), timedelta(seconds=TIMEOUT_S)
        store = dist.TCPStore("127.0.0.1", job.port, world, rank == 0, timeout=limit)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=limit)
        with open_store(job.source, missing=job.missing, format=job.format) as opened:
            pipe.send(_measure(job, opened, rank))
        dist.barrier()  # rank 0 holds the meeting point
    except Exception as error:
        pipe.send(error)
    dist.destroy_process_group()


def _measure(job: Job, store: Store, rank: int) -> Measured:
    group, part = divmod(rank, job.parts)
    mesh = DeviceMesh(
        "cpu", torch.arange(job.parts * len(job.rows)).view(-1, job.parts), mesh_dim_names=("data", "domain")
    )
    with_others = Group.join(mesh["domain"], part, timeout=TIMEOUT_S) if job.mode == "collective" else None
    reader = OwnReader(job.threads) if with_others is None else CollectiveReader(with_others, threads=job.threads)
    if with_others is not None:
        with_others.begin(0)
    samples = [_requests(job, store, part, row) for row in job.rows[group]]
    first: list[float] = []
    again: list[float] = []
    for taken in (first, again):
        dist.barrier()
        for requests in samples:
            begin = time.perf_counter()
            reader.read_all(requests)
            taken.append(time.perf_counter() - begin)
    stats, count = reader.stats, 2 * len(samples)
    reader.close()
    if with_others is not None:
        with_others.close()
    needed = sum(request.plan.bytes_needed for requests in samples for request in requests) / len(samples)
    decoded, stored = stats.bytes_fetched / count, stats.bytes_stored / count
    return Measured(rank, group, part, tuple(first), tuple(again), needed, decoded, stored)


def _requests(job: Job, store: Store, part: int, row: int) -> list[Request]:
    """A sample's reads, into buffers that are made before the clock runs."""
    found = []
    for name, planned in job.plans.items():
        index: dict[str, Any] = {job.time: [row]} if job.time is not None and job.time in store[name].dims else {}
        mine = planned[part].at(index)
        out = torch.zeros(mine.result_shape, dtype=torch.float32)
        found.append(Request(store[name], mine, out, plans=planned, index=index))
    return found

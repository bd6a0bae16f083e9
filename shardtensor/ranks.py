"""Ranks for tests: processes that stay up and run functions together, gloo on CPU, one thread each."""

from __future__ import annotations

import faulthandler
import multiprocessing as mp
import socket
import sys
import time
import traceback
from collections import ChainMap
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from datetime import timedelta
from functools import reduce
from io import BytesIO
from multiprocessing.connection import Connection, wait
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as distributed_c10d
from torch._ops import OpOverload, OpOverloadPacket
from torch.distributed.device_mesh import DeviceMesh

from shardtensor.errors import ShardTensorError

__all__ = ["RankError", "RankPool"]

# How long the others may take to answer once a rank has failed: most likely they wait for it.
PATIENCE_S = 5.0

# Groups that one call may make.
GROUPS = 1000

# Packages that a rank imports by itself; what is defined elsewhere (test files) travels by value.
IMPORTED = ("torch", "shardtensor", "shardio", "shardsets", "numpy", "builtins")


class RankError(ShardTensorError, RuntimeError):
    """A function run on the ranks raised; the message has every rank's traceback."""


class RankPool:
    """Processes that stay up and run functions together.

    Args:
        world: number of processes; meshes of fewer ranks use the first ones.
        timeout: seconds after which a collective fails, and a call that has not answered counts as hung.
    """

    MESHES = ((1,), (2,), (3,), (4,), (2, 2), (1, 2), (2, 1), (1, 3), (8,))

    def __init__(self, world: int = 4, timeout: float = 60.0) -> None:
        self.world, self.timeout = world, timeout
        self.processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._calls = 0

    def run(self, function: Callable[..., Any], *args: Any, mesh: tuple[int, ...] = (2,)) -> list[Any]:
        """Call ``function(mesh, *args)`` on every rank of a mesh of that shape; returns the results by rank.

        Function and arguments travel by value (cloudpickle): closures and lambdas are fine.

        Raises:
            RankError: a rank raised or did not answer in time; the ranks are then started anew.
        """
        __tracebackhide__ = True  # pytest then shows the line of the test
        count = torch.Size(mesh).numel()
        if count > self.world or mesh not in self.MESHES:
            raise RankError(f"no mesh {mesh} on {self.world} ranks: choose one of {self.MESHES}, or start more ranks")
        job = _pickled((function, args), _modules_of((function, *args)))
        self._calls += 1
        try:
            self._start()
            for pipe in self._pipes[:count]:
                pipe.send((mesh, self._calls, job))
            return self._collect(count)
        except BaseException:  # an interrupt, too: an answer that comes late would be taken for that of the next call
            self.close()
            raise

    def close(self) -> None:
        """End the processes."""
        for pipe in self._pipes:
            pipe.close()
        deadline = time.monotonic() + 1
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
        self.processes, self._pipes = [], []

    def _start(self) -> None:
        if self.processes and all(process.is_alive() for process in self.processes):
            return
        self.close()
        context = _context()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        for rank in range(self.world):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(there, rank, self.world, port, self.timeout), daemon=True)
            process.start()
            there.close()
            self.processes.append(process)
            self._pipes.append(here)
        self._collect(self.world)

    def _collect(self, count: int) -> list[Any]:
        """The answers of the first ``count`` ranks."""
        __tracebackhide__ = True
        waiting = {self._pipes[rank]: rank for rank in range(count)}
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        deadline = time.monotonic() + 2 * self.timeout
        while waiting:
            ready: list[Any] = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                late = "no answer in time: it hangs, or waits for a rank that failed"
                failures |= dict.fromkeys(waiting.values(), late)
                break
            for pipe in ready:
                rank = waiting.pop(pipe)
                try:
                    fine, answer = pipe.recv()
                except (EOFError, OSError):
                    fine, answer = False, "the process died"
                if fine:
                    results[rank] = answer
                else:
                    failures[rank] = answer
            if failures:
                deadline = min(deadline, time.monotonic() + PATIENCE_S)
        if failures:
            raise RankError("\n".join(f"--- rank {rank}:\n{failures[rank]}" for rank in sorted(failures)))
        return [results[rank] for rank in range(count)]


def _modules_of(values: Iterable[Any]) -> set[str]:
    """The modules, other than those that ranks import, where these functions and objects' classes are defined."""
    names = {getattr(value, "__module__", None) or type(value).__module__ for value in values}
    return {name for name in names if name.partition(".")[0] not in IMPORTED and name in sys.modules}


def _pickled(value: Any, by_value: set[str]) -> bytes:
    """The value as bytes, with what these modules define; ops travel by name, which cloudpickle alone cannot do."""
    import cloudpickle  # in the extra "test"

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        dispatch_table: ClassVar[Any] = ChainMap(
            {
                OpOverload: lambda op: (_op_at, (str(op),)),
                OpOverloadPacket: lambda op: (_op_at, (str(op),)),
                type(torch.ops.aten): lambda namespace: (_op_at, (namespace.name,)),
                type(torch.ops): lambda ops: (_op_at, ("",)),
            },
            cloudpickle.Pickler.dispatch_table,
        )

    with ExitStack() as stack, BytesIO() as buffer:
        for name in by_value:
            cloudpickle.register_pickle_by_value(sys.modules[name])
            stack.callback(cloudpickle.unregister_pickle_by_value, sys.modules[name])
        Pickler(buffer).dump(value)
        return buffer.getvalue()


def _op_at(path: str) -> Any:
    return reduce(getattr, path.split(".") if path else [], torch.ops)


def _context() -> Any:
    """How ranks start: where there is a fork server, it imports torch once, in a process without threads, for all."""
    if "forkserver" not in mp.get_all_start_methods():
        return mp.get_context("spawn")
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["shardtensor.testing"])
    return context


def _serve(pipe: Connection, rank: int, world: int, port: int, timeout: float) -> None:
    """One rank: join the others, then run what comes through the pipe until it closes."""
    import cloudpickle

    faulthandler.enable()
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, world, rank == 0, timeout=timedelta(seconds=timeout))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=timeout))
    meshes = {}
    for shape in RankPool.MESHES:
        count = torch.Size(shape).numel()
        if count <= world:
            names = ("domain",) if len(shape) == 1 else ("data", "domain")
            meshes[shape] = DeviceMesh("cpu", torch.arange(count).view(shape), mesh_dim_names=names)
    pipe.send((True, None))
    while True:
        try:
            shape, call, job = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            function, args = cloudpickle.loads(job)
            torch.manual_seed(0)
            # Groups are named by a count, which falls behind on a rank that was not among those that made some.
            distributed_c10d._world.group_count = call * GROUPS
            answer = (True, function(meshes[shape], *args))
        except BaseException:
            answer = (False, traceback.format_exc())
        try:
            pipe.send(answer)
        except (TypeError, AttributeError, ValueError):  # cannot be pickled
            pipe.send((False, f"the result cannot be sent back: {traceback.format_exc()}"))
        except OSError:  # nobody listens any more
            return

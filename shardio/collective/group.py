"""The ranks that share samples, and the steps they take together: who is slow, who has ended, what went wrong where."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import NoReturn, Self, TypeVar

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardio import errors
from shardio.collective.segment import Lifeline
from shardio.errors import RankLostError, RankTimeoutError, ReadCancelledError, ShardIOError
from shardtensor.comm import gather_facts

TIMEOUT_S = 300.0
LOOK_S = 0.05
"""While a rank waits, it looks so often whether the others live and read on."""
LONGEST_PAUSE_S = 1e-3

T = TypeVar("T")


@dataclass(frozen=True)
class Member:
    """One rank of a group.

    Attributes:
        rank: in the whole job, as errors call it.
        part: its number in the partition.
        node: number of its machine; ranks of one machine share memory.
    """

    rank: int
    part: int
    node: int


class Group:
    """The ranks that share samples: all of the mesh it was made of.

    They agree through a store of their own (on one machine) or a connection of their own to the job's (between
    machines), so that it works on a background thread beside any other communication.

    Attributes:
        name: the same on all ranks, and of no other group.
        members: the ranks, in the order of the mesh.
        me: number of this rank among them.
        channel: process group for what goes between machines; None on one machine.
        sequence: number of the sequence of reads that runs.
        timeout: seconds that the ranks wait for a slow one.
    """

    def __init__(
        self,
        name: str,
        members: Sequence[Member],
        me: int,
        store: dist.Store | None,
        *,
        lifeline: Lifeline | None = None,
        channel: dist.ProcessGroup | None = None,
        timeout: float = TIMEOUT_S,
    ) -> None:
        self.name, self.members, self.me = name, tuple(members), me
        self.channel, self.timeout = channel, timeout
        self._lifeline = lifeline
        self._store = store
        self.sequence = 0
        self._step = 0
        self._cancelled = threading.Event()
        self._readers = 0
        self._left: dict[int, list[str]] = {}
        """Own keys not deleted yet, by sequence."""

    @classmethod
    def join(cls, mesh: DeviceMesh, part: int, *, timeout: float = TIMEOUT_S, node: str | None = None) -> Self:
        """Join the ranks of a mesh; called by all of them at the same point, on the main thread.

        Args:
            mesh: the ranks that share samples (every axis but the data axis).
            part: this rank's number in the partition; ranks that hold copies have the same.
            timeout: seconds that the ranks wait for a slow one.
            node: name of this rank's machine, by default found out; ranks of one machine share memory.
        """
        ranks = [int(rank) for rank in mesh.mesh.flatten()]
        if len(ranks) == 1:
            return cls("alone", [Member(ranks[0], part, 0)], 0, None, timeout=timeout)
        me = ranks.index(dist.get_rank())
        own = uuid.uuid4().hex
        lifeline = Lifeline(f"shardio-{own}")
        met = _in_order(gather_facts((part, node or _machine(), own, str(lifeline.path)), mesh))
        names = [said[1] for said in met]
        name = met[0][2]
        watched = {at: Path(said[3]) for at, said in enumerate(met) if said[1] == names[me] and at != me}
        sees = lifeline.watch(watched)
        server = _serve(timeout) if me == 0 and len(set(names)) == 1 else None
        again = _in_order(gather_facts((sees, server.port if server is not None else 0), mesh))
        lifeline.hide()
        blind = {names[at] for at, (saw, _) in enumerate(again) if not saw}  # separate containers of one machine
        nodes = [at if names[at] in blind else names.index(names[at]) for at in range(len(ranks))]
        members = [Member(rank, said[0], at) for rank, said, at in zip(ranks, met, nodes, strict=True)]
        if len(set(nodes)) == 1:
            port = again[0][1]
            loopback = server or dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=timeout))
            return cls(name, members, me, loopback, lifeline=lifeline, timeout=timeout)
        job = dist.distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]
        channel = dist.new_group(
            ranks, timeout=timedelta(seconds=timeout), backend="gloo", use_local_synchronization=True
        )
        store = dist.PrefixStore(f"shardio/{name}", job)
        return cls(name, members, me, store, lifeline=lifeline, channel=channel, timeout=timeout)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.members)

    def tag(self) -> str:
        """A name for the next reader of this group; all ranks make their readers in the same order."""
        self._readers += 1
        return f"{self.name}-{self._readers}"

    def near(self, member: int) -> bool:
        """Whether a member shares memory with this rank."""
        return self.members[member].node == self.members[self.me].node

    # Sequences ------------------------------------------------------------------------------------------------------

    def begin(self, sequence: int) -> None:
        """Start a sequence of reads (an iteration over the loader) with a number that was not used before.

        Called on every rank at the same point of the program, while no read runs; no communication.
        """
        past, self.sequence, self._step = self.sequence, sequence, 0
        self._cancelled.clear()
        for old in [number for number in self._left if number not in (past, sequence)]:
            for key in (*self._left.pop(old), f"{old}/stop"):
                self._delete(key)

    def cancel(self) -> None:
        """End the running sequence: a read that waits for other ranks here or there ends with ReadCancelledError.

        Called from any thread, when the iteration ends early; afterwards `begin` the next one.
        """
        self._cancelled.set()
        with contextlib.suppress(RankLostError):
            self._stop(ReadCancelledError(f"rank {self.members[self.me].rank} has ended its iteration"))

    def close(self) -> None:
        """Leave the group: for the others, this rank has ended."""
        if self._lifeline is not None:
            self._lifeline.close()
            self._lifeline = None
        if self.channel is not None:
            dist.destroy_process_group(self.channel)
            self.channel = None
        self._store = None

    # Steps ----------------------------------------------------------------------------------------------------------

    def step(self, said: str = "", *, timeout: float | None = None) -> list[str]:
        """Say something and wait for what all others say in the same step; returns it by member.

        Raises:
            RankLostError, RankTimeoutError: a rank has ended or is late; the message names it.
            ReadCancelledError: a rank has ended its iteration.
        """
        if self.size == 1:
            return [said]
        number, self._step = self._step, self._step + 1
        keys = [f"{self.sequence}/{number}/{member}" for member in range(self.size)]
        mine = self._left.setdefault(self.sequence, [])
        self._call(lambda store: store.set(keys[self.me], "." + said))  # a value must not be empty
        mine.append(keys[self.me])
        if len(mine) > 2:  # all have read it: they are in this step or the one before
            self._delete(mine.pop(0))
        self._wait([key for key in keys if key != keys[self.me]], self.timeout if timeout is None else timeout)
        return [value.decode()[1:] for value in self._call(lambda store: store.multi_get(keys))]

    def agree(self, error: BaseException | None, *, timeout: float | None = None) -> None:
        """A step in which every rank says what went wrong, if anything did; then the same is raised on all.

        Raises the error of the first rank that has one: its kind, as far as it is one of shardio's, and its words.
        """
        text = "" if error is None else f"{type(error).__name__}\n{error}"
        for member, said in zip(self.members, self.step(text, timeout=timeout), strict=True):
            if said:
                kind, _, words = said.partition("\n")
                raise _as_error(kind, f"rank {member.rank}: {words}") from error

    def _wait(self, keys: list[str], timeout: float) -> None:
        began = looked = time.monotonic()
        pause = 0.0
        while not self._call(lambda store: store.check(keys)):
            if self._cancelled.is_set():
                raise ReadCancelledError("the iteration that this batch belongs to has ended")
            now = time.monotonic()
            if now - looked > LOOK_S:
                looked = now
                self._look(keys)
            if now - began > timeout:
                late = self._missing(keys)
                if late:
                    self._give_up(
                        RankTimeoutError(
                            f"{_ranks(late)} did not read along within {timeout:g} s; it is slow, stuck, or took "
                            f"another way through the program. Raise the timeout if it only needs longer"
                        )
                    )
            time.sleep(pause)
            pause = min(pause + 5e-5, LONGEST_PAUSE_S)

    def _missing(self, keys: list[str]) -> list[Member]:
        """Members whose keys are not there."""
        there = [self._call(partial(_has, key=key)) for key in keys]
        return [self.members[int(key.rpartition("/")[2])] for key, here in zip(keys, there, strict=True) if not here]

    def _look(self, keys: list[str]) -> None:
        """Raise what makes waiting useless; a rank may end once it has said what the others wait for."""
        ended = [self.members[at] for at in self._lifeline.ended()] if self._lifeline is not None else []
        stop = f"{self.sequence}/stop"
        stopped = self._call(lambda store: store.check([stop]))
        if not (ended or stopped):
            return
        missing = self._missing(keys)
        if stopped and missing:
            kind, _, words = self._call(lambda store: store.get(stop)).decode().partition("\n")
            raise _as_error(kind, words)
        lost = [member for member in ended if member in missing]
        if lost:
            self._give_up(RankLostError(f"{_ranks(lost)} has ended (killed, out of memory, or left the program)"))

    def _give_up(self, error: ShardIOError) -> NoReturn:
        with contextlib.suppress(RankLostError):
            self._stop(error)
        raise error

    def _stop(self, error: ShardIOError) -> None:
        """Tell the ranks that wait in this sequence why they need not."""
        self._left.setdefault(self.sequence, [])
        self._call(lambda store: store.set(f"{self.sequence}/stop", f"{type(error).__name__}\n{error}"))

    def _delete(self, key: str) -> None:
        self._call(lambda store: store.delete_key(key))

    def _call(self, what: Callable[[dist.Store], T]) -> T:
        if self._store is None:
            raise RankLostError("this rank has left the group that shares the reading; its loader was closed")
        try:
            return what(self._store)
        except RuntimeError as error:  # the connection is gone
            keeper = self.members[0] if self.channel is None else Member(0, 0, 0)
            raise RankLostError(
                f"rank {keeper.rank}, through which the ranks agree, has ended or cannot be reached: {error}"
            ) from error


def _has(store: dist.Store, key: str) -> bool:
    return store.check([key])


def _ranks(members: Sequence[Member]) -> str:
    numbers = ", ".join(str(member.rank) for member in members)
    return f"rank {numbers}" if len(members) == 1 else f"ranks {numbers}"


def _as_error(kind: str, words: str) -> ShardIOError:
    """An error that another rank spoke of; of its kind if that is one of shardio's."""
    known = getattr(errors, kind, None)
    if isinstance(known, type) and issubclass(known, ShardIOError):
        return known(words)
    rank, _, rest = words.partition(": ")
    return errors.ReadError(f"{rank}: {kind}: {rest}")


def _in_order(facts: dict[tuple[int, ...], T]) -> list[T]:
    return [facts[coordinate] for coordinate in sorted(facts)]


def _machine() -> str:
    """Name of this machine; another one after each start of it."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()} {boot.read_text().strip() if boot.exists() else ''}"


def _serve(timeout: float) -> dist.TCPStore:
    """A store that this rank keeps for the others on its machine."""
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout))

"""The ranks that share samples, and the steps they take together: who is slow, who has ended, what went wrong where."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import NoReturn, Self, TypeVar

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardio import errors
from shardio.collective.board import BYTES, Board, SharedBoard, StoreBoard
from shardio.collective.segment import Lifeline
from shardio.errors import RankLostError, RankTimeoutError, ReadCancelledError, ShardIOError
from shardtensor.comm import gather_facts

TIMEOUT_S = 300.0
SETUP_S = 60.0
"""What connecting to ranks on other machines may take at least."""
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

    They agree through shared memory, or between machines through a connection of their own to the job's store, so that
    it works on a background thread beside any other communication.

    Attributes:
        name: the same on all ranks, and of no other group.
        members: the ranks, in the order of the mesh.
        me: number of this rank among them.
        channel: gloo connections, by member, for what goes between machines; None on one machine.
        sequence: number of the sequence of reads that runs.
        timeout: seconds that the ranks wait for a slow one.
    """

    def __init__(
        self,
        name: str,
        members: Sequence[Member],
        me: int,
        board: Board | None,
        *,
        lifeline: Lifeline | None = None,
        channel: dist.ProcessGroupGloo | None = None,
        timeout: float = TIMEOUT_S,
    ) -> None:
        self.name, self.members, self.me = name, tuple(members), me
        self.channel, self.timeout = channel, timeout
        self._board, self._lifeline = board, lifeline
        self.sequence = 0
        self._step = 0
        self._readers = 0
        self._cancelled = threading.Event()
        self._over: ShardIOError | None = None
        """Why this sequence cannot go on."""

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
        lifeline = Lifeline(f"shardio-{own}", BYTES)
        met = _in_order(gather_facts((part, node or machine(), own, str(lifeline.path)), mesh))
        names = [said[1] for said in met]
        sees = lifeline.watch({at: Path(said[3]) for at, said in enumerate(met) if said[1] == names[me] and at != me})
        seeing = _in_order(gather_facts(sees, mesh))
        lifeline.hide()
        blind = {names[at] for at, saw in enumerate(seeing) if not saw}  # separate containers of one machine
        nodes = [at if names[at] in blind else names.index(names[at]) for at in range(len(ranks))]
        members = [Member(rank, said[0], at) for rank, said, at in zip(ranks, met, nodes, strict=True)]
        name = met[0][2]
        if len(set(nodes)) == 1:
            board = SharedBoard({me: lifeline.own, **lifeline.others}, me)
            return cls(name, members, me, board, lifeline=lifeline, timeout=timeout)
        job = dist.distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]
        # Not by new_group: without the other ranks of the job, it needs the same history of groups on all.
        channel = dist.ProcessGroupGloo(
            dist.PrefixStore(f"shardio/{name}/gloo", job), me, len(ranks), timedelta(seconds=max(timeout, SETUP_S))
        )
        stored = StoreBoard(dist.PrefixStore(f"shardio/{name}", job), len(ranks), me)
        return cls(name, members, me, stored, lifeline=lifeline, channel=channel, timeout=timeout)

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
        self.sequence, self._step, self._over = sequence, 0, None
        self._cancelled.clear()

    def cancel(self) -> None:
        """End the running sequence: a read that waits for other ranks here or there ends with ReadCancelledError.

        Called from any thread, when the iteration ends early; afterwards `begin` the next one.
        """
        self._cancelled.set()
        self._stop(ReadCancelledError(f"rank {self.members[self.me].rank} has ended its iteration"))

    def close(self) -> None:
        """Leave the group: for the others, this rank has ended."""
        if self._lifeline is not None:
            self._lifeline.close()
            self._lifeline = None
        self.channel = None
        if self._board is not None:
            self._board.close()

    # Steps ----------------------------------------------------------------------------------------------------------

    def step(self, said: str = "", *, timeout: float | None = None) -> list[str]:
        """Say something and wait for what all others say in the same step; returns it by member.

        Raises:
            RankLostError, RankTimeoutError: a rank has ended or is late; the message names it.
            ReadCancelledError: a rank has ended its iteration.
        """
        if self._board is None:
            return [said]
        if self._cancelled.is_set():
            raise ReadCancelledError("the iteration that this batch belongs to has ended")
        if self._over is not None:
            raise type(self._over)(str(self._over))
        number, self._step = self._step, self._step + 1
        self._board.put(self.sequence, number, said)
        self._wait(self._board, number, self.timeout if timeout is None else timeout)
        return self._board.texts(self.sequence, number)

    def agree(self, error: BaseException | None, *, timeout: float | None = None) -> None:
        """A step in which every rank says what went wrong, if anything did; then the same is raised on all.

        Raises the error of the first rank that has one: its kind, as far as it is one of shardio's, and its words.
        """
        text = "" if error is None else f"{type(error).__name__}\n{error}"
        for member, said in zip(self.members, self.step(text, timeout=timeout), strict=True):
            if said:
                kind, _, words = said.partition("\n")
                raise _as_error(kind, f"rank {member.rank}: {words}") from error

    def _wait(self, board: Board, step: int, timeout: float) -> None:
        began = looked = time.monotonic()
        pause = 0.0
        while board.missing(self.sequence, step):
            if self._cancelled.is_set():
                raise ReadCancelledError("the iteration that this batch belongs to has ended")
            now = time.monotonic()
            if now - looked > LOOK_S:
                looked = now
                self._look(board, step)
            if now - began > timeout:
                late = board.missing(self.sequence, step)
                if late:
                    self._give_up(
                        RankTimeoutError(
                            f"{self._ranks(late)} did not read along within {timeout:g} s; it is slow, stuck, or took "
                            f"another way through the program. Raise the timeout if it only needs longer"
                        )
                    )
            time.sleep(pause)
            pause = min(pause + 5e-5, LONGEST_PAUSE_S)

    def _look(self, board: Board, step: int) -> None:
        """Raise what makes waiting useless; a rank may end once it has said what the others wait for."""
        stopped = board.stopped(self.sequence)
        ended = self._lifeline.ended() if self._lifeline is not None else []
        missing = board.missing(self.sequence, step)
        if stopped is not None and missing:
            kind, _, words = stopped.partition("\n")
            self._over = _as_error(kind, words)
            raise self._over
        lost = [member for member in ended if member in missing]
        if lost:
            self._give_up(RankLostError(f"{self._ranks(lost)} has ended (killed, out of memory, or left the program)"))

    def _give_up(self, error: ShardIOError) -> NoReturn:
        self._over = error
        self._stop(error)
        raise error

    def _stop(self, error: ShardIOError) -> None:
        """Tell the ranks that wait in this sequence why they need not."""
        if self._board is not None:
            with contextlib.suppress(RankLostError):
                self._board.stop(self.sequence, f"{type(error).__name__}\n{error}")

    def _ranks(self, members: Sequence[int]) -> str:
        numbers = ", ".join(str(self.members[member].rank) for member in members)
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


def machine() -> str:
    """Name of this machine; another one after each start of it."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()} {boot.read_text().strip() if boot.exists() else ''}"

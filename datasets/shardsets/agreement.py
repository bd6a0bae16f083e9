"""What all ranks decide together: an error on one is an error on all, and facts that must be the same are compared."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

from shardio.collective.group import machine
from shardio.collective.segment import Lifeline
from shardsets.errors import BatchError
from shardtensor import CollectiveError, RankDisagreementError
from shardtensor.comm import gather_facts, largest
from shardtensor.spec import DeviceMesh

__all__ = ["Agreement"]

T = TypeVar("T")

PATIENCE_S = 1.0
"""How long after an exchange has failed a rank that ended may take to be seen."""


@dataclass(frozen=True)
class Agreement:
    """The ranks of a mesh. Every method is called by all of them at the same point of the program, on the main thread.

    Attributes:
        mesh: the ranks; None for one process.
        lifeline: shows which of those on this machine have ended; None where that is not watched.
    """

    mesh: DeviceMesh | None
    lifeline: Lifeline | None = None

    @classmethod
    def watching(cls, mesh: DeviceMesh | None) -> Self:
        """One that names ranks of this machine that have ended when an exchange with them fails; until `close`."""
        alone = cls(mesh)
        if mesh is None or mesh.size() == 1:
            return alone
        lifeline = Lifeline(f"shardsets-{uuid.uuid4().hex}", 1)
        said = alone.facts((machine(), lifeline.path))
        here, _ = said[alone.rank]
        lifeline.watch({rank: Path(path) for rank, (at, path) in said.items() if at == here and rank != alone.rank})
        alone.facts(None)  # all have opened the files
        lifeline.hide()
        return cls(mesh, lifeline)

    @contextmanager
    def naming(self) -> Iterator[None]:
        """Where an exchange fails inside, say which ranks have ended, if any is seen."""
        try:
            yield
        except CollectiveError as failed:
            ended = self._ended()
            if not ended:
                raise
            verb = "has" if len(ended) == 1 else "have"
            raise CollectiveError(
                f"{_names(ended)} {verb} ended (killed, out of memory, or left the program): {failed}"
            ) from failed

    def _ended(self) -> list[int]:
        deadline = time.monotonic() + PATIENCE_S
        while self.lifeline is not None:
            ended = self.lifeline.ended()
            if ended or time.monotonic() > deadline:
                return ended
            time.sleep(0.01)
        return []

    def close(self) -> None:
        """Watch no more; for the others, this rank has ended."""
        if self.lifeline is not None:
            self.lifeline.close()

    @property
    def rank(self) -> int:
        """This rank's number in the whole program."""
        return 0 if self.mesh is None else self.mesh.get_rank()

    def worst(self, grade: int) -> int:
        """The largest grade of any rank."""
        if self.mesh is None:
            return grade
        with self.naming():
            return largest(grade, self.mesh)

    def facts(self, value: T) -> dict[int, T]:
        """The picklable value of every rank, by rank."""
        if self.mesh is None:
            return {0: value}
        with self.naming():
            return {int(self.mesh.mesh[at].item()): said for at, said in gather_facts(value, self.mesh).items()}

    def together(self, what: str, step: Callable[[], T]) -> T:
        """Do a step on every rank; if it fails on any, raise on all.

        Raises:
            BatchError: it failed on other ranks; the message says ``what``, the ranks and their errors.
        """
        error: Exception | None = None
        try:
            done = step()
        except Exception as caught:
            error = caught
        try:
            failed = self.worst(int(error is not None))
        except CollectiveError as lost:
            raise (error or lost) from (lost if error else lost.__cause__)
        if failed:
            self.fail(what, error)
        return done

    def fail(self, what: str, error: Exception | None) -> None:
        """Raise on all ranks what at least one of them has run into."""
        text = None if error is None else f"{type(error).__name__}: {error}"
        told = {rank: said for rank, said in self.facts(text).items() if said is not None}
        if error is not None:
            raise error
        raise BatchError(f"{what} on " + "; ".join(f"rank {rank}: {said}" for rank, said in told.items()))

    def same(self, what: str, value: Any) -> None:
        """Compare a fact that must be the same on all ranks.

        Raises:
            RankDisagreementError: it is not; the message says ``what``, and which ranks hold which value.
        """
        by_value: dict[str, list[int]] = {}
        for rank, said in self.facts(repr(value)).items():
            by_value.setdefault(said, []).append(rank)
        if len(by_value) > 1:
            held = "; ".join(f"{_names(ranks)}: {said}" for said, ranks in by_value.items())
            raise RankDisagreementError(f"{what}: {held}")


def _names(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, sorted(ranks)))}"

"""Bad data: what it is, and what all ranks do about it in the same step: raise, skip or fill."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from shardio.errors import CorruptChunkError, MissingChunkError, ReadError
from shardsets.agreement import Agreement
from shardsets.errors import NotFiniteError
from shardtensor import CollectiveError

__all__ = ["BadData", "Judge", "OnBad", "Skipped", "reason_of"]

OnBad = Literal["raise", "skip", "fill"]
"""What is done about bad data: an error on all ranks, the step left out on all ranks, or NaN in its place."""

FINE, FILLED, BAD, FAILED = range(4)
LISTED = 1000
"""How many cases the report lists one by one; further ones are only counted."""
LOGGED = 10

log = logging.getLogger("shardsets")


@dataclass(frozen=True)
class BadData:
    """Bad data that a rank has met.

    Attributes:
        samples: in which sample; all of the rank's batch where it is not known which.
        times: their times.
        rank: of the whole program.
        reason: "missing", "corrupt", "not finite", or "unreachable" (no permission, no connection).
        error: what was found, and where.
    """

    samples: tuple[int, ...]
    times: tuple[str, ...]
    rank: int
    reason: str
    error: str

    def __str__(self) -> str:
        samples = ", ".join(map(str, self.samples))
        times = f" ({', '.join(self.times)})" if any(self.times) else ""
        return f"sample {samples}{times}, rank {self.rank}: {self.reason}: {self.error}"


@dataclass(frozen=True)
class Skipped:
    """A step that was left out on all ranks.

    Attributes:
        epoch: of the step.
        samples: of all data groups in that step.
        because: the bad data.
    """

    epoch: int
    samples: tuple[int, ...]
    because: tuple[BadData, ...]


def reason_of(error: Exception) -> str | None:
    """Why data is bad; None for errors that are not about data."""
    for kind, reason in (
        (MissingChunkError, "missing"),
        (CorruptChunkError, "corrupt"),
        (NotFiniteError, "not finite"),
        ((ReadError, PermissionError), "unreachable"),
    ):
        if isinstance(error, kind):
            return reason
    return None


@dataclass
class Judge:
    """Decides with all ranks what becomes of a step, and keeps the books.

    Attributes:
        on_bad: what the user wants.
        agreement: the ranks.
        skipped, filled: the first cases of each.
        skips, fills: how many there were.
    """

    on_bad: OnBad
    agreement: Agreement
    skipped: list[Skipped] = field(default_factory=list)
    filled: list[BadData] = field(default_factory=list)
    skips: int = 0
    fills: int = 0

    def use(self, error: Exception | None, bad: Sequence[BadData], epoch: int, samples: Sequence[int]) -> bool:
        """Whether a step is used (or left out, on all ranks); called by all of them.

        Args:
            error: why this rank has no batch, if it has none.
            bad: the bad data it has met.
            epoch, samples: of the step, all data groups together.

        Raises:
            the error itself, or BatchError naming the ranks that have one: it is no bad data, or on_bad is "raise".
        """
        skippable = self.on_bad == "skip" and (error is None or reason_of(error) is not None)
        grade = FINE if error is None and not bad else FILLED if error is None else BAD if skippable else FAILED
        try:
            worst = self.agreement.worst(grade)
        except CollectiveError as lost:
            raise (error or lost) from (lost if error else lost.__cause__)
        if worst == FINE:
            return True
        if worst == FAILED:
            self.agreement.fail("a batch could not be read", error)
        told = tuple(item for said in self.agreement.facts(tuple(bad)).values() for item in said)
        if worst == FILLED:
            self._note_filled(told)
        else:
            self._note_skipped(Skipped(epoch, tuple(samples), told))
        return worst == FILLED

    def _note_filled(self, told: Sequence[BadData]) -> None:
        self._log("filled", self.fills, [str(bad) for bad in told])
        self.filled += told[: max(0, LISTED - len(self.filled))]
        self.fills += len(told)

    def _note_skipped(self, step: Skipped) -> None:
        self._log("skipped", self.skips, [f"samples {list(step.samples)}, because of {step.because[0]}"])
        if len(self.skipped) < LISTED:
            self.skipped.append(step)
        self.skips += 1

    def _log(self, what: str, before: int, lines: Sequence[str]) -> None:
        if self.agreement.rank:
            return
        for number, line in enumerate(lines, before):
            if number < LOGGED:
                log.warning("%s: %s", what, line)
            elif number == LOGGED:
                log.warning("more is %s; loader.report() tells what", what)

"""Bad data: what it is, where it was met, and what the user can ask for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shardio.errors import CorruptChunkError, MissingChunkError, ReadError
from shardsets.errors import NotFiniteError

__all__ = ["BadData", "OnBad", "Skipped", "reason_of"]

OnBad = Literal["raise", "skip", "fill"]
"""What is done about bad data: an error on all ranks, the step left out on all ranks, or NaN in its place."""


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
        (ReadError, "unreachable"),
    ):
        if isinstance(error, kind):
            return reason
    return None

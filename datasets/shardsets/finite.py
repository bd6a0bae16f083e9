"""NaN and infinite values in a batch: found, counted, let through or replaced."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from shardsets.errors import NotANumberError, NotFiniteError, SampleError

__all__ = ["Finite"]


@dataclass(frozen=True)
class Finite:
    """What becomes of values that are not finite.

    Attributes:
        nan: "raise" where there is NaN, "allow" it, or the number to put in its place.
        inf: the same for infinite values.
        limit: share of a channel's cells that may be neither, in one sample; more is bad data even where `nan` and
            `inf` let them through.
    """

    nan: str | float = "raise"
    inf: str | float = "raise"
    limit: float = 1.0

    def __post_init__(self) -> None:
        for name in ("nan", "inf"):
            value = getattr(self, name)
            if not (value in ("raise", "allow") or isinstance(value, int | float)):
                raise SampleError(f"{name} is {value!r}; use 'raise', 'allow' or a number")
        if not 0 <= self.limit <= 1:
            raise SampleError(f"max_nonfinite is {self.limit}; it is a share of the cells, 0 to 1")

    def check_(
        self, field: torch.Tensor, name: Callable[[int, int], str], *, fill: bool
    ) -> tuple[list[tuple[int, NotFiniteError]], torch.Tensor]:
        """Look for values that are not finite and replace them in place as `nan` and `inf` say.

        Args:
            field: [B, channels, ...].
            name: says in words where a (sample, channel) is.
            fill: infinite values that are not let through become NaN (or the number that `nan` is), as well.

        Returns:
            What is not let through, as (place in the batch, error), one for each sample and kind at most; and how
            many cells of every channel are not finite, [B, channels].
        """
        none = torch.zeros(field.shape[:2], dtype=torch.int64)
        if not field.is_floating_point() or _all_finite(field):
            return [], none
        nan, infinite = field.isnan(), field.isinf()
        bad: list[tuple[int, NotFiniteError]] = []
        if self.nan == "raise":
            bad += [(at, NotANumberError(said)) for at, said in _told(nan, "NaN", "nan", name)]
        if self.inf == "raise":
            bad += [(at, NotFiniteError(said)) for at, said in _told(infinite, "infinite values", "inf", name)]
        counts = (nan | infinite).flatten(2).sum(2) if self.limit < 1 else none
        if isinstance(self.inf, int | float):
            field.masked_fill_(infinite, float(self.inf))
        elif self.inf == "raise" and fill:
            field.masked_fill_(infinite, self.nan if isinstance(self.nan, int | float) else math.nan)
        if isinstance(self.nan, int | float):
            field.masked_fill_(nan, float(self.nan))
        return bad, counts

    def beyond(self, counts: torch.Tensor, cells: int, name: Callable[[int, int], str]) -> NotFiniteError | None:
        """The error for the first channel [B, channels] with more than the limit's share of its cells not finite."""
        over = (counts > self.limit * cells).nonzero()
        if not len(over):
            return None
        sample, channel = (int(place) for place in over[0])
        return NotFiniteError(
            f"{name(sample, channel)} is NaN or infinite in {int(counts[sample, channel])} of {cells} cells, more than "
            f"max_nonfinite={self.limit:g} of them"
        )


def _all_finite(field: torch.Tensor) -> bool:
    """One pass without temporaries: a sum is finite only if all its terms are (it may overflow; then look closer)."""
    wide = torch.float32 if field.dtype in (torch.float16, torch.bfloat16) else field.dtype
    return math.isfinite(field.sum(dtype=wide).item())


def _told(found: torch.Tensor, what: str, argument: str, name: Callable[[int, int], str]) -> list[tuple[int, str]]:
    """For every sample that has such cells: its place and the words."""
    told: dict[int, str] = {}
    for sample, channel in found.flatten(2).any(2).nonzero().tolist():
        cells = int(found[sample, channel].sum())
        if sample not in told:
            told[sample] = (
                f"{name(sample, channel)} has {what} in {cells} cells. Missing values or a mask? {argument}='allow' "
                f"lets them through, {argument}=0.0 replaces them"
            )
    return list(told.items())

"""NaN and infinite values in a batch: found, counted, let through or replaced."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from shardsets.errors import NotANumberError, NotFiniteError, SampleError

__all__ = ["Finite"]

Name = Callable[[int, int], tuple[str, str]]
"""Words for a (place in the batch, channel): the sample and field, and the channel."""


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
        self, field: torch.Tensor, name: Name, *, fill: bool
    ) -> tuple[list[tuple[int, NotFiniteError]], torch.Tensor]:
        """Look for values that are not finite and replace them in place as `nan` and `inf` say.

        Args:
            field: [B, channels, ...].
            name: says in words what a (sample, channel) is.
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

    def beyond(self, counts: torch.Tensor, cells: int, name: Name) -> list[tuple[int, NotFiniteError]]:
        """Samples with a channel of which more than the limit's share of the cells is not finite.

        Args:
            counts: of such cells, [B, channels].
            cells: of a channel.
            name: as for `check_`.
        """
        told: dict[int, NotFiniteError] = {}
        for sample, channel in (counts > self.limit * cells).nonzero().tolist():
            where, label = name(sample, channel)
            told.setdefault(
                sample,
                NotFiniteError(
                    f"{where} is NaN or infinite in {int(counts[sample, channel])} of {cells} cells of {label}, more "
                    f"than max_nonfinite={self.limit:g} of them"
                ),
            )
        return list(told.items())


def _all_finite(field: torch.Tensor) -> bool:
    """One pass without temporaries: a sum is finite only if all its terms are (it may overflow; then look closer)."""
    wide = torch.float32 if field.dtype in (torch.float16, torch.bfloat16) else field.dtype
    return math.isfinite(field.sum(dtype=wide).item())


def _told(found: torch.Tensor, what: str, argument: str, name: Name) -> list[tuple[int, str]]:
    """For every sample that has such cells: its place and the words."""
    told: dict[int, str] = {}
    for sample, channel in found.flatten(2).any(2).nonzero().tolist():
        if sample not in told:
            where, label = name(sample, channel)
            told[sample] = (
                f"{where} has {what} in {int(found[sample, channel].sum())} cells of {label}. Missing values or a "
                f"mask? {argument}='allow' lets them through, {argument}=0.0 replaces them"
            )
    return list(told.items())

"""Time windows: which steps of a time axis make the inputs and targets of a sample."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, TypeAlias

import numpy as np

from shardio import TimeAxis
from shardio.errors import TimeAxisError
from shardsets.errors import SampleError

__all__ = ["TimeChoice", "Windows", "chosen_rows", "time_dim"]

TimeChoice: TypeAlias = str | slice | tuple[str | int | None, str | int | None] | Mapping[str, "slice | None"] | None
"""The time dim's name; or a stretch of it, by ISO times (end included) or row numbers; or {name: stretch}."""


@dataclass(frozen=True)
class Windows:
    """Samples cut from consecutive times.

    Sample i has as inputs the times i .. i + input_steps - 1 and as targets the times ``lead``, ``2 * lead``, ...
    steps after its last input. No sample reaches over a break; samples are numbered on behind it.

    Attributes:
        first: first usable row of the time axis.
        count: usable rows.
        input_steps, target_steps, lead: all in time steps.
        breaks: usable rows, ascending, after which the time axis is irregular.
    """

    first: int
    count: int
    input_steps: int
    target_steps: int
    lead: int
    breaks: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("input_steps", "lead"):
            if getattr(self, name) < 1:
                raise SampleError(f"{name} is {getattr(self, name)}; it must be 1 or more")
        if self.target_steps < 0:
            raise SampleError(f"target_steps is {self.target_steps}; it must be 0 or more")
        if len(self) < 1:
            raise SampleError(
                f"one sample needs {self.span} times (input_steps {self.input_steps}, target_steps "
                f"{self.target_steps}, lead {self.lead}), but only {self.count} are chosen"
                f"{f', with {len(self.breaks)} irregular places among them' if self.breaks else ''}: take a smaller "
                f"window, or more with time="
            )

    @property
    def span(self) -> int:
        """Times from the first input to the last target."""
        return self.input_steps + self.lead * self.target_steps

    @cached_property
    def stretches(self) -> tuple[tuple[int, int], ...]:
        """First row of each regular stretch that is long enough, and its samples."""
        ends = [*(row + 1 for row in self.breaks), self.first + self.count]
        starts = [self.first, *ends[:-1]]
        found = ((start, stop - start - self.span + 1) for start, stop in zip(starts, ends, strict=True))
        return tuple((start, samples) for start, samples in found if samples > 0)

    @cached_property
    def _before(self) -> list[int]:
        """Samples before each stretch, and all of them."""
        return [0, *accumulate(samples for _, samples in self.stretches)]

    def __len__(self) -> int:
        return self._before[-1]

    @property
    def left_out(self) -> int:
        """Samples that there would be if the time axis had no breaks, less those there are."""
        return max(0, self.count - self.span + 1) - len(self)

    def rows(self, index: int) -> list[int]:
        """Rows of the time axis that sample ``index`` needs: inputs, then targets."""
        if not 0 <= index < len(self):
            raise SampleError(f"sample {index} does not exist; there are {len(self)}")
        rows: list[int] = self.table([index])[0].tolist()
        return rows

    def table(self, indices: Sequence[int]) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Those rows for several samples: [len(indices), input_steps + target_steps]."""
        index = np.asarray(indices, dtype=np.int64)
        before = np.asarray(self._before)
        stretch = np.searchsorted(before, index, side="right") - 1
        start = np.asarray([row for row, _ in self.stretches])[stretch] + index - before[stretch]
        last = self.input_steps - 1
        steps = [*range(last + 1), *(last + self.lead * (step + 1) for step in range(self.target_steps))]
        table: np.ndarray[Any, np.dtype[np.int64]] = start[:, None] + np.asarray(steps)
        return table


def time_dim(choice: TimeChoice) -> str | None:
    """The name of the time dim, where the choice says it."""
    if isinstance(choice, str):
        return choice
    return next(iter(choice)) if isinstance(choice, Mapping) else None


def chosen_rows(
    choice: TimeChoice, axis: TimeAxis | None, length: int, *, irregular: bool = False
) -> tuple[int, int, tuple[int, ...]]:
    """First row and number of rows of the stretch chosen, and the rows in it after which it is irregular.

    Args:
        choice, axis, length: what is chosen of a time axis (None where it has no dates) of so many rows.
        irregular: the stretch may have irregular places.

    Raises:
        SampleError: nothing is chosen, or times are given for an axis without dates.
        TimeAxisError: the stretch goes back, repeats, or changes its step, and `irregular` does not allow that; or it
            has no usual step forward.
    """
    if isinstance(choice, Mapping):
        choice = next(iter(choice.values()))
    if choice is None or isinstance(choice, str):
        start, stop = 0, length
    else:
        bounds = (choice.start, choice.stop) if isinstance(choice, slice) else choice
        if isinstance(choice, slice) and choice.step not in (None, 1):
            raise SampleError(f"time={choice}: steps are not skipped here; a slice with step 1 is needed")
        start = _row(bounds[0], axis, length, 0, after=False)
        stop = _row(bounds[1], axis, length, length, after=True)
    if not 0 <= start < stop <= length:
        raise SampleError(f"time={choice!r} chooses no row of the {length} on the time axis{_ends(axis)}")
    breaks: tuple[int, ...] = ()
    if axis is not None:
        stretch = TimeAxis(axis.dim, axis.values[start:stop], axis.calendar)
        try:
            stretch.check()
        except TimeAxisError:
            if not irregular or stretch.step is None or not stretch.step > 0:
                raise
            breaks = tuple(start + row for row in _irregular(stretch))
    return start, stop - start, breaks


def _irregular(axis: TimeAxis) -> list[int]:
    """Rows after which the step is not the usual one, or not known."""
    step = axis.step or 0.0
    usual = np.abs(np.diff(axis.seconds) - step) <= 1e-6 * max(1.0, step)
    rows: list[int] = np.flatnonzero(~usual).tolist()
    return rows


def _row(bound: str | int | None, axis: TimeAxis | None, length: int, default: int, *, after: bool) -> int:
    if bound is None:
        return default
    if isinstance(bound, int | np.integer):
        return int(bound) if bound >= 0 else length + int(bound)
    if axis is None:
        raise SampleError(f"time bound {bound!r} is a date, but the time axis has no dates; give row numbers")
    labels = np.array([axis.label(row)[: len(str(bound))] for row in range(len(axis))])
    return int(np.searchsorted(labels, str(bound), side="right" if after else "left"))


def _ends(axis: TimeAxis | None) -> str:
    return f", which runs from {axis.label(0)} to {axis.label(len(axis) - 1)}" if axis is not None and len(axis) else ""

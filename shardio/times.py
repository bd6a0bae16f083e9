"""Time axes: stored numbers with units such as "hours since 1900-01-01" become dates of any CF calendar."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import xarray as xr

from shardio import extras
from shardio.errors import TimeAxisError
from shardio.source import Source

Array = np.ndarray[Any, np.dtype[Any]]

MODEL_CALENDARS = ("360_day", "noleap", "365_day", "all_leap", "366_day", "julian")
"""Calendars that numpy's dates do not have; their dates are cftime objects."""


USED = ("units", "calendar", "_FillValue", "missing_value", "scale_factor", "add_offset")
"""Attributes that decide which dates the stored numbers are."""


@dataclass(frozen=True, eq=False)
class TimeAxis:
    """The times along one dim.

    Attributes:
        dim: name of the dim, as errors show it.
        values: datetime64[ns], or cftime objects where numpy's dates cannot express them.
        calendar: CF name of the calendar.
    """

    dim: str
    values: Array
    calendar: str = "standard"

    def __len__(self) -> int:
        return len(self.values)

    @cached_property
    def seconds(self) -> np.ndarray[Any, np.dtype[np.float64]]:
        """Seconds of each time since the first, by its calendar."""
        if self.values.dtype.kind == "M":
            passed = (self.values - self.values[:1]) / np.timedelta64(1, "s")
            return passed.astype(np.float64)
        return np.array([(value - self.values[0]).total_seconds() for value in self.values], dtype=np.float64)

    @cached_property
    def _month_numbers(self) -> Array:
        if self.values.dtype.kind == "M":
            return self.values.astype("datetime64[M]").astype(np.int64)
        return np.array([value.year * 12 + value.month for value in self.values], dtype=np.int64)

    @cached_property
    def step(self) -> float | None:
        """The usual (most frequent, among these the smallest) step in seconds; None for fewer than two times."""
        if len(self) < 2:
            return None
        steps, counts = np.unique(np.round(np.diff(self.seconds), 6), return_counts=True)
        return float(steps[np.argmax(counts)])

    @cached_property
    def months(self) -> int | None:
        """Months per step, if that is what is constant (monthly and yearly data), else None."""
        steps = np.unique(np.diff(self._month_numbers))
        if len(self) < 3 or self.step is None or self.step < 27 * 86400 or len(np.unique(np.diff(self.seconds))) == 1:
            return None
        return int(steps[0]) if len(steps) == 1 and steps[0] > 0 else None

    @cached_property
    def gaps(self) -> tuple[int, ...]:
        """Positions after which the step is not the usual one."""
        if self.step is None or self.months is not None:
            return ()
        steps = np.diff(self.seconds)
        return tuple(np.flatnonzero(np.abs(steps - self.step) > 1e-6 * max(1.0, abs(self.step))).tolist())

    def label(self, position: int) -> str:
        """The time at a position, as text."""
        value = self.values[position]
        return str(value.astype("datetime64[s]")) if isinstance(value, np.datetime64) else value.isoformat()

    def check(self) -> None:
        """Raise TimeAxisError if times go back, repeat, are missing, or change their step; it says where."""
        if np.isnan(self.seconds).any():
            at = int(np.flatnonzero(np.isnan(self.seconds))[0])
            raise TimeAxisError(f"time axis {self.dim!r} has no value at position {at}; write it, or choose with time=")
        backward = np.flatnonzero(np.diff(self.seconds) <= 0)
        if backward.size:
            at = int(backward[0])
            raise TimeAxisError(
                f"time axis {self.dim!r} does not increase: position {at} is {self.label(at)}, position {at + 1} is "
                f"{self.label(at + 1)}; were rows appended with other units? Correct them, or choose with time="
            )
        if self.gaps:
            at = self.gaps[0]
            raise TimeAxisError(
                f"time axis {self.dim!r} is not regular: its step is {self.step:g} s, but position {at} is "
                f"{self.label(at)} and position {at + 1} is {self.label(at + 1)} ({len(self.gaps)} such places); "
                f"choose a regular stretch with time="
            )


def decode_times(source: Source) -> TimeAxis | None:
    """The dates that a 1-D array holds, or None if it holds none (numbers without "since" in their units).

    Raises TimeAxisError if units or calendar cannot be understood.
    """
    values = source.read()
    dim = source.dims[0] if source.dims else source.name
    return _axis(dim, np.atleast_1d(values), source.attrs)


def _axis(dim: str, values: Array, attrs: Mapping[str, Any]) -> TimeAxis | None:
    calendar = str(attrs.get("calendar", "standard")).lower()
    if values.dtype.kind == "M":
        return TimeAxis(dim, values.astype("datetime64[ns]"), calendar)
    if values.dtype.kind == "O" and all(hasattr(value, "calendar") for value in values):
        return TimeAxis(dim, values, str(values[0].calendar) if len(values) else calendar)
    if values.dtype.kind not in "iuf" or " since " not in str(attrs.get("units", "")):
        return None
    if calendar in MODEL_CALENDARS:
        extras.load("cftime")
    kept = {key: attrs[key] for key in USED if key in attrs}
    raw = xr.Dataset({"decoded": ("position", values, kept)})
    try:
        decoded = xr.decode_cf(raw)["decoded"].values
    except (ValueError, OverflowError, TypeError) as error:
        raise TimeAxisError(
            f"time axis {dim!r} with units {attrs['units']!r} and calendar {calendar!r} cannot be understood: {error}; "
            f"correct these attributes"
        ) from error
    if decoded.dtype.kind == "M":
        decoded = decoded.astype("datetime64[ns]")
    return TimeAxis(dim, decoded, calendar)

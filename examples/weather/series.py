"""What a store says about its times and variables, and the channels that the forecaster gets from a sample."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shardio import find_grid, open_store


@dataclass(frozen=True)
class Series:
    """How one store is trained on.

    Attributes:
        changing, fixed: names of the variables with and without a time dim.
        train, held_out: rows of the time axis to learn from, and later ones to judge by.
        input_steps: times that the forecaster sees.
        lead: steps from the last of them to the target.
        hours: length of a step in hours; None where the store has no dates.
        shape: rows and columns of the grid.
        sample_bytes: stored bytes of one sample, inputs and target.
        periodic: whether longitude goes around the globe.
    """

    changing: tuple[str, ...]
    fixed: tuple[str, ...]
    train: slice
    held_out: slice
    input_steps: int
    lead: int
    hours: float | None
    shape: tuple[int, int]
    sample_bytes: int
    periodic: bool

    @property
    def has_clock(self) -> bool:
        """Whether the hour of the day says something about the next step."""
        return self.hours is not None and self.hours < 24

    @property
    def lead_text(self) -> str:
        """The lead in words."""
        return f"{self.lead} steps" if self.hours is None else f"{self.lead * self.hours:g} hours"

    @property
    def extra_channels(self) -> int:
        """Channels before those of the inputs: the fixed variables and the clock."""
        return len(self.fixed) + 2 * self.has_clock

    def features(self, batch: dict[str, Any]) -> dict[str, Any]:
        """The loader's transform: fixed variables once, then the clock, then the changing variables step by step."""
        fields = batch["input"].unflatten(1, (self.input_steps, -1))
        changing = fields.shape[2] - len(self.fixed)
        parts = [fields[:, 0, changing:]]
        if self.has_clock:
            parts.append(clock(batch["time"])[:, :, None, None].expand(-1, -1, *fields.shape[3:]))
        parts.append(fields[:, :, :changing].flatten(1, 2))
        return {**batch, "input": torch.cat(parts, dim=1), "target": batch["target"][:, :changing]}


def look_at(
    source: Any,
    *,
    variables: list[str] | None = None,
    input_steps: int = 2,
    lead_hours: float = 6,
    held_out: float = 0.2,
) -> Series:
    """Read the axes of a store and hold out the last part of its times, from a midnight on where there are dates.

    Args:
        source: path or URL of a store.
        variables: names; default: all that lie on the grid.
        input_steps: times that the forecaster sees.
        lead_hours: how far ahead it looks; one step where the store has no dates.
        held_out: part of the times to judge by.

    Raises:
        ShardIOError: no such store, or its grid is not recognised.
        ValueError: no time dim, too few times, or a lead that is no multiple of the step.
    """
    with open_store(source) as store:
        grid = find_grid(store, variables=variables)
        changing = tuple(name for name in grid.variables if grid.time in store[name].dims)
        sizes = {name: store[name].nbytes for name in grid.variables}
    if grid.time is None or not changing:
        raise ValueError(f"{source} has no time dim that is recognised, so there is nothing to forecast")
    count = grid.sizes[grid.time]
    dates = grid.times.values if grid.times is not None and grid.times.values.dtype.kind == "M" else None
    hours = grid.times.step / 3600 if dates is not None and grid.times is not None and grid.times.step else None
    lead = 1 if hours is None else round(lead_hours / hours)
    if hours is not None and (lead < 1 or abs(lead * hours - lead_hours) > 1e-3 * hours):
        raise ValueError(f"a lead of {lead_hours:g} h is no multiple of the step of {source}, {hours:g} h: give --lead")
    span = input_steps + lead
    split = round(count * (1 - held_out))
    if dates is not None and hours is not None and hours < 24:
        midnights = np.flatnonzero(dates == dates.astype("datetime64[D]"))
        later = midnights[(midnights >= split) & (midnights <= count - span)]
        split = int(later[0]) if later.size else split
    if min(split, count - split) < span:
        raise ValueError(
            f"{source} has {count} times: {split} to learn from and {count - split} to judge by, but one sample spans "
            f"{span}; give another --held-out, --lead or --input-steps"
        )
    fixed = tuple(name for name in grid.variables if name not in changing)
    one_time = sum(sizes[name] for name in changing) // count
    return Series(
        changing=changing,
        fixed=fixed,
        train=slice(0, split),
        held_out=slice(split, count),
        input_steps=input_steps,
        lead=lead,
        hours=hours,
        shape=(grid.sizes[grid.spatial[0]], grid.sizes[grid.spatial[1]]),
        sample_bytes=(input_steps + 1) * one_time + sum(sizes[name] for name in fixed),
        periodic=bool(grid.periodic),
    )


def clock(times: Any) -> Tensor:
    """The hour of the day as a point on a circle [B, 2], for dates [B]."""
    dates = np.asarray(times, dtype="datetime64[s]")
    angle = 2 * np.pi * (dates - dates.astype("datetime64[D]")).astype(np.float64) / 86400
    return torch.from_numpy(np.stack([np.sin(angle), np.cos(angle)], axis=1)).float()

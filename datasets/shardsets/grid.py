"""Samples from a gridded store: windows over time, variables and levels stacked to channels."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch

from shardio import Grid, OwnReader, Partition, Request, Source, Store, find_grid, open_store, plan
from shardio.plan import Halo, Plan, RankPlan
from shardsets.errors import SampleError
from shardsets.samples import SampleSet, Slab, SlabReader
from shardsets.windows import TimeChoice, Windows, chosen_rows, time_dim

__all__ = ["Field", "GridSamples", "Levels"]

Levels: TypeAlias = str | Sequence[float] | Mapping[str, "Sequence[float] | None"] | None
"""The level dim's name; or the level values wanted; or {name: values}."""


@dataclass(frozen=True, eq=False)
class Field:
    """One variable of the channels.

    Attributes:
        source: the stored array.
        levels: positions along its level dim, () if it has none.
        timed: whether it has the time dim.
        first: its first channel.
    """

    source: Source
    levels: tuple[int, ...]
    timed: bool
    first: int

    @property
    def channels(self) -> int:
        """Number of channels it fills."""
        return max(1, len(self.levels))


class GridSamples(SampleSet):
    """Samples of a Zarr, HDF5, NetCDF or GRIB store or an ``xarray.Dataset``.

    Args:
        source: path or URL, opened store, or dataset.
        variables: names, or one; default: every variable that lies on the grid and has the time dim.
        levels: level values wanted (default all), or the level dim's name, or {name: values}.
        time: a stretch of the time axis (slice or pair of ISO times, end included, or of row numbers), the time dim's
            name, or {name: stretch}. Samples never reach over its ends.
        input_steps: consecutive times in the input.
        target_steps: times in the target.
        lead: time steps from the last input to the first target, and from each target to the next.
        spatial: names of the (y, x) dims where they are not recognised.
        options: passed to `shardio.open_store`.

    Raises:
        ShardIOError: no such store, no usable variable, dims that are not recognised, an irregular time axis.
        SampleError: levels or times that the store does not have; a window longer than the data.
    """

    def __init__(
        self,
        source: Any,
        *,
        variables: str | Sequence[str] | None = None,
        levels: Levels = None,
        time: TimeChoice = None,
        input_steps: int = 1,
        target_steps: int = 1,
        lead: int = 1,
        spatial: Sequence[str] | None = None,
        **options: Any,
    ) -> None:
        self.store: Store = open_store(source, **options)
        self._owns_store = self.store is not source
        self.grid: Grid = find_grid(
            self.store, variables=variables, time=time_dim(time), level=_level_dim(levels), spatial=spatial
        )
        self.fields = self._fields(variables, _level_values(levels))
        self.spatial = self.grid.spatial
        self.sizes = {dim: self.grid.sizes[dim] for dim in self.spatial}
        self.periodic = self.grid.periodic
        self.channels = tuple(name for field in self.fields for name in self.names(field))
        first, count = chosen_rows(time, self.grid.times, self._times())
        self.windows = Windows(first, count, input_steps, target_steps, lead)
        chunk_sizes = [dict(zip(f.source.dims, f.source.chunks, strict=True)) for f in self.fields]
        self.chunk_rows = {dim: math.lcm(*(sizes[dim] for sizes in chunk_sizes)) for dim in self.spatial}

    def _times(self) -> int:
        if self.grid.time is None:
            raise SampleError(
                f"{self.store.url}: none of {self.grid.variables} has a time dim that is recognised, and samples are "
                f"windows over time; name it with time="
            )
        return self.grid.sizes[self.grid.time]

    def _fields(self, variables: str | Sequence[str] | None, wanted: Sequence[float] | None) -> tuple[Field, ...]:
        if wanted is not None and self.grid.level is None:
            raise SampleError(
                f"levels={list(wanted)} are wanted, but no dim of {self.grid.variables} is recognised as levels; leave "
                f"levels= out, or name the dim with levels={{dim: values}}"
            )
        fields: list[Field] = []
        first = 0
        for name in self.grid.variables:
            source = self.store[name]
            timed = self.grid.time in source.dims
            if variables is None and not timed:
                continue
            others = [dim for dim in source.dims if dim in self.grid.other and self.grid.sizes[dim] > 1]
            if others:
                raise SampleError(
                    f"{name!r} has dims {source.dims}; {others} are neither time, level nor space. Choose one entry of "
                    f"them (open the store with xarray, .isel(...), pass the dataset), or leave {name!r} out with "
                    f"variables="
                )
            field = Field(source, self._positions(source, wanted), timed, first)
            first += field.channels
            fields.append(field)
        if not fields:
            raise SampleError(
                f"{self.store.url}: no variable has a time dim among {self.grid.variables}; name variables= or time="
            )
        return tuple(fields)

    def _positions(self, source: Source, wanted: Sequence[float] | None) -> tuple[int, ...]:
        dim = self.grid.level
        if dim is None or dim not in source.dims:
            return ()
        length = self.grid.sizes[dim]
        if wanted is None:
            return tuple(range(length))
        if self.grid.levels is None:
            raise SampleError(f"levels={list(wanted)} are values, but dim {dim!r} has no coordinate to look them up in")
        found = []
        for value in wanted:
            at = np.flatnonzero(np.isclose(self.grid.levels, value))
            if not at.size:
                raise SampleError(f"level {value} is not on dim {dim!r}, which has {self.grid.levels.tolist()}")
            found.append(int(at[0]))
        return tuple(found)

    def names(self, field: Field) -> list[str]:
        """Channel names of one variable: "t2m", or "t_850" by level."""
        name = field.source.name
        if not field.levels:
            return [name]
        values = self.grid.levels
        return [f"{name}_{position if values is None else f'{values[position]:g}'}" for position in field.levels]

    def __len__(self) -> int:
        return len(self.windows)

    def facts(self) -> Any:
        return (*super().facts(), self.windows)

    def slab_reader(self, partition: Partition, rank: int, halo: Halo, periodic: Sequence[str]) -> GridSlabReader:
        return GridSlabReader(self, partition, rank, halo, periodic)

    def close(self) -> None:
        if self._owns_store:
            self.store.close()


def _level_dim(levels: Levels) -> str | None:
    if isinstance(levels, str):
        return levels
    return next(iter(levels)) if isinstance(levels, Mapping) else None


def _level_values(levels: Levels) -> Sequence[float] | None:
    if isinstance(levels, str):
        return None
    return next(iter(levels.values())) if isinstance(levels, Mapping) else levels


class GridSlabReader(SlabReader):
    """One rank's part of the samples of a `GridSamples`; each array is read once per sample, all times together."""

    def __init__(
        self, samples: GridSamples, partition: Partition, rank: int, halo: Halo, periodic: Sequence[str]
    ) -> None:
        self.samples = samples
        self.reader = OwnReader()
        plans: dict[Any, Plan] = {}
        self._plans: list[RankPlan] = []
        for field in samples.fields:
            layout = field.source.layout
            if layout not in plans:
                plans[layout] = plan(partition, layout, halo=halo, periodic=[d for d in periodic if d in layout.dims])
            self._plans.append(plans[layout][rank])
        self.slab = _slab(samples, self._plans[0])

    def read(self, indices: Sequence[int], *, dtype: torch.dtype, pin: bool) -> dict[str, Any]:
        windows = self.samples.windows
        steps, channels = windows.input_steps + windows.target_steps, len(self.samples.channels)
        rows = [windows.rows(index) for index in indices]
        fields = self.read_times(rows, dtype=dtype, pin=pin)
        flat = fields.view(len(indices), steps * channels, *self.slab.shape)
        cut = windows.input_steps * channels
        return {
            "input": flat[:, :cut],
            "target": flat[:, cut:],
            **self._when(rows),
            "index": torch.tensor(list(indices)),
        }

    def read_times(self, rows: Sequence[list[int]], *, dtype: torch.dtype, pin: bool = False) -> torch.Tensor:
        """All channels at the given rows of the time axis: [len(rows), len(rows[0]), channels, *slab.shape]."""
        channels = len(self.samples.channels)
        fields = torch.empty(
            (len(rows), len(rows[0]), channels, *self.slab.shape),
            dtype=dtype,
            pin_memory=pin and torch.cuda.is_available(),
        )
        self.reader.read_all(
            [
                request
                for at, times in enumerate(rows)
                for field, planned in zip(self.samples.fields, self._plans, strict=True)
                for request in self._requests(field, planned, times, fields[at])
            ]
        )
        for field in self.samples.fields:
            if not field.timed:
                part = fields[:, :, field.first : field.first + field.channels]
                part[:, 1:] = part[:, :1]
        return fields

    def _requests(self, field: Field, planned: RankPlan, times: list[int], buffer: torch.Tensor) -> list[Request]:
        """What fills ``buffer`` [step, channel, y, x] with one variable."""
        grid = self.samples.grid
        index: dict[str, Any] = {dim: 0 for dim in field.source.dims if dim in grid.other}
        part = buffer[:, field.first : field.first + field.channels]
        if field.levels:
            assert grid.level is not None
            index[grid.level] = list(field.levels)
        else:
            part = part.squeeze(1)
        if not field.timed:
            return [Request(field.source, planned.at(index), _ordered(part[0], planned.at(index), grid))]
        assert grid.time is not None
        chosen = planned.at({**index, grid.time: times})
        return [Request(field.source, chosen, _ordered(part, chosen, grid))]

    def _when(self, rows: list[list[int]]) -> dict[str, Any]:
        """Valid times of the last input (``time`` [B]) and of the targets (``target_time`` [B, target_steps])."""
        steps = self.samples.windows.input_steps
        axis = self.samples.grid.times
        values = np.arange(self.samples._times()) if axis is None else axis.values
        table = np.array(rows)
        return {"time": values[table[:, steps - 1]], "target_time": values[table[:, steps:]]}

    def describe(self, index: int) -> str:
        axis = self.samples.grid.times
        rows = self.samples.windows.rows(index)
        when = f"times {axis.label(rows[0])} to {axis.label(rows[-1])}" if axis is not None else f"time rows {rows}"
        return f"sample {index} of {self.samples.store.url} ({when})"


def _ordered(part: torch.Tensor, planned: RankPlan, grid: Grid) -> torch.Tensor:
    """A view of ``part`` (its dims in the order time, level, y, x, as far as it has them) in the array's own order."""
    usual = [dim for dim in (grid.time, grid.level, *grid.spatial) if dim in planned.result_dims]
    return part.permute([usual.index(dim) for dim in planned.result_dims])


def _slab(samples: GridSamples, planned: RankPlan) -> Slab:
    by_dim = {item.dim: item for item in planned.dims}
    mine = [by_dim[dim] for dim in samples.spatial]
    coordinates = {}
    for item in mine:
        values = samples.grid.coordinates.get(item.dim)
        if values is not None:
            rows = np.concatenate([np.arange(r.source, r.source + r.size) for r in item.runs] or [np.arange(0)])
            coordinates[item.dim] = torch.from_numpy(np.ascontiguousarray(values[rows]))
    return Slab(
        dims=tuple(samples.spatial),
        start=tuple(item.owned.start - item.halo[0] for item in mine),
        shape=tuple(item.extent for item in mine),
        halo=tuple(item.halo for item in mine),
        coordinates=coordinates,
    )

"""Samples from a gridded store: windows over time, variables and levels stacked to channels."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from shardio import Grid, Partition, Source, Store, find_grid, open_store
from shardio.collective import Group, Read
from shardio.labels import labels
from shardio.plan import Halo
from shardsets.errors import SampleError
from shardsets.samples import SampleSet
from shardsets.slabs import GridSlabReader
from shardsets.windows import TimeChoice, Windows, chosen_rows, time_dim

__all__ = ["Field", "GridSamples", "Levels"]

Levels: TypeAlias = str | Sequence[float | str] | Mapping[str, "Sequence[float | str] | None"] | None
"""The level dim's name; or the level values (or texts) wanted; or {name: values}."""


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
        levels: level values or texts wanted (default all), or the level dim's name, or {name: values}.
        time: a stretch of the time axis (slice or pair of ISO times, end included, or of row numbers), the time dim's
            name, or {name: stretch}. Samples never reach over its ends.
        input_steps: consecutive times in the input.
        target_steps: times in the target.
        lead: time steps from the last input to the first target, and from each target to the next.
        spatial: names of the (y, x) dims where they are not recognised.
        skip_irregular: leave out the samples that reach over an irregular place of the time axis, instead of raising.
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
        skip_irregular: bool = False,
        **options: Any,
    ) -> None:
        self.store: Store = open_store(source, **options)
        self._owns_store = self.store is not source
        try:
            self.grid: Grid = find_grid(
                self.store, variables=variables, time=time_dim(time), level=_level_dim(levels), spatial=spatial
            )
            self.labels = self._level_names()
            self.fields = self._fields(variables, _level_values(levels))
            first, count, breaks = chosen_rows(time, self.grid.times, self._times(), irregular=skip_irregular)
            self.windows = Windows(first, count, input_steps, target_steps, lead, breaks)
        except Exception:
            if self._owns_store:
                self.store.close()
            raise
        self.left_out = self.windows.left_out
        self.spatial = self.grid.spatial
        self.sizes = {dim: self.grid.sizes[dim] for dim in self.spatial}
        self.periodic = self.grid.periodic
        self.channels = tuple(name for field in self.fields for name in self.names(field))
        chunk_sizes = [dict(zip(f.source.dims, f.source.chunks, strict=True)) for f in self.fields]
        self.chunk_rows = {dim: math.lcm(*(sizes[dim] for sizes in chunk_sizes)) for dim in self.spatial}

    def _times(self) -> int:
        if self.grid.time is None:
            raise SampleError(
                f"{self.store.url}: none of {self.grid.variables} has a time dim that is recognised, and samples are "
                f"windows over time; name it with time="
            )
        return self.grid.sizes[self.grid.time]

    def _fields(self, variables: str | Sequence[str] | None, wanted: Sequence[float | str] | None) -> tuple[Field, ...]:
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
                    f"{name!r} has dims {source.dims}; {others} are neither time, level nor space. Read one of them as "
                    f"channels with levels={others[0]!r}, choose one entry of them (open the store with xarray, "
                    f".isel(...), pass the dataset), or leave {name!r} out with variables="
                )
            _ = source.decode  # raises here, not in the middle of an epoch, where its attributes make no sense
            field = Field(source, self._positions(source, wanted), timed, first)
            first += field.channels
            fields.append(field)
        if not fields:
            raise SampleError(
                f"{self.store.url}: no variable has a time dim among {self.grid.variables}; name variables= or time="
            )
        return tuple(fields)

    def _positions(self, source: Source, wanted: Sequence[float | str] | None) -> tuple[int, ...]:
        dim = self.grid.level
        if dim is None or dim not in source.dims:
            return ()
        length = self.grid.sizes[dim]
        if wanted is None:
            return tuple(range(length))
        found = []
        for value in wanted:
            if isinstance(value, str):
                at = np.flatnonzero(np.array(self.labels) == value)
            elif self.grid.levels is not None:
                at = np.flatnonzero(np.isclose(self.grid.levels, value))
            else:
                raise SampleError(f"levels={list(wanted)} are numbers, but dim {dim!r} has {self.labels}")
            if not at.size:
                raise SampleError(f"level {value!r} is not on dim {dim!r}, which has {self.labels}")
            found.append(int(at[0]))
        return tuple(found)

    def names(self, field: Field) -> list[str]:
        """Channel names of one variable: "t2m", or "t_850" by level; "state_u10m" where the level dim holds texts."""
        name = field.source.name
        return [f"{name}_{self.labels[position]}" for position in field.levels] or [name]

    def _level_names(self) -> list[str]:
        """What tells the levels apart: values, texts, or else positions."""
        level = self.grid.level
        if level is None:
            return []
        size = self.grid.sizes[level]
        return labels(self.store, level, size) or [str(position) for position in range(size)]

    def __len__(self) -> int:
        return len(self.windows)

    def facts(self) -> Any:
        return (*super().facts(), self.windows)

    def slab_reader(
        self,
        partition: Partition,
        rank: int,
        halo: Halo,
        periodic: Sequence[str],
        *,
        read: Read = "own",
        group: Group | None = None,
        cache_bytes: int = 0,
        fill: bool = False,
    ) -> GridSlabReader:
        return GridSlabReader(
            self, partition, rank, halo, periodic, read=read, group=group, cache_bytes=cache_bytes, fill=fill
        )

    def close(self) -> None:
        if self._owns_store:
            self.store.close()


def _level_dim(levels: Levels) -> str | None:
    if isinstance(levels, str):
        return levels
    return next(iter(levels)) if isinstance(levels, Mapping) else None


def _level_values(levels: Levels) -> Sequence[float | str] | None:
    if isinstance(levels, str):
        return None
    return next(iter(levels.values())) if isinstance(levels, Mapping) else levels

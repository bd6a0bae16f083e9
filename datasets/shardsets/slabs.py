"""One rank's part of the samples of a gridded store: requests for every variable, read into one buffer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from shardio import Grid, OwnReader, Partition, Request, ShardIOError, Source, Span, plan
from shardio.box import shape_of
from shardio.cache import RowCache
from shardio.cached import CachedSource
from shardio.collective import CollectiveReader, Group, Read, make_reader
from shardio.errors import ReadError
from shardio.plan import Halo, Plan, RankPlan
from shardsets.samples import Slab, SlabReader

if TYPE_CHECKING:
    from shardsets.grid import Field, GridSamples

__all__ = ["GridSlabReader"]


class GridSlabReader(SlabReader):
    """One rank's part of the samples of a `GridSamples`; each array is read once per sample, all times together."""

    def __init__(
        self,
        samples: GridSamples,
        partition: Partition,
        rank: int,
        halo: Halo,
        periodic: Sequence[str],
        *,
        read: Read = "own",
        group: Group | None = None,
        cache_bytes: int = 0,
        fill: bool = False,
    ) -> None:
        self.samples, self.fill = samples, fill
        self.reader = make_reader(read, group)
        self._why_own = "as asked" if read == "own" else "no other rank shares the samples"
        self._sources = self._with_cache(cache_bytes)
        plans: dict[Any, Plan] = {}
        self._rank = rank
        self._plans: list[Plan] = []
        for field in samples.fields:
            layout = field.source.layout
            if layout not in plans:
                plans[layout] = plan(partition, layout, halo=halo, periodic=[d for d in periodic if d in layout.dims])
            self._plans.append(plans[layout])
        self.slab = _slab(samples, self._plans[0][rank])
        if isinstance(self.reader, CollectiveReader):
            self._choose(self.reader)

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
        if self.cache is not None:
            self.cache.begin()
        self._fill(self._requests(rows, fields))
        for field in self.samples.fields:
            if not field.timed:
                part = fields[:, :, field.first : field.first + field.channels]
                part[:, 1:] = part[:, :1]
        return fields

    def _requests(self, rows: Sequence[list[int]], fields: torch.Tensor) -> list[Request]:
        """What fills ``fields`` [sample, step, channel, y, x]; the same arrays in the same order on every rank."""
        return [
            self._request(field, source, plans, times, fields[at])
            for at, times in enumerate(rows)
            for field, source, plans in zip(self.samples.fields, self._sources, self._plans, strict=True)
        ]

    def _request(self, field: Field, source: Source, plans: Plan, times: list[int], buffer: torch.Tensor) -> Request:
        """What fills ``buffer`` [step, channel, y, x] with one variable."""
        grid = self.samples.grid
        index: dict[str, Any] = {dim: 0 for dim in field.source.dims if dim in grid.other}
        part = buffer[:, field.first : field.first + field.channels]
        if field.levels:
            assert grid.level is not None
            index[grid.level] = list(field.levels)
        else:
            part = part.squeeze(1)
        if field.timed:
            assert grid.time is not None
            index[grid.time] = times
        else:
            part = part[0]
        mine = plans[self._rank].at(index)
        return Request(source, mine, _ordered(part, mine, grid), plans=plans, index=index)

    def _fill(self, requests: list[Request]) -> None:
        """Read; where asked, with NaN in place of what is absent or corrupt."""
        if not self.fill:
            self.reader.read_all(requests)
            return
        of_sample = {id(request): at // len(self._sources) for at, request in enumerate(requests)}
        bad: list[tuple[int, ShardIOError]] = []
        self.bad = bad

        def excuse(request: Request, error: ShardIOError) -> None:
            bad.append((of_sample[id(request)], error))

        if isinstance(self.reader, OwnReader):
            self.reader.excuse = excuse
            self.reader.read_all(requests)
            return
        try:
            self.reader.read_all(requests)
        except ReadError:  # told to all ranks that share the sample: each reads for itself what it can
            with OwnReader(excuse=excuse, stats=self.reader.stats) as own:
                own.read_all(requests)

    def _with_cache(self, nbytes: int) -> list[Source]:
        """The fields' arrays; through a cache those of whose chunks one time cannot be decoded alone."""
        time = self.samples.grid.time
        sources = [field.source for field in self.samples.fields]
        wanted = [at for at, source in enumerate(sources) if time is not None and _decodes_times_together(source, time)]
        if not nbytes or not wanted or time is None:
            return sources
        self.cache = RowCache(nbytes)
        for at in wanted:
            sources[at] = CachedSource(sources[at], time, self.cache, at)
        return sources

    def expect(self, batches: Sequence[Sequence[int]]) -> None:
        if self.cache is not None:
            self.cache.expect([self.samples.windows.table(batch).ravel() for batch in batches])

    def _choose(self, reader: CollectiveReader) -> None:
        """Let a reader that shares chunks decide how to read each array, by a sample from the middle of the data."""
        windows = self.samples.windows
        rows = windows.rows(len(windows) // 2)
        shape = (1, len(rows), len(self.samples.channels), *self.slab.shape)
        example = torch.empty(1).expand(shape)  # holds no memory; nothing is read into it
        reader.choose(self._requests([rows], example))

    def modes(self) -> dict[str, str]:
        names = [field.source.name for field in self.samples.fields]
        if isinstance(self.reader, CollectiveReader):
            return {name: str(self.reader.modes[name]) for name in names}
        return dict.fromkeys(names, f"own: {self._why_own}")

    def _when(self, rows: list[list[int]]) -> dict[str, Any]:
        """Valid times of the last input (``time`` [B]) and of the targets (``target_time`` [B, target_steps])."""
        steps = self.samples.windows.input_steps
        axis = self.samples.grid.times
        values = np.arange(self.samples._times()) if axis is None else axis.values
        table = np.array(rows)
        return {"time": values[table[:, steps - 1]], "target_time": values[table[:, steps:]]}

    def describe(self, index: int) -> str:
        return f"sample {index} of {self.samples.store.url} ({self.when(index)})"

    def when(self, index: int) -> str:
        axis = self.samples.grid.times
        rows = self.samples.windows.rows(index)
        return f"times {axis.label(rows[0])} to {axis.label(rows[-1])}" if axis is not None else f"time rows {rows}"


def _decodes_times_together(source: Source, time: str) -> bool:
    """Whether reading one time of a chunk decodes much more than that time."""
    if time not in source.dims or source.chunks[source.dims.index(time)] == 1:
        return False
    row = tuple(Span(0, 1 if dim == time else size) for dim, size in zip(source.dims, source.chunks, strict=True))
    return source.layout.decoded_bytes(row) > 2 * math.prod(shape_of(row)) * source.dtype.itemsize


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

"""Mean, standard deviation and range of every variable (and level), skipping missing values, in one pass by dask.

Every chunk is read once. Each block's sums are taken about the block's own mean in float64 and merged by Chan's
formula, so a large mean does not swallow a small deviation.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import reduce
from pathlib import Path
from typing import Any, Self

import numpy as np

from shardio.box import Box, Span, shape_of
from shardio.cf import Grid, find_grid
from shardio.errors import DimensionError
from shardio.labels import labels
from shardio.location import visible
from shardio.source import Layout, Source, Store
from shardio.work import Cluster, Done, run

BLOCK_BYTES = 16 << 20
"""Stored bytes that one task reads, where chunks are smaller."""
VERSION = 2


@dataclass(frozen=True)
class Moments:
    """Count, mean, sum of squared differences from it, and range of some values; NaN and infinities counted apart."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0
    minimum: float = math.inf
    maximum: float = -math.inf
    missing: int = 0
    infinite: int = 0

    @classmethod
    def of(cls, values: np.ndarray[Any, np.dtype[np.float64]]) -> Moments:
        """Of an array."""
        missing = int(np.isnan(values).sum())
        finite = values[np.isfinite(values)]
        infinite = values.size - finite.size - missing
        if not finite.size:
            return cls(missing=missing, infinite=infinite)
        mean = float(finite.mean())
        squares = float(np.square(finite - mean).sum())
        return cls(finite.size, mean, squares, float(finite.min()), float(finite.max()), missing, infinite)

    def __add__(self, other: Moments) -> Moments:
        count = self.count + other.count
        share = other.count / count if count else 0.0
        difference = other.mean - self.mean
        return Moments(
            count,
            self.mean + difference * share if self.count else other.mean,
            self.squares + other.squares + difference**2 * self.count * share,
            min(self.minimum, other.minimum),
            max(self.maximum, other.maximum),
            self.missing + other.missing,
            self.infinite + other.infinite,
        )


@dataclass(frozen=True)
class VariableStatistics:
    """Statistics of one variable.

    Attributes:
        count: finite values; with none, the next four are NaN.
        mean, std, minimum, maximum: of these, in the variable's own units; std divides by `count`.
        missing: values that are NaN once decoded.
        infinite: values that are infinite.
        levels: the same for each level in the order stored; empty if the variable has no level dim.
        names: of the levels, as `shardio.labels` tells them; empty if nothing does.
    """

    count: int
    mean: float
    std: float
    minimum: float
    maximum: float
    missing: int = 0
    infinite: int = 0
    levels: tuple[VariableStatistics, ...] = ()
    names: tuple[str, ...] = ()

    @classmethod
    def of(cls, moments: Moments, levels: Sequence[Moments] = (), names: Sequence[str] = ()) -> VariableStatistics:
        """From merged moments."""
        numbers = (math.nan,) * 4
        if moments.count:
            std = math.sqrt(moments.squares / moments.count)
            numbers = (moments.mean, std, moments.minimum, moments.maximum)
        each = tuple(cls.of(level) for level in levels)
        return cls(moments.count, *numbers, moments.missing, moments.infinite, each, tuple(names) if each else ())

    def level(self, at: int, name: str, count: int) -> VariableStatistics | None:
        """Of one level, by its name; where no names are known, by its place among `count`. None if it has none."""
        if self.names:
            return self.levels[self.names.index(name)] if name in self.names else None
        return self.levels[at] if len(self.levels) == count else None


@dataclass(frozen=True)
class Statistics:
    """Statistics of a store's variables, by name."""

    variables: Mapping[str, VariableStatistics]

    def to_json(self, path: str | Path) -> None:
        """Write to a file; NaN is written as null."""
        Path(path).write_text(json.dumps({"version": VERSION, "variables": self.as_dict()}, indent=2) + "\n")

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers by name; NaN becomes None."""
        return {name: _plain(asdict(entry)) for name, entry in self.variables.items()}

    @classmethod
    def from_json(cls, path: str | Path) -> Self:
        """Read what `to_json` wrote. Raises ValueError if the file holds something else."""
        try:
            content = json.loads(Path(path).read_text())
            if content["version"] == VERSION:
                return cls({name: _entry(values) for name, values in content["variables"].items()})
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):  # other JSON, or none
            pass
        raise ValueError(f"{path} holds no statistics of version {VERSION}; write it with: shardio stats STORE")


def statistics_file(url: str) -> Path:
    """Where ``shardio stats`` writes the statistics of a store unless told otherwise."""
    return Path(f"{Path(visible(url).partition('?')[0].rstrip('/')).name}.stats.json")


def compute(
    store: Store,
    *,
    grid: Grid | None = None,
    variables: Sequence[str] | None = None,
    time: slice | None = None,
    threads: int | None = None,
    cluster: Cluster | None = None,
    done: Done | None = None,
) -> Statistics:
    """Read a store once, by dask, and give the statistics of its variables.

    Args:
        store: an opened store.
        grid: the grid, if known already.
        variables: names; by default all usable ones.
        time: rows of the time dim that count (such as the training period); by default all.
        threads: threads; by default dask's choice.
        cluster: an existing cluster that does the work instead.
        done: called with (blocks done, blocks in all) as the work goes on.

    Raises:
        DimensionError: `time` chooses rows of a store without a time dim, or has a step.
        ReadError: a chunk is absent or cannot be decoded.
    """
    grid = find_grid(store, variables=variables) if grid is None else grid
    names = grid.variables if variables is None else tuple(variables)
    if time is not None and time != slice(None) and grid.time is None:
        raise DimensionError(f"time={time} chooses rows of the time dim, but {store.url} has none; leave it out")
    parts = [
        (name, block, grid.level) for name in names for block in blocks(store[name], {grid.time: time} if time else {})
    ]
    found: dict[str, dict[int | None, Moments]] = {name: {} for name in names}
    results = run(_moments, store, parts, threads=threads, cluster=cluster, done=done)
    for (name, _, _), levels in zip(parts, results, strict=True):
        for level, moments in levels.items():
            found[name][level] = found[name].get(level, Moments()) + moments
    told = None if grid.level is None else labels(store, grid.level, grid.sizes[grid.level])
    return Statistics({name: _merged(levels, told or ()) for name, levels in found.items()})


def _moments(store: Store, part: tuple[str, Box, str | None]) -> dict[int | None, Moments]:
    """Moments of a block, by level number; by None if the array has no level dim."""
    name, block, level = part
    source = store[name]
    values = np.empty(shape_of(block), dtype=np.float64)
    source.decode.apply(source.read(block), values)
    if level not in source.dims:
        return {None: Moments.of(values)}
    at = source.dims.index(level)
    return {
        number: Moments.of(layer) for number, layer in zip(range(*block[at]), np.moveaxis(values, at, 0), strict=True)
    }


def _merged(levels: Mapping[int | None, Moments], names: Sequence[str]) -> VariableStatistics:
    whole = reduce(Moments.__add__, levels.values(), Moments())
    each = [levels[level] for level in sorted(at for at in levels if at is not None)]
    return VariableStatistics.of(whole, each, names)


def blocks(source: Source, chosen: Mapping[str | None, slice]) -> list[Box]:
    """Boxes of whole chunks that together cover an array, several neighbours in one where chunks are small.

    `chosen` limits the rows along a dim; steps other than 1 are refused with DimensionError.
    """
    unit = [1] * len(source.shape) if contiguous(source) else list(source.chunks)
    for at in reversed(range(len(unit))):
        room = BLOCK_BYTES // max(1, math.prod(unit) * source.dtype.itemsize)
        unit[at] *= max(1, min(room, -(-source.shape[at] // unit[at])))
    spans = []
    for dim, size, step in zip(source.dims, source.shape, unit, strict=True):
        rows = range(size)[chosen.get(dim, slice(None))]
        if rows.step != 1:
            raise DimensionError(f"{dim}={chosen[dim]} has a step; every row of a stretch is read")
        edges = [rows.start, *range((rows.start // step + 1) * step, rows.stop, step), rows.stop]
        spans.append([Span(start, stop) for start, stop in itertools.pairwise(edges) if stop > start])
    return list(itertools.product(*spans))


def contiguous(source: Source | Layout) -> bool:
    """Is an array stored as one piece of which any rows can be read alone?"""
    return source.partial and all(map(int.__ge__, source.chunks, source.shape))


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    """NaN and infinities become None, which JSON has."""
    plain = {
        key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in values.items()
    }
    plain["levels"] = [_plain(level) for level in values["levels"]]
    return plain


def _entry(values: Mapping[str, Any]) -> VariableStatistics:
    numbers: dict[str, Any] = {
        key: math.nan if values[key] is None else values[key] for key in ("mean", "std", "minimum", "maximum")
    }
    counts: dict[str, Any] = {key: values[key] for key in ("count", "missing", "infinite")}
    names = tuple(map(str, values.get("names", ())))
    return VariableStatistics(**counts, **numbers, levels=tuple(map(_entry, values["levels"])), names=names)

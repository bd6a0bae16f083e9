"""Mean, standard deviation and range of every variable (and level), skipping missing values, in one pass by dask.

Each block's sums are taken about the block's own mean in float64 and merged by Chan's formula, so a large mean does
not swallow a small deviation.
"""

from __future__ import annotations

import itertools
import json
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import reduce
from pathlib import Path
from typing import Any, Self

import numpy as np
from dask.base import compute as compute_all
from dask.delayed import delayed

from shardio.box import Box, Span, shape_of
from shardio.cf import Grid, find_grid
from shardio.errors import DimensionError
from shardio.source import Source, Store

BLOCK_BYTES = 16 << 20
"""Stored bytes that one task reads, where chunks are smaller."""
VERSION = 1


@dataclass(frozen=True)
class Moments:
    """Count, mean, sum of squared differences from it, and range of some values; those missing are not counted."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0
    minimum: float = math.inf
    maximum: float = -math.inf

    @classmethod
    def of(cls, values: np.ndarray[Any, np.dtype[np.float64]]) -> Moments:
        """Of an array, NaN skipped."""
        values = values[~np.isnan(values)]
        if not values.size:
            return cls()
        mean = float(values.mean())
        squares = float(np.square(values - mean).sum())
        return cls(values.size, mean, squares, float(values.min()), float(values.max()))

    def __add__(self, other: Moments) -> Moments:
        count = self.count + other.count
        if not (self.count and other.count):
            return self if self.count else other
        difference = other.mean - self.mean
        return Moments(
            count,
            self.mean + difference * other.count / count,
            self.squares + other.squares + difference**2 * self.count * other.count / count,
            min(self.minimum, other.minimum),
            max(self.maximum, other.maximum),
        )


@dataclass(frozen=True)
class VariableStatistics:
    """Statistics of one variable.

    Attributes:
        count: values that are not missing; with none, the others are NaN.
        mean, std, minimum, maximum: in the variable's own units; std divides by `count`.
        levels: the same for each level in the order stored; empty if the variable has no level dim.
    """

    count: int
    mean: float
    std: float
    minimum: float
    maximum: float
    levels: tuple[VariableStatistics, ...] = ()

    @classmethod
    def of(cls, moments: Moments, levels: Sequence[Moments] = ()) -> VariableStatistics:
        """From merged moments."""
        nested = tuple(cls.of(level) for level in levels)
        if not moments.count:
            return cls(0, math.nan, math.nan, math.nan, math.nan, nested)
        std = math.sqrt(moments.squares / moments.count)
        return cls(moments.count, moments.mean, std, moments.minimum, moments.maximum, nested)


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
        content = json.loads(Path(path).read_text())
        if not isinstance(content, dict) or content.get("version") != VERSION:
            raise ValueError(f"{path} holds no statistics of version {VERSION}; write it with: shardio stats STORE")
        return cls({name: _entry(values) for name, values in content["variables"].items()})


def compute(
    store: Store,
    *,
    grid: Grid | None = None,
    variables: Sequence[str] | None = None,
    time: slice | None = None,
    threads: int | None = None,
    done: Callable[[int, int], None] | None = None,
) -> Statistics:
    """Read a store once, on dask's threads, and give the statistics of its variables.

    Args:
        store: an opened store.
        grid: the grid, if known already.
        variables: names; by default all usable ones.
        time: rows of the time dim that count (such as the training period); by default all.
        threads: threads; by default dask's choice.
        done: called with (blocks done, blocks in all) as the work goes on.
    """
    grid = find_grid(store, variables=variables) if grid is None else grid
    names = grid.variables if variables is None else tuple(variables)
    blocks = {name: _blocks(store[name], grid.time, time) for name in names}
    counted = _Progress(sum(map(len, blocks.values())), done)
    work = {
        name: [delayed(_moments)(store[name], block, grid.level, counted, pure=False) for block in blocks[name]]
        for name in names
    }
    (found,) = compute_all(work, scheduler="threads", num_workers=threads)
    return Statistics({name: _merged(found[name]) for name in names})


class _Progress:
    """Counts finished blocks and tells the caller, one thread at a time."""

    def __init__(self, total: int, done: Callable[[int, int], None] | None) -> None:
        self.total, self.done, self.count, self.lock = total, done, 0, threading.Lock()

    def __call__(self) -> None:
        with self.lock:
            self.count += 1
            if self.done is not None:
                self.done(self.count, self.total)

    def __dask_tokenize__(self) -> int:
        return id(self)


def _moments(source: Source, block: Box, level: str | None, counted: _Progress) -> dict[int | None, Moments]:
    """Moments of a block, by level number; by None if the array has no level dim."""
    values = np.empty(shape_of(block), dtype=np.float64)
    source.decode.apply(source.read(block), values)
    if level in source.dims:
        at = source.dims.index(level)
        found: dict[int | None, Moments] = {
            number: Moments.of(part) for number, part in zip(range(*block[at]), np.moveaxis(values, at, 0), strict=True)
        }
    else:
        found = {None: Moments.of(values)}
    counted()
    return found


def _merged(blocks: Sequence[Mapping[int | None, Moments]]) -> VariableStatistics:
    levels: dict[int | None, Moments] = {}
    for block in blocks:
        for level, moments in block.items():
            levels[level] = levels.get(level, Moments()) + moments
    whole = reduce(Moments.__add__, levels.values(), Moments())
    return VariableStatistics.of(whole, [levels[level] for level in sorted(at for at in levels if at is not None)])


def _blocks(source: Source, time_dim: str | None, time: slice | None) -> list[Box]:
    """Boxes of whole chunks that together cover an array, several neighbours in one where chunks are small."""
    unit = [1] * len(source.shape) if source.partial else list(source.chunks)
    for at in reversed(range(len(unit))):
        room = BLOCK_BYTES // max(1, math.prod(unit) * source.dtype.itemsize)
        unit[at] *= max(1, min(room, -(-source.shape[at] // unit[at])))
    spans = []
    for dim, size, step in zip(source.dims, source.shape, unit, strict=True):
        rows = range(size)[time] if dim == time_dim and time is not None else range(size)
        if rows.step != 1:
            raise DimensionError(f"time={time} has a step; statistics are taken over every row of a stretch")
        edges = [rows.start, *range((rows.start // step + 1) * step, rows.stop, step), rows.stop]
        spans.append([Span(start, stop) for start, stop in itertools.pairwise(edges) if stop > start])
    return list(itertools.product(*spans))


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    """NaN and infinities become None, which JSON has."""
    plain = {
        key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in values.items()
    }
    plain["levels"] = [_plain(level) for level in values["levels"]]
    return plain


def _entry(values: Mapping[str, Any]) -> VariableStatistics:
    numbers = {key: math.nan if values[key] is None else values[key] for key in ("mean", "std", "minimum", "maximum")}
    return VariableStatistics(values["count"], **numbers, levels=tuple(map(_entry, values["levels"])))

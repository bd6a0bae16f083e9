"""The ranks that a command line names, and how they cut a store's grid; no process group is needed for it."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardio.cf import Grid
from shardio.errors import PartitionError
from shardio.partition import Partition, make_partition
from shardio.plan import Plan, plan
from shardio.source import Source, Store

DATA_AXES = ("data", "ddp", "dp")
"""Names of a mesh axis over which samples differ; the ranks along every other axis share a sample."""


@dataclass(frozen=True)
class Mesh:
    """A mesh of ranks, numbered with the last axis fastest: axis -> ranks."""

    axes: Mapping[str, int]

    @property
    def domain(self) -> dict[str, int]:
        """The axes whose ranks share a sample."""
        return {axis: ranks for axis, ranks in self.axes.items() if axis not in DATA_AXES}

    @property
    def groups(self) -> int:
        """Groups of ranks that read different samples."""
        return math.prod(ranks for axis, ranks in self.axes.items() if axis in DATA_AXES)

    def ranks_of(self, partition: Partition, part: int) -> tuple[int, ...]:
        """The ranks of the whole mesh that read one part of the partition."""
        at = dict(zip((cut.axis for cut in partition.cuts), partition.coordinate(part), strict=True))
        places = itertools.product(*map(range, self.axes.values()))
        return tuple(
            rank
            for rank, place in enumerate(places)
            if all(at.get(axis, index) == index for axis, index in zip(self.axes, place, strict=True))
        )

    def __str__(self) -> str:
        return " x ".join(f"{axis} {ranks}" for axis, ranks in self.axes.items())


def parse_mesh(text: str, spatial: Sequence[str]) -> Mesh:
    """A mesh from "4", "2x2" (data x domain), "2x2x2" (data x both spatial dims) or "data=2,lat=2".

    Raises PartitionError if it is none of these, or has more axes than the grid has dims to cut.
    """
    names = {1: ("domain",), 2: ("data", "domain"), 3: ("data", *spatial)}
    if re.fullmatch(r"\d+([x,]\d+){0,2}", text):
        sizes = [int(size) for size in re.split("[x,]", text)]
        if len(sizes) > 1 + len(spatial):
            raise PartitionError(f"mesh {text!r} cuts two spatial dims, but there is only {spatial[0]!r}; say '2x2'")
        axes = dict(zip(names[len(sizes)], sizes, strict=True))
    elif re.fullmatch(r"[^=,\s]+=\d+(,[^=,\s]+=\d+)*", text):
        pairs = [pair.split("=") for pair in text.split(",")]
        axes = {name: int(size) for name, size in pairs}
        if len(axes) != len(pairs):
            raise PartitionError(f"mesh {text!r} names an axis twice")
    else:
        raise PartitionError(f"mesh {text!r} is not understood; say '4', '2x2' (data x domain) or 'data=2,lat=2,lon=2'")
    if min(axes.values()) < 1:
        raise PartitionError(f"mesh {text!r} has an axis without ranks; each needs at least 1")
    return Mesh(axes)


@dataclass(frozen=True)
class Slabs:
    """How the ranks of a mesh cut a grid.

    Attributes:
        mesh: the ranks.
        partition: who owns which rows.
        halo: rows beyond the owned ones, on both sides of each cut dim.
        periodic: cut dims that go around.
    """

    mesh: Mesh
    partition: Partition
    halo: int
    periodic: tuple[str, ...]

    def plan(self, source: Source) -> Plan:
        """What every rank reads of an array, at all times."""
        return plan(self.partition, source.layout, halo=self.halo, periodic=self.periodic)

    def sample_plan(self, source: Source, grid: Grid, steps: int = 1) -> Plan:
        """What every rank reads of the first `steps` times of an array."""
        timed = grid.time is not None and grid.time in source.dims
        return self.plan(source).at({grid.time: slice(0, steps)} if timed and grid.time is not None else {})


def cut_grid(
    store: Store,
    grid: Grid,
    mesh: str,
    *,
    variables: Sequence[str] | None = None,
    shards: Sequence[str] | None = None,
    how: str = "even",
    halo: int = 0,
    periodic: bool | None = None,
) -> Slabs:
    """The slabs that a command's options ask for.

    Raises PartitionError if dims and axes do not fit each other or the grid.
    """
    ranks = parse_mesh(mesh, grid.spatial)
    shard = _shards(shards, ranks, grid)
    chunks = {
        dim: math.lcm(*(_rows(store[name], dim) for name in sample_variables(store, grid, variables)))
        for dim in grid.spatial
    }
    partition = make_partition(shard, sizes=grid.sizes, ranks=ranks.domain, how=how, chunks=chunks)
    around = {None: set(grid.periodic), True: {*grid.periodic, grid.spatial[-1]}, False: set[str]()}[periodic]
    return Slabs(ranks, partition, halo, tuple(dim for dim in partition.dims if dim in around))


def sample_variables(store: Store, grid: Grid, named: Sequence[str] | None) -> tuple[str, ...]:
    """The variables of a sample, as the loader takes them: those named, or else all that have the time dim."""
    if named or grid.time is None:
        return grid.variables
    return tuple(name for name in grid.variables if grid.time in store[name].dims)


def _rows(source: Source, dim: str) -> int:
    return source.chunks[source.dims.index(dim)]


def _shards(shards: Sequence[str] | None, mesh: Mesh, grid: Grid) -> dict[str, str]:
    axes = list(mesh.domain)
    if not shards:
        named = {axis: axis for axis in axes if axis in grid.sizes}
        rest = [dim for dim in grid.spatial if dim not in named]
        return named | dict(zip(rest, [axis for axis in axes if axis not in named], strict=False))
    found: dict[str, str] = {}
    for item in shards:
        dim, _, axis = item.partition("=")
        free = [name for name in axes if name not in found.values()]
        if not axis and not free:
            raise PartitionError(f"{item!r} has no mesh axis left to be cut over; the mesh is {mesh}")
        found[dim] = axis or free[0]
    return found

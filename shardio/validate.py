"""Whether a store has what training on it takes, and what to add: by metadata and coordinates, not by its values.

A StormCast-like model wants a state on a grid whose cells have a place, regular times, a name for every channel,
statistics to normalize by, and fields that do not change (orography, land and sea).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shardio.cf import Grid, decoded, find_grid
from shardio.errors import ShardIOError
from shardio.roles import coordinate, degrees
from shardio.source import Source, Store
from shardio.statistics import Statistics, VariableStatistics, statistics_file
from shardio.text import strings

SHOWN = 6
"""Names that one line lists."""


@dataclass(frozen=True)
class Check:
    """What was found of one thing that training takes.

    Attributes:
        what: one of CHECKS.
        ok: it is there and makes sense.
        found: what there is.
        todo: what to do if it is not; "" if it is.
    """

    what: str
    ok: bool
    found: str
    todo: str = ""


@dataclass(frozen=True)
class Wanted:
    """What a store is checked for.

    Attributes:
        grid: its grid.
        statistics: file that ``shardio stats`` wrote.
        invariants: names of the fields that must be there; () for any.
    """

    grid: Grid
    statistics: Path
    invariants: tuple[str, ...] = ()


def validate(
    store: Store,
    *,
    level: str | None = None,
    statistics: str | Path | None = None,
    invariants: Sequence[str] = (),
    without: Collection[str] = (),
) -> list[Check]:
    """Check a store for all that training takes.

    Args:
        store: an opened store.
        level: name of the dim that holds levels or channels, where it is not recognised.
        statistics: file that ``shardio stats`` wrote; by default where it writes it (`statistics_file`).
        invariants: names of fields without a time dim that must be there; by default any will do.
        without: names of checks to leave out.

    Raises:
        ValueError: there is no check of that name.
    """
    unknown = [name for name in without if name not in CHECKS]
    if unknown:
        raise ValueError(f"there is no check {unknown[0]!r}; there are: {', '.join(CHECKS)}")
    try:
        grid = find_grid(store, level=level)
    except ShardIOError as error:
        return [Check("grid", False, str(error), "see what the store holds: shardio inspect")]
    file = statistics_file(store.url) if statistics is None else Path(statistics)
    wanted = Wanted(grid, file, tuple(invariants))
    lengths = ", ".join(f"{dim} {grid.sizes[dim]}" for dim in grid.spatial)
    found = [Check("grid", True, f"{lengths}; {_listed(grid.variables)}")]
    for name, check in CHECKS.items():
        if name in without:
            continue
        try:
            found.append(check(store, wanted))
        except (ShardIOError, ValueError, OSError) as error:  # a coordinate or field that cannot be read or decoded
            found.append(Check(name, False, str(error), "mend that array; shardio verify reads all of them"))
    return found


def _coordinates(store: Store, wanted: Wanted) -> Check:
    """Latitude and longitude, on the grid or along its dims; the latter must run one way."""
    space, missing = set(wanted.grid.spatial), []
    for role, name in (("y", "latitude"), ("x", "longitude")):
        found = next((s for s in store.values() if degrees(s) == role and s.dims and set(s.dims) <= space), None)
        if found is None:
            missing.append(name)
            continue
        values = decoded(found)
        if not np.isfinite(values).all():
            return Check("coordinates", False, f"{found.name!r} has cells without a value", f"write {name} in full")
        steps = np.diff(values) if values.ndim == 1 and len(space) == 2 else np.ones(1)
        if not ((steps > 0).all() or (steps < 0).all()):
            return Check("coordinates", False, f"{found.name!r} does not run one way", f"write {name} in order")
    if missing:
        return Check(
            "coordinates",
            False,
            f"no {' and no '.join(missing)} on {wanted.grid.spatial}",
            "write arrays on these dims, or along one of them, with units degrees_north and degrees_east",
        )
    return Check("coordinates", True, "latitude and longitude of every cell")


def _times(store: Store, wanted: Wanted) -> Check:
    """A time axis that is regular."""
    axis, dim = wanted.grid.times, wanted.grid.time
    if axis is None:
        found = "no variable has a time dim" if dim is None else f"dim {dim!r} has no dates"
        todo = f'write a coordinate {dim or "time"!r} with units such as "hours since 2020-01-01"'
        return Check("times", False, found, todo)
    if len(axis) < 2:
        return Check("times", False, f"{len(axis)} time", "a sample takes an input and a later target")
    try:
        axis.check()
    except ShardIOError as error:
        return Check("times", False, str(error), "or leave out what reaches over it: on_bad='skip'")
    step = f"{axis.months} month(s)" if axis.months else f"{axis.step:g} s"
    return Check("times", True, f"{len(axis)}, {axis.label(0)} to {axis.label(-1)}, every {step}")


def _channels(store: Store, wanted: Wanted) -> Check:
    """A name of its own for every channel: a variable's, or of each entry of its level or channel dim."""
    grid = wanted.grid
    names: list[str] = []
    for source in _changing(store, grid):
        dims = _channel_dims(source, grid)
        if len(dims) > 1:
            found = f"{source.name!r} has the dims {dims} beside time and space"
            return Check("channels", False, found, "choose an entry of all but one, or stack them")
        entries = [_entries(store, dim, grid.sizes[dim]) for dim in dims]
        if None in entries:
            return Check(
                "channels",
                False,
                f"the {grid.sizes[dims[0]]} entries of dim {dims[0]!r} of {source.name!r} have no names",
                f"write an array {dims[0]!r} along {dims[0]!r} that holds a text or a value for each",
            )
        names += [f"{source.name}_{entry}" for entry in entries[0] or ()] if dims else [source.name]
    double = sorted({name for name in names if names.count(name) > 1 or name.endswith("_")})
    if double:
        return Check("channels", False, f"{_listed(double)} twice or empty", "give each channel a name of its own")
    others = dict.fromkeys(dim for source in _changing(store, grid) for dim in _channel_dims(source, grid))
    how = "".join(f"; read with levels={dim!r}" for dim in others if dim != grid.level)
    return Check("channels", True, f"{len(names)}: {_listed(names)}{how}")


def _changing(store: Store, grid: Grid) -> list[Source]:
    """The variables on the grid that have the time dim; all of them if there is none."""
    return [store[name] for name in grid.variables if grid.time is None or grid.time in store[name].dims]


def _channel_dims(source: Source, grid: Grid) -> list[str]:
    """The dims of a variable that hold levels, channels, members."""
    return [dim for dim in source.dims if dim not in (grid.time, *grid.spatial) and grid.sizes[dim] > 1]


def _entries(store: Store, dim: str, size: int) -> list[str] | None:
    """The names or values along a dim, None if nothing tells them."""
    source = coordinate(store, dim, size) or store.get(dim)
    if source is None or source.dims[:1] != (dim,) or source.shape[0] != size:
        return None
    return [f"{value:g}" for value in decoded(source)] if source.dtype.kind in "iuf" else strings(source)


def _metadata(store: Store, wanted: Wanted) -> Check:
    """Whether opening takes one read."""
    if store.consolidated is False:
        return Check(
            "metadata",
            False,
            f"not consolidated: opening reads those of {len(store)} arrays one by one",
            "zarr.consolidate_metadata(store)",
        )
    return Check("metadata", True, "one read" if store.consolidated else f"{store.format} keeps them in one place")


def _statistics(store: Store, wanted: Wanted) -> Check:
    """Mean and deviation of every variable that changes, by level where it has levels."""
    grid, file = wanted.grid, str(wanted.statistics)
    changing = _changing(store, grid)
    others = dict.fromkeys(dim for source in changing for dim in _channel_dims(source, grid) if dim != grid.level)
    todo = f"shardio stats STORE -o {file}" + "".join(f" --level {dim}" for dim in others)
    if not wanted.statistics.is_file():
        return Check("statistics", False, f"no file {file!r}", todo)
    known = Statistics.from_json(wanted.statistics).variables
    for source in changing:
        name = source.name
        if name not in known:
            return Check("statistics", False, f"{name!r} is not in {file!r}", todo)
        parts = known[name].levels
        channels = math.prod(grid.sizes[dim] for dim in _channel_dims(source, grid))
        if channels != max(1, len(parts)):
            return Check("statistics", False, f"{name!r} has {channels} channels, its statistics {len(parts)}", todo)
        for at, part in enumerate(parts or (known[name],)):
            if (problem := _useless(part)) is not None:
                where = f"{name!r}, channel {at}," if parts else repr(name)
                return Check("statistics", False, f"{where} {problem}", "leave it out with variables= or levels=")
    return Check("statistics", True, f"of {len(changing)} variables in {file!r}")


def _useless(part: VariableStatistics) -> str | None:
    if not part.count:
        return "has no value at all"
    return "is constant: its deviation is 0" if part.std == 0 else None


def _invariants(store: Store, wanted: Wanted) -> Check:
    """Fields on the grid without a time dim, in full."""
    grid = wanted.grid
    changing = {source.name for source in _changing(store, grid)}
    fixed = [name for name in grid.variables if name not in changing]
    for name in wanted.invariants:
        if name not in fixed:
            reason = _why_not_fixed(store, grid, name)
            return Check("invariants", False, reason, f"write {name!r} on {grid.spatial}, without time")
    if not fixed:
        return Check(
            "invariants",
            False,
            f"every variable on {grid.spatial} has the dim {grid.time!r}",
            "write fields that do not change, such as orography and a land-sea mask; or --without invariants",
        )
    for name in wanted.invariants or fixed:
        holes = int(np.isnan(decoded(store[name])).sum())
        if holes:
            return Check("invariants", False, f"{name!r} has {holes} cells without a value", "write it in full")
    return Check("invariants", True, _listed(fixed))


def _why_not_fixed(store: Store, grid: Grid, name: str) -> str:
    source: Source | None = store.get(name)
    if source is None:
        return f"{name!r} is not in the store"
    return f"{name!r} {grid.skipped[name]}" if name in grid.skipped else f"{name!r} has the dim {grid.time!r}"


def _listed(names: Sequence[str]) -> str:
    more = f", ... ({len(names)} in all)" if len(names) > SHOWN else ""
    return ", ".join(map(repr, names[:SHOWN])) + more


CHECKS: dict[str, Callable[[Store, Wanted], Check]] = {
    "coordinates": _coordinates,
    "times": _times,
    "channels": _channels,
    "metadata": _metadata,
    "statistics": _statistics,
    "invariants": _invariants,
}
"""What is checked once the grid is found, in this order."""

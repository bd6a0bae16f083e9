"""Whether a store has what training on it takes, and what to add: by metadata and coordinates, not by its values.

A StormCast-like model wants a state on a grid whose cells have a place, regular times, a name for every channel,
statistics to normalize by, and fields that do not change (orography, land and sea).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shardio.cf import Grid, decoded, find_grid, horizontal
from shardio.errors import ReadError, ShardIOError, TimeAxisError
from shardio.labels import labels
from shardio.source import Source, Store
from shardio.statistics import Statistics, VariableStatistics

SHOWN = 6
"""Names that one line lists."""
LONGEST = 80
"""Characters of a name that are shown."""


@dataclass(frozen=True)
class Check:
    """What was found of one thing that training takes.

    Attributes:
        what: "grid", or one of CHECKS.
        ok: it is there and makes sense.
        found: what there is.
        todo: what to do if it is not; "" if it is.
    """

    what: str
    ok: bool
    found: str
    todo: str = ""


@dataclass(frozen=True)
class Asked:
    """What a store is checked for.

    Attributes:
        grid: its grid.
        level: name of the dim of levels or channels, if the user gave one.
        statistics: file that ``shardio stats`` wrote.
        invariants: names of the fields that must be there; () for any.
    """

    grid: Grid
    level: str | None
    statistics: Path | None
    invariants: tuple[str, ...]


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
        statistics: file that ``shardio stats`` wrote.
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
    except Exception as error:  # as below
        broken = isinstance(error, (ReadError, TimeAxisError))
        todo = "mend that array; shardio verify reads all" if broken else "see what the store holds: shardio inspect"
        return [Check("grid", False, _said(error), todo)]
    asked = Asked(grid, level, None if statistics is None else Path(statistics), tuple(invariants))
    lengths = ", ".join(f"{dim!r} {grid.sizes[dim]}" for dim in grid.spatial)
    empty = [dim for dim, size in grid.sizes.items() if not size and dim != grid.time]
    if empty:
        return [Check("grid", False, f"{lengths}; there is nothing along {_listed(empty)}", "write values along it")]
    found = [Check("grid", True, f"{lengths}; {_listed(grid.variables)}")]
    for name, check in CHECKS.items():
        if name in without:
            continue
        try:
            found.append(check(store, asked))
        except Exception as error:  # codecs and file libraries raise errors of many kinds
            found.append(Check(name, False, _said(error), "mend that array; shardio verify reads all of them"))
    return found


def _coordinates(store: Store, asked: Asked) -> Check:
    """Latitude and longitude, on the grid or along its dims, where they must run one way."""
    grid, missing = asked.grid, []
    for role, name in (("y", "latitude"), ("x", "longitude")):
        source = horizontal(store, grid, role)
        if source is None:
            missing.append(name)
            continue
        values = decoded(source)
        if not np.isfinite(values).all():
            return Check("coordinates", False, f"{source.name!r} has cells without a value", f"write {name} in full")
        if len(grid.spatial) == 2 and len(source.dims) == 1:
            steps = np.diff(values)
            if role == "x":  # across 0 or 180 degrees it goes on
                steps = (steps + 180) % 360 - 180
            if not ((steps > 0).all() or (steps < 0).all()):
                return Check("coordinates", False, f"{source.name!r} does not run one way", f"write {name} in order")
    if missing:
        return Check(
            "coordinates",
            False,
            f"no {' and no '.join(missing)} on {grid.spatial}",
            "write arrays on these dims, or along one of them, with units degrees_north and degrees_east",
        )
    return Check("coordinates", True, "latitude and longitude of every cell")


def _times(store: Store, asked: Asked) -> Check:
    """A time axis that is regular."""
    axis, dim = asked.grid.times, asked.grid.time
    if axis is None:
        found = "no variable has a time dim" if dim is None else f"dim {dim!r} has no dates"
        todo = f'write a coordinate {dim or "time"!r} with units such as "hours since 2020-01-01"'
        return Check("times", False, found, todo)
    if len(axis) < 2:
        return Check("times", False, f"only {len(axis)}", "write more: a sample takes an input and a later target")
    try:
        axis.check()
    except TimeAxisError as error:
        return Check("times", False, str(error), "mend it, or choose a stretch with time=")
    step = f"{axis.months} month(s)" if axis.months else f"{axis.step:g} s"
    return Check("times", True, f"{len(axis)}, {axis.label(0)} to {axis.label(-1)}, every {step}")


def _channels(store: Store, asked: Asked) -> Check:
    """A name of its own for every channel: a variable's, or of each entry of its level or channel dim."""
    grid = asked.grid
    names: list[str] = []
    told = _entries(store, grid)
    for source in _changing(store, grid):
        _ = source.decode  # raises where its attributes make no sense
        dims = _channel_dims(source, grid)
        if len(dims) > 1:
            found = f"{source.name!r} has the dims {dims} beside time and space"
            return Check("channels", False, found, "choose an entry of all but one, or stack them")
        for dim in dims:
            entries = told[dim]
            if entries is None:
                found = f"the {grid.sizes[dim]} entries of dim {dim!r} of {source.name!r} have no names"
                return Check(
                    "channels", False, found, f"write an array {dim!r} along {dim!r} with a text or a value for each"
                )
            if "" in entries:
                found = f"entry {entries.index('')} of dim {dim!r} has an empty name"
                return Check("channels", False, found, f"write a text for it to {dim!r}")
            names += [f"{source.name}_{entry}" for entry in entries]
        if not dims:
            names.append(source.name)
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        return Check("channels", False, f"{_listed(twice)} more than once", "give each channel a name of its own")
    if len(told) > 1:
        found = f"variables have different dims beside time and space: {_listed(list(told))}"
        return Check("channels", False, found, "take those with one of them alone, by variables=")
    how = "".join(f"; read with levels={dim!r}" for dim in told if dim != grid.level)
    return Check("channels", True, f"{len(names)}: {_listed(names)}{how}")


def _changing(store: Store, grid: Grid) -> list[Source]:
    """The variables on the grid that have the time dim; all of them if there is none."""
    return [store[name] for name in grid.variables if grid.time is None or grid.time in store[name].dims]


def _channel_dims(source: Source, grid: Grid) -> list[str]:
    """The dims of a variable that hold levels, channels, members."""
    others = [dim for dim in source.dims if dim not in (grid.time, *grid.spatial)]
    return [dim for dim in others if dim == grid.level or grid.sizes[dim] > 1]


def _entries(store: Store, grid: Grid) -> dict[str, list[str] | None]:
    """Of each of these dims, of all variables, the names of its entries; None if nothing tells them."""
    dims = dict.fromkeys(dim for source in _changing(store, grid) for dim in _channel_dims(source, grid))
    return {dim: labels(store, dim, grid.sizes[dim]) for dim in dims}


def _metadata(store: Store, asked: Asked) -> Check:
    """Whether opening takes one read."""
    if store.consolidated is False:
        found = f"not consolidated: opening reads those of {len(store)} arrays, each by itself"
        return Check("metadata", False, found, f"python -c \"import zarr; zarr.consolidate_metadata('{store.url}')\"")
    return Check("metadata", True, "consolidated" if store.consolidated else f"nothing to consolidate ({store.format})")


def _statistics(store: Store, asked: Asked) -> Check:
    """Mean and deviation of every variable that changes, by level where it has levels."""
    grid, file = asked.grid, asked.statistics
    told = _entries(store, grid)
    level = asked.level or (next(iter(told), None) if grid.level is None else None)
    todo = f"shardio stats {store.url} -o {file or 'FILE'}" + (f" --level {level}" if level else "")
    try:
        if file is None or not file.is_file():
            return Check("statistics", False, "no file was named" if file is None else f"no file {str(file)!r}", todo)
        known = Statistics.from_json(file).variables
    except (ValueError, OSError) as error:
        return Check("statistics", False, _said(error), todo)
    changing = _changing(store, grid)
    for source in changing:
        name = source.name
        if name not in known:
            return Check("statistics", False, f"{name!r} is not in {str(file)!r}", todo)
        parts = known[name].levels
        dims = _channel_dims(source, grid)
        channels = math.prod(grid.sizes[dim] for dim in dims)
        if channels != max(1, len(parts)):
            return Check("statistics", False, f"{name!r} has {channels} channels, its statistics {len(parts)}", todo)
        names = (told[dims[0]] or []) if len(dims) == 1 else []
        lost = [label for label in names if known[name].names and label not in known[name].names]
        if lost:
            return Check("statistics", False, f"{name!r} has {_listed(lost)}, its statistics have not", todo)
        for at, part in enumerate(parts or (known[name],)):
            if (reason := _why_useless(part)) is not None:
                where = f"{name!r}, channel {at}," if parts else repr(name)
                return Check("statistics", False, f"{where} {reason}", "leave that channel out of the training")
    return Check("statistics", True, f"of {len(changing)} variables in {str(file)!r}")


def _why_useless(part: VariableStatistics) -> str | None:
    if not part.count:
        return "has no value at all"
    if not math.isfinite(part.mean + part.std):
        return "has no finite mean and deviation"
    return "is constant: its deviation is 0" if part.std == 0 else None


def _invariants(store: Store, asked: Asked) -> Check:
    """Fields on the grid without a time dim, in full."""
    grid = asked.grid
    fixed = [name for name in grid.variables if _fixed(store[name], grid)]
    for name in asked.invariants:
        if name not in fixed:
            reason = _why_not_fixed(store, grid, name)
            return Check("invariants", False, reason, f"write {name!r} on {grid.spatial}, without time")
    if not fixed:
        found = f"every variable on {grid.spatial} has other dims, too"
        return Check(
            "invariants",
            False,
            found if grid.time is not None else "without a time dim nothing tells which fields do not change",
            "write fields that do not change, such as orography and a land-sea mask; or --without invariants",
        )
    for name in asked.invariants or fixed:
        holes = int(np.isnan(decoded(store[name])).sum())
        if holes:
            return Check("invariants", False, f"{name!r} has {holes} cells without a value", "write it in full")
    return Check("invariants", True, _listed(fixed))


def _fixed(source: Source, grid: Grid) -> bool:
    """Whether an array lies on the grid alone."""
    others = [dim for dim in source.dims if dim not in grid.spatial]
    return grid.time is not None and grid.time not in others and all(grid.sizes[dim] == 1 for dim in others)


def _why_not_fixed(store: Store, grid: Grid, name: str) -> str:
    if name not in store:
        return f"{name!r} is not in the store"
    return f"{name!r} {grid.skipped[name]}" if name in grid.skipped else f"{name!r} has the dims {store[name].dims}"


def _said(error: Exception) -> str:
    return str(error) if isinstance(error, ShardIOError) else f"{type(error).__name__}: {error}"


def _listed(names: Sequence[str]) -> str:
    more = f", ... ({len(names)} in all)" if len(names) > SHOWN else ""
    return ", ".join(repr(name if len(name) <= LONGEST else f"{name[:LONGEST]}...") for name in names[:SHOWN]) + more


CHECKS: dict[str, Callable[[Store, Asked], Check]] = {
    "coordinates": _coordinates,
    "times": _times,
    "channels": _channels,
    "metadata": _metadata,
    "statistics": _statistics,
    "invariants": _invariants,
}
"""What is checked once the grid is found, in this order."""

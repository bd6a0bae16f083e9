"""Finds time, level, latitude and longitude among a store's dims, and the variables that lie on that grid."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardio.errors import DimensionError, NoVariableError
from shardio.roles import UNITS, coordinate, degrees, dim_roles
from shardio.source import Source, Store
from shardio.times import TimeAxis, decode_times

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, eq=False)
class Grid:
    """The grid that a store's variables lie on.

    Attributes:
        variables: names of the usable variables: numbers on all spatial dims.
        skipped: name of every other array -> why it is not one of them.
        time, level: names of these dims, None if no usable variable has one.
        spatial: names of the spatial dims: (y, x), or one that lists the cells of an irregular grid.
        sizes: dim -> extent, of all dims of the usable variables.
        other: dims of usable variables that are none of these (such as an ensemble's "number") -> extent.
        times: the decoded time axis, None if there is no coordinate for it.
        levels: the level coordinate, None if there is none.
        coordinates: the spatial dims' 1-D coordinates, where there are any.
        descending: spatial dims stored from high to low (kept as stored).
        periodic: dims that go around the globe.
    """

    variables: tuple[str, ...]
    skipped: Mapping[str, str]
    time: str | None
    level: str | None
    spatial: tuple[str, ...]
    sizes: Mapping[str, int]
    other: Mapping[str, int]
    times: TimeAxis | None
    levels: Array | None
    coordinates: Mapping[str, Array]
    descending: tuple[str, ...]
    periodic: tuple[str, ...]


def find_grid(
    store: Store,
    *,
    variables: str | Sequence[str] | None = None,
    time: str | None = None,
    level: str | None = None,
    spatial: Sequence[str] | None = None,
) -> Grid:
    """Recognise the grid of a store by CF attributes and the usual names.

    Args:
        store: an opened store.
        variables: the variables wanted, or one's name; by default all that lie on the grid that most of them share.
        time, level: name of the dim, where it is not recognised.
        spatial: names of the spatial dims, where they are not recognised.

    Raises:
        VariableNotFoundError: a name in `variables` is not in the store.
        NoVariableError: no array lies on two spatial dims, or on a list of cells.
        DimensionError: dims cannot be recognised; the error says which argument names them.
    """
    if isinstance(variables, str):  # or its letters would be looked up
        variables = (variables,)
    candidates = [store[name] for name in variables] if variables is not None else list(store.values())
    named = _referred_to(store)
    roles = dim_roles(store, time=time, level=level, spatial=spatial)
    lists = {dim for dim, role in roles.items() if role == "cell"} | set(
        spatial or () if len(spatial or ()) == 1 else ()
    )
    skipped = {source.name: reason for source in candidates if (reason := _not_data(source, store, named, lists))}
    data = [source for source in candidates if source.name not in skipped]
    spaces = {source.name: space for source in data if (space := _space(source, roles, spatial))}
    if not spaces:
        raise _no_grid(data, skipped, roles)
    # Staggered grids and groups have several spatial extents; the one that most variables share is the grid. Lists of
    # cells beside a grid are tables.
    most = max(map(len, spaces.values()))
    chosen = Counter(space for space in spaces.values() if len(space) == most).most_common(1)[0][0]
    for source in data:
        if spaces.get(source.name) != chosen:
            found = spaces.get(source.name, dict(zip(source.dims, source.shape, strict=True)))
            skipped[source.name] = f"lies on {_text(found)}, not on the grid {_text(chosen)}"
    if variables is not None and skipped:
        name, reason = next(iter(skipped.items()))
        raise DimensionError(f"variable {name!r} cannot be used: it {reason}; leave it out of variables=")
    usable = [source for source in data if source.name not in skipped]
    return _describe(store, usable, skipped, roles, tuple(dim for dim, _ in chosen))


def _referred_to(store: Store) -> dict[str, str]:
    """Name of an array that attributes make a coordinate or bounds -> whose it is."""
    found: dict[str, str] = {}
    for source in store.values():
        for key in ("bounds", "coordinates", "grid_mapping"):
            for name in str(source.attrs.get(key, "")).split():
                found.setdefault(name, source.name)
    return found


def _not_data(source: Source, store: Store, referred_to: Mapping[str, str], lists: Collection[str]) -> str | None:
    """Why an array cannot be a variable on a grid, or on one of these lists of cells; None if it can."""
    own_name = source.name.rsplit("/", 1)[-1]
    if source.name in store.coordinates or own_name in source.dims or degrees(source) is not None:
        return "is a coordinate"
    if source.dtype.kind not in "iufb":
        return f"holds {source.dtype}, no numbers"
    if len(source.dims) < 2 and not set(source.dims) & set(lists):
        return "has fewer than two dims"
    if own_name in referred_to:
        return f"is a coordinate or bounds of {referred_to[own_name]!r}"
    return None


Space = tuple[tuple[str, int], ...]
"""The spatial dims of an array with their extents, in (y, x) order."""


def _space(source: Source, roles: Mapping[str, str], spatial: Sequence[str] | None) -> Space | None:
    """Where an array lies; None if it does not have the spatial dims."""
    sizes = dict(zip(source.dims, source.shape, strict=True))
    if spatial is None:
        found = {roles[dim]: dim for dim in source.dims if dim in roles}
        spatial = [found[role] for role in ("y", "x") if role in found]
        if not spatial and "cell" in found:
            spatial = [found["cell"]]
        elif len(spatial) != 2:
            return None
    return tuple((dim, sizes[dim]) for dim in spatial) if set(spatial) <= set(sizes) else None


def _text(dims: Space | Mapping[str, int]) -> str:
    return "(" + ", ".join(f"{dim} {size}" for dim, size in dict(dims).items()) + ")"


def _no_grid(data: Sequence[Source], skipped: Mapping[str, str], roles: Mapping[str, str]) -> Exception:
    if not data:
        reasons = "; ".join(f"{name!r} {reason}" for name, reason in list(skipped.items())[:8]) or "it is empty"
        return NoVariableError(f"no array can be used as a variable on a grid: {reasons}; name others with variables=")
    source = max(data, key=lambda source: source.nbytes)
    known = {dim: roles[dim] for dim in source.dims if dim in roles}
    return DimensionError(
        f"the spatial dims of {source.name!r} are not recognised: it has dims {source.dims}, of these "
        f"{known or 'none'} are known; name them with shard= (dim -> mesh axis), "
        f"the time dim with time=, the level dim with levels="
    )


def _describe(
    store: Store,
    usable: Sequence[Source],
    skipped: Mapping[str, str],
    roles: Mapping[str, str],
    spatial: tuple[str, ...],
) -> Grid:
    sizes = _sizes(usable)
    time = _dim_of_role("time", sizes, roles)
    level = _dim_of_role("level", sizes, roles)
    found = {dim: source for dim in sizes if (source := coordinate(store, dim, sizes[dim])) is not None}
    numbers = {dim: decoded(source) for dim, source in found.items() if source.dtype.kind in "iufb" and dim != time}
    coordinates = {dim: numbers[dim] for dim in spatial if dim in numbers}
    return Grid(
        variables=tuple(source.name for source in usable),
        skipped=dict(skipped),
        time=time,
        level=level,
        spatial=spatial,
        sizes=sizes,
        other={dim: size for dim, size in sizes.items() if dim not in (*spatial, time, level)},
        times=decode_times(found[time]) if time in found else None,
        levels=numbers.get(level) if level is not None else None,
        coordinates=coordinates,
        descending=tuple(dim for dim, values in coordinates.items() if len(values) > 1 and values[0] > values[-1]),
        periodic=tuple(
            dim for dim, values in coordinates.items() if roles.get(dim) == "x" and _global(found[dim], values)
        ),
    )


def _dim_of_role(role: str, dims: Iterable[str], roles: Mapping[str, str]) -> str | None:
    found = [dim for dim in dims if roles.get(dim) == role]
    if len(found) > 1:
        argument = {"time": "time=", "level": "levels="}[role]
        raise DimensionError(
            f"several dims look like {role}: {found}; choose variables= that share one, or name it with {argument}"
        )
    return found[0] if found else None


def _sizes(usable: Sequence[Source]) -> dict[str, int]:
    """Extent of each dim, which all variables must agree on."""
    sizes: dict[str, int] = {}
    for source in usable:
        for dim, size in zip(source.dims, source.shape, strict=True):
            if sizes.setdefault(dim, size) != size:
                other = next(
                    source for source in usable if (dim, sizes[dim]) in zip(source.dims, source.shape, strict=True)
                )
                raise DimensionError(
                    f"dim {dim!r} has {sizes[dim]} rows in {other.name!r}, but {size} in {source.name!r}; "
                    f"choose variables= that agree"
                )
    return sizes


def decoded(source: Source) -> Array:
    """All values of a small array, decoded, as float64."""
    out = np.empty(source.shape, dtype=np.float64)
    source.decode.apply(source.read(), out)
    return out


def horizontal(store: Store, grid: Grid, role: str) -> Source | None:
    """Latitude ("y") or longitude ("x"), by attributes or name: an array on the grid or along one of its dims."""
    for source in store.values():
        on_grid = set(source.dims) <= set(grid.spatial) and source.shape == tuple(map(grid.sizes.get, source.dims))
        if source.dims and on_grid and degrees(source) == role:
            return source
    names = {"y": ("lat", "latitude"), "x": ("lon", "longitude")}[role]
    dim = next((dim for dim in grid.spatial if dim.lower() in names), None)
    found = None if dim is None else coordinate(store, dim, grid.sizes[dim])
    return found if found is not None and found.dtype.kind in "iuf" else None


def _global(source: Source, values: Array) -> bool:
    """Evenly spaced degrees that end one step before they began."""
    units = str(source.attrs.get("units", "")).lower()
    if len(values) < 3 or UNITS.get(units, "x" if units in ("", "degrees", "degree") else "") != "x":
        return False
    steps = np.diff(values)
    step = float(np.mean(steps))
    return bool(np.allclose(steps, step, rtol=1e-3, atol=1e-4) and abs(len(values) * abs(step) - 360) < 0.1 * abs(step))


def window(values: Array, low: float, high: float, period: float | None = None) -> tuple[int, int]:
    """Rows of an evenly running coordinate between two values, as (first row, number of rows), for `Cut.start`.

    With a period (360 for longitude) any convention of `low` and `high` fits, and the window may run over the end.

    Raises DimensionError if no row lies between them.
    """
    values = np.asarray(values, dtype=np.float64)
    beyond = values - low
    tolerance = 0.0
    if period is not None:
        tolerance = 1e-9 * period
        beyond = np.mod(beyond + tolerance, period) - tolerance
    rows = np.flatnonzero((beyond >= -tolerance) & (beyond <= high - low + tolerance))
    if not rows.size:
        raise DimensionError(f"no row lies between {low} and {high}: the coordinate runs {values[0]} to {values[-1]}")
    if rows.size == values.size and period is not None:
        falls = values[0] > values[-1]
        return int(np.argmax(beyond) if falls else np.argmin(beyond)), int(rows.size)
    jumps = np.flatnonzero(np.diff(rows) > 1)
    return int(rows[jumps[-1] + 1] if jumps.size else rows[0]), int(rows.size)

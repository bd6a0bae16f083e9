"""Finds time, level, latitude and longitude among a store's dims, and the variables that lie on that grid."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardio.errors import DimensionError, NoVariableError
from shardio.source import Source, Store
from shardio.times import TimeAxis, decode_times

Array = np.ndarray[Any, np.dtype[Any]]

ROLES = ("time", "level", "y", "x")

# role -> what the CF attributes `axis`, `standard_name` and `units` of its coordinate say, and its usual names
AXIS = {"t": "time", "z": "level", "y": "y", "x": "x"}
STANDARD_NAMES = {
    "time": "time",
    "latitude": "y",
    "grid_latitude": "y",
    "projection_y_coordinate": "y",
    "longitude": "x",
    "grid_longitude": "x",
    "projection_x_coordinate": "x",
    "air_pressure": "level",
    "height": "level",
    "altitude": "level",
    "depth": "level",
    "model_level_number": "level",
    "atmosphere_hybrid_sigma_pressure_coordinate": "level",
    "atmosphere_sigma_coordinate": "level",
    "ocean_sigma_coordinate": "level",
}
UNITS = {
    **dict.fromkeys(("degrees_north", "degree_north", "degrees_n", "degree_n", "degreesn", "degreen"), "y"),
    **dict.fromkeys(("degrees_east", "degree_east", "degrees_e", "degree_e", "degreese", "degreee"), "x"),
    **dict.fromkeys(("hpa", "mbar", "millibar", "millibars"), "level"),
}
NAMES = {
    "time": (
        *("time", "valid_time", "times", "time_index", "time_counter", "datetime", "day", "date", "t"),
        *("time1", "time0"),
    ),
    "level": (
        *("level", "lev", "levels", "plev", "pressure", "pressure_level", "isobaricinhpa", "isobaric", "model_level"),
        *("hybrid", "height", "altitude", "depth", "z", "sigma", "bottom_top", "depthbelowlandlayer", "deptht"),
        *("heightaboveground", "generalverticallayer"),
    ),
    "y": (
        "latitude",
        "lat",
        "y",
        "rlat",
        "south_north",
        "nlat",
        "yc",
        "projection_y_coordinate",
        "ydim",
        "northing",
        "j",
    ),
    "x": (
        "longitude",
        "lon",
        "x",
        "rlon",
        "west_east",
        "nlon",
        "xc",
        "projection_x_coordinate",
        "xdim",
        "easting",
        "i",
    ),
}
BY_NAME = {name: role for role, names in NAMES.items() for name in names}


@dataclass(frozen=True, eq=False)
class Grid:
    """The grid that a store's variables lie on.

    Attributes:
        variables: names of the usable variables: numbers on both spatial dims.
        skipped: name of every other array -> why it is not one of them.
        time, level: names of these dims, None if no usable variable has one.
        spatial: names of the spatial dims, (y, x).
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
    variables: Sequence[str] | None = None,
    time: str | None = None,
    level: str | None = None,
    spatial: Sequence[str] | None = None,
) -> Grid:
    """Recognise the grid of a store by CF attributes and the usual names.

    Args:
        store: an opened store.
        variables: the variables wanted; by default all that lie on the grid that most of them share.
        time, level: name of the dim, where it is not recognised.
        spatial: names of the spatial dims, where they are not recognised.

    Raises:
        VariableNotFoundError: a name in `variables` is not in the store.
        NoVariableError: no array lies on two spatial dims.
        DimensionError: dims cannot be recognised; the error says which argument names them.
    """
    candidates = [store[name] for name in variables] if variables is not None else list(store.values())
    skipped = {source.name: reason for source in candidates if (reason := _not_data(source, store))}
    roles = dim_roles(store, time=time, level=level, spatial=spatial)
    data = [source for source in candidates if source.name not in skipped]
    spaces = {source.name: space for source in data if (space := _space(source, roles, spatial))}
    if not spaces:
        raise _no_grid(data, skipped, roles, variables)
    # Staggered grids have several pairs of spatial dims; the one that most variables share is the grid.
    chosen = Counter(spaces.values()).most_common(1)[0][0]
    for source in data:
        if spaces.get(source.name) != chosen:
            found = spaces.get(source.name, source.dims)
            skipped[source.name] = f"lies on {found}, not on the grid {chosen}"
    if variables is not None and skipped:
        name, reason = next(iter(skipped.items()))
        raise DimensionError(f"variable {name!r} cannot be used: it {reason}; leave it out of variables=")
    usable = [source for source in data if source.name not in skipped]
    return _describe(store, usable, skipped, roles, chosen)


def dim_roles(
    store: Store,
    *,
    time: str | None = None,
    level: str | None = None,
    spatial: Sequence[str] | None = None,
) -> dict[str, str]:
    """Dim -> "time", "level", "y" or "x", for every dim that is recognised or named."""
    dims = dict.fromkeys(dim for source in store.values() for dim in source.dims)
    roles = {dim: role for dim in dims if (role := _role(dim, store)) is not None}
    named = [(time, "time"), (level, "level")]
    if spatial is not None:
        if len(spatial) not in (1, 2):
            raise DimensionError(f"spatial dims {tuple(spatial)}: one or two can be named")
        named += list(zip(spatial, ("y", "x"), strict=False))
    for dim, role in named:
        if dim is None:
            continue
        if dim not in dims:
            raise DimensionError(f"{role} dim {dim!r} is not a dim of the store; those are: {', '.join(dims)}")
        roles = {other: found for other, found in roles.items() if found != role} | {dim: role}
    return roles


def coordinate(store: Store, dim: str) -> Source | None:
    """The 1-D coordinate of a dim: the array of the same name in the same group."""
    source = store.get(dim) if dim in store else None
    if source is None:
        return None
    return source if len(source.dims) == 1 and source.dims[0] == dim else None


def _role(dim: str, store: Store) -> str | None:
    source = coordinate(store, dim)
    if source is not None:
        attrs = {key: str(source.attrs.get(key, "")).lower() for key in ("axis", "standard_name", "units")}
        if " since " in attrs["units"] or source.dtype.kind == "M":
            return "time" if _role_by_name(dim) in ("time", None) else None
        for table, key in ((UNITS, "units"), (STANDARD_NAMES, "standard_name"), (AXIS, "axis")):
            if attrs[key] in table:
                return table[attrs[key]]
    return _role_by_name(dim)


def _role_by_name(dim: str) -> str | None:
    return BY_NAME.get(dim.lower().removesuffix("_dim"))


def _not_data(source: Source, store: Store) -> str | None:
    """Why an array cannot be a variable on a grid; None if it can."""
    if source.name in store.coordinates or _degrees(source) is not None:
        return "is a coordinate"
    if source.dtype.kind not in "iufb":
        return f"holds {source.dtype}, no numbers"
    if len(source.dims) < 2:
        return "has fewer than two dims" if source.name not in source.dims else "is a coordinate"
    for other in store.values():
        named = " ".join(str(other.attrs.get(key, "")) for key in ("bounds", "coordinates", "grid_mapping")).split()
        if source.name in named:
            return f"is a coordinate or bounds of {other.name!r}"
    return None


def _degrees(source: Source) -> str | None:
    """Is an array latitude ("y") or longitude ("x") itself?"""
    units, name = (str(source.attrs.get(key, "")).lower() for key in ("units", "standard_name"))
    return UNITS.get(units) if UNITS.get(units) in ("y", "x") else {"latitude": "y", "longitude": "x"}.get(name)


def _space(source: Source, roles: Mapping[str, str], spatial: Sequence[str] | None) -> tuple[str, ...] | None:
    """The spatial dims of an array in (y, x) order, or None if it has not both."""
    if spatial is not None:
        return tuple(spatial) if set(spatial) <= set(source.dims) else None
    found = {roles[dim]: dim for dim in source.dims if dim in roles}
    return (found["y"], found["x"]) if {"y", "x"} <= found.keys() else None


def _no_grid(
    data: Sequence[Source], skipped: Mapping[str, str], roles: Mapping[str, str], variables: Sequence[str] | None
) -> Exception:
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
    sizes = {dim: size for source in usable for dim, size in zip(source.dims, source.shape, strict=True)}
    time = _dim_of_role("time", sizes, roles)
    level = _dim_of_role("level", sizes, roles)
    time_source = coordinate(store, time) if time else None
    level_source = coordinate(store, level) if level else None
    coordinates = {
        dim: decoded(source) for dim in spatial if (source := coordinate(store, dim)) is not None and _numeric(source)
    }
    return Grid(
        variables=tuple(source.name for source in usable),
        skipped=dict(skipped),
        time=time,
        level=level,
        spatial=spatial,
        sizes=sizes,
        other={dim: size for dim, size in sizes.items() if dim not in (*spatial, time, level)},
        times=decode_times(time_source) if time_source is not None else None,
        levels=decoded(level_source) if level_source is not None and _numeric(level_source) else None,
        coordinates=coordinates,
        descending=tuple(dim for dim, values in coordinates.items() if len(values) > 1 and values[0] > values[-1]),
        periodic=tuple(
            dim for dim, values in coordinates.items() if roles.get(dim) == "x" and _global(store, dim, values)
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


def _numeric(source: Source) -> bool:
    return source.dtype.kind in "iufb"


def decoded(source: Source) -> Array:
    """All values of a small array, decoded, as float64."""
    out = np.empty(source.shape, dtype=np.float64)
    source.decode.apply(source.read(), out)
    return out


def _global(store: Store, dim: str, values: Array) -> bool:
    """Evenly spaced degrees that end one step before they began."""
    units = str(store[dim].attrs.get("units", "")).lower()
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
    shifted = np.asarray(values, dtype=np.float64)
    if period is not None:
        tolerance = 1e-9 * period
        inside = np.mod(shifted - low + tolerance, period) <= high - low + 2 * tolerance
    else:
        inside = (shifted >= low) & (shifted <= high)
    rows = np.flatnonzero(inside)
    if not rows.size:
        raise DimensionError(f"no row lies between {low} and {high}: the coordinate runs {values[0]} to {values[-1]}")
    jumps = np.flatnonzero(np.diff(rows) > 1)
    first = int(rows[jumps[-1] + 1]) if jumps.size else int(rows[0])
    return first, int(rows.size)

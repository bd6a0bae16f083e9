"""Which dim is time, level, latitude, longitude or a list of cells: by its coordinate's CF attributes, or its name."""

from __future__ import annotations

from collections.abc import Sequence

from shardio.errors import DimensionError
from shardio.source import Source, Store

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
        *("latitude", "lat", "y", "rlat", "south_north", "nlat", "yc", "projection_y_coordinate", "ydim", "northing"),
        "j",
    ),
    "x": (
        *("longitude", "lon", "x", "rlon", "west_east", "nlon", "xc", "projection_x_coordinate", "xdim", "easting"),
        "i",
    ),
    "cell": ("cell", "cells", "ncells", "ncol", "values"),
}
BY_NAME = {name: role for role, names in NAMES.items() for name in names}


def dim_roles(
    store: Store,
    *,
    time: str | None = None,
    level: str | None = None,
    spatial: Sequence[str] | None = None,
) -> dict[str, str]:
    """Dim -> "time", "level", "y", "x" or "cell", for every dim that is recognised or named."""
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


def coordinate(store: Store, dim: str, size: int | None = None) -> Source | None:
    """The 1-D coordinate of a dim: the array of the same name, of this size if said, at the root or else in a group."""
    candidates = [store[dim]] if dim in store else []
    candidates += [source for name, source in store.items() if name.endswith(f"/{dim}")]
    return next((c for c in candidates if c.dims == (dim,) and size in (None, c.shape[0])), None)


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


def degrees(source: Source) -> str | None:
    """Is an array latitude ("y") or longitude ("x") itself?"""
    units, name = (str(source.attrs.get(key, "")).lower() for key in ("units", "standard_name"))
    return UNITS.get(units) if UNITS.get(units) in ("y", "x") else {"latitude": "y", "longitude": "x"}.get(name)

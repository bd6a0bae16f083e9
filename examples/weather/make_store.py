"""Write the shallow-water weather as a Zarr store laid out like ARCO-ERA5: a chunk per field and time, CF attributes.

Run it as `python examples/weather/make_store.py runs/demo/weather.zarr`.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import numcodecs
import numpy as np
import zarr
from numpy.typing import NDArray
from shallow_water import GRAVITY, Settings, ShallowWater

CF_NAMES = {  # standard name, units
    "u_component_of_wind": ("eastward_wind", "m s**-1"),
    "v_component_of_wind": ("northward_wind", "m s**-1"),
    "geopotential": ("geopotential", "m**2 s**-2"),
    "specific_humidity": ("specific_humidity", "kg kg**-1"),
    "geopotential_at_surface": ("surface_geopotential", "m**2 s**-2"),
    "land_sea_mask": ("land_binary_mask", "(0 - 1)"),
}


def write_store(
    path: Path, settings: Settings | None = None, *, times: int = 288, every_hours: int = 2, spin_up_days: float = 2.0
) -> Path:
    """Run the solver and write `times` float32 fields [latitude, longitude] of each variable, `every_hours` apart.

    The store is written beside `path` and moved there when it is complete; a store that exists is replaced.
    """
    water = ShallowWater(settings or Settings())
    settings = water.settings
    part = path.with_name(path.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    root = zarr.open_group(part, mode="w", zarr_format=2)
    root.attrs.update({"Conventions": "CF-1.8", "title": "Rotating shallow water over orography"})
    hours = np.arange(times, dtype=np.int64) * every_hours
    _coordinate(root, "time", hours, standard_name="time", units="hours since 1959-01-01", calendar="standard")
    _coordinate(root, "latitude", water.latitude, standard_name="latitude", units="degrees_north")
    _coordinate(root, "longitude", water.longitude, standard_name="longitude", units="degrees_east")
    grid = (settings.rows, settings.columns)
    static = {"geopotential_at_surface": GRAVITY * water.orography, "land_sea_mask": water.land}
    for name, field in static.items():
        _variable(root, name, grid)[:] = field.astype(np.float32)
    series = water.run(times, every=3600.0 * every_hours, spin_up=86400.0 * spin_up_days)
    for number, fields in enumerate(series):
        for name, values in fields.items():
            array = root[name] if number else _variable(root, name, (times, *grid))
            array[number] = values
    zarr.consolidate_metadata(part, zarr_format=2)
    shutil.rmtree(path, ignore_errors=True)
    return part.rename(path)


def _coordinate(root: zarr.Group, name: str, values: NDArray[np.generic], **attributes: str) -> None:
    array = root.create_array(name, shape=values.shape, chunks=values.shape, dtype=values.dtype, fill_value=None)
    array[:] = values
    array.attrs.update({"_ARRAY_DIMENSIONS": [name], **attributes})


def _variable(root: zarr.Group, name: str, shape: tuple[int, ...]) -> zarr.Array:
    """A float32 array [(time,) latitude, longitude]: one blosc-lz4 chunk per field and time."""
    array = root.create_array(
        name,
        shape=shape,
        chunks=(1,) * (len(shape) - 2) + shape[-2:],
        dtype=np.float32,
        compressors=numcodecs.Blosc("lz4", clevel=5, shuffle=numcodecs.Blosc.SHUFFLE),
        fill_value=float("nan"),
    )
    standard_name, units = CF_NAMES[name]
    dims = ["time", "latitude", "longitude"][-len(shape) :]
    array.attrs.update({"_ARRAY_DIMENSIONS": dims, "standard_name": standard_name, "units": units})
    return array


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path, help="where to write the store; replaced if it exists")
    parser.add_argument("--times", type=int, default=288, help="how many times to keep (default 288)")
    parser.add_argument("--every-hours", type=int, default=2, help="hours between them (default 2)")
    parser.add_argument("--rows", type=int, default=73)
    parser.add_argument("--columns", type=int, default=144)
    parser.add_argument("--seed", type=int, default=0, help="of the mountains and the first disturbance")
    given = parser.parse_args()
    settings = Settings(rows=given.rows, columns=given.columns, seed=given.seed)
    given.path.parent.mkdir(parents=True, exist_ok=True)
    print(write_store(given.path, settings, times=given.times, every_hours=given.every_hours))


if __name__ == "__main__":
    main()

"""The demo's store is laid out like ARCO-ERA5, and xarray reads it."""

from pathlib import Path

import numpy as np
import xarray as xr
import zarr
from make_store import write_store
from shallow_water import Settings, ShallowWater

SERIES = ("u_component_of_wind", "v_component_of_wind", "geopotential", "specific_humidity")
STATIC = ("geopotential_at_surface", "land_sea_mask")


def test_xarray_reads_it(weather_store: Path) -> None:
    with xr.open_zarr(weather_store, consolidated=True) as data:
        assert set(data.data_vars) == {*SERIES, *STATIC}
        assert data["geopotential"].dims == ("time", "latitude", "longitude")
        assert data["land_sea_mask"].dims == ("latitude", "longitude")
        assert data["time"].values[1] - data["time"].values[0] == np.timedelta64(2, "h")
        assert (np.diff(data["latitude"].values) < 0).all()
        assert data["latitude"].attrs == {"standard_name": "latitude", "units": "degrees_north"}
        assert data["longitude"].attrs["units"] == "degrees_east"
        for name in (*SERIES, *STATIC):
            assert data[name].dtype == np.float32
            assert np.isfinite(data[name].values).all()
            assert {"standard_name", "units"} <= data[name].attrs.keys()
        assert set(np.unique(data["land_sea_mask"].values)) == {0.0, 1.0}


def test_a_chunk_is_a_field_at_a_time(weather_store: Path) -> None:
    root = zarr.open_group(weather_store, mode="r")
    assert all(root[name].chunks == (1, 19, 24) for name in SERIES)
    assert (weather_store / ".zmetadata").is_file()


def test_it_holds_what_the_solver_gives(tmp_path: Path) -> None:
    settings = Settings(rows=19, columns=24, step=900.0, seed=3)
    path = write_store(tmp_path / "weather.zarr", settings, times=3, every_hours=1, spin_up_days=0.0)
    assert not (tmp_path / "weather.zarr.part").exists()
    fields = list(ShallowWater(settings).run(3, every=3600))
    with xr.open_zarr(path) as data:
        for name in SERIES:
            np.testing.assert_array_equal(data[name].values, np.stack([field[name] for field in fields]))


def test_it_replaces_an_older_store(tmp_path: Path) -> None:
    settings = Settings(rows=19, columns=24, step=900.0)
    for times in (4, 2):
        path = write_store(tmp_path / "weather.zarr", settings, times=times, spin_up_days=0.0)
    with xr.open_zarr(path) as data:
        assert data.sizes["time"] == 2

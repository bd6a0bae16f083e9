"""Recognising grids: real files of many origins, and small ones for each rule and each error."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr

from shardio import find_grid, open_store
from shardio.cf import window
from shardio.errors import DimensionError, NoVariableError, VariableNotFoundError

REAL: dict[str, tuple[Any, ...]] = {
    # file: (some variables, time, level, spatial dims, descending, periodic)
    "grid-netcdf/test4.nc": (("t", "z"), "time", "level", ("latitude", "longitude"), ("latitude",), ("longitude",)),
    "zarr/test_zarr": (("t", "z"), "time", "level", ("latitude", "longitude"), ("latitude",), ("longitude",)),
    "grid-netcdf/small_rotPole_precipitation.nc": (("pr",), "time", None, ("rlat", "rlon"), (), ()),
    "grid-netcdf/euro_air_temp.nc": (
        ("air_temperature",), None, None, ("projection_y_coordinate", "projection_x_coordinate"), (), (),
    ),
    "grid-netcdf/test_lcc.nc": (("tas",), "time", None, ("y", "x"), (), ()),
    "grid-netcdf/air_MCruns_ensemble_mean_LMRv2.1.nc": (("air",), "time", None, ("lat", "lon"), (), ()),
    "grid-netcdf/wrf_d01_allvars_cropped_compressed.nc": (
        ("T2", "QVAPOR"), "Time", "bottom_top", ("south_north", "west_east"), (), (),
    ),
    "grid-netcdf/tmmx_20190121.nc": (("air_temperature",), None, None, ("lat", "lon"), ("lat",), ()),
    "grid-netcdf/air/air.nc": (("air",), "time", None, ("lat", "lon"), ("lat",), ()),
    "weather-series/vic/VIC_temperatures.nc": (("Avg_temp",), "time", None, ("lat_dim", "lon_dim"), (), ()),
    "weather-series/ERA5_example_data.nc": (
        ("u100", "t2m"), "time", None, ("latitude", "longitude"), ("latitude",), (),
    ),
    "weather-series/psl_ERA5_mon_194001-202212.nc": (("psl",), "time", None, ("lat", "lon"), (), ()),
    "weather-series/era5_alps/sel_era5_invariant.nc": (
        ("lsm", "z"), "time", None, ("latitude", "longitude"), ("latitude",), (),
    ),
    "zarr/cube_l2.zarr": (("conc_chl",), "time", None, ("lat", "lon"), ("lat",), ()),
}  # fmt: skip


@pytest.mark.parametrize("name", REAL)
def test_real_files(shared_data: Path, name: str) -> None:
    variables, time, level, spatial, descending, periodic = REAL[name]
    with open_store(shared_data / name) as store:
        grid = find_grid(store)
        assert set(variables) <= set(grid.variables)
        assert (grid.time, grid.level, grid.spatial) == (time, level, spatial)
        assert (grid.descending, grid.periodic) == (descending, periodic)
        assert set(grid.variables) | set(grid.skipped) == set(store)
        for kind in ("time", "lat", "lon", "latitude", "longitude", "time_bnds", "crs", "XLAT", "Times", "level"):
            assert kind not in grid.variables


def test_other_dims_are_told(shared_data: Path) -> None:
    with open_store(shared_data / "weather-series/sel_cera-20c_t2m_1901-2010.nc") as store:
        assert find_grid(store).other == {"number": 10}


def test_staggered_variables_are_skipped_with_the_reason(shared_data: Path) -> None:
    with open_store(shared_data / "grid-netcdf/wrf_d01_allvars_cropped_compressed.nc") as store:
        grid = find_grid(store)
        assert grid.skipped["U"] == (
            "lies on (Time 4, bottom_top 27, south_north 8, west_east_stag 11), "
            "not on the grid (south_north 8, west_east 10)"
        )
        with pytest.raises(DimensionError, match=r"variable 'U' cannot be used: it .*; leave it out of variables="):
            find_grid(store, variables=["T2", "U"])


def grid_of(dataset: xr.Dataset, **options: Any) -> Any:
    return find_grid(open_store(dataset), **options)


def field(*dims: str, **coords: Any) -> xr.Dataset:
    sizes = {"time": 4, "level": 3, "lat": 5, "lon": 6}
    shape = tuple(len(coords[dim][1]) if dim in coords else sizes.get(dim, 2) for dim in dims)
    return xr.Dataset({"v": (dims, np.zeros(shape, np.float32))}, coords=coords)


@pytest.mark.parametrize(
    ("dim", "attrs", "role"),
    [
        ("foo", {"units": "degrees_north"}, "y"),
        ("foo", {"units": "degreeN"}, "y"),
        ("foo", {"standard_name": "grid_latitude", "units": "degrees"}, "y"),
        ("foo", {"axis": "Y"}, "y"),
        ("Latitude", {}, "y"),
        ("south_north", {}, "y"),
    ],
)
def test_rules_for_a_dim(dim: str, attrs: dict[str, str], role: str) -> None:
    grid = grid_of(field(dim, "lon", **{dim: (dim, np.arange(4.0), attrs)}))
    assert grid.spatial == (dim, "lon")


def test_time_by_units_and_level_by_units() -> None:
    dataset = field(
        "t0", "p", "lat", "lon",
        t0=("t0", np.arange(3), {"units": "hours since 2000-01-01"}),
        p=("p", np.array([1000.0, 500.0]), {"units": "hPa"}),
    )  # fmt: skip
    grid = grid_of(dataset)
    assert (grid.time, grid.level) == ("t0", "p")
    assert grid.levels.tolist() == [1000, 500]
    assert grid.times.step == 3600


def test_names_win_where_the_caller_gives_them() -> None:
    dataset = field("run", "station", "band", "time")
    with pytest.raises(DimensionError, match=r"'v' are not recognised.*name them with shard= .*time=.*levels="):
        grid_of(dataset)
    grid = grid_of(dataset, spatial=("station", "band"), time="run")
    assert (grid.spatial, grid.time, grid.other) == (("station", "band"), "run", {"time": 4})
    assert grid_of(dataset, spatial=["station"]).spatial == ("station",)
    with pytest.raises(DimensionError, match="y dim 'rows' is not a dim of the store; those are: run, station"):
        grid_of(dataset, spatial=("rows",))
    with pytest.raises(DimensionError, match="one or two can be named"):
        grid_of(dataset, spatial=("run", "station", "band"))


def test_two_time_dims_need_a_word() -> None:
    dataset = field("time", "valid_time", "lat", "lon")
    with pytest.raises(DimensionError, match=r"several dims look like time: \['time', 'valid_time'\].*time="):
        grid_of(dataset)
    assert grid_of(dataset, time="time").other == {"valid_time": 2}


@pytest.mark.parametrize(
    ("lon", "periodic"),
    [
        (np.arange(0, 360, 0.25), True),
        (np.arange(-180, 180, 2.5), True),
        (np.linspace(0, 360, 37), False),  # both ends
        (np.arange(0, 350, 10.0), False),
        (np.arange(0, 360, 0.7), False),
        (np.array([0.0, 100, 250]), False),
        (np.arange(0, 360, 1 / 3).astype(np.float32), True),
    ],
)
def test_global_longitudes_are_periodic(lon: np.ndarray, periodic: bool) -> None:
    grid = grid_of(field("lat", "lon", lon=("lon", lon, {"units": "degrees_east"})))
    assert grid.periodic == (("lon",) if periodic else ())


def test_metres_are_not_periodic() -> None:
    assert grid_of(field("y", "x", x=("x", np.arange(0, 360, 1.0), {"units": "m"}))).periodic == ()


def test_no_usable_variable() -> None:
    dataset = xr.Dataset({"name": ("lat", list("abcde")), "crs": ((), 1)})
    with pytest.raises(NoVariableError, match=r"'name' holds .* no numbers; 'crs' has fewer than two dims.*variables="):
        grid_of(dataset)
    with pytest.raises(NoVariableError, match="it is empty"):
        grid_of(xr.Dataset())
    with pytest.raises(VariableNotFoundError, match="has no array 'w'; it has: 'v'"):
        grid_of(field("lat", "lon"), variables=["w"])


@pytest.mark.parametrize(
    ("lon", "low", "high", "expected"),
    [
        (np.arange(0, 360, 0.25), -2.5, 0.5, np.r_[357.5:360:0.25, 0:0.75:0.25]),
        (np.arange(0, 360, 0.25), 10, 11, np.arange(10, 11.25, 0.25)),
        (np.arange(-180, 180, 0.5), 179, 181, [179, 179.5, -180, -179.5, -179]),
        (np.arange(0, 360, 10.0), -180, 180, np.r_[180:360:10.0, 0:180:10.0]),
        (np.arange(350, -10, -10.0), -180, 180, np.r_[170:-10:-10.0, 350:170:-10.0]),
        (np.array([0.1, 90.1, 180.1, 270.1], np.float32), -90, 91, [270.1, 0.1, 90.1]),
    ],
)
def test_window_across_the_seam(lon: np.ndarray, low: float, high: float, expected: Any) -> None:
    start, size = window(lon, low, high, period=360)
    np.testing.assert_allclose(lon[np.arange(start, start + size) % len(lon)], expected, rtol=1e-6)


def test_groups_have_their_own_coordinates(tmp_path: Path) -> None:
    for name, size in (("coarse", 3), ("fine", 6)):
        coords = {"lat": np.linspace(90, -90, size), "lon": ("lon", np.arange(size) * 360.0 / size)}
        data = {key: (("lat", "lon"), np.zeros((size, size), np.float32)) for key in ("a", "b")[: size // 3]}
        xr.Dataset(data, coords).to_zarr(tmp_path / "a.zarr", group=name, mode="a")
    with open_store(tmp_path / "a.zarr") as store:
        grid = find_grid(store)
        assert grid.variables == ("fine/a", "fine/b")
        assert grid.skipped["coarse/a"] == "lies on (lat 3, lon 3), not on the grid (lat 6, lon 6)"
        assert grid.coordinates["lat"].tolist() == np.linspace(90, -90, 6).tolist()
        assert grid.periodic == ("lon",)
        assert find_grid(store, variables=["coarse/a"]).sizes == {"lat": 3, "lon": 3}


def test_variables_that_disagree_about_a_dim(tmp_path: Path) -> None:
    for name, steps in (("a", 2), ("b", 3)):
        dataset = field("time", "lat", "lon", time=("time", np.arange(steps)))
        dataset.to_zarr(tmp_path / "a.zarr", group=name, mode="a")
    message = "dim 'time' has 2 rows in 'a/v', but 3 in 'b/v'; choose variables= that agree"
    with open_store(tmp_path / "a.zarr") as store, pytest.raises(DimensionError, match=message):
        find_grid(store)


def test_window_of_descending_latitudes() -> None:
    lat = np.arange(90, -91, -30.0)
    assert window(lat, 0, 60) == (1, 3)
    with pytest.raises(DimensionError, match=r"no row lies between 91 and 95: the coordinate runs 90.0 to -90.0"):
        window(lat, 91, 95)

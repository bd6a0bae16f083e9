"""`shardio validate`: each thing that training takes, taken away from a complete store in turn."""

from __future__ import annotations

import json
import re
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr
import zarr
from typer.testing import CliRunner

from shardio import open_store
from shardio.cli import app
from shardio.statistics import statistics_file
from shardio.validate import CHECKS, validate
from shardsets import DomainDataLoader

NAMES = ["u10m", "t2m", "refc"]


def stormcast(names: Any = NAMES) -> xr.Dataset:
    """HRRR [time, channel, y, x] with named channels, 2-D latitude and longitude, and two invariants."""
    random = np.random.default_rng(0)
    lat, lon = np.meshgrid(np.linspace(30, 40, 6), np.linspace(250, 260, 5), indexing="ij")
    return xr.Dataset(
        {
            "HRRR": (("time", "channel", "y", "x"), random.normal(0, 5, (7, 3, 6, 5)).astype("f4")),
            "orog": (("y", "x"), random.random((6, 5)).astype("f4")),
            "lsm": (("y", "x"), random.random((6, 5)).astype("f4")),
        },
        {
            "time": np.datetime64("2020-01-01", "ns") + np.arange(7) * np.timedelta64(1, "h"),
            "channel": names,
            "latitude": (("y", "x"), lat, {"units": "degrees_north"}),
            "longitude": (("y", "x"), lon, {"units": "degrees_east"}),
        },
    )


def run(*arguments: object) -> tuple[int, str]:
    result = CliRunner(env={"COLUMNS": "250"}).invoke(app, list(map(str, arguments)))
    return result.exit_code, result.output


def write(data: xr.Dataset, path: Path, **options: Any) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # zarr warns of texts, and of consolidated metadata in version 3
        data.to_zarr(path, **options)
    return path


@pytest.mark.parametrize("version", [2, 3])
def test_a_complete_store_lacks_nothing_and_trains(
    version: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Statistics are found where `stats` puts them; the loader takes both, as the command says."""
    monkeypatch.chdir(tmp_path)
    store = write(stormcast(), tmp_path / "hrrr.zarr", zarr_format=version)
    code, output = run("validate", store)
    assert code == 1
    assert f"shardio stats {store} -o hrrr.zarr.stats.json --level channel" in output
    assert run("stats", store, "--level", "channel")[0] == 0
    code, output = run("validate", store)
    assert code == 0, output
    assert "channels: 3: 'HRRR_u10m', 'HRRR_t2m', 'HRRR_refc'; read with levels='channel'" in output
    assert "nothing is missing" in output
    with DomainDataLoader(store, levels="channel", statistics="hrrr.zarr.stats.json") as loader:
        assert loader.channels == ("HRRR_u10m", "HRRR_t2m", "HRRR_refc")
        assert abs(float(np.mean([batch["input"].mean() for batch in loader]))) < 0.5


def unnamed(data: xr.Dataset) -> xr.Dataset:
    return data.drop_vars("channel")


def irregular(data: xr.Dataset) -> xr.Dataset:
    return data.isel(time=[0, 1, 2, 4, 5])


def other_dim(data: xr.Dataset) -> xr.Dataset:
    return data.assign(
        moisture=data.HRRR.isel(channel=slice(2)).drop_vars("channel").rename(channel="soil")
    ).assign_coords(soil=[0.1, 0.5])


def height(data: xr.Dataset) -> xr.DataArray:
    """Numbers of the name of their first dim that are no coordinate of it."""
    return xr.DataArray(np.zeros((3, 6, 5)), dims=("channel", "y", "x"))


def holes(data: xr.Dataset) -> xr.Dataset:
    return data.assign(lsm=data.lsm.where(data.lsm < 0.9))


def odd_scale(data: xr.Dataset) -> xr.Dataset:
    data.HRRR.attrs["scale_factor"] = "abc"
    return data


LACKS: list[tuple[str, Callable[[xr.Dataset], xr.Dataset], str]] = [
    ("channels", unnamed, "the 3 entries of dim 'channel' of 'HRRR' have no names"),
    ("channels", lambda data: data.assign_coords(channel=["a", "b", "a"]), "'HRRR_a' more than once"),
    ("channels", lambda data: data.assign_coords(channel=["a", "b", ""]), "entry 2 of dim 'channel' has an empty name"),
    ("channels", other_dim, "variables have different dims beside time and space: 'channel', 'soil'"),
    ("channels", lambda data: data.drop_vars("channel").assign(channel=height(data)), "'channel' of 'HRRR' have no"),
    (
        "channels",
        lambda data: data.assign(HRRR=data.HRRR.expand_dims(member=2, axis=1)),
        "['member', 'channel'] beside time and space",
    ),
    ("channels", odd_scale, "attribute scale_factor = 'abc' is no number"),
    ("grid", lambda data: data.isel(y=slice(0)), "there is nothing along 'y'"),
    ("grid", lambda data: data.isel(channel=slice(0)), "there is nothing along 'channel'"),
    ("times", irregular, "is not regular"),
    ("times", lambda data: data.isel(time=slice(None, None, -1)), "does not increase"),
    ("times", lambda data: data.drop_vars("time"), "dim 'time' has no dates"),
    ("times", lambda data: data.isel(time=[0]), "only 1"),
    ("times", lambda data: data[["orog", "lsm"]], "no variable has a time dim"),
    ("coordinates", lambda data: data.drop_vars("longitude"), "no longitude on ('y', 'x')"),
    ("coordinates", lambda data: data.drop_vars(["latitude", "longitude"]), "no latitude and no longitude"),
    ("coordinates", lambda data: data.assign(latitude=data.latitude.where(data.x > 1)), "cells without a value"),
    ("invariants", lambda data: data.drop_vars(["orog", "lsm"]), "every variable on ('y', 'x') has other dims, too"),
    ("invariants", holes, "'lsm' has "),
]


@pytest.mark.parametrize(("what", "change", "said"), LACKS)
def test_what_is_taken_away_is_named(
    what: str, change: Callable[[xr.Dataset], xr.Dataset], said: str, tmp_path: Path
) -> None:
    data = stormcast()
    attrs = {name: data[name].attrs for name in ("latitude", "longitude")}
    changed = change(data)
    for name in attrs.keys() & changed.variables.keys():
        changed[name].attrs = attrs[name]
    with open_store(write(changed, tmp_path / "a.zarr", zarr_format=2)) as store:
        checks = validate(store, without=["statistics"])
    missing = {check.what: check for check in checks if not check.ok}
    assert said in missing[what].found
    assert missing[what].todo
    without_time = "no variable has a time dim" in said  # nothing tells then which fields do not change
    assert set(missing) == ({what, "invariants"} if without_time else {what}), "nothing else is missing"


def test_all_that_stormcast_lacks_is_told_at_once(tmp_path: Path) -> None:
    """Case R35: no channel names, metadata in many files, no statistics and no invariants."""
    data = stormcast().drop_vars(["channel", "orog", "lsm"])
    code, output = run("validate", write(data, tmp_path / "a.zarr", zarr_format=2, consolidated=False))
    assert code == 1
    missing = [line.split()[1] for line in output.splitlines() if line.startswith("MISSING")]
    assert missing == ["channels:", "metadata:", "statistics:", "invariants:"]


@pytest.mark.parametrize("version", [2, 3])
def test_metadata_that_are_not_consolidated(version: int, tmp_path: Path) -> None:
    path = write(stormcast(), tmp_path / "a.zarr", zarr_format=version, consolidated=False)
    code, output = run("validate", path, "--without", "statistics")
    assert code == 1
    assert "MISSING  metadata: not consolidated: opening reads those of 7 arrays, each by itself" in output
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        zarr.consolidate_metadata(path, zarr_format=version)
    assert run("validate", path, "--without", "statistics")[0] == 0


def test_statistics_must_fit(tmp_path: Path) -> None:
    """Of other variables, of all channels together, of a channel that is constant or has no values."""
    data = stormcast()
    path, stats = write(data, tmp_path / "a.zarr", zarr_format=2), tmp_path / "a.json"

    def found() -> str:
        with open_store(path) as store:
            return next(check for check in validate(store, statistics=stats) if check.what == "statistics").found

    assert "no file" in found()
    for text in ("[]", "no json", '{"version": 2}', '{"version": 2, "variables": {"HRRR": {}}}'):
        stats.write_text(text)
        assert "holds no statistics" in found()
    assert run("stats", path, "-o", stats)[0] == 0
    assert "'HRRR' has 3 channels, its statistics 0" in found()
    assert run("stats", path, "-o", stats, "-v", "orog")[0] == 0
    assert "'HRRR' is not in" in found()
    assert run("stats", path, "-o", stats, "--level", "channel")[0] == 0
    sound = stats.read_text()
    for value in ("null", "NaN", "Infinity"):
        stats.write_text(re.sub(r'("std": )[\d.]+', rf"\1{value}", sound))
        assert "has no finite mean" in found()
    stats.write_text("[" * 100_000)
    assert "holds no statistics" in found()
    stats.write_text(sound.replace("refc", "sp"))
    assert "'HRRR' has 'refc', its statistics have not" in found()
    for value, said in ((1.0, "is constant"), (np.nan, "has no value at all")):
        changed = data.copy(deep=True)
        changed.HRRR[:, 1] = value
        write(changed, path, zarr_format=2, mode="w")
        assert run("stats", path, "-o", stats, "--level", "channel")[0] == 0
        assert f"'HRRR', channel 1, {said}" in found()


def test_levels_and_plain_variables_of_a_global_grid(tmp_path: Path) -> None:
    """NetCDF: no metadata to consolidate; 1-D coordinates, one of them out of order."""
    levels, lat, lon = [500.0, 850.0], np.linspace(90, -90, 5), np.arange(8) * 45.0
    data = xr.Dataset(
        {
            "t": (("time", "level", "lat", "lon"), np.random.default_rng(0).random((3, 2, 5, 8))),
            "u": (("time", "lat", "lon"), np.random.default_rng(0).random((3, 5, 8))),
        },
        {
            "time": np.datetime64("2020-01-01", "ns") + np.arange(3) * np.timedelta64(6, "h"),
            "level": ("level", levels, {"units": "hPa"}),
            "lat": ("lat", lat, {"units": "degrees_north"}),
            "lon": ("lon", lon, {"units": "degrees_east"}),
        },
    )
    data.to_netcdf(tmp_path / "a.nc", engine="h5netcdf")
    options = ("--without", "statistics", "--without", "invariants")
    code, output = run("validate", tmp_path / "a.nc", *options)
    assert code == 0, output
    assert "channels: 3: 't_500', 't_850', 'u'" in output
    assert "metadata: nothing to consolidate (hdf5)" in output
    data.isel(lat=[0, 2, 1, 3, 4]).to_netcdf(tmp_path / "b.nc", engine="h5netcdf")
    code, output = run("validate", tmp_path / "b.nc", *options)
    assert code == 1
    assert "MISSING  coordinates: 'lat' does not run one way" in output


@pytest.mark.parametrize(
    ("lon", "fine"), [([350, 355, 0, 5], True), ([170, 175, -180, -175], True), ([0, 10, 5, 20], False)]
)
def test_longitude_may_go_on_across_its_seam(lon: list[float], fine: bool) -> None:
    data = xr.Dataset(
        {"t": (("time", "lat", "lon"), np.zeros((2, 3, 4)))},
        {"lat": ("lat", [1.0, 0, -1], {"units": "degrees_north"}), "lon": ("lon", lon, {"units": "degrees_east"})},
    )
    check = next(check for check in validate(open_store(data)) if check.what == "coordinates")
    assert check.ok is fine


def test_what_is_told_to_do_helps(tmp_path: Path) -> None:
    """The command printed for statistics, with and without the dim named to `validate`, and with one level."""
    path, stats = write(stormcast(), tmp_path / "a.zarr", zarr_format=2), tmp_path / "a.json"
    for options in ((), ("--level", "channel")):
        stats.unlink(missing_ok=True)
        code, output = run("validate", path, "--stats", stats, *options)
        assert code == 1
        todo = next(line for line in output.splitlines() if "shardio stats" in line).split("shardio ")[1]
        assert run(*todo.split())[0] == 0
        code, output = run("validate", path, "--stats", stats, *options)
        assert code == 0, output


def test_a_single_level_is_named_as_the_loader_names_it() -> None:
    data = xr.Dataset(
        {"t": (("time", "level", "lat", "lon"), np.zeros((2, 1, 3, 4)))},
        {"level": ("level", [500.0], {"units": "hPa"}), "time": np.array(["2020-01-01", "2020-01-02"], "M8[ns]")},
    )
    check = next(check for check in validate(open_store(data)) if check.what == "channels")
    assert check.found == "1: 't_500'"
    assert DomainDataLoader(data).channels == ("t_500",)


def test_a_list_of_cells_with_a_field_that_stays(tmp_path: Path) -> None:
    """`inspect`, `plan` and `validate` know such a grid, and say what they cannot do with it."""
    data = xr.Dataset(
        {"t": (("time", "cell"), np.random.default_rng(0).random((4, 20))), "orog": ("cell", np.ones(20))},
        {
            "time": np.datetime64("2020-01-01", "ns") + np.arange(4) * np.timedelta64(6, "h"),
            "latitude": ("cell", np.linspace(0, 50, 20) % 7, {"units": "degrees_north"}),
            "longitude": ("cell", np.linspace(0, 50, 20), {"units": "degrees_east"}),
        },
    )
    path = write(data, tmp_path / "a.zarr", zarr_format=2)
    code, output = run("validate", path, "--without", "statistics")
    assert code == 0, output
    assert "invariants: 'orog'" in output
    assert "dims: time = time 4, cell = cell 20" in run("inspect", path)[1]
    code, output = run("plan", path, "--mesh", "2x2")
    assert code == 0
    assert "0:10" in output
    assert "only 'cell'" in run("plan", path, "--mesh", "2x2x2")[1]
    code, output = run("plan", path, "--mesh", "2x2", "--png", tmp_path / "a.png")
    assert code == 1
    assert "a picture shows two spatial dims" in output


def test_json_names_and_options(tmp_path: Path) -> None:
    path = write(stormcast(), tmp_path / "a.zarr", zarr_format=2)
    code, output = run("validate", path, "--json", "--invariant", "orog", "--invariant", "soil", "--without", "times")
    assert code == 1
    found = {check["what"]: check for check in json.loads(output)}
    assert list(found) == ["grid", "coordinates", "channels", "metadata", "statistics", "invariants"]
    assert found["invariants"]["found"] == "'soil' is not in the store"
    assert "'HRRR' has the dims ('time', 'channel', 'y', 'x')" in run("validate", path, "--invariant", "HRRR")[1]
    code, output = run("validate", path, "--without", "weather")
    assert code == 2
    assert "weather" in output
    assert all(name in output for name in CHECKS)


def test_a_climatology_is_no_invariant(tmp_path: Path) -> None:
    """It is not read for it, either."""
    data = stormcast().drop_vars(["orog", "lsm"])
    data["clim"] = (("dayofyear", "y", "x"), np.zeros((366, 6, 5), "f4"))
    check = next(check for check in validate(open_store(data)) if check.what == "invariants")
    assert not check.ok


def test_coordinates_are_known_by_name() -> None:
    data = xr.Dataset(
        {"t": (("time", "lat", "lon"), np.zeros((2, 3, 4)))}, {"lat": [1.0, 0, -1], "lon": [0.0, 1, 2, 3]}
    )
    assert next(check for check in validate(open_store(data)) if check.what == "coordinates").ok


def test_names_that_are_long_or_odd_end_nothing(tmp_path: Path) -> None:
    """Latin-1 bytes, brackets, line ends, numbers alike in six digits, a word of 100,000 characters."""
    for at, names in enumerate(
        ([b"a", "\xe4".encode("latin-1"), b"c"], ["[/b]", "[red]", "x"], [1e6, 1e6 + 1, 1e6 + 2])
    ):
        path = write(stormcast(np.array(names)), tmp_path / f"{at}.zarr", zarr_format=2)
        code, output = run("validate", path, "--without", "statistics")
        assert code == 0, output
        code, output = run("stats", path, "-o", tmp_path / f"{at}.json", "--level", "channel")
        assert code == 0, output
        assert all(str(name) in output for name in names if isinstance(name, str))
        with DomainDataLoader(path, levels="channel", statistics=str(tmp_path / f"{at}.json")) as loader:
            assert len(set(loader.channels)) == 3
    data = stormcast(["a" * 100_000, "b", "c"])
    data = data.rename(y="lat\nok      statistics: of 1")
    began = time.monotonic()
    code, output = run("validate", write(data, tmp_path / "long.zarr", zarr_format=2))
    assert time.monotonic() - began < 60
    assert not any(line.startswith("ok      statistics") for line in output.splitlines())


def test_a_password_is_shown_nowhere() -> None:
    assert "SECRET" not in str(statistics_file("http://me:SECRET@127.0.0.1:9"))
    assert str(statistics_file("http://me:SECRET@127.0.0.1:9/a.zarr/?key=SECRET")) == "a.zarr.stats.json"


def test_no_grid_is_said_with_what_there_is(tmp_path: Path) -> None:
    xr.Dataset({"a": (("b",), np.arange(3.0))}).to_netcdf(tmp_path / "a.nc", engine="h5netcdf")
    code, output = run("validate", tmp_path / "a.nc")
    assert code == 1
    assert "MISSING  grid: " in output
    assert "fewer than two dims" in output


REAL = {
    "grid-netcdf/test4.nc": {"coordinates": True, "channels": True, "metadata": True},
    "weather-series/ERA5_example_data.nc": {"coordinates": True, "times": True, "channels": True},
    "weather-series/era5-2mt-2019-03-uk.grib": {"coordinates": True, "times": True, "invariants": False},
    "zarr/cities_v2.zarr": {"grid": False},
}


@pytest.mark.parametrize("name", REAL)
def test_real_stores(shared_data: Path, name: str) -> None:
    code, output = run("validate", shared_data / name, "--json")
    assert code == 1, "there are no statistics"
    found = {check["what"]: check["ok"] for check in json.loads(output)}
    assert REAL[name].items() <= found.items(), output

"""Verify: stores with one thing wrong each."""

import json
from pathlib import Path

import numpy as np
import pytest
import xarray as xr
from typer.testing import CliRunner

from shardio import open_store
from shardio.cli import app
from shardio.verify import Report, verify


def make(path: Path, times: np.ndarray | None = None, **fields: np.ndarray) -> Path:
    """A Zarr 3 store of fields [6, 2, 4, 5], a time step per chunk."""
    times = np.arange(6) if times is None else times
    coords = {
        "time": ("time", times, {"units": "hours since 2020-01-01"}),
        "level": ("level", [500.0, 850.0], {"units": "hPa"}),
        "lat": np.arange(4.0),
        "lon": np.arange(5.0),
    }
    fields = fields or {"a": np.ones((6, 2, 4, 5), np.float32)}
    dataset = xr.Dataset({name: (("time", "level", "lat", "lon"), value) for name, value in fields.items()}, coords)
    encoding = {name: {"chunks": (1, 2, 4, 5), "_FillValue": None} for name in fields}
    dataset.to_zarr(path, encoding=encoding)
    return path


def check(path: Path, **options: bool) -> Report:
    with open_store(path) as store:
        return verify(store, **options)


def kinds(report: Report) -> list[tuple[str, str]]:
    return [(problem.array, problem.kind) for problem in report.problems]


def test_sound(tmp_path: Path) -> None:
    path = make(tmp_path / "a.zarr")
    report = check(path)
    assert report.sound, report.problems
    assert report.arrays["a"].chunks == 6
    assert report.arrays["a"].nbytes == 6 * 2 * 4 * 5 * 4
    assert report.arrays["a"].total.values == 6 * 2 * 4 * 5
    result = CliRunner().invoke(app, ["verify", str(path)])
    assert result.exit_code == 0
    assert "nothing is wrong" in result.output


def test_every_bad_chunk_is_named(tmp_path: Path) -> None:
    """One is absent, one cut short, one overwritten; the others are read all the same."""
    path = make(tmp_path / "a.zarr")
    chunk = path / "a/c/1/0/0/0"
    whole = chunk.read_bytes()
    chunk.unlink()
    (path / "a/c/3/0/0/0").write_bytes(whole[: len(whole) // 2])
    (path / "a/c/4/0/0/0").write_bytes(b"\xff" * len(whole))
    report = check(path)
    found = report.arrays["a"]
    assert kinds(report) == [("a", "missing"), ("a", "corrupt"), ("a", "corrupt")]
    assert "a/c/1/0/0/0" in report.problems[0].message
    assert [
        str((number, 0, 0, 0)) in problem.message for number, problem in zip((3, 4), report.problems[1:], strict=True)
    ]
    assert (found.chunks, found.missing, found.corrupt) == (6, 1, 2)
    assert found.total.values == 3 * 2 * 4 * 5


def test_a_lost_coordinate_is_one_problem_among_others(tmp_path: Path) -> None:
    path = make(tmp_path / "a.zarr")
    (path / "time/c/0").unlink()
    (path / "level/c/0").unlink()
    report = check(path)
    assert kinds(report) == [("level", "missing"), ("time", "missing")]
    assert list(report.arrays["a"].channels) == ["0", "1"]


def test_nan_and_inf_by_channel(tmp_path: Path) -> None:
    field = np.ones((6, 2, 4, 5))
    field[2, 1, :, 0] = np.nan
    field[3, 0, 0, 0] = -np.inf
    path = make(tmp_path / "a.zarr", a=field)
    report = check(path)
    assert kinds(report) == [("a", "nan"), ("a", "inf")]
    assert "4 of 240 values are nan" in report.problems[0].message
    assert "850 (4)" in report.problems[0].message
    assert {name: (part.nan, part.inf) for name, part in report.arrays["a"].channels.items()} == {
        "500": (0, 1),
        "850": (4, 0),
    }
    assert kinds(check(path, allow_nan=True)) == [("a", "inf")]


def test_declared_missing_values_are_counted_and_not_wrong(tmp_path: Path) -> None:
    field = np.arange(240.0).reshape(6, 2, 4, 5)
    field[0, 0, 0] = np.nan
    make(tmp_path / "a.zarr", b=np.ones((6, 2, 4, 5)))
    packed = xr.Dataset({"a": (("time", "level", "lat", "lon"), field)})
    encoding = {"a": {"dtype": "int16", "scale_factor": 0.5, "_FillValue": -99}}
    packed.to_zarr(tmp_path / "a.zarr", mode="a", encoding=encoding)
    report = check(tmp_path / "a.zarr")
    assert report.sound, report.problems
    assert report.arrays["a"].total.absent == 5


@pytest.mark.parametrize(
    ("times", "words"),
    [
        ([0, 1, 2, 3, 4, 6], "is not regular"),
        ([0, 1, 2, 1, 2, 3], "does not increase"),
        ([0, 1, 1, 2, 3, 4], "does not increase"),
    ],
)
def test_odd_times(tmp_path: Path, times: list[int], words: str) -> None:
    report = check(make(tmp_path / "a.zarr", np.array(times)))
    assert kinds(report) == [("time", "time")]
    assert words in report.problems[0].message


def test_attributes_that_make_no_sense(tmp_path: Path) -> None:
    path = make(tmp_path / "a.zarr")
    (path / "zarr.json").unlink()
    metadata = json.loads((path / "a/zarr.json").read_text())
    metadata["attributes"]["scale_factor"] = "a lot"
    (path / "a/zarr.json").write_text(json.dumps(metadata))
    (path / "zarr.json").write_text('{"zarr_format": 3, "node_type": "group"}')
    report = check(path)
    assert kinds(report) == [("a", "decode")]


def test_command(tmp_path: Path) -> None:
    path = make(tmp_path / "a.zarr")
    (path / "a/c/5/0/0/0").unlink()
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["verify", str(path)])
    assert result.exit_code == 1
    assert "missing: a: chunk 'a/c/5/0/0/0' is not in" in result.output
    assert "1 problem(s)" in result.output
    result = CliRunner().invoke(app, ["verify", str(path), "--json"])
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert found["sound"] is False
    assert found["arrays"]["a"]["missing"] == 1
    assert found["arrays"]["a"]["channels"]["500"]["values"] == 5 * 20
    assert CliRunner().invoke(app, ["verify", str(path), "-v", "lat"]).exit_code == 0


def test_a_store_for_stormcast(tmp_path: Path) -> None:
    """One array of channels, and invariants: inspect tells the channel dim, verify what of them is lost."""
    store = tmp_path / "a.zarr"
    fields = np.random.default_rng(0).normal(size=(4, 3, 8, 8)).astype(np.float32)
    xr.Dataset(
        {
            "state": (("time", "channel", "y", "x"), fields),
            "invariant": (("constant", "y", "x"), fields[0, :2]),
        },
        {
            "time": ("time", np.arange(4), {"units": "hours since 2020-01-01"}),
            "channel": ["u10m", "v10m", "t2m"],
        },
    ).to_zarr(store, zarr_format=2)
    shown = CliRunner(env={"COLUMNS": "160"}).invoke(app, ["inspect", str(store)])
    assert shown.exit_code == 0
    assert "time = time 4, y = y 8, x = x 8" in shown.output
    assert "other: constant, channel" in shown.output
    assert check(store).sound
    (store / "invariant/0.0.0").unlink()
    (store / "channel/0").unlink()
    assert sorted(kinds(check(store))) == [("channel", "missing"), ("invariant", "missing")]


def test_hdf5_chunks_that_were_never_written(tmp_path: Path) -> None:
    import h5py

    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("x", (8, 6), "f4", chunks=(2, 6))[:4] = 1
        file.create_dataset("y", (8, 6), "f4")[:] = 1
    report = check(tmp_path / "a.h5")
    assert report.arrays["x"].chunks == 4
    assert kinds(report) == [("x", "missing")] * 2
    assert report.arrays["y"].total.values == 48


@pytest.mark.parametrize(
    "name",
    [
        "zarr/test_zarr",
        "zarr/v2_blosc_F.zarr",
        "zarr/v3_fletcher32.zarr",
        "grid-netcdf/test4.nc",
        "hdf5/fletcher32_datasets_latest.hdf5",
        "weather-series/ERA5_example_data.nc",
    ],
)
def test_real_stores_are_sound(shared_data: Path, name: str) -> None:
    report = check(shared_data / name)
    assert report.sound, report.problems
    assert all(found.chunks for found in report.arrays.values())


def test_a_real_store_with_gaps_in_its_fields(shared_data: Path) -> None:
    """Ocean colour under clouds: NaN, as many as numpy counts, and chunks left out because they hold nothing else."""
    path = shared_data / "zarr/cube_l2.zarr"
    report = check(path)
    truth = xr.open_zarr(path, decode_cf=False)
    assert {problem.kind for problem in report.problems} == {"nan", "time", "missing"}
    for name in ("conc_chl", "kd489"):
        found = report.arrays[name]
        assert found.chunks == 5 * 1 * 2
        assert found.missing == 10 - len([file for file in (path / name).iterdir() if file.name[0] != "."])
        assert found.total.nan == int(np.isnan(truth[name].values).sum()) - found.missing * 250 * 250

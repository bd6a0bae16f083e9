"""Statistics against numpy's over everything, and the commands."""

import json
from pathlib import Path

import numpy as np
import pytest
import xarray as xr
from typer.testing import CliRunner

from shardio import open_store
from shardio.cli import app
from shardio.errors import DimensionError
from shardio.statistics import Moments, Statistics, VariableStatistics, compute


def check(found: VariableStatistics, values: np.ndarray) -> None:
    values = values.astype(np.float64)
    assert found.count == np.isfinite(values).sum()
    np.testing.assert_allclose(found.mean, np.nanmean(values), rtol=1e-12)
    np.testing.assert_allclose(found.std, np.nanstd(values), rtol=1e-9)
    assert (found.minimum, found.maximum) == (np.nanmin(values), np.nanmax(values))


@pytest.fixture
def values() -> np.ndarray:
    values = np.random.default_rng(0).normal(3000, 1, size=(9, 3, 14, 11)).astype(np.float32)
    values[values > 3002] = np.nan
    return values


@pytest.mark.parametrize("chunks", [(1, 1, 14, 11), (2, 3, 5, 4), (9, 2, 14, 11)])
@pytest.mark.parametrize("limit", [64, 2000, 16 << 20])
def test_against_numpy(
    tmp_path: Path, values: np.ndarray, chunks: tuple[int, ...], limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardio.statistics.BLOCK_BYTES", limit)
    dims = ("time", "level", "lat", "lon")
    dataset = xr.Dataset({"a": (dims, values), "b": (dims[2:], values[0, 0]), "c": (dims[1:], values[0])})
    dataset.to_zarr(tmp_path / "a.zarr", encoding={"a": {"chunks": chunks}})
    seen: list[tuple[int, int]] = []
    with open_store(tmp_path / "a.zarr") as store:
        found = compute(store, threads=3, done=lambda count, total: seen.append((count, total)))
        part = compute(store, variables=["a"], time=slice(2, 7))
        with pytest.raises(DimensionError, match="has a step"):
            compute(store, time=slice(None, None, 2))
    check(found.variables["a"], values)
    check(found.variables["b"], values[0, 0])
    for level in range(3):
        check(found.variables["a"].levels[level], values[:, level])
        check(found.variables["c"].levels[level], values[0, level])
    assert found.variables["b"].levels == ()
    check(part.variables["a"], values[2:7])
    assert [count for count, _ in seen] == list(range(1, seen[0][1] + 1))


def test_contiguous_arrays_are_read_in_blocks(
    tmp_path: Path, values: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardio.statistics.BLOCK_BYTES", 1000)
    xr.Dataset({"a": (("time", "level", "lat", "lon"), values)}).to_netcdf(tmp_path / "a.nc", engine="h5netcdf")
    with open_store(tmp_path / "a.nc") as store:
        assert store["a"].partial
        check(compute(store).variables["a"], values)


def test_large_mean_small_deviation() -> None:
    """1e8 +- 1: sums of squares in float64 would keep no digit of the variance."""
    values = 1e8 + np.random.default_rng(0).normal(size=10000)
    merged = Moments()
    for part in np.array_split(values, 7):
        merged = merged + Moments.of(part)
    np.testing.assert_allclose(merged.squares / merged.count, values.var(), rtol=1e-9)
    assert merged + Moments() == Moments() + merged == merged


def test_nothing_but_missing_values(tmp_path: Path) -> None:
    found = VariableStatistics.of(Moments.of(np.array([np.nan])))
    assert found.count == 0
    assert np.isnan([found.mean, found.std, found.minimum, found.maximum]).all()
    Statistics({"x": found}).to_json(tmp_path / "a.json")
    assert json.loads((tmp_path / "a.json").read_text())["variables"]["x"]["mean"] is None
    assert np.isnan(Statistics.from_json(tmp_path / "a.json").variables["x"].mean)


def test_json_round_trip(tmp_path: Path, values: np.ndarray) -> None:
    dataset = xr.Dataset({"a": (("time", "level", "lat", "lon"), values)})
    found = compute(open_store(dataset))
    found.to_json(tmp_path / "a.json")
    assert Statistics.from_json(tmp_path / "a.json") == found
    (tmp_path / "b.json").write_text('{"version": 0}')
    with pytest.raises(ValueError, match=r"b\.json holds no statistics of version 1"):
        Statistics.from_json(tmp_path / "b.json")


def run(*arguments: object) -> tuple[int, str]:
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, list(map(str, arguments)))
    return result.exit_code, result.output


def test_command_stats(tmp_path: Path, values: np.ndarray) -> None:
    xr.Dataset({"a": (("time", "level", "lat", "lon"), values)}).to_zarr(tmp_path / "a.zarr")
    code, output = run("stats", tmp_path / "a.zarr", "-o", tmp_path / "out.json", "--stop", 5)
    assert code == 0, output
    check(Statistics.from_json(tmp_path / "out.json").variables["a"], values[:5])


def test_command_inspect(shared_data: Path) -> None:
    code, output = run("inspect", shared_data / "grid-netcdf/test4.nc")
    assert code == 0
    assert "variables: t, z" in output
    assert "descending: latitude" in output
    assert "times: 1, 2007-01-01T12:00:00" in output


def test_command_plan(tmp_path: Path, values: np.ndarray) -> None:
    dataset = xr.Dataset({"a": (("time", "level", "lat", "lon"), values)})
    dataset.to_zarr(tmp_path / "a.zarr", encoding={"a": {"chunks": (1, 3, 14, 11)}})
    code, output = run("plan", tmp_path / "a.zarr", "--ranks", 2, "--halo", 1)
    assert code == 0, output
    assert "0:7 +0/1" in output
    assert "1.75" in output  # 14 rows fetched for 8 needed


def test_commands_fail_with_one_line(tmp_path: Path, values: np.ndarray) -> None:
    code, output = run("inspect", tmp_path / "no.zarr")
    assert code == 1
    assert "StoreNotFoundError: there is nothing at" in output
    xr.Dataset({"a": (("lat", "lon"), values[0, 0])}).to_zarr(tmp_path / "a.zarr")
    code, output = run("plan", tmp_path / "a.zarr", "--ranks", 99)
    assert code == 1
    assert "PartitionError: dim 'lat' over mesh axis 'domain': 14 rows cannot be cut over 99 ranks" in output


def test_command_stats_refuses_before_it_reads(tmp_path: Path, values: np.ndarray) -> None:
    xr.Dataset({"a": (("time", "level", "lat", "lon"), values)}).to_zarr(tmp_path / "a.zarr")
    code, output = run("stats", tmp_path / "a.zarr", "-o", tmp_path / "nowhere" / "out.json")
    assert code == 2
    assert "there is no folder" in output
    assert "minimum" not in output
    code, output = run("stats", tmp_path / "a.zarr", "--missing", "rais")
    assert code == 2
    assert "raise" in output


def test_commands_take_a_format(tmp_path: Path, values: np.ndarray) -> None:
    xr.Dataset({"a": (("lat", "lon"), values[0, 0])}).to_netcdf(tmp_path / "a.nc", engine="h5netcdf")
    assert run("inspect", tmp_path / "a.nc", "--format", "hdf5")[0] == 0
    code, output = run("inspect", tmp_path / "a.nc", "--format", "zarr")
    assert code == 1
    assert "UnknownFormatError" in output


def test_a_url_that_fsspec_has_no_library_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def from_url(*_: object, **__: object) -> None:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr("shardio.formats.zarr.FsspecStore.from_url", from_url)
    code, output = run("inspect", "s3://bucket/era5.zarr")
    assert code == 1
    assert "MissingExtraError: 's3://bucket/era5.zarr' needs a library" in output
    assert "Install s3fs" in output

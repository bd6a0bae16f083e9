"""Statistics against numpy's over everything."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import xarray as xr

from shardio import open_store
from shardio.box import Box
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
    with pytest.raises(ValueError, match=r"b\.json holds no statistics of version 2"):
        Statistics.from_json(tmp_path / "b.json")


def test_every_chunk_is_read_once(tmp_path: Path, values: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = xr.Dataset({"a": (("time", "level", "lat", "lon"), values)})
    dataset.to_zarr(tmp_path / "a.zarr", encoding={"a": {"chunks": (2, 3, 5, 4)}})
    read: list[tuple[int, ...]] = []
    with open_store(tmp_path / "a.zarr") as store:
        source = store["a"]
        plain = source.read

        def counting(box: Box) -> np.ndarray:
            spans = zip(box, source.chunks, source.shape, strict=True)
            assert all(a % n == 0 and (b % n == 0 or b == size) for (a, b), n, size in spans), "whole chunks"
            numbers = (range(a // n, -(-b // n)) for (a, b), n in zip(box, source.chunks, strict=True))
            read.extend(itertools.product(*numbers))
            return plain(box)

        monkeypatch.setattr(source, "read", counting)
        compute(store, variables=["a"])
    assert len(read) == len(set(read)) == 5 * 1 * 3 * 3


def test_missing_and_infinite_values_are_counted_apart(tmp_path: Path) -> None:
    field = np.arange(24.0).reshape(2, 3, 4)
    field[0, 0] = [np.nan, np.inf, -np.inf, 3]
    (tmp_path / "a.zarr").mkdir()
    xr.Dataset({"a": (("time", "lat", "lon"), field)}).to_zarr(tmp_path / "a.zarr", mode="w")
    found = compute(open_store(tmp_path / "a.zarr")).variables["a"]
    assert (found.count, found.missing, found.infinite) == (21, 1, 2)
    assert (found.minimum, found.maximum, found.mean) == (3, 23, field[np.isfinite(field)].mean())


def test_times_of_a_store_without_time() -> None:
    store = open_store(xr.Dataset({"a": (("lat", "lon"), np.zeros((2, 3)))}))
    with pytest.raises(DimensionError, match=r"chooses rows of the time dim, but .* has none"):
        compute(store, time=slice(0, 1))

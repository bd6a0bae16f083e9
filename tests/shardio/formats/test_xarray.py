"""Datasets that the user has opened: in memory, lazy, chunked by dask, decoded or not; and GRIB, which comes as one."""

import sys
from collections.abc import Iterator
from pathlib import Path

import dask.array as da
import numpy as np
import pytest
import torch
import xarray as xr

from shardio import Cut, Partition, find_grid, open_store, plan, read
from shardio.errors import MissingExtraError, ReadError
from shardio.source import Store
from shardio.testing import Expected, SourceContract


def as_expected(dataset: xr.Dataset) -> dict[str, Expected]:
    return {
        str(name): Expected(
            tuple(map(str, variable.dims)),
            variable.values,
            variable.values if variable.dtype.kind in "iuf" else None,
        )
        for name, variable in dataset.variables.items()
    }


@pytest.mark.parametrize("chunks", [None, {}, {"time": 7, "lat": 4}], ids=["memory", "dask", "dask rechunked"])
class TestDataset(SourceContract):
    """The same file opened in several ways."""

    @pytest.fixture
    def dataset(self, shared_data: Path, chunks: dict[str, int] | None) -> Iterator[xr.Dataset]:
        with xr.open_dataset(shared_data / "grid-netcdf/air/air.nc", chunks=chunks) as dataset:
            yield dataset.load() if chunks is None else dataset

    @pytest.fixture
    def store(self, dataset: xr.Dataset) -> Store:
        store = open_store(dataset)
        assert store.format == "xarray"
        return store

    @pytest.fixture
    def expected(self, dataset: xr.Dataset) -> dict[str, Expected]:
        return as_expected(dataset.compute())

    def test_chunks_are_dasks(self, store: Store, chunks: dict[str, int] | None) -> None:
        source = store["air"]
        if chunks:
            assert source.chunks == (7, 4, 21)
            assert not source.partial
        else:
            assert source.partial == (chunks is None)


def test_undecoded_dataset_is_decoded_here(shared_data: Path) -> None:
    path = shared_data / "grid-netcdf/air/air.nc"
    with xr.open_dataset(path, decode_cf=False) as raw, xr.open_dataset(path) as decoded:
        source = open_store(raw)["air"]
        assert source.dtype == np.int16
        planned = plan(Partition((Cut("lat", "domain", (6, 5)),)), source.layout)
        found = read(source, planned, 1, index={"time": 3})
        np.testing.assert_allclose(found.numpy(), decoded["air"][3, 6:].values, rtol=2e-7)


def test_data_array_and_times_of_decoded_dataset(shared_data: Path) -> None:
    with xr.open_dataset(shared_data / "grid-netcdf/air/air.nc") as dataset:
        grid = find_grid(open_store(dataset["air"]))
        assert grid.variables == ("air",)
        assert grid.times is not None
        np.testing.assert_array_equal(grid.times.values, dataset["time"].values)


def test_closing_the_store_leaves_the_callers_dataset_open() -> None:
    closed: list[bool] = []
    dataset = xr.Dataset({"t": (("y", "x"), np.zeros((2, 3), np.float32))})
    dataset.set_close(lambda: closed.append(True))
    with open_store(dataset) as store:
        assert store["t"].read().shape == (2, 3)
    assert not closed


def test_reading_is_lazy() -> None:
    """A slab of a dask-backed variable computes only the chunks under it."""
    computed = []

    def block(block_id: tuple[int, ...]) -> np.ndarray:
        computed.append(block_id)
        return np.zeros((1, 4, 8), np.float32)

    array = da.map_blocks(
        block, chunks=((1,) * 5, (4, 4), (8,)), dtype=np.float32, meta=np.empty((0, 0, 0), np.float32)
    )
    dataset = xr.Dataset({"x": (("time", "lat", "lon"), array)})
    source = open_store(dataset)["x"]
    planned = plan(Partition((Cut("lat", "domain", (4, 4)),)), source.layout)
    computed.clear()
    read(source, planned, 1, index={"time": 2})
    assert computed == [(2, 1, 0)]


class TestGrib(SourceContract):
    """Several parameters on several levels and steps, beside cfgrib."""

    @pytest.fixture
    def path(self, shared_data: Path) -> Path:
        pytest.importorskip("cfgrib")
        return shared_data / "grib/multi_param_on_multi_dims.grib"

    @pytest.fixture
    def store(self, path: Path) -> Iterator[Store]:
        with open_store(path) as store:
            assert store.format == "grib"
            yield store

    @pytest.fixture
    def expected(self, path: Path) -> dict[str, Expected]:
        with xr.open_dataset(path, engine="cfgrib", backend_kwargs={"indexpath": ""}) as dataset:
            return as_expected(dataset.compute())

    def test_a_message_is_a_chunk(self, store: Store, path: Path) -> None:
        assert store["t"].chunks == (1, 1, 37, 72)
        assert not list(path.parent.glob("*.idx"))
        grid = find_grid(store)
        assert (grid.level, grid.spatial) == ("isobaricInhPa", ("latitude", "longitude"))
        assert (grid.descending, grid.periodic) == (("latitude",), ("longitude",))


def test_slabs_of_the_hourly_era5_series(shared_data: Path) -> None:
    pytest.importorskip("cfgrib")
    path = shared_data / "weather-series/era5-2mt-2019-03-uk.grib"
    with (
        open_store(path) as store,
        xr.open_dataset(path, engine="cfgrib", backend_kwargs={"indexpath": ""}) as dataset,
    ):
        grid = find_grid(store)
        assert (grid.variables, grid.time, grid.descending) == (("t2m",), "time", ("latitude",))
        assert grid.times is not None
        assert (len(grid.times), grid.times.step, grid.times.gaps) == (744, 3600.0, ())
        source = store["t2m"]
        planned = plan(Partition((Cut("latitude", "domain", (17, 16)),)), source.layout, halo=1)
        found = read(source, planned, 1, index={"time": [5, 700]})
        assert found.dtype == torch.float32
        np.testing.assert_array_equal(found.numpy(), dataset["t2m"][[5, 700], 16:].values)


def test_grib_with_several_grids_says_how_to_choose(shared_data: Path) -> None:
    pytest.importorskip("cfgrib")
    path = shared_data / "grib/tp_on_different_grid_resolutions.grib"
    with pytest.raises(ReadError, match="filter_by_keys"):
        open_store(path)
    store = open_store(path, backend_kwargs={"filter_by_keys": {"numberOfPoints": 2664}})
    assert store["tp"].shape == (37, 72)


def test_grib_without_cfgrib_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.grib").write_bytes(b"GRIB")
    monkeypatch.setitem(sys.modules, "cfgrib", None)
    with pytest.raises(MissingExtraError, match=r"'cfgrib'.*pip install 'shardtensor\[grib\]'"):
        open_store(tmp_path / "a.grib")

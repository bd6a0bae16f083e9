"""Every format through the loader on two ranks, each reading for itself and both together: the store's values."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import xarray as xr
from numcodecs import BZ2

from shardio import open_store
from shardio.statistics import compute
from shardsets import DomainDataLoader, SampleError

CHUNKS = {"t": (1, 3, 11, 8), "u": (1, 11, 8)}


def _zarr(data: xr.Dataset, folder: Path, **options) -> Path:
    data.to_zarr(folder / "a.zarr", **options)
    return folder / "a.zarr"


def _sharded(data: xr.Dataset, folder: Path) -> Path:
    whole = {"t": (1, 3, 12, 8), "u": (2, 12, 8)}
    encoding = {name: {"chunks": (*shards[:-2], 3, 8), "shards": shards} for name, shards in whole.items()}
    encoding["u"]["chunks"] = (1, 3, 8)
    return _zarr(data, folder, zarr_format=3, encoding=encoding)


def _netcdf4(data: xr.Dataset, folder: Path) -> Path:
    encoding = {name: {"chunksizes": chunks, "zlib": True} for name, chunks in CHUNKS.items() if name in data}
    data.to_netcdf(folder / "a.nc", engine="h5netcdf", encoding=encoding)
    return folder / "a.nc"


def _zarr_library(data: xr.Dataset, folder: Path) -> Path:
    return _zarr(data, folder, zarr_format=2, encoding={name: {"compressors": BZ2()} for name in CHUNKS})


def _hdf5_library(data: xr.Dataset, folder: Path) -> Path:
    bits = dict(pytest.importorskip("hdf5plugin").Bitshuffle())
    encoding = {name: {"chunksizes": chunks, **bits} for name, chunks in CHUNKS.items()}
    data.to_netcdf(folder / "a.nc", engine="h5netcdf", encoding=encoding)
    return folder / "a.nc"


def _netcdf3(data: xr.Dataset, folder: Path) -> Path:
    data.to_netcdf(folder / "a.nc", engine="scipy", format="NETCDF3_CLASSIC")
    return folder / "a.nc"


def _references(data: xr.Dataset, folder: Path) -> Path:
    kerchunk = pytest.importorskip("kerchunk.hdf")
    found = kerchunk.SingleHdf5ToZarr(str(_netcdf4(data, folder)), inline_threshold=0).translate()
    (folder / "refs.json").write_text(json.dumps(found))
    return folder / "refs.json"


def _icechunk(data: xr.Dataset, folder: Path) -> Path:
    icechunk = pytest.importorskip("icechunk")
    repo = icechunk.Repository.create(icechunk.local_filesystem_storage(str(folder / "repo")))
    session = repo.writable_session("main")
    data.to_zarr(session.store, zarr_format=3, consolidated=False)
    session.commit("all")
    return folder / "repo"


WRITERS: dict[str, Callable[[xr.Dataset, Path], Path]] = {
    "zarr 2": lambda data, folder: _zarr(data, folder, zarr_format=2),
    "zarr 3": lambda data, folder: _zarr(data, folder, zarr_format=3),
    "zarr 3, shards": _sharded,
    "zarr 2, the library's codec": _zarr_library,
    "netcdf 4": _netcdf4,
    "netcdf 4, the library's filter": _hdf5_library,
    "netcdf 3": _netcdf3,
    "references": _references,
    "icechunk": _icechunk,
    "xarray": _netcdf3,
}


@pytest.mark.parametrize("name", WRITERS)
def test_two_ranks_read_what_is_stored(ranks, globe, truth, tmp_path, name):
    """Case R42: each reader, those of the formats' own libraries too, and a dataset that xarray has opened."""
    path = WRITERS[name](globe, tmp_path)

    def check(mesh):
        source = xr.open_dataset(path, engine="scipy", chunks={"time": 1}) if name == "xarray" else str(path)
        for read in ("own", "collective"):
            loader = DomainDataLoader(source, mesh, variables=["t", "u"], read=read, halo=1)
            seen = []
            for batch in loader:
                seen.append(int(batch["index"]))
                for field, at in (("input", seen[-1]), ("target", seen[-1] + 1)):
                    assert tuple(batch[field]._local_tensor.shape[2:]) in ((6, 8), (5, 8))
                    assert torch.equal(batch[field].full_tensor()[0], torch.from_numpy(truth[at]))
            assert seen == list(range(11))
            loader.close()

    ranks.run(check, mesh=(2,))


@pytest.mark.parametrize("kind", ["<U5", "S5", "object"])
@pytest.mark.parametrize("store_format", ["zarr 2", "zarr 3", "netcdf 4"])
@pytest.mark.filterwarnings("ignore:.*does not have a Zarr V3 specification")
def test_a_channel_dim_of_texts_names_the_channels(globe, truth, tmp_path, store_format, kind):
    """One array of all channels with their names beside it, as stores for StormCast are: the same names from each."""
    texts = np.array(["u10m", "v10m", "t2m"], dtype=object if kind == "object" else kind)
    data = globe[["t"]].rename(t="state", level="channel").assign_coords(channel=("channel", texts))
    if store_format == "netcdf 4" and kind == "<U5":  # h5netcdf writes texts of one length as bytes alone
        data = data.assign_coords(channel=("channel", texts.astype(object)))
    path = WRITERS[store_format](data.transpose("time", "channel", "lat", "lon"), tmp_path)
    with pytest.raises(SampleError, match="Read one of them as channels with levels='channel'"):
        DomainDataLoader(path)
    loader = DomainDataLoader(path, levels="channel", target_steps=0)
    assert loader.channels == ("state_u10m", "state_v10m", "state_t2m")
    assert torch.equal(next(iter(loader))["input"][0], torch.from_numpy(truth[0, :3]))


def test_statistics_of_all_channels_together_are_refused(globe, tmp_path):
    """One mean of wind and temperature is no mean of either."""
    data = globe[["t"]].rename(t="state", level="channel").assign_coords(channel=["u10m", "v10m", "t2m"])
    path = _zarr(data, tmp_path, zarr_format=2)
    with open_store(path) as store:
        compute(store).to_json(tmp_path / "stats.json")
    with pytest.raises(SampleError, match=r"'state' are of all its 3 channels together.*statistics='compute'"):
        DomainDataLoader(path, levels="channel", statistics=tmp_path / "stats.json")
    found = DomainDataLoader(path, levels="channel", statistics="compute").statistics
    np.testing.assert_allclose(found.mean, data["state"].values.astype("f8").mean((0, 2, 3)), rtol=1e-9)


def test_two_ranks_read_a_real_grib(ranks, shared_data):
    """Case R42: GRIB."""
    pytest.importorskip("cfgrib")
    path = str(shared_data / "weather-series/era5-2mt-2019-03-uk.grib")
    with xr.open_dataset(path, engine="cfgrib", backend_kwargs={"indexpath": ""}) as dataset:
        expected = torch.from_numpy(dataset["t2m"][:4].values)

    def check(mesh):
        for read in ("own", "collective"):
            loader = DomainDataLoader(path, mesh, read=read, time=(0, 4), target_steps=0)
            fields = [batch["input"].full_tensor()[0, 0] for batch in loader]
            assert torch.equal(torch.stack(fields), expected)
            loader.close()

    ranks.run(check, mesh=(2,))

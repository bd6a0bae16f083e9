"""NetCDF-3 against netCDF4: classic, 64-bit offset, CDF-5, record variables, _Unsigned, truncated files."""

from collections.abc import Callable, Iterator
from pathlib import Path

import netCDF4
import numpy as np
import pytest

from shardio import open_store
from shardio.errors import CorruptChunkError
from shardio.source import Store
from shardio.testing import Expected, SourceContract
from shardio.text import strings

REAL = [
    "grid-netcdf/test4.nc",
    "grid-netcdf/small_rotPole_precipitation.nc",
    "grid-netcdf/test_lcc.nc",
    "grid-netcdf/era_interim_tibet.nc",
    "grid-netcdf/ubyte.nc",
    "weather-series/ERA5_example_data.nc",
    "weather-series/ecearth_gap/tas_day_EC-EARTH_historical_r1i1p1_19600101-19691231.nc",
    "grid-unstructured/mixed.exo",
]


def by_netcdf4(path: Path) -> dict[str, tuple[tuple[str, ...], np.ndarray]]:
    with netCDF4.Dataset(path) as dataset:
        dataset.set_auto_maskandscale(False)
        dataset.set_auto_chartostring(False)
        return {key: (variable.dimensions, np.asarray(variable[...])) for key, variable in dataset.variables.items()}


@pytest.mark.parametrize("name", REAL)
class TestReal(SourceContract):
    """Real files, beside netCDF4 and xarray."""

    @pytest.fixture
    def store(self, shared_data: Path, name: str) -> Iterator[Store]:
        with open_store(shared_data / name) as store:
            assert store.format == "netcdf3"
            yield store

    @pytest.fixture
    def expected(
        self, shared_data: Path, name: str, beside_xarray: Callable[..., dict[str, Expected]]
    ) -> dict[str, Expected]:
        return beside_xarray(by_netcdf4(shared_data / name), shared_data / name, engine="netcdf4")


@pytest.mark.parametrize("version", ["NETCDF3_CLASSIC", "NETCDF3_64BIT_OFFSET", "NETCDF3_64BIT_DATA"])
@pytest.mark.parametrize("records", [0, 1, 3])
@pytest.mark.parametrize("variables", [1, 2])
class TestWritten(SourceContract):
    """Every version, with no, one and several records, and the odd-sized records of one and of several variables."""

    @pytest.fixture
    def path(self, tmp_path: Path, version: str, records: int, variables: int) -> Path:
        random = np.random.default_rng(records)
        with netCDF4.Dataset(tmp_path / "a.nc", "w", format=version) as dataset:
            dataset.createDimension("time", None)
            dataset.createDimension("lat", 5)
            dataset.createDimension("lon", 3)
            dataset.title = "größe"
            fixed = dataset.createVariable("fixed", "f8", ("lat", "lon"))
            fixed[:] = random.normal(size=(5, 3))
            fixed.valid = np.array([1, 2, 3], np.int16)
            dataset.createVariable("scalar", "i4", ())[...] = 7
            kinds = ["i2", "i1"][:variables]
            if version == "NETCDF3_64BIT_DATA":
                kinds += ["u2", "i8"][: variables - 1]
            for kind in kinds:
                variable = dataset.createVariable(f"record_{kind}", kind, ("time", "lat", "lon"), fill_value=99)
                variable.set_auto_maskandscale(False)
                variable.scale_factor = 0.5
                variable[:records] = random.integers(0, 100, size=(records, 5, 3))
        return tmp_path / "a.nc"

    @pytest.fixture
    def store(self, path: Path) -> Iterator[Store]:
        with open_store(path) as store:
            assert store.format == "netcdf3"
            assert store.attrs["title"] == "größe"
            assert store["fixed"].attrs["valid"].tolist() == [1, 2, 3]
            yield store

    @pytest.fixture
    def expected(self, path: Path, beside_xarray: Callable[..., dict[str, Expected]]) -> dict[str, Expected]:
        return beside_xarray(by_netcdf4(path), path, engine="netcdf4")


def test_characters_are_texts(tmp_path: Path) -> None:
    with netCDF4.Dataset(tmp_path / "a.nc", "w", format="NETCDF3_CLASSIC") as dataset:
        dataset.createDimension("channel", 2)
        dataset.createDimension("length", 4)
        dataset.createVariable("name", "S1", ("channel", "length"))[:] = netCDF4.stringtochar(
            np.array(["t2m", "u"], "S4")
        )
    with open_store(tmp_path / "a.nc") as store:
        assert strings(store["name"]) == ["t2m", "u"]


def test_truncated_file_is_refused(tmp_path: Path) -> None:
    with netCDF4.Dataset(tmp_path / "a.nc", "w", format="NETCDF3_CLASSIC") as dataset:
        dataset.createDimension("x", 1000)
        dataset.createVariable("v", "f8", ("x",))[:] = 1.0
    whole = (tmp_path / "a.nc").read_bytes()
    for length in (5, 60, len(whole) - 8):
        (tmp_path / "cut.nc").write_bytes(whole[:length])
        with pytest.raises(CorruptChunkError, match=r"cut\.nc is no complete NetCDF-3 file"):
            open_store(tmp_path / "cut.nc")

"""HDF5 and NetCDF-4 against h5py and netCDF4: filters, dims, virtual datasets, missing filters, links, byte order."""

import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import fsspec
import h5py
import netCDF4
import numpy as np
import pytest
import torch

from shardio import Cut, Partition, open_store, plan, read
from shardio.box import Span, whole
from shardio.errors import (
    CorruptChunkError,
    DecodeError,
    MissingChunkError,
    MissingFilterError,
    ShardIOError,
    StoreNotFoundError,
)
from shardio.source import Store
from shardio.testing import CountingStore, Expected, SourceContract
from shardio.text import strings

NETCDF4 = [
    "grid-netcdf/euro_air_temp.nc",
    "grid-netcdf/air_MCruns_ensemble_mean_LMRv2.1.nc",
    "grid-netcdf/wrf_d01_allvars_cropped_compressed.nc",
    "grid-netcdf/tmmx_20190121.nc",
    "grid-netcdf/air/air.nc",
    "grid-netcdf/daily_surface_cancities_1990-1993.nc",
    "weather-series/vic/VIC_temperatures.nc",
    "weather-series/vic/VIC_streaminputs.nc",
    "weather-series/psl_ERA5_mon_194001-202212.nc",
    "weather-series/snw_day_CanESM5_historical_r1i1p1f1_gn_19910101-20101231.nc",
    "weather-series/era5_alps/sel_era5_monthly_t2m_1979-2018.nc",
    "weather-series/era5_alps/sel_era5_monthly_prcp_1979-2018.nc",
    "weather-series/era5_alps/sel_era5_invariant.nc",
    "weather-series/sel_cera-20c_t2m_1901-2010.nc",
    "grid-unstructured/lfric_ngvat_2D_72t_face_half_levels_main_conv_rain.nc",
    "grid-unstructured/test-c12.native.nc4",
    "grid-unstructured/data.nc",
]
HDF5 = [
    "hdf5/bitshuffle_datasets.hdf5",
    "hdf5/lz4_datasets.hdf5",
    "hdf5/fletcher32_datasets_latest.hdf5",
    "hdf5/autzen.h5",
    "hdf5/vlen_string_s390x.h5",
    "weather-series/knmi/RAD_NL25_RAP_5min_201008260000.h5",
]


@pytest.mark.parametrize("name", NETCDF4)
class TestNetCDF4(SourceContract):
    """Real NetCDF-4 files, beside the netCDF4 library and xarray."""

    @pytest.fixture
    def store(self, shared_data: Path, name: str) -> Iterator[Store]:
        with open_store(shared_data / name) as store:
            assert store.format == "hdf5"
            yield store

    @pytest.fixture
    def expected(
        self, shared_data: Path, name: str, beside_xarray: Callable[..., dict[str, Expected]]
    ) -> dict[str, Expected]:
        stored = {}
        with netCDF4.Dataset(shared_data / name) as dataset:
            dataset.set_auto_maskandscale(False)
            dataset.set_auto_chartostring(False)
            for key, variable in dataset.variables.items():
                if variable.dtype is not str:
                    stored[key] = (variable.dimensions, np.asarray(variable[...]))
        return beside_xarray(stored, shared_data / name, engine="netcdf4")


@pytest.mark.parametrize("name", HDF5)
class TestHdf5(SourceContract):
    """Real HDF5 files, beside h5py."""

    @pytest.fixture
    def store(self, shared_data: Path, name: str) -> Iterator[Store]:
        with open_store(shared_data / name) as store:
            yield store

    @pytest.fixture
    def expected(self, shared_data: Path, name: str) -> dict[str, Expected]:
        found = {}

        def visit(key: str, node: h5py.HLObject) -> None:
            if isinstance(node, h5py.Dataset) and node.shape is not None:
                values = node[()]
                values = np.asarray(values)
                dims = tuple(f"dim_{at}" for at in range(values.ndim))
                numeric = values.dtype.kind in "iuf" and "missing" not in str(list(node.attrs))
                found[key] = Expected(dims, values, values.astype(np.float64) if numeric else None)

        with h5py.File(shared_data / name) as file:
            file.visititems(visit)
        return found


class TestSynthetic(SourceContract):
    """Every layout and filter of HDF5 itself, big-endian, packed, empty, scalar."""

    @pytest.fixture
    def expected(self) -> dict[str, Expected]:
        random = np.random.default_rng(0)
        values = random.normal(size=(6, 11, 7)).astype(np.float32)
        values[2, 3] = np.nan
        ints = random.integers(-1000, 1000, size=(6, 11, 7)).astype(np.int16)
        ints[0, 0, :3] = -999
        decoded = np.where(ints == -999, np.nan, ints * np.float64(0.01) + 273.15)
        dims = ("dim_0", "dim_1", "dim_2")
        found = {key: Expected(dims, values, values.astype(np.float64)) for key in LAYOUTS}
        found["big"] = Expected(dims, values.astype(">f4"), values.astype(np.float64))
        found["packed"] = Expected(dims, ints, decoded)
        found["group/deep"] = found["contiguous"]
        found["scalar"] = Expected((), np.array(3.5), np.array(3.5))
        found["empty"] = Expected(("dim_0", "dim_1"), np.zeros((0, 4)), np.zeros((0, 4)))
        return found

    @pytest.fixture
    def store(self, tmp_path: Path, expected: Mapping[str, Expected]) -> Iterator[Store]:
        with h5py.File(tmp_path / "all.h5", "w") as file:
            for key, truth in expected.items():
                dataset = file.create_dataset(key, data=truth.stored, **LAYOUTS.get(key, {}))
                if key == "packed":
                    dataset.attrs.update(scale_factor=0.01, add_offset=273.15, _FillValue=np.array([-999], np.int16))
        with open_store(tmp_path / "all.h5") as store:
            yield store


LAYOUTS: dict[str, dict[str, object]] = {
    "contiguous": {},
    "chunked": {"chunks": (2, 4, 7)},
    "gzip": {"chunks": (1, 11, 7), "compression": "gzip", "shuffle": True},
    "lzf": {"chunks": (6, 5, 3), "compression": "lzf", "fletcher32": True},
}


def test_chunks_of_several_steps_keep_a_cache_that_holds_a_step(tmp_path: Path) -> None:
    """Two chunks of 8 steps through a filter that HDF5 undoes: it decodes each once, not eight times."""
    values = np.random.default_rng(0).normal(size=(8, 1024, 256)).round(3)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("x", data=values, chunks=(8, 512, 256), scaleoffset=3)
        file.create_dataset("y", data=values, chunks=(1, 512, 256), scaleoffset=3)
    with open_store(tmp_path / "a.h5") as store:
        sizes = [store[name]._dataset.id.get_access_plist().get_chunk_cache()[1] for name in "xy"]  # type: ignore[attr-defined]
        assert sizes[0] > values.nbytes > sizes[1]
        for step in range(8):
            np.testing.assert_allclose(store["x"].read((Span(step, step + 1), *whole((1024, 256))))[0], values[step])


def test_what_netcdf_never_wrote_is_missing(shared_data: Path) -> None:
    """42 of 100 cells lie outside the basin and hold the NetCDF library's fill value, with no attribute to say so."""
    with open_store(shared_data / "weather-series/vic/VIC_temperatures.nc") as store:
        source = store["Avg_temp"]
        assert "_FillValue" not in source.attrs
        found = read(source, plan(Partition(()), source.layout, index={"time": 0}))
        assert int(found.isnan().sum()) == 42
        assert float(found.nan_to_num().abs().max()) < 100


def test_the_same_number_in_a_plain_hdf5_file_is_a_number(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"] = np.array([9.969209968386869e36])
    with open_store(tmp_path / "a.h5") as store:
        assert read(store["x"], plan(Partition(()), store["x"].layout), dtype=torch.float64).tolist() == [
            9.969209968386869e36
        ]


def test_an_attribute_without_sense_stops_only_its_own_array(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"], file["y"] = np.zeros(3), np.zeros(3)
        file["x"].attrs["missing_value"] = "none"
    with open_store(tmp_path / "a.h5") as store:
        planned = plan(Partition(()), store["y"].layout)
        assert read(store["y"], planned).tolist() == [0, 0, 0]
        with pytest.raises(DecodeError, match="missing_value = 'none' is no number"):
            read(store["x"], planned)


def test_linked_coordinates_share_one_dim_name(shared_data: Path) -> None:
    with open_store(shared_data / "grid-netcdf/air/air_linked.nc") as store:
        assert store["air"].dims == ("time", "lat", "lon")
        assert store["lat_hard"].dims == store["lat_soft"].dims == store["lat"].dims == ("lat",)


def test_text_of_every_kind(tmp_path: Path) -> None:
    names = ["t2m", "tp", "größe"]
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("vlen", data=names, dtype=h5py.string_dtype())
        file.create_dataset("fixed", data=np.array([name.encode() for name in names]))
        file.create_dataset("chars", data=np.array([list(b"abc"), list(b"de\0")], dtype=np.uint8).view("S1"))
    with open_store(tmp_path / "a.h5") as store:
        assert strings(store["vlen"]) == names
        assert strings(store["fixed"]) == names
        assert strings(store["chars"]) == ["abc", "de"]


def write_two_years(folder: Path) -> None:
    """0.h5 and 1.h5, whose values are their names, and all.h5, which joins them virtually."""
    layout = h5py.VirtualLayout(shape=(4, 3), dtype="f4")
    for year in range(2):
        with h5py.File(folder / f"{year}.h5", "w") as file:
            file["x"] = np.full((2, 3), year, np.float32)
        layout[2 * year : 2 * year + 2] = h5py.VirtualSource(folder / f"{year}.h5", "x", shape=(2, 3))
    with h5py.File(folder / "all.h5", "w") as file:
        file.create_virtual_dataset("x", layout, fillvalue=-1)


def test_virtual_dataset_with_a_source_gone(tmp_path: Path) -> None:
    """Case R17: of two files one is removed; its rows are an error that names it, or the fill value on request."""
    write_two_years(tmp_path)
    with open_store(tmp_path / "all.h5") as store:
        assert store["x"].read()[:, 0].tolist() == [0, 0, 1, 1]
    (tmp_path / "1.h5").unlink()
    partition = Partition((Cut("dim_0", "domain", (2, 2)),))
    with open_store(tmp_path / "all.h5") as store:
        planned = plan(partition, store["x"].layout)
        assert read(store["x"], planned, 0).tolist() == [[0, 0, 0]] * 2
        with pytest.raises(MissingChunkError, match=r"1\.h5' is missing"):
            read(store["x"], planned, 1)
    with open_store(tmp_path / "all.h5", missing="fill") as store:
        assert read(store["x"], planned, 1).tolist() == [[-1, -1, -1]] * 2


@pytest.mark.parametrize("damage", ["cut", "trash", "no such dataset"])
def test_virtual_dataset_with_a_source_that_cannot_be_read(tmp_path: Path, damage: str) -> None:
    write_two_years(tmp_path)
    bad = tmp_path / "1.h5"
    if damage == "no such dataset":
        with h5py.File(bad, "w") as file:
            file["y"] = np.zeros((2, 3), np.float32)
    else:
        bad.write_bytes(bad.read_bytes()[:1000] if damage == "cut" else b"nonsense" * 100)
    with open_store(tmp_path / "all.h5") as store:
        planned = plan(Partition((Cut("dim_0", "domain", (2, 2)),)), store["x"].layout)
        assert read(store["x"], planned, 0).tolist() == [[0, 0, 0]] * 2
        with pytest.raises(MissingChunkError, match=r"rows \[\(2, 4\), .*1\.h5' (cannot be opened|has no dataset 'x')"):
            read(store["x"], planned, 1)


def test_chunks_never_written(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("x", shape=(4, 4), dtype="f4", chunks=(2, 4), fillvalue=7)[:2] = 1
        file.create_dataset("y", shape=(4, 4), dtype="f4")
    with open_store(tmp_path / "a.h5") as store:
        planned = plan(Partition((Cut("dim_0", "domain", (2, 2)),)), store["x"].layout)
        assert read(store["x"], planned, 0).tolist() == [[1] * 4] * 2
        with pytest.raises(MissingChunkError, match=r"'x' \(1, 0\) is not in .*a\.h5"):
            read(store["x"], planned, 1)
        with pytest.raises(MissingChunkError, match=r"'y' .*is not in .*a\.h5"):
            store["y"].read()
    with open_store(tmp_path / "a.h5", missing="fill") as store:
        assert read(store["x"], planned, 1).tolist() == [[7] * 4] * 2
        assert store["y"].read().tolist() == [[0] * 4] * 4


def write_with_filter(path: Path, number: int) -> None:
    with h5py.File(path, "w") as file:
        settings = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        settings.set_chunk((4,))
        settings.set_filter(h5py.h5z.FILTER_SHUFFLE)
        space = h5py.h5s.create_simple((4,))
        settings.set_filter(h5py.h5z.FILTER_DEFLATE, 0, (1,))
        dataset = h5py.h5d.create(file.id, b"x", h5py.h5t.NATIVE_FLOAT, space, settings)
        dataset.write_direct_chunk((0,), b"0123")
    # There is no writing a filter that is not there: give the deflate filter of the written file another number.
    data = path.read_bytes()
    at = data.index(b"deflate\0") - 8
    assert int.from_bytes(data[at : at + 2], "little") == 1
    path.write_bytes(data[:at] + number.to_bytes(2, "little") + data[at + 2 :].replace(b"deflate", b"mystery", 1))


def test_missing_filter_is_named_when_opening(tmp_path: Path) -> None:
    """Case R28: a filter that no plugin has registered, by number and name, before anything is read."""
    write_with_filter(tmp_path / "a.h5", 31999)
    with pytest.raises(MissingFilterError, match=r"'x' in .*a\.h5 is stored through filter 31999 \(mystery\)"):
        open_store(tmp_path / "a.h5")


def test_missing_plugin_names_the_extra(shared_data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plugin = pytest.importorskip("hdf5plugin")
    h5py.h5z.unregister_filter(32008)
    monkeypatch.setitem(sys.modules, "hdf5plugin", None)
    try:
        with pytest.raises(MissingFilterError, match=r"filter 32008 .*pip install 'shardtensor\[hdf5\]'"):
            open_store(shared_data / "hdf5/bitshuffle_datasets.hdf5")
    finally:
        plugin.register("bshuf")


def test_file_that_is_no_hdf5_or_broken(tmp_path: Path) -> None:
    with pytest.raises(StoreNotFoundError, match=r"nothing at .*gone\.h5"):
        open_store(tmp_path / "gone.h5")
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"] = np.arange(10000)
    (tmp_path / "cut.h5").write_bytes((tmp_path / "a.h5").read_bytes()[:5000])
    with pytest.raises(CorruptChunkError, match=r"cut\.h5 cannot be opened as HDF5"):
        open_store(tmp_path / "cut.h5")


def test_remote_through_fsspec(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"] = np.arange(3.0)
    fsspec.filesystem("memory").put(str(tmp_path / "a.h5"), "/remote.h5")
    with open_store("memory://remote.h5") as store:
        assert store["x"].read().tolist() == [0, 1, 2]
    with pytest.raises(StoreNotFoundError, match="nothing at 'memory://gone"):
        open_store("memory://gone.h5")


def test_locked_by_a_writer(tmp_path: Path) -> None:
    """Case R27: another process holds the file open for writing; reading takes no lock."""
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        file["x"] = np.arange(3.0)
    hold = f"import h5py; file = h5py.File({str(path)!r}, 'a'); print('held', flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", hold], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline().strip() == b"held"
            with open_store(path) as store:
                assert store["x"].read().tolist() == [0, 1, 2]
        finally:
            holder.communicate(b"\n", timeout=60)


def test_counting_store_is_no_hdf5() -> None:
    """Formats are told apart by what the source is."""
    from zarr.storage import MemoryStore

    with pytest.raises(ShardIOError, match="no Zarr group or array"):
        open_store(CountingStore(MemoryStore()))

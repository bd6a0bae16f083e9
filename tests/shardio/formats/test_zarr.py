"""Zarr against the zarr library: versions, codecs, sharding, F order, byte order, groups, strings, absent chunks."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numcodecs
import numpy as np
import pytest
import xarray as xr
import zarr
from zarr.codecs import BloscCodec, BytesCodec, Crc32cCodec, GzipCodec, ShardingCodec, TransposeCodec, ZstdCodec
from zarr.codecs.numcodecs import LZ4, Delta, Fletcher32, Shuffle
from zarr.storage import LocalStore, MemoryStore

from shardio import Cut, Partition, find_grid, open_store, plan, read
from shardio.errors import CorruptChunkError, MissingChunkError, StoreNotFoundError, UnknownFormatError
from shardio.formats.zarr_chunks import ZarrChunks
from shardio.source import Store
from shardio.testing import CountingStore, Expected, SourceContract
from shardio.text import strings

VALUES = np.random.default_rng(0).normal(size=(5, 11, 7)).astype(np.float32)
CASES: dict[str, dict[str, Any]] = {
    "v2": {"zarr_format": 2, "chunks": (1, 4, 7)},
    "v2 uncompressed": {"zarr_format": 2, "chunks": (2, 4, 3), "compressors": None},
    "v2 blosc": {"zarr_format": 2, "chunks": (2, 4, 3), "compressors": numcodecs.Blosc("lz4", 5, 1)},
    "v2 zlib": {"zarr_format": 2, "chunks": (2, 4, 3), "compressors": numcodecs.Zlib()},
    "v2 lzma": {"zarr_format": 2, "chunks": (5, 11, 7), "compressors": numcodecs.LZMA()},
    "v2 filters": {
        "zarr_format": 2,
        "chunks": (2, 4, 3),
        "filters": [numcodecs.Shuffle(4)],
        "compressors": numcodecs.LZ4(),
    },
    "v2 F": {"zarr_format": 2, "chunks": (2, 4, 3), "order": "F"},
    "v2 big-endian": {"zarr_format": 2, "chunks": (2, 4, 3), "dtype": ">f4"},
    "v3": {"chunks": (2, 4, 3)},
    "v3 uncompressed": {"chunks": (2, 4, 3), "compressors": None},
    "v3 gzip": {"chunks": (2, 4, 3), "compressors": GzipCodec()},
    "v3 blosc": {"chunks": (2, 4, 3), "compressors": BloscCodec(cname="zstd", shuffle="bitshuffle")},
    "v3 zstd crc": {"chunks": (2, 4, 3), "compressors": [ZstdCodec(), Crc32cCodec()]},
    "v3 transposed": {"chunks": (2, 4, 3), "filters": TransposeCodec(order=(2, 0, 1))},
    "v3 big-endian": {"chunks": (2, 4, 3), "serializer": BytesCodec(endian="big")},
    "v3 numcodecs": {"chunks": (2, 4, 3), "compressors": [Shuffle(elementsize=4), LZ4(), Fletcher32()]},
    "v3 delta": {"chunks": (2, 4, 3), "filters": Delta(dtype="<i4"), "dtype": "int32"},
    "v3 sharded": {"chunks": (1, 2, 7), "shards": (2, 4, 7)},
    "v3 sharded nested key": {
        "chunks": (1, 2, 3),
        "shards": (5, 12, 9),
        "chunk_key_encoding": {"name": "v2", "separator": "."},
    },
    "v3 index first": {
        "chunks": (2, 4, 7),
        "serializer": ShardingCodec(chunk_shape=(1, 2, 7), index_location="start", index_codecs=[BytesCodec()]),
        "compressors": None,
    },
}


@pytest.mark.filterwarnings("ignore:Numcodecs codecs are not in the Zarr version 3")
@pytest.mark.parametrize("case", CASES)
class TestWritten(SourceContract):
    """Every way to store the same values."""

    @pytest.fixture
    def path(self, tmp_path: Path, case: str) -> Path:
        options = {"dtype": "float32", **CASES[case]}
        group = zarr.open_group(tmp_path / "a.zarr", mode="w", zarr_format=options.pop("zarr_format", 3))
        array = group.create_array("deep/x", shape=VALUES.shape, **options)
        array[...] = (VALUES * 1000).astype(options["dtype"])
        array.attrs["units"] = "K"
        return tmp_path / "a.zarr"

    @pytest.fixture
    def store(self, path: Path) -> Iterator[Store]:
        with open_store(path) as store:
            assert store.format == "zarr"
            assert store["deep/x"].attrs == {"units": "K"}
            yield store

    @pytest.fixture
    def expected(self, path: Path) -> dict[str, Expected]:
        values = np.asarray(zarr.open_group(path, mode="r")["deep/x"][...])  # type: ignore[index]
        return {"deep/x": Expected(("dim_0", "dim_1", "dim_2"), values, values.astype(np.float64))}

    def test_unit_is_what_is_decoded_at_once(self, store: Store, case: str) -> None:
        inner = {"v3 index first": (1, 2, 7)}
        assert store["deep/x"].chunks == inner.get(case, CASES[case]["chunks"])


@pytest.mark.filterwarnings("ignore:Numcodecs codecs are not in the Zarr version 3")
@pytest.mark.parametrize("name", ["cube_l2.zarr", "test_zarr", "v2_blosc_F.zarr", "v3_fletcher32.zarr"])
class TestReal(SourceContract):
    """Real stores, beside zarr and xarray; chunks were never written in some."""

    @pytest.fixture
    def store(self, shared_data: Path, name: str) -> Iterator[Store]:
        with open_store(shared_data / "zarr" / name, missing="fill") as store:
            yield store

    @pytest.fixture
    def expected(
        self, shared_data: Path, name: str, beside_xarray: Callable[..., dict[str, Expected]]
    ) -> dict[str, Expected]:
        path = shared_data / "zarr" / name
        node = zarr.open(path, mode="r")
        if isinstance(node, zarr.Array):
            values = np.asarray(node[...])
            return {"array": Expected(("dim_0", "dim_1"), values, values.astype(np.float64))}
        stored = {
            key: (tuple(array.attrs["_ARRAY_DIMENSIONS"]), np.asarray(array[...])) for key, array in node.arrays()
        }
        return beside_xarray(stored, path, engine="zarr", consolidated=True)


@pytest.mark.parametrize("zarr_format", [2, 3])
@pytest.mark.parametrize("consolidated", [True, False])
def test_store_written_by_xarray(tmp_path: Path, zarr_format: Any, consolidated: bool) -> None:
    """Dim names of either version; the file of the time 0 is left unwritten by zarr and still reads."""
    dataset = xr.Dataset(
        {"x": (("time", "lat", "lon"), np.ones((1, 4, 3), np.float32))},
        coords={"time": ("time", [0], {"units": "hours since 2000-01-01"}), "lat": [3.0, 2, 1, 0]},
    )
    dataset.to_zarr(tmp_path / "a.zarr", zarr_format=zarr_format, consolidated=consolidated)
    with open_store(tmp_path / "a.zarr") as store:
        assert store["x"].dims == ("time", "lat", "lon")
        assert "_ARRAY_DIMENSIONS" not in store["x"].attrs
        grid = find_grid(store)
        assert grid.times is not None
        assert grid.times.label(0) == "2000-01-01T00:00:00"
        assert grid.descending == ("lat",)


@pytest.mark.parametrize("zarr_format", [2, 3])
@pytest.mark.parametrize("kind", ["<U3", "|S3", "object"])
@pytest.mark.filterwarnings("ignore:.*does not have a Zarr V3 specification")
def test_channel_names_of_every_kind(tmp_path: Path, zarr_format: Any, kind: str) -> None:
    """Case R59: fixed-length text and bytes, and texts of any length, in both versions; the same list."""
    names = ["t2m", "u10", "z"]
    group = zarr.open_group(tmp_path / "a.zarr", mode="w", zarr_format=zarr_format)
    dtype = str if kind == "object" else kind
    array = group.create_array("channel", shape=(3,), dtype=dtype, chunks=(2,))
    array[...] = np.array(names, dtype=np.dtypes.StringDType() if kind == "object" else kind)
    with open_store(tmp_path / "a.zarr") as store:
        assert strings(store["channel"]) == names


def test_thousands_of_texts(shared_data: Path) -> None:
    with open_store(shared_data / "zarr/cities_v2.zarr") as store:
        found = strings(store["array"])
    assert found == [str(name).rstrip("\0 ") for name in zarr.open(shared_data / "zarr/cities_v2.zarr", mode="r")[...]]  # type: ignore[index]


def make(store: Any, *, zarr_format: Any = 3, fill_value: float = 0, **options: Any) -> None:
    group = zarr.open_group(store, mode="w", zarr_format=zarr_format)
    array = group.create_array(
        "x", shape=(8, 6), dtype="float32", chunks=(2, 6), compressors=None, fill_value=fill_value, **options
    )
    array[...] = np.arange(48).reshape(8, 6) + 1


@pytest.mark.parametrize(("zarr_format", "key"), [(2, "x/1.0"), (3, "x/c/1/0")])
def test_a_deleted_chunk_is_named(tmp_path: Path, zarr_format: int, key: str) -> None:
    make(tmp_path / "a.zarr", zarr_format=zarr_format)
    (tmp_path / "a.zarr" / key).unlink()
    with open_store(tmp_path / "a.zarr") as store:
        planned = plan(Partition((Cut("dim_0", "domain", (2, 3, 3)),)), store["x"].layout)
        assert read(store["x"], planned, 0)[0, 0] == 1
        with pytest.raises(MissingChunkError, match=rf"chunk '{key}' is not in .*missing='fill'"):
            read(store["x"], planned, 1)
        assert read(store["x"], planned, 2)[-1, -1] == 48
    with open_store(tmp_path / "a.zarr", missing="fill") as store:
        assert read(store["x"], planned, 1)[:, 0].tolist() == [0, 0, 25]


def test_an_inner_chunk_never_written_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.zarr"
    group = zarr.open_group(path, mode="w")
    array = group.create_array("x", shape=(8, 6), dtype="float32", chunks=(2, 6), shards=(4, 6))
    array[...] = np.repeat([1, 1, 0, 0, 1, 1, 1, 1], 6).reshape(8, 6)
    with open_store(path) as store:
        source = store["x"]
        np.testing.assert_array_equal(read(source, plan(Partition(()), source.layout, index={"dim_0": [0, 5, 7]})), 1)
        with pytest.raises(MissingChunkError, match=r"chunk 'x/c/0/0', inner chunk \(1, 0\), is not in"):
            source.read()
        (path / "x/c/1/0").unlink()
    with open_store(path) as store, pytest.raises(MissingChunkError, match="x/c/1/0"):
        read(store["x"], plan(Partition(()), store["x"].layout, index={"dim_0": 7}))


def test_a_shards_index_is_read_once(tmp_path: Path) -> None:
    """Case R11: 2 x 8 of 8 x 8 inner chunks of a shard are 16 ranges and 1 index, not 16 indexes or the whole shard."""
    counting = CountingStore(MemoryStore())
    group = zarr.open_group(counting, mode="w")
    array = group.create_array("x", shape=(16, 64), dtype="float32", chunks=(2, 8), shards=(16, 64), compressors=None)
    array[...] = np.arange(1, 1025).reshape(16, 64)
    counting.reset()
    with open_store(counting) as store:
        planned = plan(Partition((Cut("dim_0", "domain", (4, 12)),)), store["x"].layout)
        found = read(store["x"], planned, 0, threads=1)
    np.testing.assert_array_equal(found.numpy(), np.arange(1, 257).reshape(4, 64))
    index = 8 * 8 * 16 + 4
    assert counting.gets == {"x/c/0/0": 17}
    assert counting.bytes == 4 * 64 * 4 + index


def test_fill_value_is_not_what_is_missing(tmp_path: Path) -> None:
    """Case R19: -999 in an unwritten chunk is a number unless the attribute says that it is missing."""
    for name, attrs in (("without", {}), ("with", {"_FillValue": -999.0})):
        make(tmp_path / name, fill_value=-999)
        zarr.open_group(tmp_path / name, mode="a")["x"].attrs.update(attrs)
        (tmp_path / name / "x/c/1/0").unlink()
        with open_store(tmp_path / name, missing="fill") as store:
            source = store["x"]
            found, valid = read_with_mask(source)
            assert valid[2:4].any() != bool(attrs)
            expected = np.nan if attrs else -999.0
            np.testing.assert_array_equal(found[2:4], np.full((2, 6), expected))
            assert valid[[0, 1, 4, 5, 6, 7]].all()


def test_zeros_that_equal_the_fill_value_stay_zeros(tmp_path: Path) -> None:
    """Case R19: version 3 has a fill_value in every array, which declares nothing missing."""
    group = zarr.open_group(tmp_path / "a.zarr", mode="w")
    array = group.create_array("x", shape=(2, 2), dtype="float32", chunks=(2, 2), fill_value=0)
    array[...] = np.array([[0, 1], [2, 0]])
    with open_store(tmp_path / "a.zarr") as store:
        found, valid = read_with_mask(store["x"])
    assert found.tolist() == [[0, 1], [2, 0]]
    assert valid.all()


def read_with_mask(source: Any) -> tuple[np.ndarray, np.ndarray]:
    from shardio import OwnReader

    with OwnReader(threads=1) as reader:
        found, valid = reader.read(source, plan(Partition(()), source.layout), mask=True)
    return found.numpy(), valid.numpy()


def test_corrupt_chunk_is_named(tmp_path: Path) -> None:
    group = zarr.open_group(tmp_path / "a.zarr", mode="w")
    array = group.create_array("x", shape=(4, 6), dtype="float32", chunks=(2, 6), compressors=GzipCodec())
    array[...] = VALUES[0, :4, :6]
    file = tmp_path / "a.zarr/x/c/1/0"
    file.write_bytes(file.read_bytes()[:20] + b"\xff" * 20)
    with open_store(tmp_path / "a.zarr") as store:
        planned = plan(Partition((Cut("dim_0", "domain", (2, 2)),)), store["x"].layout)
        read(store["x"], planned, 0)
        with pytest.raises(CorruptChunkError, match=r"chunk \(1, 0\) of 'x'"):
            read(store["x"], planned, 1)


def test_opens_what_zarr_has_opened(tmp_path: Path) -> None:
    make(tmp_path / "a.zarr")
    group = zarr.open_group(tmp_path / "a.zarr", mode="r")
    for source in (group, group["x"], group.store, str(tmp_path / "a.zarr"), f"file://{tmp_path}/a.zarr"):
        store = open_store(source)
        assert store["x"].read()[0, 0] == 1
    with zarr.storage.ZipStore(tmp_path / "a.zarr.zip", mode="w") as zipped:
        make(zipped)
    with open_store(tmp_path / "a.zarr.zip") as store:
        assert store["x"].read()[0, 0] == 1
    with open_store(LocalStore(tmp_path / "a.zarr")) as store:
        assert list(store) == ["x"]


def test_remote_through_fsspec(tmp_path: Path) -> None:
    import fsspec

    make(tmp_path / "a.zarr")
    memory = fsspec.filesystem("memory")
    memory.put(str(tmp_path / "a.zarr"), "/remote.zarr", recursive=True)
    with open_store("memory://remote.zarr") as store:
        assert store["x"].read()[0, 0] == 1
    with pytest.raises(StoreNotFoundError, match="memory://gone"):
        open_store("memory://gone.zarr")


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("zarr_format", [2, 3])
def test_files_of_another_kind_are_passed_over_in_silence(tmp_path: Path, zarr_format: Any) -> None:
    zarr.open_group(tmp_path, mode="w", zarr_format=zarr_format).create_array("a", shape=(4, 6), dtype="f4")
    (tmp_path / "sample_info.json").write_text("{}")
    with open_store(tmp_path) as store:
        assert list(store) == ["a"]


def test_folder_that_is_no_store(tmp_path: Path) -> None:
    with pytest.raises(UnknownFormatError, match=r"no store that a format recognises.*'zarr'|zarr"):
        open_store(tmp_path)
    (tmp_path / "a.zarr").mkdir()
    with pytest.raises(UnknownFormatError, match="holds no Zarr group or array"):
        open_store(tmp_path / "a.zarr")
    (tmp_path / "zarr.json").write_text(json.dumps({"zarr_format": 9, "node_type": "group"}))
    with pytest.raises(UnknownFormatError, match="cannot be opened as Zarr"):
        open_store(tmp_path)


@pytest.mark.parametrize("zarr_format", [2, 3])
@pytest.mark.parametrize("encoding", [{"dtype": "int16", "scale_factor": 0.5, "_FillValue": -99}, {"_FillValue": -9.0}])
@pytest.mark.parametrize("codec", ["known here", "the zarr library's"])
def test_missing_values_as_xarray_writes_them(tmp_path: Path, zarr_format: Any, encoding: Any, codec: str) -> None:
    """xarray keeps _FillValue in the attributes of version 3, and in the metadata's fill_value of version 2."""
    field = np.array([[0, 1, np.nan], [2.5, np.nan, 3]], np.float32)
    dataset = xr.Dataset({"x": (("lat", "lon"), field)})
    if codec != "known here" and zarr_format == 2:
        encoding = {**encoding, "filters": [numcodecs.BZ2()]}
    dataset.to_zarr(tmp_path / "a.zarr", zarr_format=zarr_format, encoding={"x": encoding})
    with open_store(tmp_path / "a.zarr") as store:
        found, valid = read_with_mask(store["x"])
    np.testing.assert_array_equal(found, field)
    np.testing.assert_array_equal(valid, ~np.isnan(field))
    np.testing.assert_array_equal(xr.open_zarr(tmp_path / "a.zarr")["x"].values, field)


@pytest.mark.filterwarnings("ignore:The data type")
def test_texts_and_dates_beside_it_leave_an_array_to_shardio(tmp_path: Path) -> None:
    """Version 3 writes their dtypes as objects; the zarr library reads those arrays alone."""
    group = zarr.open_group(tmp_path / "a.zarr", mode="w", zarr_format=3)
    group.create_array("channel", data=np.array(["u10m", "t2m"]), dimension_names=("channel",))
    group.create_array("time", data=np.array(["2020-01-01"], "M8[s]"), dimension_names=("time",))
    group.create_array("t", data=np.ones((2, 3), "f4"), dimension_names=("channel", "x"))
    with open_store(tmp_path / "a.zarr") as store:
        assert isinstance(store["t"], ZarrChunks)
        assert strings(store["channel"]) == ["u10m", "t2m"]
        assert store["time"].read().astype("M8[D]").astype(str).tolist() == ["2020-01-01"]

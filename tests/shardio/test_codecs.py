"""Zarr chunks decoded here against the zarr library: codecs, dtypes, orders, edges; planned bytes, and damaged ones."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numcodecs
import numpy as np
import pytest
import torch
import zarr
from zarr.codecs import BloscCodec, BytesCodec, Crc32cCodec, GzipCodec, ShardingCodec, TransposeCodec, ZstdCodec
from zarr.codecs.numcodecs import LZ4, Fletcher32, Shuffle, Zlib

from shardio import Cut, OwnReader, Partition, open_store, plan
from shardio.box import Span, slices
from shardio.codecs import blosc_units
from shardio.errors import CorruptChunkError, MissingChunkError, ReadError
from shardio.formats.zarr_chunks import ZarrChunks
from shardio.partition import even
from shardio.testing import random_box

pytestmark = pytest.mark.filterwarnings("ignore:Numcodecs codecs are not in the Zarr version 3")
SHAPE = (3, 5, 12, 7)
SHAPES = [(3, 5, 12, 7), (1, 4, 12, 7), (2, 3, 7, 5)]
V2: dict[str, dict[str, Any]] = {
    "none": {"compressors": None},
    "blosc lz4": {"compressors": numcodecs.Blosc("lz4", 5, numcodecs.Blosc.SHUFFLE, blocksize=256)},
    "blosc zstd bits": {"compressors": numcodecs.Blosc("zstd", 1, numcodecs.Blosc.BITSHUFFLE, blocksize=1024)},
    "blosc lz4hc": {"compressors": numcodecs.Blosc("lz4hc", 1, numcodecs.Blosc.NOSHUFFLE, blocksize=300)},
    "blosc zlib": {"compressors": numcodecs.Blosc("zlib", 1)},
    "blosc copied": {"compressors": numcodecs.Blosc("blosclz", 0, blocksize=256)},
    "zstd": {"compressors": numcodecs.Zstd()},
    "zlib": {"compressors": numcodecs.Zlib()},
    "gzip": {"compressors": numcodecs.GZip()},
    "lz4": {"compressors": numcodecs.LZ4()},
    "shuffle lz4": {"filters": [numcodecs.Shuffle(4)], "compressors": numcodecs.LZ4()},
    "delta zstd": {"filters": [numcodecs.Delta("i4")], "compressors": numcodecs.Zstd()},
    "scaled shuffle blosc": {
        "filters": [numcodecs.FixedScaleOffset(0, 1, "i4", "i2"), numcodecs.Shuffle(2)],
        "compressors": numcodecs.Blosc(),
    },
    "fletcher": {"filters": [numcodecs.Fletcher32()], "compressors": None},
}
V3: dict[str, dict[str, Any]] = {
    "none": {"compressors": None},
    "blosc": {"compressors": BloscCodec(cname="lz4", blocksize=256)},
    "zstd": {"compressors": ZstdCodec()},
    "gzip": {"compressors": GzipCodec()},
    "crc": {"compressors": [Crc32cCodec()]},
    "zstd crc": {"compressors": [ZstdCodec(), Crc32cCodec()]},
    "shuffle lz4 fletcher": {"compressors": [Shuffle(elementsize=4), LZ4(), Fletcher32()]},
    "shuffle zlib": {"compressors": [Shuffle(elementsize=4), Zlib()]},
}
ONLY_INTEGERS = ("delta zstd", "scaled shuffle blosc")


def write(path: Path, values: np.ndarray, zarr_format: Any, **options: Any) -> ZarrChunks:
    group = zarr.open_group(path, mode="w", zarr_format=zarr_format)
    array = group.create_array("g/x", shape=values.shape, dtype=values.dtype, **options)
    array[...] = values
    source = open_store(path)["g/x"]
    assert isinstance(source, ZarrChunks), "the zarr library reads it"
    return source


def values_of(dtype: str) -> np.ndarray:
    random = np.random.default_rng(0)
    numbers = np.cumsum(random.integers(1, 5, SHAPE), axis=-1) + 1.0
    return (numbers + (0 if np.dtype(dtype).kind in "iub" else random.normal(size=SHAPE))).astype(dtype)


def agree(source: ZarrChunks, path: Path, boxes: int = 6) -> None:
    """Boxes of a source are what the zarr library reads, and take what was planned."""
    truth = np.asarray(zarr.open_group(path, mode="r")["g/x"][...])  # type: ignore[index]
    np.testing.assert_array_equal(source.read(), truth)
    random = np.random.default_rng(1)
    for _ in range(boxes):
        box = random_box(random, source.shape)
        spread = np.zeros([2 * span.size for span in box], source.dtype)
        every: tuple[Any, ...] = (*(slice(0, None, 2) for _ in box), ...)
        np.testing.assert_array_equal(source.read(box), truth[slices(box)], err_msg=str(box))
        source.read_into(box, spread[every])
        np.testing.assert_array_equal(spread[every], truth[slices(box)], err_msg=str(box))


@pytest.mark.parametrize("codec", V2)
def test_version_2(tmp_path: Path, codec: str) -> None:
    dtypes = (
        ["<i4"] if codec in ONLY_INTEGERS else ["<f4", ">f8"] if "shuffle" in codec else ["<f4", ">f8", "<i2", "|u1"]
    )
    for dtype, chunks, order in itertools.product(dtypes, SHAPES, "CF"):
        path = tmp_path / f"{dtype.strip('<>|')}-{chunks[2]}-{order}"
        agree(write(path, values_of(dtype), 2, chunks=chunks, order=order, **V2[codec]), path, 3)


@pytest.mark.parametrize("codec", V3)
def test_version_3(tmp_path: Path, codec: str) -> None:
    for (dtype, endian), chunks, order in itertools.product(
        [("f4", "little"), ("f8", "big"), ("int16", "big")], SHAPES, [(0, 1, 2, 3), (2, 0, 3, 1)]
    ):
        path = tmp_path / f"{dtype}-{chunks[2]}-{order[0]}"
        options = dict(V3[codec], filters=[TransposeCodec(order=order)], serializer=BytesCodec(endian=endian))  # type: ignore[arg-type]
        agree(write(path, values_of(dtype), 3, chunks=chunks, **options), path, 3)


@pytest.mark.parametrize("codec", V3)
@pytest.mark.parametrize("location", ["start", "end"])
@pytest.mark.parametrize("index", [[BytesCodec()], [BytesCodec(endian="big"), Crc32cCodec()]], ids=["plain", "crc"])
def test_shards(tmp_path: Path, codec: str, location: Any, index: Any) -> None:
    compressors = V3[codec]["compressors"] or []
    inner = [BytesCodec(), *(compressors if isinstance(compressors, list) else [compressors])]
    sharding = ShardingCodec(chunk_shape=(1, 2, 7, 5), codecs=inner, index_location=location, index_codecs=index)
    source = write(
        tmp_path, values_of("f4"), 3, chunks=(2, 4, 14, 10), serializer=sharding, compressors=None, filters=None
    )
    assert source.chunks == (1, 2, 7, 5)
    agree(source, tmp_path)


@pytest.mark.parametrize("dtype", ["bool", "float16", "complex64", "uint64"])
def test_dtypes_and_no_dims(tmp_path: Path, dtype: str) -> None:
    for zarr_format in (2, 3):
        path = tmp_path / str(zarr_format)
        agree(write(path, values_of("f4").astype(dtype), zarr_format, chunks=(2, 3, 7, 5)), path)
        path = tmp_path / f"{zarr_format} alone"
        agree(write(path, np.array(1).astype(dtype), zarr_format, chunks=()), path)


def test_blosc_elements_larger_than_the_chunk(tmp_path: Path) -> None:
    for typesize in (3, 8, 255):
        path = tmp_path / str(typesize)
        agree(write(path, values_of("f4"), 3, chunks=(1, 1, 1, 2), compressors=BloscCodec(typesize=typesize)), path, 1)


def test_jobs_of_many_rows_are_not_kept() -> None:
    before = blosc_units._kept.cache_info().currsize
    box = (Span(0, blosc_units.KEPT_ROWS + 1), Span(0, 1))
    jobs = blosc_units.jobs_of(box, (blosc_units.KEPT_ROWS + 1, 512), 4, 256, 2)
    assert sum(unit.last - unit.first for job in jobs for unit in job) == blosc_units.KEPT_ROWS + 1
    assert blosc_units._kept.cache_info().currsize == before


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "L1": (2, {"chunks": (1, 1, 46, 34), "compressors": numcodecs.Blosc("lz4", 5, 1, blocksize=256)}),
    "L2": (3, {"chunks": (1, 6, 46, 34), "compressors": ZstdCodec()}),
    "L2b": (2, {"chunks": (1, 6, 46, 34), "compressors": numcodecs.Blosc("zstd", 1, 1, blocksize=1024)}),
    "L3": (3, {"chunks": (1, 6, 5, 34), "shards": (1, 6, 50, 34), "compressors": ZstdCodec()}),
    "L4": (3, {"chunks": (1, 6, 8, 9), "compressors": BloscCodec(cname="zstd", blocksize=512)}),
    "L5": (2, {"chunks": (1, 6, 46, 34), "compressors": None}),
}
HALOS: list[Any] = [0, 3, {"lat": (1, 3), "lon": (2, 2)}]


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_counted_bytes_are_the_planned_ones(tmp_path: Path, layout: str, threads: int) -> None:
    zarr_format, options = LAYOUTS[layout]
    values = np.random.default_rng(0).normal(size=(2, 6, 46, 34)).astype(np.float32)
    array = zarr.open_group(tmp_path, mode="w", zarr_format=zarr_format).create_array(
        "x",
        shape=values.shape,
        dtype="f4",
        attributes={"_ARRAY_DIMENSIONS": ["time", "level", "lat", "lon"]},
        **options,
    )
    array[...] = values
    source = open_store(tmp_path)["x"]
    assert isinstance(source, ZarrChunks)
    assert source.block == {"L1": 256, "L2b": 1024, "L4": 512, "L5": 1}.get(layout, 0)
    for ranks, halo, periodic in itertools.product(range(1, 5), HALOS, [(), ("lat", "lon")]):
        partition = Partition((Cut("lat", "domain", even(46, ranks)),))
        planned = plan(partition, source.layout, halo=halo, periodic=periodic, index={"time": 1})
        for rank in range(ranks):
            with OwnReader(threads=threads) as reader:
                before = source._store.fetched
                found = reader.read(source, planned, rank)
                stats = reader.stats
            rows, columns = planned[rank].dims[2], planned[rank].dims[3]
            lat = [row for run in rows.runs for row in range(run.source, run.source + run.size)]
            lon = [row for run in columns.runs for row in range(run.source, run.source + run.size)]
            np.testing.assert_array_equal(found.numpy(), values[1][:, lat][..., lon])
            assert stats.bytes_fetched == planned[rank].bytes_fetched
            assert stats.bytes_needed == planned[rank].bytes_needed
            assert 0 < stats.bytes_stored <= source._store.fetched - before
        if layout != "L2" and ranks == 4 and halo == 0:
            assert planned.amplification < 2


DAMAGED: dict[str, tuple[int, dict[str, Any], bool]] = {  # with a checksum of the values?
    "blosc": (2, {"compressors": numcodecs.Blosc("lz4", 5, 1, blocksize=256)}, False),
    "blosc zstd": (2, {"compressors": numcodecs.Blosc("zstd", 5, 2, blocksize=512)}, False),
    "zstd": (2, {"compressors": numcodecs.Zstd()}, False),
    "lz4": (2, {"compressors": numcodecs.LZ4()}, False),
    "gzip": (2, {"compressors": numcodecs.GZip()}, True),
    "zstd crc": (3, {"compressors": [ZstdCodec(), Crc32cCodec()]}, True),
    "shards": (3, {"shards": (4, 6, 8), "compressors": [ZstdCodec(), Crc32cCodec()]}, True),
}


@pytest.mark.parametrize("codec", DAMAGED)
def test_damaged_chunks_are_errors_or_values_and_never_more(tmp_path: Path, codec: str) -> None:
    zarr_format, options, checked = DAMAGED[codec]
    values = np.cumsum(np.random.default_rng(0).integers(0, 3, size=(4, 6, 8)), axis=1).astype(np.float32) + 1
    chunks = (4, 6, 4) if "shards" in options else (4, 6, 8)
    source = write(tmp_path, values, zarr_format, chunks=chunks, **options)
    (file,) = (path for path in (tmp_path / "g/x").rglob("*") if path.is_file() and path.name[0] in "0123456789")
    whole = file.read_bytes()
    random = np.random.default_rng(2)
    damaged = [whole[:size] for size in range(0, len(whole), max(1, len(whole) // 40))]
    for _ in range(200):
        bits = np.frombuffer(whole, np.uint8).copy()
        where = random.integers(0, min(len(bits), random.choice([24, len(bits)])))
        bits[where] ^= 1 << random.integers(0, 8)
        damaged.append(bits.tobytes())
    errors = 0
    for content in damaged:
        file.write_bytes(content)
        with open_store(tmp_path) as store:
            try:
                found = store["g/x"].read()
            except (CorruptChunkError, MissingChunkError) as error:
                assert "'g/x'" in str(error), error  # noqa: PT017
                assert "g/x/" in str(error), error  # noqa: PT017
                errors += 1
            else:
                assert not checked or np.array_equal(found, values)
    assert errors > 30
    file.write_bytes(whole)
    np.testing.assert_array_equal(source.read(), values)


def test_a_wrong_checksum_is_named(tmp_path: Path) -> None:
    values = values_of("f4")
    source = write(tmp_path, values, 3, chunks=SHAPE, compressors=[Crc32cCodec()])
    file = tmp_path / "g/x/c/0/0/0/0"
    file.write_bytes(b"\1" + file.read_bytes()[1:])
    source = open_store(tmp_path)["g/x"]
    with pytest.raises(CorruptChunkError, match=r"chunk \(0, 0, 0, 0\) of 'g/x' \('g/x/c/0/0/0/0' in .*checksum"):
        source.read()


@pytest.mark.parametrize("kind", ["fill", "raise"])
def test_fill_values_and_missing_chunks(tmp_path: Path, kind: Any) -> None:
    blosc: dict[int, Any] = {2: {"compressors": numcodecs.Blosc()}, 3: {"compressors": BloscCodec()}}
    for number, (zarr_format, fill) in enumerate(itertools.product((2, 3), (-999.5, float("nan"), float("-inf")))):
        path = tmp_path / str(number)
        group = zarr.open_group(path, mode="w", zarr_format=zarr_format)  # type: ignore[arg-type]
        array = group.create_array("x", shape=(4, 4), chunks=(2, 2), dtype="f4", fill_value=fill, **blosc[zarr_format])
        array[2:] = 1
        with open_store(path, missing=kind) as store:
            source = store["x"]
            assert isinstance(source, ZarrChunks)
            assert source.layout.block  # from a chunk that is there
            if kind == "fill":
                np.testing.assert_array_equal(source.read(), np.asarray(array[...]))
            else:
                with pytest.raises(MissingChunkError, match=r"chunk 'x/(c/0/0|0.0)' is not in .*missing='fill'"):
                    source.read()


def test_a_chunk_that_may_not_be_read_is_not_missing(tmp_path: Path) -> None:
    source = write(tmp_path, values_of("f4"), 2, chunks=SHAPE)
    file = tmp_path / "g/x/0.0.0.0"
    file.unlink()
    file.mkdir()
    with pytest.raises(ReadError, match=r"'g/x/0.0.0.0' in") as caught:
        open_store(tmp_path, missing="fill")["g/x"].read()
    assert not isinstance(caught.value, MissingChunkError)
    assert source.shape == SHAPE


def test_a_packed_array_is_decoded_from_reused_memory(tmp_path: Path) -> None:
    group = zarr.open_group(tmp_path, mode="w", zarr_format=2)
    array = group.create_array("x", shape=(6, 8), dtype=">i2", chunks=(4, 3), order="F")
    array[...] = np.arange(48).reshape(6, 8)
    array.attrs.update(scale_factor=0.5, add_offset=1.0)
    with open_store(tmp_path) as store, OwnReader(threads=2) as reader:
        for _ in range(2):
            found = reader.read(store["x"], plan(Partition(()), store["x"].layout), dtype=torch.float32)
            np.testing.assert_array_equal(found.numpy(), np.arange(48).reshape(6, 8) * 0.5 + 1)


@pytest.mark.parametrize("zarr_format", [2, 3])
def test_opening_consolidated_metadata_reads_one_object(
    tmp_path: Path, zarr_format: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from shardio.bytes import LocalBytes

    group = zarr.open_group(tmp_path, mode="w", zarr_format=zarr_format)
    for at in range(5):
        group.create_array(f"g{at}/x", shape=(2,), dtype="f4", attributes={"at": at})[...] = 1
    read: list[str] = []
    plain: Callable[..., Any] = LocalBytes.read

    def counting(store: LocalBytes, key: str, *args: Any) -> Any:
        found = plain(store, key, *args)
        read.extend([key] if found is not None else [])
        return found

    monkeypatch.setattr(LocalBytes, "read", counting)
    apart = {name: (source.attrs, source.shape) for name, source in open_store(tmp_path).items()}
    assert len(read) > 5
    with pytest.warns() if zarr_format == 3 else monkeypatch.context():
        zarr.consolidate_metadata(tmp_path)
    read.clear()
    together = {name: (source.attrs, source.shape) for name, source in open_store(tmp_path).items()}
    assert together == apart == {f"g{at}/x": ({"at": at}, (2,)) for at in range(5)}
    assert read == [{2: ".zmetadata", 3: "zarr.json"}[zarr_format]]

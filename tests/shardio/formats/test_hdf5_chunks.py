"""HDF5 datasets read from the file's bytes, beside h5py: every filter, dtype and byte order; damage; counted bytes."""

import itertools
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

from shardio import Cut, OwnReader, Partition, open_store, plan
from shardio.box import Span, slices
from shardio.codecs import deflate, hdf5
from shardio.errors import CorruptChunkError, MissingExtraError
from shardio.formats.hdf5 import Hdf5Source
from shardio.formats.hdf5_chunks import StoredSource
from shardio.partition import even
from shardio.testing import random_box

plugins = pytest.importorskip("hdf5plugin")
pytest.importorskip("imagecodecs")

FILTERS: dict[str, dict[str, Any]] = {
    "none": {},
    "gzip": {"compression": "gzip"},
    "gzip-shuffle": {"compression": "gzip", "shuffle": True},
    "gzip-shuffle-sum": {"compression": "gzip", "shuffle": True, "fletcher32": True},
    "sum": {"fletcher32": True},
    "lzf": {"compression": "lzf"},
    "lzf-shuffle-sum": {"compression": "lzf", "shuffle": True, "fletcher32": True},
    "blosc-lz4": plugins.Blosc("lz4", 5, plugins.Blosc.SHUFFLE),
    "blosc-zstd-bits": plugins.Blosc("zstd", 5, plugins.Blosc.BITSHUFFLE),
    "zstd": plugins.Zstd(),
    "zstd-shuffle": {**plugins.Zstd(), "shuffle": True},
    "lz4": plugins.LZ4(),
}
DTYPES = ("<f4", ">f4", "<f8", ">f8", "<f2", "i1", "<i2", ">i2", ">i4", "<i8", "u1", ">u8", "bool")
SHAPE = (5, 23, 9)
STORAGE = {"contiguous": None, "ragged": (2, 7, 4), "one": SHAPE, "odd": (1, 23, 3)}


def values(dtype: str) -> np.ndarray:
    return (np.random.default_rng(0).normal(size=SHAPE) * 30).astype(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_same_values_as_h5py(tmp_path: Path, dtype: str) -> None:
    """Each filter on each storage: all of it, and boxes, into contiguous and strided buffers."""
    random = np.random.default_rng(1)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for storage, name in itertools.product(STORAGE, FILTERS):
            if storage != "contiguous" or name == "none":
                options = FILTERS[name]
                file.create_dataset(f"{storage} {name}", data=values(dtype), chunks=STORAGE[storage], **options)
    with open_store(tmp_path / "a.h5") as store, h5py.File(tmp_path / "a.h5") as file:
        assert len(store) == 1 + (len(STORAGE) - 1) * len(FILTERS)
        for name, source in store.items():
            assert isinstance(source, StoredSource), name
            truth = file[name][()]
            assert source.dtype == truth.dtype.newbyteorder("=")
            np.testing.assert_array_equal(source.read(), truth, err_msg=name)
            for _ in range(4):
                box = random_box(random, SHAPE)
                spread = np.zeros([2 * span.size for span in box], source.dtype)[::2, ::2, ::2]
                source.read_into(box, spread)
                np.testing.assert_array_equal(spread, truth[slices(box)], err_msg=f"{name} {box}")


def test_scalar_and_empty(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["scalar"] = np.array(2.5, ">f8")
        file["empty"] = np.zeros((0, 3))
        file.create_dataset("chunked", shape=(0, 3), dtype="f4", chunks=(2, 3), maxshape=(None, 3))
    with open_store(tmp_path / "a.h5") as store:
        assert isinstance(store["scalar"], StoredSource)
        assert store["scalar"].read() == 2.5
        assert store["empty"].read().shape == store["chunked"].read().shape == (0, 3)


def write_at_hdf5s_mercy(file: h5py.File) -> None:
    """Datasets whose bytes are not simply their values."""
    numbers = np.arange(-60, 60).reshape(10, 12)
    file.create_dataset("nbit", data=numbers, chunks=(5, 6), dtype="i4", scaleoffset=0)
    file.create_dataset("bitshuffle", data=numbers.astype("f4"), chunks=(5, 6), **plugins.Bitshuffle())
    file.create_dataset("two compressors", data=numbers, chunks=(5, 6), compression="gzip", **{"shuffle": True})
    settings = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    settings.set_layout(h5py.h5d.COMPACT)
    space = h5py.h5s.create_simple((10, 12))
    h5py.Dataset(h5py.h5d.create(file.id, b"compact", h5py.h5t.NATIVE_INT16, space, settings))[:] = numbers
    twelve = h5py.h5t.NATIVE_INT16.copy()
    twelve.set_precision(12)  # HDF5 extends the sign, numpy has no such type
    h5py.Dataset(h5py.h5d.create(file.id, b"12 bits", twelve, space))[:] = numbers
    layout = h5py.VirtualLayout((10, 12), "i4")
    layout[:] = h5py.VirtualSource(file["nbit"])
    file.create_virtual_dataset("virtual", layout)
    file.create_dataset("complex", data=numbers * 1j)
    file.create_dataset("text", data=[["a"] * 12] * 10)


def test_what_hdf5_must_read_itself(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        write_at_hdf5s_mercy(file)
        file.create_dataset(
            "external", data=np.arange(120.0).reshape(10, 12), external=[(str(tmp_path / "x.bin"), 0, 960)]
        )
    with open_store(tmp_path / "a.h5") as store, h5py.File(tmp_path / "a.h5") as file:
        by_bytes = {name for name, source in store.items() if not isinstance(source, Hdf5Source)}
        assert by_bytes == {"two compressors"}  # which is one: gzip after shuffle
        for name, source in store.items():
            assert source.read().tolist() == file[name][()].tolist(), name


def test_files_that_only_hdf5_reads(tmp_path: Path) -> None:
    """Being written, in memory, behind a user block, linked from another file."""
    data = np.arange(12.0).reshape(3, 4)
    with h5py.File(tmp_path / "block.h5", "w", userblock_size=512) as file:
        file["x"] = data
    with open_store(tmp_path / "block.h5") as store:
        assert isinstance(store["x"], Hdf5Source)
        np.testing.assert_array_equal(store["x"].read(), data)
    with h5py.File(tmp_path / "link.h5", "w") as file:
        file["x"] = h5py.ExternalLink("block.h5", "x")
        file["y"] = data
    with open_store(tmp_path / "link.h5") as store:
        assert isinstance(store["x"], Hdf5Source)
        assert isinstance(store["y"], StoredSource)
        np.testing.assert_array_equal(store["x"].read(), data)
    with h5py.File(tmp_path / "new.h5", "w") as file:
        file["x"] = data  # perhaps not on disk yet
        np.testing.assert_array_equal(open_store(file)["x"].read(), data)
    with h5py.File(tmp_path / "memory.h5", "w", driver="core", backing_store=False) as file:
        file["x"] = data
        np.testing.assert_array_equal(open_store(file)["x"].read(), data)


def test_an_open_file_that_is_only_read(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["group/x"] = np.arange(5)
    with h5py.File(tmp_path / "a.h5") as file:
        store = open_store(file["group"])
        assert isinstance(store["x"], StoredSource)
        assert store["x"].read().tolist() == [0, 1, 2, 3, 4]
        store.close()
        assert file["group/x"][0] == 0


def test_reading_needs_no_lock_of_hdf5(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("x", data=values("f4"), chunks=(1, 7, 9), compression="gzip")
    with open_store(tmp_path / "a.h5") as store:
        source = store["x"]
        source.read((Span(0, 1), Span(0, 1), Span(0, 1)))  # finds out where the chunks lie
        found: list[np.ndarray] = []
        with h5py._hl.base.phil:
            thread = threading.Thread(target=lambda: found.append(source.read()))
            thread.start()
            thread.join(30)
        np.testing.assert_array_equal(found[0], values("f4"))


def test_chunks_that_filters_were_not_applied_to(tmp_path: Path) -> None:
    """Bit i of a chunk's mask says that filter i was left out."""
    data = np.arange(24, dtype="<i4").reshape(4, 6)
    shuffled = [half.view("u1").reshape(-1, 4).T.tobytes() for half in (data[:2].copy(), data[2:].copy())]
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for name, masks in (("neither", (3, 0)), ("deflate only", (1, 0)), ("shuffle only", (2, 3))):
            dataset = file.create_dataset(
                name, shape=(4, 6), dtype="<i4", chunks=(2, 6), compression="gzip", shuffle=True
            )
            for half, mask in enumerate(masks):
                raw = data[2 * half : 2 * half + 2].tobytes() if mask & 1 else shuffled[half]
                dataset.id.write_direct_chunk((2 * half, 0), raw if mask & 2 else zlib.compress(raw), mask)
        blosc = file.create_dataset("blosc", data=data, chunks=(2, 6), **plugins.Blosc("lz4"))
        blosc.id.write_direct_chunk((2, 0), data[2:].tobytes(), 1)
    with open_store(tmp_path / "a.h5") as store, h5py.File(tmp_path / "a.h5") as file:
        for name, source in store.items():
            assert isinstance(source, StoredSource)
            assert file[name][()].tolist() == data.tolist()
            np.testing.assert_array_equal(source.read(), data, err_msg=name)
            np.testing.assert_array_equal(source.read((Span(1, 3), Span(2, 4))), data[1:3, 2:4], err_msg=name)


def test_edge_chunks_that_may_be_stored_without_filters(tmp_path: Path) -> None:
    """HDF5 can leave filters out at the edge and set no mask; a chunk that looks like it is left to HDF5."""
    size = 64
    for zeros in range(size):
        data = np.random.default_rng(0).integers(1, 256, size, np.uint8)
        data[:zeros] = 0
        if len(zlib.compress(data.tobytes())) == size:
            break
    assert len(zlib.compress(data.tobytes())) == size
    with h5py.File(tmp_path / "a.h5", "w") as file:
        dataset = file.create_dataset("x", shape=(size + size // 2,), dtype="u1", chunks=(size,), compression="gzip")
        for start in (0, size):
            dataset.id.write_direct_chunk((start,), zlib.compress(data.tobytes()))
    with open_store(tmp_path / "a.h5") as store:
        source = store["x"]
        assert isinstance(source, StoredSource)
        assert source._table is not None
        assert source._table.doubtful()
        np.testing.assert_array_equal(source.read(), np.concatenate([data, data[: size // 2]]))


def test_checksums_that_early_versions_wrote_swapped(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        place = file.create_dataset("x", data=values("f4"), chunks=SHAPE, fletcher32=True).id.get_chunk_info(0)
    raw = bytearray((tmp_path / "a.h5").read_bytes())
    at = place.byte_offset + place.size
    raw[at - 4 : at] = bytes(raw[at - 4 : at][order] for order in (1, 0, 3, 2))
    (tmp_path / "a.h5").write_bytes(raw)
    with open_store(tmp_path / "a.h5") as store:
        np.testing.assert_array_equal(store["x"].read(), values("f4"))


DAMAGED = [name for name in FILTERS if name != "none"]


@pytest.mark.parametrize("name", DAMAGED)
@pytest.mark.parametrize("damage", ["cut", "trash", "bomb", "short"])
def test_damaged_chunks_are_named(tmp_path: Path, name: str, damage: str) -> None:
    """Chunk (1, 0, 0) of two is cut off, random, decodes to more than a chunk, or to less."""
    with h5py.File(tmp_path / "a.h5", "w") as file:
        dataset = file.create_dataset("x", data=np.zeros((4, 8, 16), "f4"), chunks=(2, 8, 16), **FILTERS[name])
        shape = (64 if damage == "bomb" else 1, 8, 16)
        other = file.create_dataset("y", data=np.zeros(shape, "f4"), chunks=shape, **FILTERS[name])
        _, good = dataset.id.read_direct_chunk((2, 0, 0))
        chunk = {
            "cut": good[: len(good) // 2],
            "trash": np.random.default_rng(0).bytes(len(good)),
            "bomb": other.id.read_direct_chunk((0, 0, 0))[1],
            "short": other.id.read_direct_chunk((0, 0, 0))[1],
        }[damage]
        dataset.id.write_direct_chunk((2, 0, 0), chunk)
    with open_store(tmp_path / "a.h5") as store:
        assert isinstance(store["x"], StoredSource)
        assert not store["x"].read((Span(0, 2), Span(0, 8), Span(0, 16))).any()
        with pytest.raises(CorruptChunkError, match=r"chunk \(1, 0, 0\) of 'x' \(.*a\.h5\) cannot be decoded"):
            store["x"].read()


def test_a_chunk_larger_than_any_filter_makes_it(tmp_path: Path) -> None:
    """The size comes from the file; no memory is taken for one that makes no sense."""
    with h5py.File(tmp_path / "a.h5", "w") as file:
        dataset = file.create_dataset("x", shape=(8,), dtype="f4", chunks=(8,), compression="gzip")
        dataset.id.write_direct_chunk((0,), bytes(3 << 20))
    with (
        open_store(tmp_path / "a.h5") as store,
        pytest.raises(CorruptChunkError, match="bytes or more, but decoded only 32"),
    ):
        store["x"].read()


def test_file_cut_behind_the_metadata(tmp_path: Path) -> None:
    """A descriptor that is held, and a file that somebody shortens."""
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("x", data=values("f8"), chunks=(1, 23, 9), compression="gzip")
        file.create_dataset("y", data=values("f8"))
    size = (tmp_path / "a.h5").stat().st_size
    with open_store(tmp_path / "a.h5") as store:
        store["x"].read()
        with (tmp_path / "a.h5").open("r+b") as file:
            file.truncate(size // 8)
        for name in "xy":
            with pytest.raises(CorruptChunkError, match=f"of {name!r} .*a\\.h5.* ends at byte"):
                store[name].read()


@pytest.fixture
def no_imagecodecs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def missing(library: str) -> None:
        raise MissingExtraError(library)

    caches = (deflate._fast, hdf5._decoder)
    for cached in caches:
        cached.cache_clear()
    monkeypatch.setattr("shardio.extras.load", missing)
    yield
    for cached in caches:
        cached.cache_clear()


@pytest.mark.usefixtures("no_imagecodecs")
def test_without_the_fast_extra(tmp_path: Path) -> None:
    """Deflate by zlib, lzf and lz4 by HDF5; damage is found all the same."""
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for name, options in FILTERS.items():
            file.create_dataset(name, data=values("f4"), chunks=(2, 7, 4), **options)
        bad = file.create_dataset("bad", data=values("f4"), chunks=(2, 7, 4), compression="gzip")
        bad.id.write_direct_chunk((0, 0, 0), zlib.compress(bytes(1 << 20)))
        bad.id.write_direct_chunk((2, 0, 0), bad.id.read_direct_chunk((2, 0, 0))[1][:-9])
        bad.id.write_direct_chunk((4, 0, 0), b"no deflate stream")
    with open_store(tmp_path / "a.h5") as store:
        for name in FILTERS:
            assert isinstance(store[name], Hdf5Source if name.startswith("lz") else StoredSource)
            np.testing.assert_array_equal(store[name].read(), values("f4"), err_msg=name)
        for row, reason in ((0, "more than 224 bytes"), (2, "has no end"), (4, "no deflate stream")):
            with pytest.raises(CorruptChunkError, match=reason):
                store["bad"].read((Span(row, row + 1), Span(0, 7), Span(0, 4)))


GRID = (2, 3, 45, 64)
"""Time, channel, rows, columns."""
LAYOUTS: dict[str, dict[str, Any]] = {
    "L6": {},
    "L7": {"chunks": (1, 1, 45, 64), "compression": "gzip", "shuffle": True},
    "L8": {"chunks": (1, 1, 6, 64), **plugins.Blosc("lz4", 5, plugins.Blosc.SHUFFLE)},
    "L8b": {"chunks": (1, 1, 6, 64), "compression": "lzf", "shuffle": True},
    "blocks": {"chunks": (1, 1, 45, 64), **plugins.Blosc("lz4", 1, plugins.Blosc.SHUFFLE)},
}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("periodic", [(), ("dim_2",)])
def test_decodes_the_planned_bytes(tmp_path: Path, name: str, ranks: int, periodic: tuple[str, ...]) -> None:
    data = np.random.default_rng(0).normal(size=GRID).round(0).astype("f4")
    with h5py.File(tmp_path / "a.h5", "w") as file:
        dataset = file.create_dataset("x", data=data, **LAYOUTS[name])
        sizes = {}
        for at in range(dataset.id.get_num_chunks() if dataset.chunks else 0):
            found = dataset.id.get_chunk_info(at)
            sizes[tuple(i // n for i, n in zip(found.chunk_offset, dataset.chunks, strict=True))] = found.size
    with open_store(tmp_path / "a.h5") as store:
        source = store["x"]
        assert isinstance(source, StoredSource)
        partition = Partition((Cut("dim_2", "domain", even(GRID[2], ranks)),))
        planned = plan(partition, source.layout, halo=3, periodic=periodic)
        total = 0
        for rank in range(ranks):
            with OwnReader(threads=2) as reader:
                found = reader.read(source, planned, rank, dtype=torch.float32)
                rows = np.concatenate([np.arange(r.source, r.source + r.size) for r in planned[rank].dims[2].runs])
                np.testing.assert_array_equal(found.numpy(), data[:, :, rows])
                assert reader.stats.bytes_fetched == planned[rank].bytes_fetched
                assert reader.stats.bytes_needed == planned[rank].bytes_needed
                total += reader.stats.bytes_stored
        assert total > 0
        if name in ("L7", "L8b"):  # whole chunks, each as often as ranks need it
            assert total == sum(sizes[chunk] * len(readers) for chunk, readers in planned.readers().items())

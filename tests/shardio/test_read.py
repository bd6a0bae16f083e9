"""Slabs of real stores against numpy, and what reading them fetches, counted by the store itself."""

import gc
import pickle
import threading
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
import xarray as xr
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from zarr.storage import MemoryStore

from shardio import Cut, OwnReader, Partition, Request, Source, find_grid, make_partition, open_store, plan, read
from shardio.box import Box
from shardio.cf import window
from shardio.decode import Decode
from shardio.errors import CorruptChunkError, DimensionError, PartitionError
from shardio.partition import even
from shardio.testing import CountingStore

VALUES = np.random.default_rng(0).normal(size=(4, 3, 23, 17)).astype(np.float32)
DIMS = ("time", "level", "lat", "lon")


def counted(chunks: tuple[int, ...], **options: Any) -> tuple[CountingStore, Source]:
    """A counted, uncompressed array: its bytes are its values."""
    store = CountingStore(MemoryStore())
    group = zarr.open_group(store, mode="w", zarr_format=3)
    array = group.create_array(
        "x", shape=VALUES.shape, dtype="float32", chunks=chunks, compressors=None, dimension_names=DIMS, **options
    )
    array[...] = VALUES
    source = open_store(store)["x"]
    store.reset()
    return store, source


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("chunks", [(1, 1, 23, 17), (1, 3, 5, 17), (2, 2, 6, 4), (1, 1, 1, 17)])
@pytest.mark.parametrize("halo", [0, 2, {"lat": (1, 3), "lon": (2, 2)}])
def test_no_rank_reads_more_than_its_slab_and_halo_need(ranks: int, chunks: tuple[int, ...], halo: Any) -> None:
    store, source = counted(chunks)
    partition = Partition((Cut("lat", "domain", even(23, ranks)),))
    planned = plan(partition, source.layout, halo=halo, periodic=("lon",), index={"time": 2})
    low, high = halo["lat"] if isinstance(halo, dict) else (halo, halo)
    east_west = 2 if isinstance(halo, dict) else 0
    for rank in range(ranks):
        store.reset()
        with OwnReader(threads=2) as reader:
            found = reader.read(source, planned, rank)
        lat = partition.spans(rank)["lat"]
        rows = np.arange(max(0, lat.start - low), min(23, lat.stop + high))
        columns = np.arange(-east_west, 17 + east_west)
        expected = VALUES[2][:, rows][..., np.take(np.arange(17), columns, mode="wrap")]
        np.testing.assert_array_equal(found.numpy(), expected)

        needed = {
            (2 // chunks[0], z // chunks[1], y // chunks[2], x // chunks[3])
            for z in range(3)
            for y in rows.tolist()
            for x in range(17)
        }
        assert dict(store.gets) == {"x/c/" + "/".join(map(str, chunk)): 1 for chunk in needed}
        assert store.bytes == planned[rank].bytes_fetched == reader.stats.bytes_fetched
        assert len(needed) == planned[rank].chunk_count == reader.stats.chunks
        assert planned[rank].bytes_needed == expected.nbytes == reader.stats.bytes_needed


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_ranks_aligned_to_chunks_read_the_sample_once(ranks: int) -> None:
    store, source = counted((1, 3, 5, 17))
    sizes = {"lat": 23}
    partition = make_partition({"lat": "d"}, sizes=sizes, ranks={"d": ranks}, how="aligned", chunks={"lat": 5})
    planned = plan(partition, source.layout, index={"time": 1})
    with OwnReader(threads=1) as reader:
        parts = [reader.read(source, planned, rank) for rank in range(ranks)]
    np.testing.assert_array_equal(torch.cat(parts, dim=1).numpy(), VALUES[1])
    assert set(store.gets.values()) == {1}
    assert store.bytes == 5 * 3 * 5 * 17 * 4


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_two_dims_halo_wrap_and_index_against_numpy(data: st.DataObject) -> None:
    store, source = counted(tuple(data.draw(st.integers(-(-size // 3), size)) for size in VALUES.shape))
    parts = data.draw(st.sampled_from([(1, 1), (2, 2), (3, 2), (1, 4)]))
    partition = Partition((Cut("lat", "a", even(23, parts[0])), Cut("lon", "b", even(17, parts[1]))))
    halo = data.draw(st.integers(0, 17))
    time = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=3))
    level = data.draw(st.integers(-3, 2))
    planned = plan(partition, source.layout, halo=halo, periodic=("lat", "lon"), index={"time": time, "level": level})
    rank = data.draw(st.integers(0, partition.ranks - 1))
    with OwnReader(threads=data.draw(st.sampled_from([1, 3]))) as reader:
        found, valid = reader.read(source, planned, rank, dtype=torch.float64, mask=True)
    expected = VALUES[time][:, level]
    for axis, (dim, size) in enumerate((("lat", 23), ("lon", 17)), start=1):
        span = partition.spans(rank)[dim]
        expected = np.take(expected, np.arange(span.start - halo, span.stop + halo) % size, axis=axis)
    np.testing.assert_array_equal(found.numpy(), expected)
    assert found.is_contiguous()
    assert valid.all()
    assert store.bytes == planned[rank].bytes_fetched


@pytest.mark.parametrize(
    ("lon", "low", "high", "first"),
    [(np.arange(0, 360, 0.25), -2.5, 0.5, 357.5), (np.arange(-180, 180, 0.25), 179, 181, 179.0)],
)
def test_a_box_across_the_seam_is_whole_and_no_more(lon: np.ndarray, low: float, high: float, first: float) -> None:
    """Case R24: every column holds its degrees; two ranks, with a halo that goes on beyond the box and around."""
    counting = CountingStore(MemoryStore())
    group = zarr.open_group(counting, mode="w")
    stored = np.stack([lon, lon + 1000]).astype(np.float32)
    names = ("lat", "lon")
    group.create_array("x", shape=(2, 1440), dtype="f4", chunks=(2, 90), dimension_names=names)[...] = stored
    source = open_store(counting)["x"]
    start, size = window(lon, low, high, period=360)
    partition = Partition((Cut("lon", "domain", even(size, 2), start=start),))
    planned = plan(partition, source.layout, halo={"lon": 2}, periodic=("lon",))
    counting.reset()
    parts = [read(source, planned, rank) for rank in (0, 1)]
    expected = (first + 0.25 * np.arange(-2, size + 2) - lon[0]) % 360 + lon[0]
    sizes = even(size, 2)
    np.testing.assert_array_equal(parts[0][0].numpy(), expected[: sizes[0] + 4])
    np.testing.assert_array_equal(parts[1][0].numpy(), expected[sizes[0] :])
    np.testing.assert_array_equal(parts[1][1].numpy(), expected[sizes[0] :] + 1000)
    assert set(counting.gets) == {"x/c/0/0", "x/c/0/15"}, "two chunks of 16 hold the box"


@pytest.mark.parametrize("rows", [[7, 8, 9], [2, 3, 5, 11, 12, 20], [20, 3, 3]])
def test_rows_by_number_cost_their_chunks_alone(rows: list[int]) -> None:
    """A tenth of the rows, without and with holes: as a slice where they are one, and byte by byte the same."""
    store, source = counted((4, 3, 2, 17))
    picked = read(source, plan(Partition(()), source.layout, index={"lat": rows}))
    np.testing.assert_array_equal(picked.numpy(), VALUES[:, :, rows])
    assert dict(store.gets) == {f"x/c/0/0/{row // 2}/0": 1 for row in rows}
    bytes_of_rows = store.bytes
    assert bytes_of_rows == len({row // 2 for row in rows}) * 4 * 3 * 2 * 17 * 4
    if rows == list(range(rows[0], rows[-1] + 1)):
        store.reset()
        sliced = read(source, plan(Partition((Cut("lat", "domain", (len(rows),), start=rows[0]),)), source.layout))
        assert torch.equal(sliced, picked)
        assert store.bytes == bytes_of_rows


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_721_rows(tmp_path: Path, ranks: int) -> None:
    rows = np.arange(721, dtype=np.int32)[:, None].repeat(3, axis=1)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"] = rows
    with open_store(tmp_path / "a.h5") as store:
        partition = make_partition({"dim_0": "domain"}, sizes={"dim_0": 721}, ranks={"domain": ranks})
        planned = plan(partition, store["x"].layout)
        parts = [read(store["x"], planned, rank, dtype=torch.int32) for rank in range(ranks)]
    assert [len(part) for part in parts] == list(even(721, ranks))
    np.testing.assert_array_equal(torch.cat(parts).numpy(), rows)
    assert planned.amplification == 1.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_dtypes(dtype: torch.dtype) -> None:
    _, source = counted((1, 3, 5, 17))
    found = read(source, plan(Partition(()), source.layout), dtype=dtype)
    assert found.dtype == dtype
    assert torch.equal(found, torch.from_numpy(VALUES).to(dtype))


@pytest.mark.parametrize("kind", ["zarr", "hdf5"])
def test_packed_int16_comes_in_the_dtype_asked_for(tmp_path: Path, kind: str) -> None:
    """Case R20: scale 0.01 and offset 273.15, beside xarray, which makes float64 of them."""
    stored = np.random.default_rng(0).integers(-5000, 5000, size=(9, 8)).astype(np.int16)
    stored[4, 4] = -32767
    attrs = {"scale_factor": 0.01, "add_offset": 273.15, "_FillValue": np.int16(-32767)}
    data, path = xr.Dataset({"x": (("lat", "lon"), stored, attrs)}), tmp_path / "a"
    data.to_zarr(path) if kind == "zarr" else data.to_netcdf(path, engine="h5netcdf")
    with xr.open_dataset(path, engine="zarr" if kind == "zarr" else "h5netcdf") as dataset:
        truth = dataset["x"].values
    assert truth.dtype == np.float64
    with open_store(path) as store:
        source = store["x"]
        planned = plan(Partition(()), source.layout)
        assert source.dtype == np.int16
        assert read(source, planned).dtype == torch.float32
        for dtype, accuracy in ((torch.float32, 2e-7), (torch.float64, 1e-15)):
            found = read(source, planned, dtype=dtype)
            assert found.dtype == dtype
            np.testing.assert_allclose(found.numpy(), truth, rtol=accuracy)


@pytest.mark.parametrize("kind", ["zarr 2", "hdf5", "netcdf 3"])
def test_big_endian_floats_come_native(tmp_path: Path, kind: str) -> None:
    """Case R22: as numpy arrays that torch takes, and as tensors."""
    values, path = np.random.default_rng(0).normal(size=(9, 8)).astype(">f4"), tmp_path / "a"
    if kind == "zarr 2":
        zarr.open_group(path, mode="w", zarr_format=2).create_array("x", data=values, chunks=(4, 3))
    elif kind == "hdf5":
        with h5py.File(path, "w") as file:
            file.create_dataset("x", data=values, chunks=(4, 3), compression="gzip")
    else:
        xr.Dataset({"x": (("lat", "lon"), values)}).to_netcdf(path, engine="scipy", format="NETCDF3_CLASSIC")
    with open_store(path) as store:
        source = store["x"]
        assert source.dtype.isnative
        assert torch.from_numpy(source.read()).tolist() == values.tolist()
        planned = plan(Partition((Cut(source.dims[0], "domain", (4, 5)),)), source.layout)
        found = read(source, planned, 1)
    assert found.dtype == torch.float32
    assert found.tolist() == values[4:].tolist()


def test_packed_big_endian_f_order_come_native_and_contiguous(tmp_path: Path) -> None:
    """Case R23: a slab of rows of a version 2 array in F order."""
    stored = np.random.default_rng(0).integers(-1000, 1000, size=(9, 8)).astype(">i2")
    group = zarr.open_group(tmp_path / "a.zarr", mode="w", zarr_format=2)
    array = group.create_array("x", shape=(9, 8), dtype=">i2", chunks=(4, 3), order="F")
    array[...] = stored
    array.attrs.update(scale_factor=0.01, add_offset=273.15, _FillValue=int(stored[4, 4]))
    with open_store(tmp_path / "a.zarr") as store:
        planned = plan(Partition((Cut("dim_0", "domain", (4, 5)),)), store["x"].layout, halo=1)
        found = read(store["x"], planned, 1)
    assert found.is_contiguous()
    expected = np.where(stored == stored[4, 4], np.nan, stored * 0.01 + 273.15)[3:]
    np.testing.assert_allclose(found.numpy(), expected, rtol=2e-7)


def test_many_requests_into_one_strided_buffer() -> None:
    _, source = counted((1, 1, 8, 17))
    planned = plan(Partition((Cut("lat", "domain", (12, 11)),)), source.layout)
    buffer = torch.full((2, 3, 11, 17, 2), -1.0)
    requests = [
        Request(source, planned[1].at({"time": time, "level": level}), buffer[time, level, ..., 0])
        for time in range(2)
        for level in range(3)
    ]
    with OwnReader(threads=3) as reader:
        reader.read_all(requests)
    np.testing.assert_array_equal(buffer[..., 0].numpy(), VALUES[:2, :, 12:])
    assert (buffer[..., 1] == -1).all()


def test_out_is_filled_and_given_back() -> None:
    _, source = counted((1, 1, 8, 17))
    planned = plan(Partition(()), source.layout, index={"time": 0, "level": 0})
    out = torch.empty(23, 17, dtype=torch.float64)
    assert read(source, planned, out=out) is out
    np.testing.assert_array_equal(out.numpy(), VALUES[0, 0])
    with pytest.raises(DimensionError, match=r"out is \(17, 23\) .* the plan of 'x' gives \(23, 17\) \('lat', 'lon'\)"):
        read(source, planned, out=torch.empty(17, 23))


def test_a_plan_for_another_layout_is_refused() -> None:
    _, source = counted((1, 1, 8, 17))
    _, other = counted((1, 1, 9, 17))
    with pytest.raises(DimensionError, match="the plan was made for"):
        read(source, plan(Partition(()), other.layout))


class Slow(Source):
    """Reads only when two threads do so at once, or fails where told."""

    def __init__(self, fails: int | None = None) -> None:
        super().__init__("slow", dims=("x",), shape=(8,), chunks=(1,), dtype=np.dtype("f4"), attrs={}, decode=Decode())
        self.fails = fails
        self.meeting = threading.Barrier(2, timeout=10)

    def read_into(self, box: Box, out: np.ndarray) -> None:
        rows = range(*box[0])
        if self.fails in rows:
            raise RuntimeError("bad bits")
        if self.fails is None:
            self.meeting.wait()  # ends only if two threads read at once
        out[...] = rows


def test_several_chunks_at_once() -> None:
    source = Slow()
    with OwnReader(threads=2) as reader:
        assert reader.read(source, plan(Partition(()), source.layout)).tolist() == list(range(8))


@pytest.mark.parametrize("threads", [1, 3])
def test_an_error_names_chunk_and_array_and_the_reader_goes_on(threads: int) -> None:
    source = Slow(fails=3)
    planned = plan(Partition((Cut("x", "domain", (2, 6)),)), source.layout)
    with OwnReader(threads=threads) as reader:
        with pytest.raises(CorruptChunkError, match=r"chunk \(3,\) of 'slow' .*RuntimeError: bad bits") as caught:
            reader.read(source, planned, 1)
        assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
        assert reader.read(source, planned, 0).tolist() == [0, 1]


def test_one_reader_serves_several_threads() -> None:
    _, source = counted((1, 1, 8, 17))
    planned = plan(Partition((Cut("lat", "domain", (12, 11)),)), source.layout)
    with OwnReader(threads=2) as reader:
        found: dict[int, torch.Tensor] = {}

        def work(time: int) -> None:
            found[time] = reader.read(source, planned, time % 2, index={"time": time})

        threads = [threading.Thread(target=work, args=(time,)) for time in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    for time in range(4):
        np.testing.assert_array_equal(found[time].numpy(), VALUES[time][:, [slice(0, 12), slice(12, 23)][time % 2]])


def test_threads_end_with_the_reader() -> None:
    before = threading.active_count()
    _, source = counted((1, 1, 2, 17))
    for _ in range(3):
        read(source, plan(Partition(()), source.layout), threads=4)
    gc.collect()
    named = [thread.name for thread in threading.enumerate() if thread.name.startswith("shardio-read")]
    assert named == []
    assert threading.active_count() <= before + 8  # zarr's own loop and pool stay
    with pytest.raises(ValueError, match="threads=0; at least 1"):
        OwnReader(threads=0)


def test_more_ranks_than_rows_on_a_real_grid(shared_data: Path) -> None:
    with open_store(shared_data / "weather-series/ERA5_example_data.nc") as store:
        grid = find_grid(store)
        with pytest.raises(PartitionError, match="2 rows cannot be cut over 4 ranks"):
            make_partition({grid.spatial[0]: "domain"}, sizes=grid.sizes, ranks={"domain": 4})

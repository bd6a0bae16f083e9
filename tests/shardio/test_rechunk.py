"""Rechunk: the same values, attributes and packing in other chunks; killed and resumed; never half there."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import xarray as xr
import zarr
from typer.testing import CliRunner

from shardio import open_store
from shardio import rechunk as rechunking
from shardio.cli import app
from shardio.errors import CorruptChunkError, DestinationError, MissingChunkError
from shardio.rechunk import Journal, rechunk
from shardio.slab_chunks import Chunking

DIMS = ("time", "level", "lat", "lon")


def run(*arguments: object) -> tuple[int, str]:
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["rechunk", *map(str, arguments)])
    return result.exit_code, result.output


@pytest.fixture
def dataset() -> xr.Dataset:
    random = np.random.default_rng(0)
    packed = xr.DataArray(random.normal(280, 10, (7, 2, 12, 10)).round(1), dims=DIMS)
    packed[0, 0, 0] = np.nan
    floats = xr.DataArray(random.normal(size=(7, 12, 10)).astype("f4"), dims=("time", "lat", "lon"))
    floats[3] = np.nan
    return xr.Dataset(
        {
            "t": packed.assign_attrs(units="K", coordinates="region"),
            "u": floats.assign_attrs(long_name="wind", cell_methods="time: mean", valid_min=-100.0),
            "mask": (("lat", "lon"), random.integers(0, 2, (12, 10)).astype("i1")),
        },
        coords={
            "time": np.arange(7).astype("datetime64[D]").astype("datetime64[ns]"),
            "level": ("level", [500.0, 850.0], {"units": "hPa"}),
            "lat": ("lat", np.linspace(55, 0, 12), {"units": "degrees_north"}),
            "lon": ("lon", np.arange(10) * 36.0, {"units": "degrees_east"}),
            "region": ("lat", np.array(["a", "bcd"] * 6)),
        },
        attrs={"title": "a test", "history": ["one", "two"]},
    )


PACKED = {"dtype": "int16", "scale_factor": 0.1, "add_offset": 273.15, "_FillValue": -999}
CHUNKS = {"t": {"chunks": (2, 1, 12, 10), **PACKED}, "u": {"chunks": (3, 5, 4)}}


@pytest.fixture
def source(tmp_path: Path, dataset: xr.Dataset) -> Path:
    dataset.to_zarr(tmp_path / "source.zarr", encoding=CHUNKS)
    return tmp_path / "source.zarr"


def plain(attrs: Mapping[str, Any]) -> dict[str, Any]:
    """Attributes without numpy's types, and without the missing value, which `Decode` has."""
    return {key: rechunking._plain(value) for key, value in sorted(attrs.items()) if key != "_FillValue"}


def assert_same(one: Path, other: Path) -> None:
    """Stored values to the bit, attributes and dims, in what we read."""
    with open_store(one) as first, open_store(other) as second:
        assert set(first) == set(second)
        for name in first:
            a, b = first[name], second[name]
            assert (a.dims, a.shape, a.dtype) == (b.dims, b.shape, b.dtype), name
            assert a.decode == b.decode, name
            assert str(plain(a.attrs)) == str(plain(b.attrs)), name
            assert a.read().tobytes() == b.read().tobytes() or a.dtype.kind in "OT", name
            np.testing.assert_array_equal(a.read(), b.read())


@pytest.mark.parametrize(
    "options", [(), ("--no-shards", "--codec", "none"), ("--codec", "zstd", "--chunks", "time=2,lat=3")]
)
def test_the_same_store_in_other_chunks(source: Path, tmp_path: Path, options: tuple[str, ...]) -> None:
    code, output = run(source, tmp_path / "out.zarr", "--for-mesh", "2x2", "--halo", 1, *options)
    assert code == 0, output
    assert_same(source, tmp_path / "out.zarr")
    with xr.open_zarr(source) as one, xr.open_zarr(tmp_path / "out.zarr") as other:
        xr.testing.assert_identical(one.load(), other.load())
        for key in ("dtype", "scale_factor", "add_offset", "_FillValue"):
            assert one["t"].encoding[key] == other["t"].encoding[key]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.zarr", "source.zarr"]
    array = zarr.open_array(tmp_path / "out.zarr/u", mode="r")
    if "zstd" in options:
        assert array.chunks == (2, 3, 10)
    else:
        assert array.chunks == (7, 12, 10)  # 480 bytes a step: small fields are not divided, but put together
    assert (array.shards is None) == ("zstd" not in options)


def test_version_2(source: Path, tmp_path: Path) -> None:
    code, output = run(source, tmp_path / "out.zarr", "-m", "2", "--zarr-format", 2)
    assert code == 0, output
    with xr.open_zarr(source) as one, xr.open_zarr(tmp_path / "out.zarr") as other:
        xr.testing.assert_identical(one.load(), other.load())
    assert json.loads((tmp_path / "out.zarr/t/.zarray").read_text())["fill_value"] == -999
    assert (tmp_path / "out.zarr/.zmetadata").exists()


def test_other_formats(dataset: xr.Dataset, tmp_path: Path) -> None:
    dataset.drop_vars("region").to_netcdf(tmp_path / "a.nc", engine="h5netcdf")
    code, output = run(tmp_path / "a.nc", tmp_path / "out.zarr", "-m", "2", "--halo", 1)
    assert code == 0, output
    assert_same(tmp_path / "a.nc", tmp_path / "out.zarr")
    with xr.open_dataset(tmp_path / "a.nc") as one, xr.open_zarr(tmp_path / "out.zarr") as other:
        xr.testing.assert_equal(one.load(), other.load())


def test_unwritten_values_are_written(tmp_path: Path) -> None:
    """Chunks that hold nothing but fill values are stored, so that an absent chunk of the copy is a lost one."""
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("x", (4, 6, 6), "f4", chunks=(1, 6, 6))[:2] = 1
        for at, dim in enumerate(("time", "lat", "lon")):
            file["x"].dims[at].label = dim
    code, output = run(tmp_path / "a.h5", tmp_path / "out.zarr", "-m", "2")
    assert (code, "MissingChunkError" in output) == (1, True)
    assert not (tmp_path / "out.zarr").exists()
    code, output = run(tmp_path / "a.h5", tmp_path / "out.zarr", "-m", "2", "--missing", "fill")
    assert code == 0, output
    with open_store(tmp_path / "out.zarr", missing="raise") as store:
        assert store["x"].read().sum() == 2 * 36


@pytest.mark.parametrize("name", ["zarr/test_zarr", "grid-netcdf/test4.nc", "weather-series/ERA5_example_data.nc"])
def test_real_stores(shared_data: Path, tmp_path: Path, name: str) -> None:
    code, output = run(shared_data / name, tmp_path / "out.zarr", "-m", "2", "--halo", 3, "--periodic")
    assert code == 0, output
    assert_same(shared_data / name, tmp_path / "out.zarr")


def test_a_real_grib(shared_data: Path, tmp_path: Path) -> None:
    """Dates become numbers with units; they read as the same dates."""
    pytest.importorskip("cfgrib")
    code, output = run(shared_data / "grib/lambert_grid.grib", tmp_path / "out.zarr", "-m", "2")
    assert code == 0, output
    with open_store(shared_data / "grib/lambert_grid.grib") as one, xr.open_zarr(tmp_path / "out.zarr") as other:
        for name, array in one.items():
            np.testing.assert_array_equal(array.read(), other[name].values, err_msg=name)


KILLED = """
import os, sys
from shardio import rechunk
from shardio.cli import app
left, plain = [{parts}], rechunk._copy_piece
def copy(*arguments):
    if not left[0]:
        os._exit(9)
    left[0] -= 1
    return plain(*arguments)
rechunk._copy_piece = copy
app(sys.argv[1:])
"""


def test_killed_and_run_again(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was done before is not done again, and nothing looks complete in between."""
    arguments = [source, tmp_path / "out.zarr", "-m", "2", "--no-shards", "--threads", 1, "--chunks", "time=1"]
    script = [sys.executable, "-c", KILLED.format(parts=5), "rechunk", *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    assert subprocess.run(script, env=environment, timeout=110).returncode == 9
    assert not (tmp_path / "out.zarr").exists()
    work = tmp_path / "out.zarr.partial"
    before = {json.loads(line)[0] for line in (work / "done.jsonl").read_text().splitlines()}
    assert len(before) == 5
    with (work / "done.jsonl").open("a") as journal:
        journal.write('["u 0:')  # a line cut short
    copied: list[str] = []
    plain = rechunking._copy_piece

    def counting(*arguments: object) -> str:
        copied.append(arguments[-1].key)
        return plain(*arguments)

    monkeypatch.setattr(rechunking, "_copy_piece", counting)
    code, output = run(*arguments)
    assert code == 0, output
    assert not before & set(copied)
    assert len(copied) == len(set(copied)) > 0
    assert f"{len(copied)} parts copied" in output
    assert_same(source, tmp_path / "out.zarr")
    assert not work.exists()


def test_damage_to_what_was_copied_is_found_and_mended(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file cut short between two runs, as a crash of the machine leaves them."""
    chunking = {"u": Chunking((1, 12, 10)), "t": Chunking((1, 2, 12, 10)), "time": Chunking((7,))}
    with open_store(source) as store:
        monkeypatch.setattr(rechunking, "_damaged", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            rechunk(store, tmp_path / "out.zarr", chunking)
        monkeypatch.undo()
        chunk = tmp_path / "out.zarr.partial/data/u/c/2/0/0"
        chunk.write_bytes(chunk.read_bytes()[:-7])
        (tmp_path / "out.zarr.partial/data/t/c/0/0/0/0").unlink()
        assert rechunk(store, tmp_path / "out.zarr", chunking) == 2
        with open_store(tmp_path / "out.zarr") as written:
            for name in chunking:
                np.testing.assert_array_equal(written[name].read(), store[name].read())


def test_what_never_reads_back_right_is_not_put_in_place(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        rechunking,
        "_checksum",
        lambda store, piece: "0" if piece.array == "u" else rechunking.checksum_of(store[piece.array].read(piece.box)),
    )
    with (
        open_store(source) as store,
        pytest.raises(CorruptChunkError, match=r"do not read back as they were copied, among them u 0:"),
    ):
        rechunk(store, tmp_path / "out.zarr", {"u": Chunking((1, 12, 10)), "lat": Chunking((12,))})
    assert not (tmp_path / "out.zarr").exists()


def test_a_lost_chunk_of_the_source_stops_it_and_it_goes_on_once_restored(source: Path, tmp_path: Path) -> None:
    lost = source / "u/c/1/0/0"
    content = lost.read_bytes()
    lost.unlink()
    chunking = {"u": Chunking((3, 12, 10))}
    with open_store(source) as store:
        with pytest.raises(MissingChunkError, match="u/c/1/0/0"):
            rechunk(store, tmp_path / "out.zarr", chunking, threads=1)
        lost.write_bytes(content)
        assert 0 < rechunk(store, tmp_path / "out.zarr", chunking, threads=1) <= 3
        with open_store(tmp_path / "out.zarr") as written:
            np.testing.assert_array_equal(written["u"].read(), store["u"].read())


def test_other_settings_and_a_destination_that_exists(source: Path, tmp_path: Path) -> None:
    with open_store(source) as store:
        settings = rechunking._settings(store, [], "zstd", 3)
        (tmp_path / "out.zarr.partial").mkdir()
        Journal(tmp_path / "out.zarr.partial", settings).begin()
        with pytest.raises(DestinationError, match=r"other settings \(they differ in: codec, arrays\)"):
            rechunk(store, tmp_path / "out.zarr", {"u": Chunking((1, 12, 10))})
    shutil.rmtree(tmp_path / "out.zarr.partial")
    for destination, words in ((source, "exists already"), ("s3://me:secret@bucket/a.zarr", "is a URL")):
        code, output = run(source, destination, "-m", "2")
        assert code == 1
        assert words in output
        assert "secret" not in output
    for options, words in (
        (("--codec", "zip"), "codec 'zip' is not known"),
        (("--chunks", "depth=1"), "--chunks 'depth=1' is not understood"),
        (("--zarr-format", 4), "Zarr format 4 is not known"),
    ):
        code, output = run(source, tmp_path / "out.zarr", "-m", "2", *options)
        assert code == 1
        assert words in output
        assert not (tmp_path / "out.zarr").exists()


def test_source_chunks_are_decoded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four time steps to a chunk of the source, one to a chunk of the copy."""
    field = np.arange(8 * 6 * 5.0).reshape(8, 6, 5)
    xr.Dataset({"u": (("time", "lat", "lon"), field)}).to_zarr(
        tmp_path / "a.zarr", encoding={"u": {"chunks": (4, 4, 5)}}
    )
    read = []
    with open_store(tmp_path / "a.zarr") as store:
        plain = store["u"].read
        monkeypatch.setattr(store["u"], "read", lambda box: (read.append(box), plain(box))[1])
        rechunk(store, tmp_path / "out.zarr", {"u": Chunking((1, 6, 5))})
    assert sorted(box[0] for box in read) == [(0, 4), (4, 8)]


@pytest.mark.parametrize("chunking", [Chunking((4, 3)), Chunking((2, 3), (4, 6))])
def test_no_two_parts_share_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunking: Chunking) -> None:
    """Case R37: two threads copy chunks of 5 rows to chunks (shards) of 4; by source chunk, rows would be lost."""
    values = np.arange(1, 20 * 6 + 1, dtype=np.int32).reshape(20, 6)
    zarr.open_group(tmp_path / "a.zarr", mode="w").create_array("x", data=values, chunks=(5, 6))
    monkeypatch.setattr(rechunking, "PART_BYTES", 1)  # parts as small as they can be
    boxes: list[Any] = []
    copy = rechunking._copy_piece
    monkeypatch.setattr(rechunking, "_copy_piece", lambda *args: (boxes.append(args[-1].box), copy(*args))[1])
    with open_store(tmp_path / "a.zarr") as store:
        rechunk(store, tmp_path / "out.zarr", {"x": chunking}, threads=2)
    with open_store(tmp_path / "out.zarr") as written:
        np.testing.assert_array_equal(written["x"].read(), values)
    files = [
        {(row // chunking.unit[0], column // chunking.unit[1]) for row in range(*box[0]) for column in range(*box[1])}
        for box in boxes
    ]
    assert len(files) > 2
    assert sum(map(len, files)) == len(set().union(*files)), "two parts write to one file"


def test_a_second_copy_to_the_same_place_is_refused(source: Path, tmp_path: Path) -> None:
    said = r"another process is writing to .*out\.zarr\.partial; wait for it"
    with open_store(source) as store, rechunking._locked(tmp_path / "out.zarr.partial"):
        with pytest.raises(DestinationError, match=said):
            rechunk(store, tmp_path / "out.zarr", {"u": Chunking((1, 12, 10))})
        assert not (tmp_path / "out.zarr").exists()


def test_a_part_is_no_larger_than_memory_allows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rechunking, "PART_BYTES", 2 * 6 * 5 * 8)
    field = np.arange(8 * 6 * 5.0).reshape(8, 6, 5)
    xr.Dataset({"u": (("time", "lat", "lon"), field)}).to_zarr(
        tmp_path / "a.zarr", encoding={"u": {"chunks": (8, 2, 5)}}
    )
    with open_store(tmp_path / "a.zarr") as store:
        assert rechunk(store, tmp_path / "out.zarr", {"u": Chunking((1, 6, 5))}) >= 4
        with open_store(tmp_path / "out.zarr") as written:
            np.testing.assert_array_equal(written["u"].read(), field)

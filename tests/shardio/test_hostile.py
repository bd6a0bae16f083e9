"""Damaged and hostile stores: an error of shardio or a value; no other error, no crash, no hang, little memory."""

from __future__ import annotations

import json
import math
import random
import shutil
import subprocess
import sys
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

import h5py
import numcodecs
import numpy as np
import pytest
import xarray as xr
import zarr
from zarr.codecs import BloscCodec, GzipCodec, ZstdCodec

from shardio import limits, open_store
from shardio.box import Span
from shardio.errors import (
    CorruptChunkError,
    LimitError,
    OutsideStoreError,
    ShardIOError,
    UnknownFormatError,
    UnsafeCodecError,
)

ROUNDS = 25
"""Damaged copies of each store."""
MOST_MEMORY = 512 << 20
"""Bytes by which the child that reads damaged stores may grow; the stores hold a few KiB."""
VALUES = np.arange(8 * 12, dtype="f4").reshape(8, 12)


def write_all(folder: Path) -> list[str]:
    """One small store of every layout; their names."""
    v3: dict[str, Any] = {
        "raw": {"compressors": None},
        "blosc": {"compressors": BloscCodec(cname="lz4")},
        "zstd": {"compressors": ZstdCodec()},
        "gzip": {"compressors": GzipCodec()},
        "sharded": {"compressors": ZstdCodec(), "shards": (8, 12)},
        "sharded_raw": {"compressors": None, "shards": (8, 12)},
    }
    v2: dict[str, Any] = {
        "blosc": numcodecs.Blosc("zstd"),
        "lz4": numcodecs.LZ4(),
        "zlib": numcodecs.Zlib(),
        "bz2": numcodecs.BZ2(),  # read by the zarr library
        "raw": None,
    }
    for name, settings in v3.items():
        group = zarr.open_group(folder / f"{name}.v3.zarr", mode="w")
        group.create_array("x", shape=(8, 12), chunks=(4, 6), dtype="f4", **settings)[...] = VALUES
    for name, codec in v2.items():
        group = zarr.open_group(folder / f"{name}.v2.zarr", mode="w", zarr_format=2)
        group.create_array("x", shape=(8, 12), chunks=(4, 6), dtype="f4", compressors=codec)[...] = VALUES
    zarr.consolidate_metadata(folder / "raw.v2.zarr")
    h5: dict[str, dict[str, Any]] = {
        "gzip": {"chunks": (4, 6), "compression": "gzip", "shuffle": True, "fletcher32": True},
        "lzf": {"chunks": (4, 6), "compression": "lzf"},
        "shuffle": {"chunks": (4, 6), "shuffle": True},
        "contiguous": {},
    }
    for name, settings in h5.items():
        with h5py.File(folder / f"{name}.h5", "w") as file:
            file.create_dataset("x", data=VALUES, **settings)
    xr.Dataset({"x": (("y", "z"), VALUES)}).to_netcdf(folder / "classic.nc", engine="scipy", format="NETCDF3_CLASSIC")
    return sorted(path.name for path in folder.iterdir())


def damage(store: Path, chance: random.Random) -> None:
    """Flip bytes of one file of a store, or cut it, or both."""
    files = sorted(path for path in [store, *store.rglob("*")] if path.is_file() and path.stat().st_size)
    path = chance.choice(files)
    data = bytearray(path.read_bytes())
    if chance.random() < 0.25:
        del data[chance.randrange(len(data)) :]
    for _ in range(chance.choice((0, 1, 1, 2, 8)) if len(data) else 0):
        data[chance.randrange(len(data))] = chance.choice((0, 1, 127, 128, 255, chance.randrange(256)))
    path.write_bytes(data)


def read_some(path: Path) -> None:
    """Open a store and read the corner and the end of each array."""
    with open_store(path) as store:
        for source in store.values():
            _ = source.layout, source.decode
            if source.dtype.kind not in "iufcb":
                continue
            for ends in (False, True):
                sizes = [min(size, 16) for size in source.shape[:4]] + [min(size, 1) for size in source.shape[4:]]
                starts = [size - n if ends else 0 for size, n in zip(source.shape, sizes, strict=True)]
                source.read(tuple(Span(start, start + n) for start, n in zip(starts, sizes, strict=True)))


def fuzz(folder: Path, names: list[str]) -> dict[str, int]:
    """Read damaged copies of stores; how often what came out. Any error that is not shardio's is raised."""
    outcomes: Counter[str] = Counter()
    copy = folder / "damaged"
    for name in names:
        for seed in range(ROUNDS):
            target = copy / name
            shutil.rmtree(copy, ignore_errors=True)
            copy.mkdir()
            (shutil.copytree if (folder / name).is_dir() else shutil.copy)(folder / name, target)
            damage(target, random.Random(zlib.crc32(name.encode()) + seed))
            print(f"{name}, seed {seed}", file=sys.stderr, flush=True)
            try:
                read_some(target)
                outcomes["value"] += 1
            except ShardIOError as error:
                outcomes[type(error).__name__] += 1
    return outcomes


def test_damaged_stores(tmp_path: Path) -> None:
    """In one child process, so that a crash is seen as one."""
    names = write_all(tmp_path)
    for name in names:
        with open_store(tmp_path / name) as store:
            np.testing.assert_array_equal(store["x"].read(), VALUES, err_msg=name)
    child = subprocess.run(
        [sys.executable, __file__, str(tmp_path), *names], capture_output=True, text=True, timeout=300, check=False
    )
    assert child.returncode == 0, child.stderr[-3000:]
    outcomes, grown = json.loads(child.stdout.splitlines()[-1])
    assert sum(outcomes.values()) == ROUNDS * len(names)
    assert {"value", "CorruptChunkError", "UnknownFormatError"} <= set(outcomes)
    assert grown < MOST_MEMORY


def zarr_with(folder: Path, **changes: Any) -> Path:
    """A version 2 array of one chunk whose metadata were changed."""
    compressor = changes.get("compressor", {"id": "zlib", "level": 1})
    meta = {
        "zarr_format": 2, "shape": [8, 12], "chunks": [8, 12], "dtype": "<f4", "order": "C", "fill_value": None,
        "filters": None, "compressor": compressor,
    }  # fmt: skip
    folder.mkdir()
    (folder / ".zgroup").write_text('{"zarr_format": 2}')
    (folder / "x").mkdir()
    (folder / "x" / ".zarray").write_text(json.dumps({**meta, **changes}))
    (folder / "x" / "0.0").write_bytes(zlib.compress(VALUES.tobytes()))
    return folder


@pytest.mark.parametrize(
    "changes",
    [{"chunks": [1_000_000, 2_500_000]}, {"shape": [-8, 12]}, {"shape": [2**62, 2**62]}, {"shape": [8.5, 12]}],
    ids=["10 TB chunk", "negative", "huge", "no integer"],
)
def test_odd_sizes(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(LimitError, match=r"'x' in .*a\.zarr"):
        open_store(zarr_with(tmp_path / "a.zarr", **changes))


def test_an_uncompressed_chunk_may_be_of_any_size(tmp_path: Path) -> None:
    """Only what is wanted of it is read, so the memory taken is not the chunk's."""
    store = zarr_with(tmp_path / "a.zarr", chunks=[1_000_000, 2_500_000], compressor=None)
    with open_store(store) as opened, pytest.raises(CorruptChunkError, match=r"a\.zarr"):
        opened["x"].read()
    assert math.prod((1_000_000, 2_500_000)) * 4 > limits.chunk_limit()


@pytest.mark.parametrize("codec", ["zlib", "gzip", "zstd", "lz4", "blosc"])
def test_bombs(tmp_path: Path, codec: str) -> None:
    """A chunk that decodes to more than a chunk has."""
    store = zarr_with(tmp_path / "a.zarr", compressor={"id": codec})
    bomb = numcodecs.get_codec({"id": codec}).encode(np.zeros(32 << 20, np.uint8))
    (store / "x" / "0.0").write_bytes(bomb)
    with open_store(store) as opened, pytest.raises(CorruptChunkError, match=r"'x/0\.0' in .*a\.zarr"):
        opened["x"].read()


def test_elements_to_unshuffle_of_any_size(tmp_path: Path) -> None:
    """More bytes than a chunk has take no longer; a hang would fail by the time limit of the child."""
    stores = []
    for width in (300, 10**8, 2**31 - 1, 2**32):
        filters = [{"id": "shuffle", "elementsize": width}]
        stores.append(zarr_with(tmp_path / f"{width}.zarr", filters=filters, compressor={"id": "zlib"}))
        (stores[-1] / "x" / "0.0").write_bytes(numcodecs.Zlib().encode(np.zeros(VALUES.nbytes, np.uint8)))
    script = f"""if True:
        from shardio import open_store
        from shardio.errors import CorruptChunkError
        for store in {list(map(str, stores))!r}:
            try:
                open_store(store)["x"].read()
            except CorruptChunkError as error:
                print(error)
    """
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_a_blosc_header_that_claims_more_than_any_codec_makes(tmp_path: Path) -> None:
    store = zarr_with(tmp_path / "a.zarr", compressor={"id": "blosc"})
    chunk = bytearray(numcodecs.Blosc(blocksize=16).encode(VALUES))
    chunk[12:16] = (2**31 - 1).to_bytes(4, "little")
    (store / "x" / "0.0").write_bytes(chunk)
    with open_store(store) as opened, pytest.raises(CorruptChunkError, match="2147483647"):
        opened["x"].read((Span(0, 1), Span(0, 1)))


def test_metadata_that_are_no_json(tmp_path: Path) -> None:
    store = zarr_with(tmp_path / "a.zarr")
    (store / "x" / ".zarray").write_text("{")
    with pytest.raises(UnknownFormatError, match=r"'x/\.zarray' in .*a\.zarr is no JSON"):
        open_store(store)


def test_pickle_is_refused(tmp_path: Path) -> None:
    filters = [{"id": "vlen-utf8"}, {"id": "pickle", "protocol": 5}]
    store = zarr_with(tmp_path / "a.zarr", dtype="|O", filters=filters, compressor=None)
    with pytest.raises(UnsafeCodecError, match=r"'x' in .*allow_pickle=True"):
        open_store(store)
    with open_store(store, allow_pickle=True) as opened:
        assert list(opened) == ["x"]


def test_paths_do_not_leave_the_store(tmp_path: Path) -> None:
    inside = zarr_with(tmp_path / "a.zarr")
    zarr_with(tmp_path / "b.zarr")
    meta = json.loads((inside / "x" / ".zarray").read_text())
    kept = {".zgroup": {"zarr_format": 2}, "../b.zarr/x/.zarray": meta}
    (inside / ".zmetadata").write_text(json.dumps({"zarr_consolidated_format": 1, "metadata": kept}))
    with pytest.raises(OutsideStoreError, match="leads out of"):
        open_store(inside)


@pytest.mark.parametrize("kind", ["link", "soft link", "external", "virtual"])
def test_hdf5_does_not_leave_its_folder(tmp_path: Path, kind: str) -> None:
    secret, inside = tmp_path / "secret.h5", tmp_path / "inside"
    inside.mkdir()
    with h5py.File(secret, "w") as file:
        file["x"] = VALUES
    with h5py.File(inside / "a.h5", "w") as file:
        if "link" in kind:
            file["group/link" if kind == "soft link" else "x"] = h5py.ExternalLink("../secret.h5", "x")
        if kind == "soft link":
            file["a"] = h5py.SoftLink("/group/link")
        elif kind == "external":
            file.create_dataset("x", (8, 12), "f4", external=[(str(tmp_path / "raw"), 0, VALUES.nbytes)])
        elif kind == "virtual":
            layout = h5py.VirtualLayout((8, 12), "f4")
            layout[:] = h5py.VirtualSource("../secret.h5", "x", shape=(8, 12))
            file.create_virtual_dataset("x", layout)
    (tmp_path / "raw").write_bytes(VALUES.tobytes())
    with pytest.raises(OutsideStoreError, match="lies outside its folder"):
        open_store(inside / "a.h5")
    for allow in (True, [str(tmp_path)]):
        with open_store(inside / "a.h5", allow=allow) as store:
            np.testing.assert_array_equal(next(iter(store.values())).read(), VALUES)


if __name__ == "__main__":
    import resource

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = fuzz(Path(sys.argv[1]), sys.argv[2:])
    print(json.dumps([found, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024]))

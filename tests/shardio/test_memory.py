"""Memory does not grow with the number of reads, whoever decodes."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import hdf5plugin
import numcodecs
import numpy as np
import pytest
import torch
import zarr

from shardio import Cut, OwnReader, Partition, open_store, plan
from shardio.partition import even

READS, OTHERS = 10_000, 1_000
"""Reads of uncompressed chunks, and of each other kind."""
ALLOWED = 4 << 20
"""Bytes; the last four fifths of 1,000 reads would take 8 MiB if each kept its slab of 10 KiB."""
VALUES = np.random.default_rng(0).normal(280, 9, (4, 3, 24, 64)).astype(np.float32)
STATM = Path("/proc/self/statm")
pytestmark = pytest.mark.skipif(not STATM.exists(), reason="the system does not tell a process its memory")


def resident() -> int:
    """Bytes that this process holds."""
    return int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def zarr_store(path: Path, **options: Any) -> Path:
    group = zarr.open_group(path, mode="w", zarr_format=options.pop("zarr_format", 3))
    group.create_array("x", shape=VALUES.shape, dtype="f4", **options)[...] = VALUES
    return path


def hdf5_file(path: Path, **options: Any) -> Path:
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=VALUES, **options)
    return path


STORES: dict[str, Callable[[Path], Path]] = {
    "raw": lambda path: zarr_store(path, chunks=(1, 3, 24, 64), compressors=None),
    "blosc": lambda path: zarr_store(
        path, zarr_format=2, chunks=(1, 3, 24, 64), compressors=numcodecs.Blosc("lz4", blocksize=2048)
    ),
    "shards of zstd": lambda path: zarr_store(path, chunks=(1, 3, 6, 64), shards=(1, 3, 24, 64)),
    "the zarr library": lambda path: zarr_store(
        path, zarr_format=2, chunks=(1, 3, 24, 64), compressors=numcodecs.BZ2(1)
    ),
    "hdf5 gzip": lambda path: hdf5_file(path, chunks=(1, 3, 24, 64), compression="gzip", shuffle=True),
    "hdf5 blosc": lambda path: hdf5_file(path, chunks=(1, 3, 24, 64), **hdf5plugin.Blosc()),
    "the hdf5 library": lambda path: (
        hdf5_file(path, chunks=(1, 3, 24, 64), compression="szip")
        if h5py.h5z.filter_avail(h5py.h5z.FILTER_SZIP)
        else hdf5_file(path, chunks=(1, 3, 24, 64), scaleoffset=3)
    ),
}


@pytest.mark.parametrize("kind", STORES)
def test_many_reads_hold_no_more_than_a_few(tmp_path: Path, kind: str) -> None:
    reads = READS if kind == "raw" else OTHERS
    with open_store(STORES[kind](tmp_path / "a")) as store, OwnReader(threads=2) as reader:
        source = store["x"]
        plans = plan(Partition((Cut(source.dims[2], "domain", even(24, 2)),)), source.layout, halo=1)
        held = 0
        for at in range(reads):
            out = reader.read(source, plans, at % 2, index={source.dims[0]: at % 4})
            if at == reads // 5:
                held = resident()
        grown = resident() - held
        assert torch.equal(out, torch.from_numpy(VALUES[(reads - 1) % 4, :, 11:]))
    assert grown < ALLOWED

"""Payloads beyond what 32 bits count."""

from __future__ import annotations

import json
import os
import shutil
import zlib

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from shardio import Partition, Request, open_store, plan
from shardio.collective import CollectiveReader, Group
from shardtensor.testing import Ranks

SIZE = (2 << 30) + 4096
MARKED = [0, (1 << 31) - 1, 1 << 31, SIZE - 1]
"""Bytes that are not 0, before and after 2^31."""
NEEDED = 9 << 30
"""Memory for two ranks: what is read, what is delivered, and what is shared."""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One chunk of SIZE bytes that can only be decoded whole."""
    meta = {"zarr_format": 2, "shape": [SIZE], "chunks": [SIZE], "dtype": "|u1", "fill_value": 0, "order": "C"}
    path = tmp_path_factory.mktemp("large") / "a.zarr"
    (path / "x").mkdir(parents=True)
    (path / ".zgroup").write_text('{"zarr_format": 2}')
    (path / "x/.zarray").write_text(json.dumps({**meta, "compressor": {"id": "zlib", "level": 1}, "filters": None}))
    (path / "x/.zattrs").write_text('{"_ARRAY_DIMENSIONS": ["cell"]}')
    packer, step = zlib.compressobj(1), 64 << 20
    with (path / "x/0").open("wb") as file:
        for start in range(0, SIZE, step):
            block = bytearray(min(step, SIZE - start))
            for value, at in enumerate(MARKED, 1):
                if start <= at < start + len(block):
                    block[at - start] = value
            file.write(packer.compress(block))
        file.write(packer.flush())
    return str(path)


def whole(mesh: DeviceMesh, path: str, apart: bool) -> tuple[list[int], int, int]:
    """Every rank wants everything: the marked bytes, how many are not 0, and the bytes that this rank decoded."""
    group = Group.join(mesh, 0, node=str(mesh.get_rank()) if apart else None)
    with open_store(path) as store, CollectiveReader(group, threads=1, budget=4 << 30) as reader:
        source = store["x"]
        plans = plan(Partition(()), source.layout)
        out = torch.empty(SIZE, dtype=torch.uint8)
        reader.read_all([Request(source, plans[0], out, plans=plans)])
        decoded = reader.stats.bytes_fetched
    group.close()
    return out[MARKED].tolist(), int(np.count_nonzero(out.numpy())), decoded


def memory() -> int:
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("apart", [False, True], ids=["shared memory", "between machines"])
def test_more_than_two_gib_go_from_one_rank_to_another(ranks: Ranks, store: str, apart: bool) -> None:
    """Case R66: one chunk whose bytes 31 bits cannot count; every value is right, and one rank has decoded it."""
    if memory() < NEEDED or shutil.disk_usage("/dev/shm").free < SIZE + (64 << 20):
        pytest.skip(f"needs {NEEDED >> 30} GiB of free memory")
    found = ranks.run(whole, store, apart, mesh=(2,))
    assert [marked for marked, *_ in found] == [[1, 2, 3, 4]] * 2
    assert [total for _, total, _ in found] == [len(MARKED)] * 2
    assert sorted(decoded for *_, decoded in found) == [0, SIZE], "one rank read it for both"

"""Numbers that do not divide: rows over ranks, and samples over groups of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import xarray as xr
from torch.distributed.device_mesh import DeviceMesh

from shardsets import DomainDataLoader
from shardtensor.testing import Ranks

ROWS, COLUMNS = 721, 6


def write(path: Path, times: int, rows: int, chunk: int) -> str:
    """t [time, lat, lon], chunks of so many rows; every value tells its time and row."""
    values = np.arange(times)[:, None, None] * 1000.0 + np.arange(rows)[:, None] + np.zeros(COLUMNS)
    when = np.datetime64("2020-01-01", "ns") + np.arange(times) * np.timedelta64(1, "h")
    data = xr.Dataset({"t": (("time", "lat", "lon"), values.astype("f4"))}, {"time": when})
    data.to_zarr(path, zarr_format=2, encoding={"t": {"chunks": (1, chunk, COLUMNS)}})
    return str(path)


@pytest.fixture(scope="module")
def eight() -> Iterator[Ranks]:
    pool = Ranks(8)
    yield pool
    pool.close()


def slab(mesh: DeviceMesh, path: str) -> tuple[int, int]:
    """The rows that this rank holds, after comparing their values, and the bytes it decoded."""
    with DomainDataLoader(path, mesh, read="own", prefetch=0) as loader:
        batch = next(iter(loader))
        local = batch["input"].to_local()
        rank, size = mesh.get_local_rank(), mesh.size()
        each = [ROWS // size + (at < ROWS % size) for at in range(size)]
        first = sum(each[:rank])
        rows = np.arange(first, first + each[rank], dtype=np.float32)
        np.testing.assert_array_equal(local[0, 0].numpy(), np.broadcast_to(rows[:, None], (each[rank], COLUMNS)))
        whole = batch["input"].full_tensor()
        np.testing.assert_array_equal(whole[0, 0, :, 0].numpy(), np.arange(ROWS))
        return each[rank], loader.stats.bytes_fetched


@pytest.mark.parametrize("size", [2, 4, 8])
def test_721_rows(eight: Ranks, tmp_path: Path, size: int) -> None:
    """Case R40: no rank decodes more than the chunks of 16 rows under its own; input and target are two times."""
    found = eight.run(slab, write(tmp_path / "a.zarr", 3, ROWS, 16), mesh=(size,))
    assert sum(rows for rows, _ in found) == ROWS
    for rows, decoded in found:
        assert rows in (ROWS // size, ROWS // size + 1)
        assert decoded <= 2 * (rows // 16 + 2) * 16 * COLUMNS * 4


def ids(mesh: DeviceMesh, path: str, drop_last: bool) -> list[list[int]]:
    """The samples of every batch of this rank, which is a data group by itself."""
    groups = DeviceMesh("cpu", mesh.mesh[:, None], mesh_dim_names=("data", "domain"))
    with DomainDataLoader(path, groups, batch_size=16, shuffle=True, drop_last=drop_last) as loader:
        return [batch["index"].tolist() for batch in loader]


@pytest.mark.parametrize("drop_last", [True, False])
def test_145_samples_in_batches_of_16_on_3_ranks(ranks: Ranks, tmp_path: Path, drop_last: bool) -> None:
    """Case R9, Case R32: every rank has as many batches; no sample comes twice but the two that fill the last step."""
    found = ranks.run(ids, write(tmp_path / "a.zarr", 146, 3, 3), drop_last, mesh=(3,))
    assert {len(batches) for batches in found} == {3 if drop_last else 4}
    seen = [sample for batches in found for batch in batches for sample in batch]
    if drop_last:
        assert len(seen) == len(set(seen)) == 144
    else:
        assert set(seen) == set(range(145))
        assert len(seen) == 147

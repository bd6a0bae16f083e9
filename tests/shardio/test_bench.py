"""Bench: ranks as processes, and what they say they read."""

from pathlib import Path

import numpy as np
import pytest
import xarray as xr
from typer.testing import CliRunner

from shardio import open_store
from shardio.bench import measure
from shardio.cf import find_grid
from shardio.cli import app
from shardio.cli.bench import _rows
from shardio.errors import MissingChunkError, ShardIOError
from shardio.partition import make_partition
from shardio.plan import Plan, plan

DIMS = ("time", "lat", "lon")


@pytest.fixture
def store(tmp_path: Path) -> Path:
    field = np.random.default_rng(0).normal(size=(6, 12, 10)).astype("f4")
    coords = {"lat": np.arange(12.0), "lon": np.arange(10.0)}
    xr.Dataset({"a": (DIMS, field)}, coords).to_zarr(tmp_path / "a.zarr", encoding={"a": {"chunks": (1, 12, 10)}})
    return tmp_path / "a.zarr"


def planned_for(store: Path) -> Plan:
    with open_store(store) as opened:
        layout = opened["a"].layout
    return plan(make_partition({"lat": "d"}, sizes={"lat": 12}, ranks={"d": 2}), layout, halo=1)


def test_ranks_count_what_the_plan_says(store: Path) -> None:
    planned = planned_for(store)
    one = planned.at({"time": [0]})
    found = measure(str(store), {"a": planned}, [[0, 3, 5]], time="time", mode="own")
    assert [rank.needed for rank in found] == [rank.bytes_needed for rank in one.ranks]
    assert [rank.decoded for rank in found] == [rank.bytes_fetched for rank in one.ranks]
    assert [(rank.rank, rank.group, rank.part) for rank in found] == [(0, 0, 0), (1, 0, 1)]
    assert all(len(rank.first) == len(rank.again) == 3 and min(rank.first) > 0 for rank in found)


def test_together_they_decode_a_sample_once(store: Path) -> None:
    planned = planned_for(store)
    together = measure(str(store), {"a": planned}, [[0, 3, 5]], time="time", mode="collective")
    assert sum(rank.decoded for rank in together) == 12 * 10 * 4


def test_an_error_of_a_rank_is_raised(store: Path) -> None:
    planned = planned_for(store)
    (store / "a/c/3/0/0").unlink()
    with pytest.raises(MissingChunkError, match="a/c/3/0/0"):
        measure(str(store), {"a": planned}, [[0, 3, 5]], time="time", mode="own")


def test_command(store: Path) -> None:
    arguments = ["bench", str(store), "-m", "2", "--halo", "1", "--samples", "2", "--read", "own"]
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "2 processes on the" in result.output
    assert "own, all ranks together: first" in result.output


def test_ranks_open_by_the_format_that_was_named(store: Path) -> None:
    planned = planned_for(store)
    with pytest.raises(ShardIOError, match="cannot be opened as HDF5"):
        measure(str(store), {"a": planned}, [[0]], time="time", format="hdf5")


def test_groups_read_different_times(store: Path) -> None:
    with open_store(store) as opened:
        grid = find_grid(opened)
    rows = _rows(grid, 2, 3)
    assert sorted(row for group in rows for row in group) == [0, 1, 2, 3, 4, 5]
    assert len(_rows(grid, 2, 10)[1]) == 10

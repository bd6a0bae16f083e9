"""Icechunk repositories: branches, tags and snapshots, absent chunks, and what is not there."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

from shardio import open_store
from shardio.errors import MissingChunkError, StoreNotFoundError

icechunk = pytest.importorskip("icechunk")
OLD, NEW = np.arange(12.0).reshape(3, 4), np.arange(12.0).reshape(3, 4) + 100


@pytest.fixture
def repository(tmp_path: Path) -> tuple[Path, str]:
    """Two snapshots: OLD, tagged "first", and NEW on main; and the first one's id."""
    path = tmp_path / "repo"
    repo = icechunk.Repository.create(icechunk.local_filesystem_storage(str(path)))
    session = repo.writable_session("main")
    group = zarr.group(session.store)
    array = group.create_array("fine/x", shape=(3, 4), chunks=(1, 4), dtype="f8", dimension_names=("lat", "lon"))
    array[:] = OLD
    group.create_array("gap", shape=(4,), chunks=(2,), dtype="f8")[:2] = 1.0
    first = session.commit("first")
    repo.create_tag("first", snapshot_id=first)
    session = repo.writable_session("main")
    zarr.open_array(session.store, path="fine/x")[:] = NEW
    session.commit("second")
    return path, first


def test_opens_like_any_store_at_any_version(repository: tuple[Path, str]) -> None:
    path, first = repository
    store = open_store(path)
    assert store.format == "icechunk"
    assert store["fine/x"].dims == ("lat", "lon")
    np.testing.assert_array_equal(store["fine/x"].read(), NEW)
    np.testing.assert_array_equal(open_store(path, tag="first")["fine/x"].read(), OLD)
    np.testing.assert_array_equal(open_store(path, snapshot=first)["fine/x"].read(), OLD)
    np.testing.assert_array_equal(open_store(path, branch="main", group="fine")["x"].read(), NEW)
    session = icechunk.Repository.open(icechunk.local_filesystem_storage(str(path))).readonly_session("main")
    np.testing.assert_array_equal(open_store(session)["fine/x"].read(), NEW)


def test_absent_chunks_and_versions(repository: tuple[Path, str]) -> None:
    path, _ = repository
    with pytest.raises(MissingChunkError, match=r"gap/c/1.*repo"):
        open_store(path)["gap"].read()
    assert open_store(path, missing="fill")["gap"].read().tolist() == [1, 1, 0, 0]
    wrong: list[dict[str, Any]] = [{"branch": "nothing"}, {"tag": "nothing"}]
    for version in wrong:
        with pytest.raises(StoreNotFoundError, match=r"repo.*nothing"):
            open_store(path, **version)
    with pytest.raises(ValueError, match="give one"):
        open_store(path, branch="main", tag="first")

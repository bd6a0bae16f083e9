"""Bytes of local files: ranges, what is absent, cut or forbidden, held descriptors."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import shardio.bytes.local
from shardio.bytes import LocalBytes
from shardio.errors import CorruptChunkError, ReadError

CONTENT = bytes(range(256)) * 4


@pytest.fixture(params=[True, False], ids=["preadv", "seek"])
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LocalBytes:
    monkeypatch.setattr(shardio.bytes.local, "PREADV", request.param)
    (tmp_path / "x").mkdir()
    (tmp_path / "x/0").write_bytes(CONTENT)
    return LocalBytes(tmp_path)


def test_ranges(store: LocalBytes) -> None:
    assert store.size("x/0") == 1024
    assert store.read("x/0") == CONTENT
    assert store.read("x/0", 5, 9) == CONTENT[5:9]
    assert store.read("x/0", -4) == CONTENT[-4:]
    assert store.read("x/0", 1000, 2000) == CONTENT[1000:]
    ranges = [(0, 3), (3, 10), (500, 501), (900, 1024)]
    into = [memoryview(bytearray(stop - start)) for start, stop in ranges]
    assert store.read_ranges("x/0", ranges, into)
    assert into == [CONTENT[start:stop] for start, stop in ranges]
    assert store.fetched == 1024 + 4 + 4 + 24 + sum(map(len, into))
    assert store.folders("") == ["x"]


def test_absent_cut_and_unreadable(store: LocalBytes, monkeypatch: pytest.MonkeyPatch) -> None:
    for key in ("x/1", "y/0", "x/0/0"):
        assert store.size(key) is store.read(key) is None
        assert not store.read_into(key, 0, memoryview(bytearray(1)))
    with pytest.raises(CorruptChunkError, match=r"'x/0' in .* ends at byte 1024, but bytes 1000 to 1030 are needed"):
        store.read_into("x/0", 1000, memoryview(bytearray(30)))
    with pytest.raises(CorruptChunkError, match="ends at byte 1024"):
        store.read_ranges("x/0", [(0, 4), (1020, 1030)], [memoryview(bytearray(4)), memoryview(bytearray(10))])
    with pytest.raises(ReadError, match=r"'x' in .* cannot be read") as caught:
        store.read("x")  # a folder
    assert not isinstance(caught.value, FileNotFoundError)

    def forbidden(*_: Any) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", forbidden)
    with pytest.raises(ReadError, match=r"'x/2' in .* cannot be opened: .*Permission denied"):
        store.read("x/2")


def test_descriptors_are_held_and_bounded(tmp_path: Path) -> None:
    for at in range(20):
        (tmp_path / str(at)).write_bytes(bytes([at]) * 100)
    store = LocalBytes(tmp_path, held=3)
    here = Path("/proc/self/fd")
    before = len(list(here.iterdir())) if here.exists() else None
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda at: store.read(str(at % 20), 0, 1), range(400)))
    assert [bytes(one)[0] for one in found if one is not None] == [at % 20 for at in range(400)]
    if before is not None:
        assert len(list(here.iterdir())) <= before + 3
        store.close()
        assert len(list(here.iterdir())) <= before
    assert store.read("7", 0, 1) == b"\7"
    store.close()

"""RemoteBytes against real servers: ranges, requests in flight, new tries, refusal, and nothing secret shown."""

from __future__ import annotations

import copy
import itertools
import logging
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import numpy as np
import pytest

from shardio.bytes import RemoteBytes
from shardio.bytes import remote as remote_file
from shardio.bytes.client import failure_of
from shardio.bytes.options import for_obstore
from shardio.bytes.remote import merged
from shardio.errors import CorruptChunkError, NotAllowedError, ReadError
from shardio.location import visible

BLOB = np.random.default_rng(0).integers(0, 256, 3 << 20, dtype=np.uint8).tobytes()
Proxied = Callable[[str], Any]


@pytest.fixture(scope="session")
def blob(web: Any) -> Any:
    """The served folder, holding blob, empty, and copies of blob where not everybody may read."""
    for name in ("blob", "a b%20c/d", "forbidden/blob", "private/blob", "signed/blob"):
        (web.folder / name).parent.mkdir(parents=True, exist_ok=True)
        (web.folder / name).write_bytes(BLOB)
    (web.folder / "empty").write_bytes(b"")
    return web


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """New tries at once."""
    monkeypatch.setattr(remote_file, "FIRST_WAIT_S", 0.01)


def test_reads_whole_objects_ranges_and_ends(blob: Any) -> None:
    store = RemoteBytes(blob.url)
    assert store.read("blob") == BLOB
    assert store.read("blob", 5, 17) == BLOB[5:17]
    assert store.read("blob", len(BLOB) - 3, len(BLOB) + 100) == BLOB[-3:], "fewer come where the object ends"
    assert store.read("blob", len(BLOB) + 5, len(BLOB) + 9) == b""
    assert store.read("blob", 100) == BLOB[100:]
    assert store.read("blob", -16) == BLOB[-16:]
    assert store.read("blob", 7, 7) == b""
    assert store.read("empty") == b""
    assert store.read("a b%20c/d") == BLOB, "a key is a key, not part of a URL"
    assert store.size("blob") == len(BLOB)
    assert store.size("empty") == 0
    assert store.fetched == 2 * len(BLOB) + 12 + 3 + len(BLOB) - 100 + 16
    buffer = bytearray(1000)
    assert store.read_into("blob", 99, memoryview(buffer))
    assert buffer == BLOB[99:1099]


def test_absent_is_none_and_truncated_is_corrupt(blob: Any) -> None:
    store = RemoteBytes(f"{blob.url}/")
    assert store.read("nothing") is None
    assert store.read("nothing", 0, 4) is None
    assert store.read("nothing", -4) is None
    assert store.size("nothing") is None
    assert not store.read_into("nothing", 0, memoryview(bytearray(4)))
    with pytest.raises(CorruptChunkError, match=rf"'blob'.*ends at byte {len(BLOB)}"):
        store.read_into("blob", len(BLOB) - 4, memoryview(bytearray(8)))
    with pytest.raises(ReadError, match="leads out of"):
        RemoteBytes(f"{blob.url}/private").read("../blob")


def test_large_objects_come_in_several_requests_at_once(
    blob: Any, proxied: Proxied, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_file, "PART", 256 << 10)
    proxy = proxied(blob.url)
    proxy.delay = 0.1
    store = RemoteBytes(proxy.url)
    buffer = bytearray(len(BLOB))
    assert store.read_into("blob", 0, memoryview(buffer))
    assert buffer == BLOB
    assert len(proxy.paths) == 12
    assert proxy.most >= 6, "requests wait for each other"
    assert store.read("blob", 0, 1 << 20) == BLOB[: 1 << 20]


def test_near_ranges_are_one_request(blob: Any, proxied: Proxied) -> None:
    proxy = proxied(blob.url)
    store = RemoteBytes(proxy.url)
    store.gap = 1000
    ranges = [(0, 100), (600, 700), (700, 900), (500_000, 500_100), (501_200, 501_300)]
    buffers = [bytearray(stop - start) for start, stop in ranges]
    assert store.read_ranges("blob", ranges, list(map(memoryview, buffers)))
    assert [bytes(buffer) for buffer in buffers] == [BLOB[start:stop] for start, stop in ranges]
    assert sorted(proxy.ranges) == ["bytes=0-899", "bytes=500000-500099", "bytes=501200-501299"]
    assert store.requests_made == 3
    assert store.fetched == 900 + 200


def test_merged_by_brute_force(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_file, "PART", 50)
    random = np.random.default_rng(0)
    stored = bytes(range(256)) * 4
    for _ in range(200):
        edges = np.sort(random.integers(0, 1024, size=2 * int(random.integers(1, 8)))).tolist()
        ranges = [(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if a < b]
        buffers = [memoryview(bytearray(stop - start)) for start, stop in ranges]
        gap = int(random.integers(0, 40))
        parts = list(merged(ranges, buffers, gap))
        for part in parts:
            assert 0 < part.stop - part.start <= 50
            for start, piece in part.pieces:
                piece[:] = stored[start : start + len(piece)]
        assert all(one.stop <= other.start for one, other in itertools.pairwise(parts))
        assert [bytes(buffer) for buffer in buffers] == [stored[start:stop] for start, stop in ranges]
        assert sum(part.stop - part.start for part in parts) <= sum(b - a for a, b in ranges) + gap * len(ranges)


def test_the_gap_follows_the_latency(blob: Any, proxied: Proxied) -> None:
    near, far = RemoteBytes(blob.url), proxied(blob.url)
    far.delay = 0.05
    distant = RemoteBytes(far.url)
    for store in (near, distant):
        for _ in range(4):
            store.read("blob", 0, 16)
    assert near.gap < distant.gap
    assert distant.gap >= 0.05 * remote_file.BANDWIDTH / distant.requests


@pytest.mark.parametrize("fault", ["drop", "cut", 429, 500, 503, 408])
def test_tries_again_where_it_may_help(blob: Any, proxied: Proxied, fault: str | int) -> None:
    proxy = proxied(blob.url)
    proxy.fault = lambda number, path: fault if number < 3 else None
    store = RemoteBytes(proxy.url)
    assert store.read("blob", 10, 5000) == BLOB[10:5000]
    assert store.requests_made >= 4
    assert store.fetched == 4990


def test_a_slow_server_is_asked_again(blob: Any, proxied: Proxied) -> None:
    proxy = proxied(blob.url)

    def slow_once(number: int, path: str) -> None:
        if number == 0:
            time.sleep(1.5)

    proxy.fault = slow_once
    assert RemoteBytes(proxy.url, {"timeout": 0.5}).read("blob", 0, 9) == BLOB[:9]
    assert len(proxy.paths) == 2


@pytest.mark.parametrize(("fault", "reason"), [(503, "HTTP status 503"), ("drop", "dropped|connection")])
def test_gives_up_in_the_end_and_says_why(blob: Any, proxied: Proxied, fault: str | int, reason: str) -> None:
    proxy = proxied(blob.url)
    proxy.fault = lambda number, path: fault
    with pytest.raises(ReadError, match=rf"'blob' in {proxy.url} .*after 3 tries: .*({reason})"):
        RemoteBytes(proxy.url, {"retries": 2}).read("blob", 0, 9)
    if isinstance(fault, int):
        assert len(proxy.paths) == 3


def test_what_cannot_pass_is_not_tried_again(blob: Any, proxied: Proxied) -> None:
    proxy = proxied(blob.url)
    proxy.fault = lambda number, path: 400
    with pytest.raises(ReadError, match="HTTP status 400"):
        RemoteBytes(proxy.url).read("blob", 0, 9)
    assert len(proxy.paths) == 1


def test_a_refusal_is_not_absence(blob: Any) -> None:
    store = RemoteBytes(blob.url)
    for read in (
        lambda: store.read("forbidden/blob"),
        lambda: store.read("forbidden/blob", 0, 4),
        lambda: store.read("forbidden/not there"),
        lambda: store.read_into("forbidden/blob", 0, memoryview(bytearray(4))),
    ):
        with pytest.raises(NotAllowedError, match=r"not allowed to be read.*403") as caught:
            read()
        assert isinstance(caught.value, PermissionError)
        assert isinstance(caught.value, ReadError)


def test_when_there_are_too_many_requests_all_wait(blob: Any, proxied: Proxied) -> None:
    """A server that takes 4 at once: many threads, several stores."""
    proxy = proxied(blob.url)
    proxy.delay = 0.005
    proxy.fault = lambda number, path: 429 if proxy.now > 4 else None
    stores = [RemoteBytes(proxy.url) for _ in range(5)]
    with ThreadPoolExecutor(20) as pool:
        found = list(pool.map(lambda at: stores[at % 5].read("blob", at, at + 10), range(100)))
    assert found == [BLOB[at : at + 10] for at in range(100)]


def test_requests_in_flight_are_bounded_for_all_stores_of_a_server(blob: Any, proxied: Proxied) -> None:
    proxy = proxied(blob.url)
    proxy.delay = 0.02
    stores = [RemoteBytes(f"{proxy.url}/", {"requests": 3}) for _ in range(4)]
    assert len({id(store._client) for store in stores}) == 1, "one client per server and process"
    assert RemoteBytes(proxy.url, {"requests": 4})._client is not stores[0]._client
    with ThreadPoolExecutor(12) as pool:
        list(pool.map(lambda at: stores[at % 4].read("blob", at, at + 1), range(24)))
    assert proxy.most == 3


def test_latency_and_dropped_connections(blob: Any, proxied: Proxied) -> None:
    """Case R16: 50 ms a request, 1 in 20 dropped; requests go at once, and all of them come in the end."""
    proxy = proxied(blob.url)
    proxy.delay = 0.05
    proxy.fault = lambda number, path: "drop" if number % 20 == 7 else None
    store, before = RemoteBytes(proxy.url), threading.active_count()
    store.gap = 16
    ranges = [(at * 4096, at * 4096 + 512) for at in range(120)]
    buffers = [bytearray(512) for _ in ranges]
    assert store.read_ranges("blob", ranges, list(map(memoryview, buffers)))
    assert [bytes(buffer) for buffer in buffers] == [BLOB[start:stop] for start, stop in ranges]
    assert proxy.most >= 8, "one request after another"
    assert len(proxy.paths) < 150
    assert threading.active_count() < before + 200


def test_password_and_token_are_used_but_never_shown(blob: Any, caplog: pytest.LogCaptureFixture) -> None:
    host = blob.url.removeprefix("http://")
    caplog.set_level(logging.DEBUG)
    private = RemoteBytes(f"http://user:hidden@{host}/private")
    assert private.read("blob", 0, 8) == BLOB[:8]
    signed = RemoteBytes(f"http://{host}/signed?token=hidden")
    assert signed.read("blob", 0, 8) == BLOB[:8]
    assert signed.read("nothing") is None
    assert signed.size("blob") == len(BLOB)
    assert signed.read("blob", -8) == BLOB[-8:]
    shown = [repr(private), repr(signed), private.url, signed.url, str(vars(private)), str(vars(signed))]
    wrong = [
        lambda: RemoteBytes(f"http://user:hidden_too@{host}/private").read("blob"),
        lambda: RemoteBytes(f"http://{host}/signed?token=hidden_too").read("blob", 0, 4),
        lambda: RemoteBytes(f"http://{host}/private", {"headers": {"Authorization": "hidden_too"}}).read("blob"),
        lambda: RemoteBytes("http://user:hidden@127.0.0.1:1/x", {"retries": 0}).read("blob"),
        lambda: RemoteBytes("http://127.0.0.1:1/x?token=hidden", {"retries": 0}).read("blob"),
        lambda: RemoteBytes("s3://bucket/x", {"secret": "hidden", "nonsense": "hidden"}).read("blob"),
    ]
    for read in wrong:
        with pytest.raises((ReadError, ValueError)) as caught:
            read()
        frames = traceback.TracebackException.from_exception(caught.value)
        shown.append("".join(frames.format()).replace('"hidden', "").replace(":hidden", "").replace("=hidden", ""))
        shown += [str(caught.value), repr(caught.value)]
    assert "hidden" not in "".join(shown) + caplog.text


def test_what_is_shown_of_a_url() -> None:
    for given, shown in [
        ("https://user:pw@host:8080/a/b.zarr?sig=x#frag", "https://host:8080/a/b.zarr"),
        ("https://user:p@ss@host/a", "https://host/a"),
        ("https://user:p?w@host/a", "https://..."),
        ("https://user:p/w@host/a", "https://..."),
        ("http://[::1]:80/a?x", "http://[::1]:80/a"),
        ("https://host/a@b.zarr", "https://host/a@b.zarr"),
        ("s3://bucket/a", "s3://bucket/a"),
        ("abfs://container@account.dfs.core.windows.net/a?sig=x", "abfs://container@account.dfs.core.windows.net/a"),
        ("simplecache::https://u:p@host/a?x=1", "simplecache::https://host/a"),
        ("zip://x.nc::s3://key:secret@bucket/a.zip", "zip://x.nc::s3://bucket/a.zip"),
        ("/data/what?.zarr", "/data/what?.zarr"),
        (Path("/data/a.zarr"), "/data/a.zarr"),
    ]:
        assert visible(given) == shown, given


def test_options_by_the_names_of_fsspec() -> None:
    def of(url: str, **options: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        kept = copy.deepcopy(options)
        found = for_obstore(url.partition(":")[0], url, options)
        assert options == kept, "the caller's options are left as they are"
        return found

    assert of("s3://b", key="k", secret="s", token=None, client_kwargs={"region_name": "r"}) == (
        {"access_key_id": "k", "secret_access_key": "s", "region": "r"},
        {},
    )
    assert of("s3://b", anon=True, endpoint_url="http://h:1") == (
        {"skip_signature": True, "endpoint": "http://h:1"},
        {"allow_http": True},
    )
    assert of("s3://b", access_key_id="k", config={"region": "r"}, client_options={"user_agent": "me"}) == (
        {"access_key_id": "k", "region": "r"},
        {"user_agent": "me"},
    )
    assert of("gs://b", token="anon")[0] == {"skip_signature": True}
    assert of("gs://b", token="/keys/a.json", project="p")[0] == {"application_credentials": "/keys/a.json"}
    assert of("abfs://c", account_name="a", sas_token="t")[0] == {"account_name": "a", "sas_key": "t"}
    assert of("https://h", client_kwargs={"headers": {"A": "1"}}, headers={"B": "2"})[1] == {
        "default_headers": {"A": "1", "B": "2"}
    }


def test_what_failures_mean() -> None:
    kinds = {404: "absent", 410: "absent", 401: "refused", 403: "refused", 429: "busy", 503: "busy", 500: "again"}
    assert {status: failure_of(status, "").kind for status in kinds} == kinds
    assert failure_of(301, "").kind == "final"
    assert failure_of(None, "Error performing GET http://169.254.169.254/ TimedOut").kind == "final"
    assert failure_of(None, "TimedOut") == ("again", "timed out")


def test_other_schemes_go_through_fsspec() -> None:
    import fsspec

    memory = fsspec.filesystem("memory")
    memory.pipe("/remote/a/blob", BLOB)
    memory.pipe("/remote/b/c", b"x")
    store = RemoteBytes("memory://remote")
    assert store.read("a/blob") == BLOB
    assert store.read("a/blob", 3, 9) == BLOB[3:9]
    assert store.read("a/blob", -5) == BLOB[-5:]
    assert store.size("a/blob") == len(BLOB)
    assert store.read("a/nothing") is None
    assert store.size("a") is None
    assert sorted(store.folders("")) == ["a", "b"]


def test_s3(s3: str, proxied: Proxied) -> None:
    for key, body in {"": b"", "/deep/store/a/blob": BLOB, "/deep/store/b%20c/blob": b"x"}.items():
        binary = {"Content-Type": "application/octet-stream"}
        urlopen(Request(f"{s3}/data{key}", data=body, method="PUT", headers=binary)).close()
    proxy = proxied(s3)
    proxy.fault = lambda number, path: "drop" if number == 1 else None
    options = {
        "key": "key",
        "secret": "hidden",
        "endpoint_url": proxy.url,
        "client_kwargs": {"region_name": "us-east-1"},
    }
    store = RemoteBytes("s3://data/deep/store", options)
    assert store.read("a/blob") == BLOB
    assert store.read("a/blob", 100, 300) == BLOB[100:300]
    assert store.read("a/blob", -30) == BLOB[-30:]
    assert store.size("a/blob") == len(BLOB)
    assert store.read("b c/blob") == b"x"
    assert store.read("a/nothing") is None
    assert sorted(store.folders("")) == ["a", "b c"]
    assert store.folders("a/") == []
    proxy.fault = lambda number, path: 403
    with pytest.raises(NotAllowedError, match=r"'a/blob' in s3://data/deep/store is not allowed"):
        store.read("a/blob")


def test_a_forked_process_is_told(blob: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    store = RemoteBytes(blob.url)
    monkeypatch.setattr(store._client, "process", store._client.process + 1)
    with pytest.raises(ReadError, match="forked"):
        store.read("blob")

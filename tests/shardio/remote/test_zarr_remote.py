"""Zarr stores behind HTTP and S3: values as local, few requests and bytes, absent and refused told apart."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import requests
import zarr
from numcodecs import Blosc

from shardio import Cut, OwnReader, Partition, open_store, plan
from shardio.box import Span, slices
from shardio.bytes import remote as remote_file
from shardio.errors import MissingChunkError, NotAllowedError, ReadError, StoreNotFoundError
from shardio.partition import even

Proxied = Callable[[str], Any]
TRUTH = np.random.default_rng(1).normal(280, 5, (2, 4, 96, 128)).astype("f4").round(1)


def write(folder: Path) -> None:
    """sharded: as L3 of the benchmarks, an eighth of a shard in an inner chunk; blosc: as L2b, a sample a chunk."""
    v3 = zarr.open_group(folder / "v3.zarr", mode="w", zarr_format=3)
    v3.create_array("sharded", shape=TRUTH.shape, dtype="f4", chunks=(1, 4, 12, 128), shards=(1, 4, 96, 128))[:] = TRUTH
    v3.create_array("small", shape=TRUTH.shape, dtype="f4", chunks=(1, 4, 24, 128))[:] = TRUTH
    v3.create_array("raw", shape=TRUTH.shape, dtype="f4", chunks=(1, 4, 96, 128), compressors=None)[:] = TRUTH
    zarr.consolidate_metadata(v3.store)
    v2 = zarr.open_group(folder / "v2.zarr", mode="w", zarr_format=2)
    blosc = Blosc("zstd", 3, Blosc.SHUFFLE, blocksize=12 * 128 * 4)
    v2.create_array("blosc", shape=TRUTH.shape, dtype="f4", chunks=(1, 4, 96, 128), compressors=blosc)[:] = TRUTH
    zarr.consolidate_metadata(v2.store)
    text = zarr.open_group(folder / "text.zarr", mode="w", zarr_format=3)
    text.create_array("text", shape=(2,), dtype=str, chunks=(2,))[:] = np.array(["a", "bc"])
    text.create_array("number", shape=(2,), dtype="f4", chunks=(2,))[:] = np.arange(2)
    zarr.consolidate_metadata(text.store)
    plain = zarr.open_group(folder / "plain.zarr", mode="w", zarr_format=3)
    plain.create_array("deep/x", shape=(4,), dtype="i2", chunks=(2,))[:] = np.arange(4)


@pytest.fixture(scope="session")
def zarrs(web: Any) -> Any:
    """The served folder with the stores."""
    write(web.folder)
    for name in ("forbidden", "private", "signed"):
        (web.folder / name).mkdir(exist_ok=True)
        zarr.save_array(web.folder / name / "x.zarr", TRUTH[0])
    return web


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """New tries at once."""
    monkeypatch.setattr(remote_file, "FIRST_WAIT_S", 0.01)


@pytest.mark.parametrize("name", ["v3.zarr", "v2.zarr", "text.zarr"])
def test_values_are_as_local(zarrs: Any, name: str) -> None:
    with open_store(f"{zarrs.url}/{name}") as far, open_store(zarrs.folder / name) as near:
        assert set(far) == set(near)
        assert far.attrs == near.attrs
        for array, source in far.items():
            assert source.layout == near[array].layout
            assert source.read().tolist() == near[array].read().tolist()
            if source.shape == TRUTH.shape:
                box = (Span(1, 2), Span(1, 3), Span(17, 60), Span(3, 90))
                np.testing.assert_array_equal(source.read(box), TRUTH[slices(box)])


def test_opening_takes_one_request_where_metadata_is_consolidated(zarrs: Any, proxied: Proxied) -> None:
    proxy = proxied(zarrs.url)
    assert len(open_store(f"{proxy.url}/v3.zarr")) == 3
    assert proxy.paths == ["/v3.zarr/zarr.json"]
    proxy.reset()
    assert len(open_store(f"{proxy.url}/v2.zarr")) == 1
    assert proxy.paths == ["/v2.zarr/zarr.json", "/v2.zarr/.zmetadata"]


def test_without_consolidated_metadata_http_needs_a_name(zarrs: Any) -> None:
    with pytest.raises(ReadError, match=r"cannot list.*consolidate.*group="):
        open_store(f"{zarrs.url}/plain.zarr")
    assert open_store(f"{zarrs.url}/plain.zarr", group="deep/x")["x"].read().tolist() == [0, 1, 2, 3]
    assert open_store(f"{zarrs.url}/plain.zarr/deep/x", format="zarr")["array"].read().tolist() == [0, 1, 2, 3]
    with pytest.raises(StoreNotFoundError, match=r"nothing\.zarr"):
        open_store(f"{zarrs.url}/nothing.zarr")


@pytest.mark.parametrize(
    ("store", "array", "most_requests", "most_bytes"),
    [("v3.zarr", "sharded", 4, 0.45), ("v2.zarr", "blosc", 7, 0.45), ("v3.zarr", "raw", 4, 0.25)],
)
def test_a_quarter_slab_takes_few_requests_and_the_bytes_it_needs(
    zarrs: Any, proxied: Proxied, store: str, array: str, most_requests: int, most_bytes: float
) -> None:
    proxy = proxied(zarrs.url)
    opened = open_store(f"{proxy.url}/{store}", storage_options={"gap": 256})
    source = opened[array]
    planned = plan(Partition((Cut("dim_2", "domain", even(96, 4)),)), source.layout, index={"dim_0": 1})
    proxy.reset()
    with OwnReader() as reader:
        found = reader.read(source, planned, 1)
    np.testing.assert_array_equal(found.numpy(), TRUTH[1, :, 24:48])
    stored = sum(path.stat().st_size for path in (zarrs.folder / store / array).rglob("*") if path.is_file()) / 2
    assert proxy.bodies <= most_bytes * stored
    assert len(proxy.paths) <= most_requests


def test_chunks_of_a_slow_server_are_fetched_at_once_and_drops_survived(zarrs: Any, proxied: Proxied) -> None:
    """Case R16: 50 ms a request, some dropped."""
    proxy = proxied(zarrs.url)
    proxy.delay = 0.05
    source = open_store(f"{proxy.url}/v3.zarr")["small"]
    proxy.reset()
    proxy.fault = lambda number, path: "drop" if number % 4 == 1 else None
    everything = plan(Partition(()), source.layout)
    with OwnReader() as reader:
        found = reader.read(source, everything)
    np.testing.assert_array_equal(found.numpy(), TRUTH)
    assert proxy.most >= 6, "one request after another"
    assert len(proxy.paths) <= 8 + 6


def test_fifty_stores_open_at_a_server_that_limits_requests(zarrs: Any, proxied: Proxied) -> None:
    """Case R61: 429 is the answer to more than 3 requests at once; all open, and hold the right values."""
    proxy = proxied(zarrs.url)
    proxy.delay = 0.005
    refused: list[int] = []

    def busy(number: int, path: str) -> int | None:
        if proxy.now > 3:
            refused.append(number)
            return 429
        return None

    proxy.fault = busy
    with ThreadPoolExecutor(10) as pool:
        stores = list(pool.map(lambda at: open_store(f"{proxy.url}/v{2 + at % 2}.zarr"), range(50)))
        names = {"v2.zarr": "blosc", "v3.zarr": "small"}
        box = (Span(1, 2), Span(1, 2), Span(0, 8), Span(0, 128))
        found = list(pool.map(lambda store: store[names[store.url.rsplit("/", 1)[-1]]].read(box), stores))
    assert refused, "the limit was never met"
    assert len(found) == 50
    for values in found:
        np.testing.assert_array_equal(values, TRUTH[slices(box)])


def test_absent_refused_and_truncated_chunks(zarrs: Any, proxied: Proxied) -> None:
    proxy = proxied(zarrs.url)
    for array in ("small", "raw", "sharded"):
        source = open_store(f"{proxy.url}/v3.zarr")[array]
        proxy.fault = lambda number, path: 404
        with pytest.raises(MissingChunkError, match=rf"{array}/c/0/0/0/0.* not in {proxy.url}/v3.zarr"):
            source.read((Span(0, 1), Span(0, 1), Span(0, 2), Span(0, 128)))
        proxy.fault = lambda number, path: None
        source = open_store(f"{proxy.url}/v3.zarr")[array]
        proxy.fault = lambda number, path: 403
        with pytest.raises(NotAllowedError, match=rf"{array}/c/0/0/0/0.*not allowed"):
            source.read((Span(0, 1), Span(0, 1), Span(0, 2), Span(0, 128)))
        proxy.fault = lambda number, path: None
    filled = open_store(f"{proxy.url}/v3.zarr", missing="fill")["small"]
    proxy.fault = lambda number, path: 404
    assert not filled.read().any()
    proxy.fault = lambda number, path: 403
    with pytest.raises(NotAllowedError):
        filled.read()


def test_metadata_that_s3_refuses_since_it_is_absent(zarrs: Any, proxied: Proxied) -> None:
    """Without leave to list, S3 says 403 of what is not there."""
    proxy = proxied(zarrs.url)
    proxy.fault = lambda number, path: 403 if path.endswith("zarr.json") else None
    assert list(open_store(f"{proxy.url}/v2.zarr")) == ["blosc"]
    proxy.fault = lambda number, path: 403
    with pytest.raises(NotAllowedError):
        open_store(f"{proxy.url}/v2.zarr")


def test_a_password_stays_out_of_stores(zarrs: Any) -> None:
    host = zarrs.url.removeprefix("http://")
    for url in (f"http://user:hidden@{host}/private/x.zarr", f"http://{host}/signed/x.zarr?token=hidden"):
        store = open_store(url, format="zarr")
        np.testing.assert_array_equal(store["array"].read(), TRUTH[0])
        assert "hidden" not in f"{store!r}{store.url}{store['array']!r}{vars(store['array'])}"
    with pytest.raises(NotAllowedError) as caught:
        open_store(f"http://user:hidden_too@{host}/private/x.zarr")
    assert "hidden" not in str(caught.value)


def test_s3(s3: str, proxied: Proxied, tmp_path: Path) -> None:
    write(tmp_path)
    requests.put(f"{s3}/grid").raise_for_status()
    for path in tmp_path.rglob("*"):
        if path.is_file():
            requests.put(f"{s3}/grid/era/{path.relative_to(tmp_path)}", data=path.read_bytes()).raise_for_status()
    proxy = proxied(s3)
    options = {"key": "k", "secret": "hidden", "endpoint_url": proxy.url, "region_name": "us-east-1"}
    store = open_store("s3://grid/era/v3.zarr", storage_options=options)
    for array in ("sharded", "small", "raw"):
        np.testing.assert_array_equal(store[array].read(), TRUTH)
    text = open_store("s3://grid/era/text.zarr", storage_options=options)
    assert text["text"].read().tolist() == ["a", "bc"], "by the zarr library"
    found = open_store("s3://grid/era/plain.zarr", storage_options=options)
    assert found["deep/x"].read().tolist() == [0, 1, 2, 3], "S3 can list"
    proxy.fault = lambda number, path: 403
    with pytest.raises(NotAllowedError, match=r"s3://grid/era/v3\.zarr"):
        store["small"].read()

"""HDF5 files behind HTTP and S3: values as local, chunks by ranges of their own, drops survived, no secrets told."""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable
from typing import Any

import h5py
import hdf5plugin
import numpy as np
import pytest

from shardio import Cut, OwnReader, Partition, open_store, plan
from shardio.box import Span, slices
from shardio.bytes import remote as remote_file
from shardio.errors import CorruptChunkError, MissingChunkError, NotAllowedError, OutsideStoreError, StoreNotFoundError
from shardio.formats.hdf5_chunks import StoredSource
from shardio.partition import even

Proxied = Callable[[str], Any]
TRUTH = np.random.default_rng(1).normal(280, 5, (2, 4, 96, 128)).astype("f4").round(1)
KINDS: dict[str, dict[str, Any]] = {
    "contiguous": {},
    "gzip": {"chunks": (1, 1, 96, 128), "compression": "gzip", "shuffle": True},
    "small": {"chunks": (1, 1, 12, 128), "compression": "gzip"},
    "blosc": {"chunks": (1, 4, 96, 128), **hdf5plugin.Blosc("zstd", 3, hdf5plugin.Blosc.SHUFFLE)},
    "by the library": {"chunks": (1, 1, 96, 128), "scaleoffset": 1},
}


@pytest.fixture(scope="session")
def files(web: Any) -> Any:
    """The served folder with a file of all kinds, and the same behind a password and a signature."""
    for folder in (web.folder, web.folder / "private", web.folder / "signed", web.folder / "forbidden"):
        folder.mkdir(exist_ok=True)
        with h5py.File(folder / "a.h5", "w") as file:
            for name, options in KINDS.items():
                file.create_dataset(name, data=TRUTH, **options)
            file.create_dataset("holes", shape=(4, 8), dtype="f4", chunks=(1, 8))[1] = 1
            file.attrs["title"] = "of all kinds"
    (web.folder / "text.h5").write_text("no HDF5 at all" * 99)
    return web


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """New tries at once."""
    monkeypatch.setattr(remote_file, "FIRST_WAIT_S", 0.01)


def test_values_are_as_local(files: Any) -> None:
    with open_store(f"{files.url}/a.h5") as far, open_store(files.folder / "a.h5") as near:
        assert set(far) == set(near)
        assert far.attrs == near.attrs
        for name in KINDS:
            assert far[name].layout == near[name].layout
            assert isinstance(far[name], StoredSource) == (name != "by the library")
            box = (Span(0, 2), Span(1, 3), Span(17, 60), Span(3, 90))
            np.testing.assert_array_equal(far[name].read(box), near[name].read(box))
        np.testing.assert_array_equal(far["gzip"].read(), TRUTH)
        with pytest.raises(MissingChunkError, match=r"'holes' \(0, 0\) is not in .*a\.h5"):
            far["holes"].read()
        assert far["holes"].read((Span(1, 2), Span(0, 8))).tolist() == [[1] * 8]


@pytest.mark.parametrize(("name", "most_requests"), [("contiguous", 4), ("gzip", 4), ("small", 4), ("blosc", 3)])
def test_a_quarter_slab_takes_few_requests_and_the_bytes_it_needs(
    files: Any, proxied: Proxied, name: str, most_requests: int
) -> None:
    proxy = proxied(files.url)
    source = open_store(f"{proxy.url}/a.h5", storage_options={"gap": 256})[name]
    planned = plan(Partition((Cut("dim_2", "domain", even(96, 4)),)), source.layout, index={"dim_0": 1})
    proxy.reset()
    with OwnReader() as reader:
        found = reader.read(source, planned, 1)
    np.testing.assert_array_equal(found.numpy(), TRUTH[1, :, 24:48])
    with h5py.File(files.folder / "a.h5") as file:
        stored = file[name].id.get_storage_size() / 2
    assert proxy.bodies <= {"gzip": 1.01, "blosc": 1.05}.get(name, 0.3) * stored
    assert len(proxy.paths) <= most_requests


def test_a_slow_server_that_drops(files: Any, proxied: Proxied) -> None:
    proxy = proxied(files.url)
    proxy.delay = 0.02
    proxy.fault = lambda number, path: "drop" if number % 5 == 1 else None
    with open_store(f"{proxy.url}/a.h5") as store:
        assert store.attrs["title"] == "of all kinds"
        with OwnReader() as reader:
            for name in KINDS:
                everything = plan(Partition(()), store[name].layout)
                np.testing.assert_allclose(reader.read(store[name], everything).numpy(), TRUTH, atol=0.06)


def test_what_is_refused_absent_or_no_hdf5_and_no_secrets(files: Any) -> None:
    host = files.url.removeprefix("http://")
    for url in (f"http://user:hidden@{host}/private/a.h5", f"http://{host}/signed/a.h5?token=hidden"):
        with open_store(url, format="hdf5") as store:
            np.testing.assert_array_equal(store["gzip"].read(), TRUTH)
            assert "hidden" not in store.url + repr(store["gzip"])
    cases = {
        f"http://user:hidden@{host}/gone.h5": StoreNotFoundError,
        f"http://{host}/gone.h5?token=hidden": StoreNotFoundError,
        f"http://user:hidden@{host}/text.h5": CorruptChunkError,
        f"http://{host}/forbidden/a.h5?token=hidden": NotAllowedError,
        f"simplecache::http://user:hidden@{host}/gone.h5": StoreNotFoundError,
    }
    for url, kind in cases.items():
        with pytest.raises(kind) as caught:
            open_store(url, format="hdf5")
        assert "hidden" not in "".join(traceback.format_exception(caught.value))


def test_in_s3(files: Any, s3: str) -> None:
    import boto3

    client = boto3.client(
        "s3", endpoint_url=s3, aws_access_key_id="a", aws_secret_access_key="b", region_name="us-east-1"
    )
    client.create_bucket(Bucket="files")
    client.upload_file(str(files.folder / "a.h5"), "files", "deep/a.h5")
    options = {"key": "a", "secret": "b", "endpoint_url": s3, "region": "us-east-1"}
    with open_store("s3://files/deep/a.h5", storage_options=options) as store:
        box = (Span(1, 2), Span(0, 4), Span(5, 9), Span(0, 128))
        for name in ("contiguous", "gzip", "blosc"):
            np.testing.assert_array_equal(store[name].read(box), TRUTH[slices(box)])


@pytest.mark.parametrize("where", ["a.h5", "{url}/a.h5"], ids=["beside", "by URL"])
def test_references_behind_a_url_to_a_file_beside_them(files: Any, where: str) -> None:
    with h5py.File(files.folder / "a.h5") as file:
        offset = file["contiguous"].id.get_offset()
    array = {"shape": TRUTH.shape, "chunks": TRUTH.shape, "dtype": "<f4", "order": "C", "fill_value": None}
    references = {
        ".zgroup": json.dumps({"zarr_format": 2}),
        "x/.zarray": json.dumps({"zarr_format": 2, **array, "compressor": None, "filters": None}),
        "x/.zattrs": json.dumps({"_ARRAY_DIMENSIONS": list("abcd")}),
        "x/0.0.0.0": [where.format(url=files.url), offset, TRUTH.nbytes],
        "y/.zarray": json.dumps({"zarr_format": 2, **array, "compressor": None, "filters": None}),
        "y/0.0.0.0": ["http://127.0.0.1:9/elsewhere.h5", 0, TRUTH.nbytes],
    }
    (files.folder / "refs.json").write_text(json.dumps({"version": 1, "refs": references}))
    box = (Span(1, 2), Span(0, 4), Span(5, 9), Span(0, 128))
    with open_store(f"{files.url}/refs.json", format="references") as store:
        np.testing.assert_array_equal(store["x"].read(box), TRUTH[slices(box)])
        with pytest.raises(OutsideStoreError, match="elsewhere"):
            store["y"].read(box)

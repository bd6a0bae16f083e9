"""References of kerchunk, in JSON and Parquet, into HDF5: values, and nothing outside their folder unless allowed."""

import json
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from shardio import open_store
from shardio.box import Span
from shardio.errors import CorruptChunkError, MissingChunkError, OutsideStoreError, UnknownFormatError

VALUES = np.random.default_rng(0).normal(size=(4, 6, 8)).astype("f4")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """An HDF5 file."""
    folder = tmp_path / "data"
    folder.mkdir()
    with h5py.File(folder / "a.h5", "w") as file:
        file.create_dataset("deflated", data=VALUES, chunks=(1, 6, 8), compression="gzip", shuffle=True)
        file.create_dataset("raw", data=VALUES)
        file.create_dataset("chunked", data=VALUES, chunks=(2, 3, 8))
    return folder / "a.h5"


def references(data: Path) -> dict[str, Any]:
    """What kerchunk says of the file."""
    kerchunk = pytest.importorskip("kerchunk.hdf")
    found: dict[str, Any] = kerchunk.SingleHdf5ToZarr(str(data), inline_threshold=0).translate()
    return found


def check(store: Any) -> None:
    """All arrays, whole and in part."""
    for name in ("deflated", "raw", "chunked"):
        np.testing.assert_array_equal(store[name].read(), VALUES)
        box = (Span(1, 3), Span(2, 5), Span(0, 8))
        np.testing.assert_array_equal(store[name].read(box), VALUES[1:3, 2:5])


def test_json(data: Path) -> None:
    path = data.parent / "refs.json"
    path.write_text(json.dumps(references(data)))
    store = open_store(path)
    assert store.format == "references"
    check(store)


def test_parquet(data: Path) -> None:
    pytest.importorskip("pyarrow")
    from fsspec.implementations.reference import LazyReferenceMapper

    path = data.parent / "refs.parq"
    table = LazyReferenceMapper.create(str(path), record_size=3, engine="pyarrow")
    refs = references(data)["refs"]
    for key in sorted(refs, key=lambda key: ".z" not in key):  # the tables follow from the metadata
        table[key] = refs[key]
    table.flush()
    check(open_store(path))


def test_relative_paths_templates_and_inline_chunks(data: Path) -> None:
    meta = {"zarr_format": 2, "shape": [2, 2], "chunks": [1, 2], "dtype": "<i2", "compressor": None, "filters": None}
    meta |= {"fill_value": 0, "order": "C"}
    (data.parent / "numbers").write_bytes(np.array([9, 9, 1, 2], "<i2").tobytes())
    refs = {
        ".zgroup": {"zarr_format": 2},
        "x/.zarray": json.dumps(meta),
        "x/0.0": ["{{u}}", 4, 4],
        "x/1.0": "base64:AwAEAA==",
        "y/.zarray": json.dumps(meta),
        "y/0.0": ["numbers", 4, 4],
        "y/1.0": ["gone", 0, 4],
        "z/.zarray": json.dumps(meta),
        "z/0.0": ["numbers", -4, 4],
    }
    path = data.parent / "refs.json"
    path.write_text(json.dumps({"version": 1, "templates": {"u": "numbers"}, "refs": refs}))
    store = open_store(path)
    assert store["x"].read().tolist() == [[1, 2], [3, 4]]
    with pytest.raises(MissingChunkError, match=r"'y/1.0'.*gone, which is not there"):
        store["y"].read()
    with pytest.raises(CorruptChunkError, match=r"'z/0.0'.*no range"):
        store["z"].read()
    path.write_text(json.dumps({"version": 1, "gen": [], "refs": refs}))
    with pytest.raises(UnknownFormatError, match="generated"):
        open_store(path)


def test_files_elsewhere_are_read_only_if_allowed(data: Path, tmp_path: Path) -> None:
    path = tmp_path / "other" / "refs.json"
    path.parent.mkdir()
    path.write_text(json.dumps(references(data)))
    with pytest.raises(OutsideStoreError, match=r"data/a\.h5.*allow="):
        open_store(path)["raw"].read()
    for allow in (True, str(data.parent), [str(data.parent.parent)]):
        check(open_store(path, allow=allow))
    link = path.parent / "link.h5"
    link.symlink_to(data)
    path.write_text(path.read_text().replace(str(data), "link.h5"))
    with pytest.raises(OutsideStoreError):
        open_store(path)["raw"].read()
    text = path.read_text()
    for target in ("http://user:hidden@127.0.0.1:1/x.h5?token=hidden", "s3://bucket/x.h5", "../data/a.h5"):
        path.write_text(text.replace("link.h5", target))
        with pytest.raises(OutsideStoreError) as caught:
            open_store(path, allow=["http://127.0.0.1:10/"])["raw"].read()
        assert "hidden" not in str(caught.value)

"""Zarr arrays whose codecs are all decoded here: metadata parsed as it is, chunks and shards found by their keys."""

from __future__ import annotations

import base64
import marshal
import math
import struct
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

import numpy as np

from shardio.bytes import ByteStore
from shardio.chunked import ChunkedSource, Number
from shardio.codecs.base import Extent, Pipeline
from shardio.codecs.raw import RawPipeline
from shardio.codecs.zarr import checked, v2_pipeline, v3_pipeline
from shardio.errors import CorruptChunkError
from shardio.limits import check_array, check_sizes

CACHED_INDEXES = 1024
"""Shard indexes kept of each array (16 bytes per inner chunk each)."""
EMPTY = 2**64 - 1
"""Offset and length that a shard's index gives for an inner chunk that was never written."""
V3_DTYPES = {"bool", *(f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64))} | {
    "float16",
    "float32",
    "float64",
    "complex64",
    "complex128",
}
STORED = {
    2: ("zarr_format", "dtype", "chunks", "order", "compressor", "filters", "dimension_separator"),
    3: ("zarr_format", "data_type", "chunk_grid", "chunk_key_encoding", "codecs", "storage_transformers"),
}
"""Version -> metadata that say how chunks are stored."""
Meta = Mapping[str, Any]


class ShardIndexes:
    """Where the inner chunks of an array's shards lie: each index is fetched and checked once, and kept.

    Attributes:
        per_shard: inner chunks of a shard along each dim.
    """

    def __init__(self, per_shard: tuple[int, ...], *, at_end: bool, checksum: bool, little: bool) -> None:
        self.per_shard = per_shard
        self._at_end, self._checksum = at_end, checksum
        self._dtype = np.dtype("<u8" if little else ">u8")
        self._nbytes = math.prod(per_shard) * 16 + 4 * checksum
        self._kept: dict[str, Future[np.ndarray[Any, Any] | None]] = {}
        self._lock = threading.Lock()

    def find(self, store: ByteStore, key: str, within: Number) -> Extent | None:
        """Where an inner chunk lies; None if it, or the shard, was never written."""
        with self._lock:
            found = self._kept.get(key)
            mine = found is None
            if found is None:
                found = self._kept[key] = Future()
                if len(self._kept) > CACHED_INDEXES:
                    self._kept.pop(next(iter(self._kept)))
        if mine:
            try:
                found.set_result(self._fetch(store, key))
            except BaseException as error:
                self._kept.pop(key, None)
                found.set_exception(error)
        index = found.result()
        if index is None:
            return None
        start, nbytes = index[within].tolist()
        return None if start == nbytes == EMPTY else Extent(store, key, start, start + nbytes)

    def _fetch(self, store: ByteStore, key: str) -> np.ndarray[Any, Any] | None:
        stored = store.read(key, -self._nbytes) if self._at_end else store.read(key, 0, self._nbytes)
        if stored is None:
            return None
        raw = np.frombuffer(stored, np.uint8)
        if len(raw) != self._nbytes:
            raise CorruptChunkError(f"it has {len(raw)} bytes, but the index of its inner chunks takes {self._nbytes}")
        if self._checksum:
            raw = checked(raw)
        index = raw.view(self._dtype).astype(np.uint64).reshape(*self.per_shard, 2)
        written = (index != EMPTY).any(axis=-1)
        if (index[written] >= 2**62).any():
            raise CorruptChunkError("the index of its inner chunks points beyond any file")
        return index


class ZarrChunks(ChunkedSource):
    """One Zarr array in a byte store."""

    def __init__(
        self, name: str, store: ByteStore, prefix: str, separator: str, shards: ShardIndexes | None, **others: Any
    ) -> None:
        super().__init__(name, store, **others)
        self._prefix = prefix
        self._only = f"{prefix}0" if prefix[-1:] in ("", "/") and not prefix.endswith("c/") else prefix[:-1]
        self._separator = separator
        self._shards = shards

    @property
    def fetched_together(self) -> bool:
        """See Source.fetched_together."""
        return self._shards is not None and self._store.requests > 1

    def locate(self, number: Number) -> Extent | None:
        """See ChunkedSource.locate."""
        if self._shards is None:
            return Extent(self._store, self.key(number))
        shard, within = self._in_shard(number, self._shards.per_shard)
        return self._shards.find(self._store, self.key(shard), within)

    def describe(self, number: Number) -> str:
        """See ChunkedSource.describe."""
        if self._shards is None:
            return f"{self.key(number)!r} in {self._store.url}"
        shard, within = self._in_shard(number, self._shards.per_shard)
        return f"{self.key(shard)!r}, inner chunk {within}, in {self._store.url}"

    def key(self, number: Number) -> str:
        """Key of a stored object, a chunk or a shard."""
        if not number:
            return self._only
        return self._prefix + self._separator.join(map(str, number))

    def _in_shard(self, number: Number, per_shard: tuple[int, ...]) -> tuple[Number, Number]:
        both = [divmod(at, per) for at, per in zip(number, per_shard, strict=True)]
        return tuple(shard for shard, _ in both), tuple(within for _, within in both)


def zarr_chunks(
    store: ByteStore, path: str, name: str, meta: Meta, strict: bool, alike: Alike, key: bytes
) -> ZarrChunks | None:
    """The array that metadata describes; None if the zarr library must read it.

    Args:
        store: holds the chunks.
        path: of the array in the store, "" for its root.
        name: of the array, for users.
        meta: zarr.json, or .zarray with the content of .zattrs as "attributes".
        strict: an absent chunk is an error.
        alike: given to all arrays of a store, it saves time where they are stored alike.
        key: `stored_alike` of the metadata.

    Raises KeyError, TypeError or ValueError if the metadata makes no sense.
    """
    shape = check_sizes(meta["shape"], "shape", name, store.url)
    found = _found(meta, alike, key)
    if found is None:
        return None
    pipeline, shards, encoding, separator = found
    check_sizes(pipeline.shape, "chunks", name, store.url)
    check_array(name, store.url, shape, pipeline.shape, pipeline.dtype, parts=isinstance(pipeline, RawPipeline))
    if separator not in ("/", "."):
        raise ValueError(f"keys are separated by {separator!r}; '/' or '.' is expected")
    if len(shape) != len(pipeline.shape) or min((*pipeline.shape, 1)) < 1:
        raise ValueError(f"shape {shape} and chunks {pipeline.shape} do not fit each other")
    attrs = dict(meta.get("attributes") or {})
    dims = attrs.pop("_ARRAY_DIMENSIONS", None) or meta.get("dimension_names") or [None] * len(shape)
    if len(dims) != len(shape):
        raise ValueError(f"shape {shape} and dims {dims} do not fit each other")
    if "_FillValue" in attrs:
        attrs["_FillValue"] = fill_value_of_xarray(attrs["_FillValue"])
    elif meta["zarr_format"] == 2 and "_ARRAY_DIMENSIONS" in (meta.get("attributes") or {}):
        attrs |= missing_by_xarray(meta.get("fill_value"))
    fill = _fill_value(meta.get("fill_value"), pipeline.dtype)
    return ZarrChunks(
        name,
        store,
        f"{path}/{encoding}" if path else encoding,
        separator,
        shards,
        pipeline=pipeline,
        fill=lambda: fill,
        # One element that equals the fill value is ordinarily left unwritten (the time 0, a crs); it cannot mislead.
        strict=strict and not (len(shape) <= 1 and math.prod(pipeline.shape) == 1),
        dims=tuple(f"dim_{at}" if dim is None else str(dim) for at, dim in enumerate(dims)),
        shape=shape,
        attrs=attrs,
    )


Found = tuple[Pipeline, ShardIndexes | None, str, str]
"""Pipeline, shards, what keys begin with, and what stands between the numbers in them."""


Alike = dict[bytes, Found | None]
"""What was found for the metadata that say how chunks are stored; None if it must be found anew for each array."""


def stored_alike(meta: Meta) -> bytes:
    """The same for arrays that are stored in the same way. Raises KeyError if the version is not known."""
    return marshal.dumps([meta.get(name) for name in STORED[meta["zarr_format"]]], 2)  # five times as fast as text


def _found(meta: Meta, alike: Alike, key: bytes) -> Found | None:
    found = alike.get(key)
    if found is None:
        found = _v2(meta) if meta["zarr_format"] == 2 else _v3(meta)
        alike[key] = found if found is not None and found[1] is None else None  # each array has its shards' indexes
    return found


def _v2(meta: Meta) -> Found | None:
    if not isinstance(meta["dtype"], str) or np.dtype(meta["dtype"]).kind not in "iufcb":
        return None
    pipeline = v2_pipeline(meta, np.dtype(meta["dtype"]))
    return None if pipeline is None else (pipeline, None, "", str(meta.get("dimension_separator", ".")))


def _v3(meta: Meta) -> Found | None:
    grid, keys, codecs = meta["chunk_grid"], meta["chunk_key_encoding"], meta["codecs"]
    known = isinstance(meta["data_type"], str) and meta["data_type"] in V3_DTYPES  # texts and dates are objects
    if not known or grid["name"] != "regular" or meta.get("storage_transformers"):
        return None
    dtype, chunks, shards = np.dtype(meta["data_type"]), tuple(grid["configuration"]["chunk_shape"]), None
    if [codec["name"] for codec in codecs] == ["sharding_indexed"]:
        config = codecs[0]["configuration"]
        inner, codecs = tuple(config["chunk_shape"]), config["codecs"]
        shards = _shards(chunks, inner, config)
        if shards is None:
            return None
        chunks = inner
    pipeline = v3_pipeline(chunks, dtype, codecs)
    if pipeline is None or keys["name"] not in ("default", "v2"):
        return None
    default = keys["name"] == "default"
    separator = (keys.get("configuration") or {}).get("separator", "/" if default else ".")
    return pipeline, shards, f"c{separator}" if default else "", separator


def _shards(outer: tuple[int, ...], inner: tuple[int, ...], config: Meta) -> ShardIndexes | None:
    """The indexes of shards; None if they are compressed, or otherwise unknown here."""
    if (
        len(outer) != len(inner)
        or min((*inner, 1)) < 1
        or any(size % part for size, part in zip(outer, inner, strict=True))
    ):
        raise ValueError(f"shards {outer} are no multiple of their inner chunks {inner}")
    codecs = config.get("index_codecs") or []
    names = [codec["name"] for codec in codecs]
    if names not in (["bytes"], ["bytes", "crc32c"]):
        return None
    return ShardIndexes(
        tuple(size // part for size, part in zip(outer, inner, strict=True)),
        at_end=config.get("index_location", "end") == "end",
        checksum=len(names) == 2,
        little=(codecs[0].get("configuration") or {}).get("endian", "little") == "little",
    )


def _fill_value(stored: Any, dtype: np.dtype[Any]) -> Any:
    """The value of absent chunks. Raises TypeError or ValueError if it is none of this dtype."""
    if stored is None:
        return dtype.type(0)
    if isinstance(stored, str) and stored.startswith("0x"):
        return np.frombuffer(bytes.fromhex(stored[2:]), dtype.newbyteorder(">"))[0]
    if isinstance(stored, list):
        return dtype.type(complex(*map(float, stored)))
    return dtype.type(float(stored) if isinstance(stored, str) else stored)


def missing_by_xarray(fill_value: Any) -> dict[str, Any]:
    """The attribute _FillValue that xarray moves into the fill_value of version 2, where it counts as missing.

    0 does not: other programs write it everywhere without meaning that zeros are missing.
    """
    known = fill_value is not None and fill_value == fill_value and fill_value not in (0, "NaN", "")
    return {"_FillValue": fill_value} if known and not isinstance(fill_value, list) else {}


def fill_value_of_xarray(stored: Any) -> Any:
    """The number in an attribute _FillValue; xarray writes floats into version 3 as base64 of their 8 bytes."""
    if not (isinstance(stored, str) and len(stored) == 12 and stored.endswith("=")):
        return stored
    try:
        return struct.unpack("<d", base64.b64decode(stored, validate=True))[0]
    except ValueError:
        return stored

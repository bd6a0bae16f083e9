"""The codecs in a Zarr array's metadata as a Pipeline, if all of them are decoded here; the zarr library has others."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import google_crc32c
import numcodecs
import numpy as np

from shardio.box import whole
from shardio.codecs import native
from shardio.codecs.base import Bytes, Pipeline
from shardio.codecs.blosc import BloscPipeline, decode_whole
from shardio.codecs.deflate import inflate
from shardio.codecs.raw import RawPipeline
from shardio.codecs.shuffle import unshuffle
from shardio.codecs.whole import Room, Step, WholePipeline
from shardio.errors import CorruptChunkError

Config = Mapping[str, Any]
COMPRESSORS: dict[str, Callable[[Bytes, Bytes], Any]] = {
    "blosc": decode_whole,
    "zstd": native.zstd,
    "lz4": native.lz4,
    "zlib": lambda stored, into: native.expect(inflate(stored, into, "zlib"), len(into), "zlib"),
    "gzip": lambda stored, into: native.expect(inflate(stored, into, "gzip"), len(into), "gzip"),
}
CHECKS = ("fletcher32", "crc32", "adler32")
"""Codecs of numcodecs that put a checksum of 4 bytes beside the data."""
CONVERSIONS = {
    "delta": ("dtype", "astype"),
    "fixedscaleoffset": ("dtype", "astype"),
    "quantize": ("dtype", "astype"),
    "astype": ("decode_dtype", "encode_dtype"),
}
"""Filters of numcodecs that turn elements of one dtype to another, and what names the two."""


def v2_pipeline(meta: Config, dtype: np.dtype[Any]) -> Pipeline | None:
    """The pipeline of a version 2 array; None if a codec is not known here."""
    codecs = [*(meta.get("filters") or ()), *([meta["compressor"]] if meta.get("compressor") else ())]
    order = range(len(meta["chunks"]))
    named = [(str(codec["id"]), codec) for codec in codecs]
    return _pipeline(meta["chunks"], dtype, named, order if meta["order"] == "C" else order[::-1])


def v3_pipeline(shape: Sequence[int], dtype: np.dtype[Any], codecs: Sequence[Config]) -> Pipeline | None:
    """The pipeline of a version 3 array's chunks, or of inner chunks; None if a codec is not known here."""
    order: Sequence[int] = range(len(shape))
    rest = [(str(codec["name"]), codec.get("configuration") or {}) for codec in codecs]
    while rest and rest[0][0] == "transpose":
        order = [order[at] for at in rest.pop(0)[1]["order"]]
    if not rest or rest[0][0] != "bytes" or sorted(order) != list(range(len(shape))):
        return None
    endian = rest.pop(0)[1].get("endian", None if dtype.itemsize > 1 else "little")
    if endian not in ("little", "big"):
        return None
    known = [(name.removeprefix("numcodecs."), config) for name, config in rest]
    if any(name in (*CONVERSIONS, "bitround") for name, _ in known):  # these come before bytes in this version
        return None
    return _pipeline(shape, dtype.newbyteorder("<" if endian == "little" else ">"), known, order)


def _pipeline(
    shape: Sequence[int], dtype: np.dtype[Any], codecs: Sequence[tuple[str, Config]], order: Sequence[int]
) -> Pipeline | None:
    if not native.available():
        return None
    swap, native_dtype = not dtype.isnative, dtype.newbyteorder("=")
    names = [name for name, _ in codecs]
    if not names:
        return RawPipeline(shape, native_dtype, order, swap=swap)
    if names == ["blosc"]:
        return BloscPipeline(shape, native_dtype, order, swap=swap)
    steps = _steps(codecs, math.prod(shape) * dtype.itemsize)
    return None if steps is None else WholePipeline(shape, native_dtype, steps, order, swap=swap)


def _steps(codecs: Sequence[tuple[str, Config]], nbytes: int) -> list[Step] | None:
    """How to undo codecs, given in the order of writing, that were given `nbytes`; None if one is not known."""
    steps: list[Step] = []
    size: int | None = nbytes  # None: as many as a compressor gave
    for name, config in codecs:
        if name in CHECKS or (name == "crc32c" and config.get("location", "end") == "end"):
            steps.append(Step(_numcodec(name, config) if name in CHECKS else _crc32c, size, name))
            size = None if size is None else size + 4
            continue
        if size is None:
            return None
        if name in COMPRESSORS:
            steps.append(Step(_compressor(COMPRESSORS[name]), size, name))
            size = None
        elif name == "shuffle":
            steps.append(Step(_unshuffle(int(config.get("elementsize", 4))), size, name))
        elif name in CONVERSIONS or name == "bitround":
            steps.append(Step(_numcodec(name, config), size, name))
            decoded, encoded = CONVERSIONS.get(name, ("", ""))
            if decoded and config.get(encoded):
                size = size // np.dtype(config[decoded]).itemsize * np.dtype(config[encoded]).itemsize
        else:
            return None
    return steps[::-1]


def _compressor(decode: Callable[[Bytes, Bytes], Any]) -> Callable[[Bytes, Room], Bytes]:
    def step(stored: Bytes, room: Room) -> Bytes:
        into = room()
        decode(stored, into)
        return into

    return step


def _numcodec(name: str, config: Config) -> Callable[[Bytes, Room], Bytes]:
    """A codec of numcodecs whose result is no longer than a small multiple of what it is given."""
    codec = numcodecs.get_codec({**config, "id": name})
    return lambda stored, room: np.ascontiguousarray(codec.decode(stored)).reshape(-1).view(np.uint8)


def _unshuffle(width: int) -> Callable[[Bytes, Room], Bytes]:
    """Put the bytes of elements, stored as all first bytes, all second bytes, ..., together again."""

    def step(stored: Bytes, room: Room) -> Bytes:
        into = room()
        if not 0 < width < 2**31 or len(stored) != len(into):
            raise CorruptChunkError(f"{len(stored)} bytes in elements of {width}; expected are {len(into)}")
        count = len(stored) // width * width
        elements = into[:count].view(f"V{width}")
        unshuffle(stored[:count].reshape(width, -1), whole(elements.shape), elements)
        into[count:] = stored[count:]
        return into

    return step


def _crc32c(stored: Bytes, room: Room) -> Bytes:
    """The bytes before the checksum, if it is theirs."""
    return checked(stored)


def checked(stored: Bytes) -> Bytes:
    """The bytes before a crc32c. Raises CorruptChunkError if it is not theirs."""
    values, found = stored[:-4], int.from_bytes(stored[-4:].tobytes(), "little")
    expected = google_crc32c.value(cast("bytes", values)) if len(stored) >= 4 else None
    if found != expected:
        raise CorruptChunkError(f"the checksum stored is {found}, but that of the {len(values)} bytes is {expected}")
    return values

"""Deflate: by libdeflate through imagecodecs (the extra "fast") where it is installed, else by zlib."""

from __future__ import annotations

import zlib
from functools import cache
from typing import Any, Literal

from shardio import extras
from shardio.codecs.base import Array
from shardio.errors import CorruptChunkError, MissingExtraError

WINDOW_BITS = {"zlib": 15, "gzip": 31}
"""What zlib calls the two wrappings of a deflate stream."""


def inflate(stored: Any, into: Array, wrapping: Literal["zlib", "gzip"] = "zlib") -> int:
    """Decode a stream into `into` (bytes, contiguous); how many bytes it gave.

    Raises CorruptChunkError if it is damaged, cut, or gives more bytes than `into` holds.
    """
    fast = _fast(wrapping)
    if fast is None:
        return _by_zlib(stored, into, WINDOW_BITS[wrapping])
    try:
        return len(fast(stored, out=into))
    except (RuntimeError, ValueError) as error:
        raise CorruptChunkError(f"it is no {wrapping} stream of at most {into.nbytes} bytes: {error}") from error


@cache
def _fast(wrapping: str) -> Any:
    try:
        imagecodecs = extras.load("imagecodecs")
    except MissingExtraError:
        return None
    return imagecodecs.deflate_decode if wrapping == "zlib" else imagecodecs.gzip_decode


def _by_zlib(stored: Any, into: Array, window_bits: int) -> int:
    """The same; never takes more memory than the result may have."""
    stream = zlib.decompressobj(window_bits)
    try:
        values = stream.decompress(stored, into.nbytes + 1)
    except zlib.error as error:
        raise CorruptChunkError(f"it is no deflate stream: {error}") from error
    if len(values) > into.nbytes or not stream.eof:
        found = f"more than {into.nbytes} bytes" if len(values) > into.nbytes else "no end"
        raise CorruptChunkError(f"its deflate stream has {found}, at most {into.nbytes} bytes are expected")
    into[: len(values)] = memoryview(values)
    return len(values)

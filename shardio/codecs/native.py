"""Decoders of the compiled libraries inside numcodecs, called with given memory; none of them trusts what it decodes.

They are called through ctypes, which lets go of the interpreter lock. Where numcodecs does not export them (Windows),
`available` says so, and zarr's own path is taken.
"""

from __future__ import annotations

import ctypes
import importlib
import threading
from ctypes import c_char_p, c_int, c_size_t, c_uint, c_void_p
from functools import cache
from typing import Any

from shardio.codecs.base import Bytes
from shardio.errors import CorruptChunkError

_FUNCTIONS: dict[str, tuple[str, Any, list[Any]]] = {
    "blosc_decompress_ctx": ("numcodecs.blosc", c_int, [c_void_p, c_void_p, c_size_t, c_int]),
    "ZSTD_createDCtx": ("numcodecs.zstd", c_void_p, []),
    "ZSTD_freeDCtx": ("numcodecs.zstd", c_size_t, [c_void_p]),
    "ZSTD_decompressDCtx": ("numcodecs.zstd", c_size_t, [c_void_p, c_void_p, c_size_t, c_void_p, c_size_t]),
    "ZSTD_isError": ("numcodecs.zstd", c_uint, [c_size_t]),
    "ZSTD_getErrorName": ("numcodecs.zstd", c_char_p, [c_size_t]),
    "LZ4_decompress_safe": ("numcodecs.lz4", c_int, [c_void_p, c_void_p, c_int, c_int]),
}


@cache
def _function(name: str) -> Any:
    module, result, arguments = _FUNCTIONS[name]
    function = getattr(ctypes.CDLL(str(importlib.import_module(module).__file__)), name)
    function.restype, function.argtypes = result, arguments
    return function


@cache
def available() -> bool:
    """Can all of these functions be called here?"""
    try:
        for name in _FUNCTIONS:
            _function(name)
    except (ImportError, OSError, AttributeError):
        return False
    return True


def address(array: Bytes) -> int:
    """Where a contiguous array's bytes lie."""
    return int(array.__array_interface__["data"][0])


def blosc(stored: Bytes, into: Bytes) -> None:
    """Decode a blosc buffer of exactly `into`'s size; `stored` has a header that was checked."""
    found = _function("blosc_decompress_ctx")(address(stored), address(into), len(into), 1)
    if found != len(into):
        raise CorruptChunkError(f"blosc decodes {found} bytes of {len(into)}")


class _Context:
    """A zstd decompression context; one a thread."""

    def __init__(self) -> None:
        self.pointer = _function("ZSTD_createDCtx")()
        self._free = _function("ZSTD_freeDCtx")

    def __del__(self) -> None:
        self._free(self.pointer)


_CONTEXTS = threading.local()


def _context() -> int:
    if not hasattr(_CONTEXTS, "zstd"):
        _CONTEXTS.zstd = _Context()
    return int(_CONTEXTS.zstd.pointer)


def zstd(stored: Bytes, into: Bytes) -> None:
    """Decode zstd frames of exactly `into`'s size."""
    found = _function("ZSTD_decompressDCtx")(_context(), address(into), len(into), address(stored), len(stored))
    if _function("ZSTD_isError")(found):
        raise CorruptChunkError(f"zstd: {_function('ZSTD_getErrorName')(found).decode()}, of {len(into)} bytes")
    expect(found, len(into), "zstd")


def lz4(stored: Bytes, into: Bytes) -> None:
    """Decode what numcodecs.LZ4 wrote, a size and a block of exactly `into`'s size."""
    if len(stored) < 4:
        raise CorruptChunkError(f"lz4: {len(stored)} bytes are too few for its header")
    expect(int.from_bytes(stored[:4].tobytes(), "little"), len(into), "lz4")
    found = _function("LZ4_decompress_safe")(address(stored) + 4, address(into), len(stored) - 4, len(into))
    expect(found, len(into), "lz4")


def expect(found: int, expected: int, codec: str) -> None:
    """Raise CorruptChunkError unless a codec gave the bytes that it had to."""
    if found != expected:
        raise CorruptChunkError(f"{codec} decodes {found} bytes, but a chunk has {expected}")

"""What a store may ask for: metadata are checked before memory is taken, and nothing in a store is run or led out of.

Stores are data, perhaps of strangers. A chunk that must be decoded as a whole is refused above `chunk_limit()`; chunks
decode into memory of the size that the metadata say, so a decompression bomb fails as corrupt. Links in the file
system are followed: who made them could write to this machine.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from shardio.errors import LimitError, OutsideStoreError, UnsafeCodecError

LARGEST_CHUNK = 16 << 30
"""Bytes, decoded, of the largest chunk that is read as a whole."""
LARGEST_ARRAY = 2**62
"""Bytes of the largest array; offsets in it are computed with 64 bits."""
MOST_DIMS = 64


@cache
def chunk_limit() -> int:
    """LARGEST_CHUNK, or this machine's memory if it is less."""
    try:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):  # Windows does not tell
        return LARGEST_CHUNK
    return min(LARGEST_CHUNK, memory) if memory > 0 else LARGEST_CHUNK


def check_sizes(sizes: Sequence[Any], what: str, name: str, url: str) -> tuple[int, ...]:
    """Sizes in metadata as integers. Raises LimitError if one is none, or negative, or there are too many."""
    if not isinstance(sizes, (list, tuple)) or len(sizes) > MOST_DIMS:
        raise LimitError(f"{name!r} in {url} has as {what} no list of at most {MOST_DIMS} sizes; mend its metadata")
    if not all(type(size) is int and 0 <= size < LARGEST_ARRAY for size in sizes):
        raise LimitError(
            f"{name!r} in {url} has the {what} {list(sizes)!r:.200}; integers of 0 to {LARGEST_ARRAY} are expected; "
            f"mend its metadata"
        )
    return tuple(sizes)


def check_array(
    name: str, url: str, shape: Sequence[int], chunks: Sequence[int], dtype: np.dtype[Any], *, parts: bool = False
) -> None:
    """Raise LimitError if an array is larger than can be addressed, or a chunk larger than may be decoded.

    Args:
        name, url: for errors.
        shape, chunks: as `check_sizes` gave them.
        dtype: as decoded.
        parts: chunks are not compressed, so only what is wanted is read, whatever their size.
    """
    chunk = math.prod(chunks) * dtype.itemsize
    if math.prod(shape) * dtype.itemsize > LARGEST_ARRAY or chunk > LARGEST_ARRAY:
        raise LimitError(
            f"{name!r} in {url}, shape {tuple(shape)}, chunks {tuple(chunks)}, {dtype}, is larger than "
            f"{LARGEST_ARRAY} bytes; mend its metadata"
        )
    if not parts and chunk > chunk_limit():
        raise LimitError(
            f"{name!r} in {url}, shape {tuple(shape)}, {dtype}, has chunks {tuple(chunks)} of {chunk} bytes, more than "
            f"the {chunk_limit()} that one chunk may take here; rewrite it with smaller chunks"
        )


def check_codecs(meta: Any, name: str, url: str) -> None:
    """Raise UnsafeCodecError if the metadata of an array, as JSON has them, name a codec that unpickles.

    It would run code of the store.
    """
    if isinstance(meta, dict):
        for key in ("id", "name", "object_codec_id"):
            if key in meta and str(meta[key]).removeprefix("numcodecs.") == "pickle":
                raise UnsafeCodecError(
                    f"{name!r} in {url} is stored through the codec 'pickle': reading it would run code from the "
                    f"store; if you trust who wrote it, open it with open_store(..., allow_pickle=True)"
                )
    for part in meta.values() if isinstance(meta, dict) else meta:
        if isinstance(part, (dict, list, tuple)):
            check_codecs(part, name, url)


def check_key(key: str, url: str) -> None:
    """Raise OutsideStoreError if a key leads out of its store."""
    if ".." in key and ".." in key.replace("\\", "/").split("/"):
        raise OutsideStoreError(f"the key {key!r} leads out of {url}; mend the metadata that name it")

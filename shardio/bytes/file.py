"""An object of a byte store as a file, for libraries that want one; only what they ask for is fetched."""

from __future__ import annotations

import io
import os
from collections import OrderedDict
from typing import Any

from shardio.bytes.base import ByteStore
from shardio.errors import ReadError

BLOCK = 256 << 10
"""Bytes fetched at once: structure is scattered in small pieces, each of which would be a request."""
BLOCKS = 64
"""Blocks kept, the last used ones."""


class ObjectFile(io.RawIOBase):
    """A readable, seekable file. Long reads are passed on, short ones are answered from blocks that are kept.

    Args:
        store, key: the object.
        size: its bytes.
    """

    def __init__(self, store: ByteStore, key: str, size: int) -> None:
        self._store, self._key, self._size = store, key, size
        self._at = 0
        self._blocks: OrderedDict[int, memoryview] = OrderedDict()

    def readable(self) -> bool:
        """It is."""
        return True

    def seekable(self) -> bool:
        """It is."""
        return True

    def tell(self) -> int:
        """Where the next read begins."""
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Go to a byte."""
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        """Fill a buffer, or as much of it as there is. Raises ReadError or CorruptChunkError as the store does."""
        into = memoryview(buffer).cast("B")
        into = into[: max(0, self._size - self._at)]
        if len(into) >= BLOCK:
            self._fill(self._at, into)
        else:
            done = 0
            while done < len(into):
                number, first = divmod(self._at + done, BLOCK)
                part = self._block(number)[first : first + len(into) - done]
                into[done : done + len(part)] = part
                done += len(part)
        self._at += len(into)
        return len(into)

    def _block(self, number: int) -> memoryview:
        found = self._blocks.pop(number, None)
        if found is None:
            start = number * BLOCK
            found = memoryview(bytearray(min(BLOCK, self._size - start)))
            self._fill(start, found)
            while len(self._blocks) >= BLOCKS:
                self._blocks.popitem(last=False)
        self._blocks[number] = found
        return found

    def _fill(self, start: int, into: memoryview) -> None:
        if not self._store.read_into(self._key, start, into):
            raise ReadError(
                f"{self._key!r} in {self._store.url} vanished while it was read; restore it, and open it anew"
            )

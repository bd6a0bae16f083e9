"""From the stored bytes of one chunk to the values of a box of it, decoding as little as the codec allows."""

from __future__ import annotations

import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from shardio.aligned import LINE, empty_bytes
from shardio.box import Box, Span, whole
from shardio.bytes.base import ByteStore
from shardio.errors import CorruptChunkError

Array = np.ndarray[Any, np.dtype[Any]]
Bytes = np.ndarray[Any, np.dtype[np.uint8]]
T = TypeVar("T")
OVERHEAD = 1 << 20
"""Stored bytes that a chunk has at most beyond twice those of its values; no codec writes more."""
Share = Callable[[Sequence[Callable[[], Any]]], list[Any]]
"""Runs jobs, perhaps on several threads, and gives their results; an error of one is raised once none runs any more."""


def in_turn(jobs: Sequence[Callable[[], T]]) -> list[T]:
    """Share without other threads."""
    return [job() for job in jobs]


class Extent(NamedTuple):
    """Where the bytes of a stored chunk lie: in an object, from start to stop (None: to its end)."""

    store: ByteStore
    key: str
    start: int = 0
    stop: int | None = None


class Counted(NamedTuple):
    """What a read took: bytes decoded, and bytes that came from the store."""

    decoded: int = 0
    stored: int = 0

    def __add__(self, other: tuple[Any, ...]) -> Counted:
        return Counted(self.decoded + other[0], self.stored + other[1])


class Pipeline(ABC):
    """The codecs of an array, ready to read its chunks, all stored whole: [*shape] elements of dtype.

    Attributes:
        shape: extent of a chunk along each dim.
        dtype: of its values, in native byte order.
        order: the dims as the chunk is stored, slowest first; (0, 1, ...) is C order.
    """

    def __init__(self, shape: Sequence[int], dtype: np.dtype[Any], order: Sequence[int] | None = None) -> None:
        self.shape = tuple(shape)
        self.dtype = dtype
        self.order = tuple(range(len(self.shape)) if order is None else order)
        c_order = self.order == tuple(range(len(self.shape)))
        self._stored_shape = (self.shape if c_order else tuple(self.shape[at] for at in self.order)) or (1,)
        self._everything = whole(self._stored_shape)
        self.nbytes = math.prod(self.shape) * dtype.itemsize

    def stored(self, box: Box, out: Array) -> tuple[Box, Array, tuple[int, ...]]:
        """A box of a chunk, what is to hold it, and the chunk's shape, with the dims as they are stored; 1 at least."""
        if not self.order:
            return (Span(0, 1),), out.reshape(1), self._stored_shape
        if self._stored_shape is self.shape:
            return box, out, self.shape
        return tuple(box[at] for at in self.order), out.transpose(self.order), self._stored_shape

    @abstractmethod
    def block(self, extent: Extent) -> int | None:
        """Decoded bytes that can be decoded alone: 1 for any, 0 for the whole chunk only.

        Where chunks can differ, it is what this one says; None if it is absent.
        """

    @abstractmethod
    def read(self, extent: Extent, box: Box, out: Array, share: Share = in_turn) -> Counted | None:
        """Read a box of a chunk, counted from the chunk's corner, into `out` (its shape; may be strided).

        None if there is no such chunk (`out` is as it was). Raises CorruptChunkError if it cannot be decoded, with
        the reason only: who calls knows its name.
        """


_SCRATCH = threading.local()


def scratch(name: str, nbytes: int, offset: int = 0) -> Bytes:
    """Bytes of this thread to work in, [nbytes], used again by the next who asks for the same name.

    `offset` is that of the file's byte which comes first; see shardio.aligned.
    """
    buffer: Bytes | None = getattr(_SCRATCH, name, None)
    start = offset % LINE
    if buffer is None or len(buffer) < start + nbytes:
        buffer = empty_bytes(start + nbytes)
        setattr(_SCRATCH, name, buffer)
    return buffer[start : start + nbytes]


def fetched_whole(extent: Extent, nbytes: int) -> Bytes | None:
    """All stored bytes of a chunk that decodes to `nbytes`, in memory that is used again; None if it is absent.

    Raises CorruptChunkError if they are more than any codec makes of so many.
    """
    most = 2 * nbytes + OVERHEAD
    stop = extent.stop
    if stop is None and extent.store.requests > 1:  # to ask for the size takes another request
        found = extent.store.read(extent.key, extent.start, extent.start + most + 1)
        stored = None if found is None else np.frombuffer(found, np.uint8)
    else:
        stop = extent.store.size(extent.key) if stop is None else stop
        stored = None if stop is None else scratch("stored", min(stop - extent.start, most + 1), extent.start)
        if stored is not None and not extent.store.read_into(extent.key, extent.start, stored.data):
            stored = None
    if stored is not None and len(stored) > most:
        raise CorruptChunkError(f"it has {len(stored)} bytes or more, but decoded only {nbytes}")
    return stored

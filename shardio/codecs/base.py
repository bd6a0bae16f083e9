"""From the stored bytes of one chunk to the values of a box of it, decoding as little as the codec allows."""

from __future__ import annotations

import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from shardio.box import Box, Span
from shardio.bytes.base import ByteStore

Array = np.ndarray[Any, np.dtype[Any]]
Bytes = np.ndarray[Any, np.dtype[np.uint8]]
T = TypeVar("T")
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


def scratch(name: str, nbytes: int) -> Bytes:
    """Bytes of this thread to work in, [nbytes], used again by the next who asks for the same name."""
    buffer: Bytes | None = getattr(_SCRATCH, name, None)
    if buffer is None or len(buffer) < nbytes:
        buffer = np.empty(nbytes, np.uint8)
        setattr(_SCRATCH, name, buffer)
    return buffer[:nbytes]

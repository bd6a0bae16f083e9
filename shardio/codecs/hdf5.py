"""The filters of HDF5 chunks that are undone here, outside HDF5's lock; HDF5 itself undoes all others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np
from numcodecs.fletcher32 import Fletcher32

from shardio import extras
from shardio.box import Box, shape_of, slices
from shardio.codecs import native, shuffle
from shardio.codecs.base import Array, Bytes, Counted, Extent, Pipeline, Share, fetched_whole, in_turn, scratch
from shardio.codecs.blosc import BloscPipeline
from shardio.codecs.deflate import inflate
from shardio.codecs.raw import RawPipeline
from shardio.errors import CorruptChunkError, MissingExtraError

DEFLATE, SHUFFLE, FLETCHER32, LZF, BLOSC, LZ4, ZSTD = 1, 2, 3, 32000, 32001, 32004, 32015
CHECKSUM = 4
"""Bytes that fletcher32 puts behind a chunk."""


def known(filters: Sequence[int]) -> bool:
    """Can chunks with these filters (as numbered by HDF5, in the order of writing) be decoded here?

    At most one compresses, shuffle comes before all others, as all writers have it, and blosc is alone.
    """
    if BLOSC in filters:
        return len(filters) == 1 and native.available()
    compressors = [number for number in filters if number not in (SHUFFLE, FLETCHER32)]
    if len(compressors) > 1 or SHUFFLE in filters[1:] or list(filters) == [SHUFFLE]:
        return False
    return all(_decoder(number) is not None for number in compressors)


class FilteredPipeline(Pipeline):
    """The chunks of one HDF5 dataset, each behind the filters that were applied to it.

    Args:
        shape: of a chunk.
        dtype: as stored, in either byte order.
        filters: their numbers in the order of writing.
        masks: of chunks (by their first byte in the file) that some filters were not applied to: bit i is filter i.
    """

    def __init__(
        self, shape: Sequence[int], dtype: np.dtype[Any], filters: Sequence[int], masks: Mapping[int, int]
    ) -> None:
        super().__init__(shape, dtype.newbyteorder("="))
        self._stored_dtype = dtype
        self._filters = tuple(filters)
        self._masks = masks
        swap = not dtype.isnative
        self._raw = RawPipeline(shape, self.dtype, swap=swap)
        self._blosc = BloscPipeline(shape, self.dtype, swap=swap) if BLOSC in filters else None

    @property
    def in_parts(self) -> bool:
        """Can chunks be read in parts, apart from those that a filter was not applied to?"""
        return not self._filters or self._blosc is not None

    def block(self, extent: Extent) -> int | None:
        """See Pipeline.block."""
        parts = self._in_parts(extent)
        return 0 if parts is None else parts.block(extent)

    def read(self, extent: Extent, box: Box, out: Array, share: Share = in_turn) -> Counted | None:
        """See Pipeline.read."""
        parts = self._in_parts(extent)
        if parts is not None:
            return parts.read(extent, box, out, share)
        stored = fetched_whole(extent, self.nbytes)
        if stored is None:
            return None
        size = len(stored)
        filters = self._applied(extent)
        shuffled = filters[0] == SHUFFLE
        if shuffled:
            place = shuffle.room(self.nbytes) if shape_of(box) == self.shape else None
        else:
            place = self._place(box, out)
        values = self._undone(stored, filters[1:] if shuffled else filters, place)
        if shuffled:
            shuffle.unshuffle(values.reshape(-1, *self.shape), box, out, swapped=not self._stored_dtype.isnative)
        elif place is None or values.ctypes.data != place.ctypes.data:
            np.copyto(out, values.view(self._stored_dtype).reshape(self.shape)[slices(box)])
        return Counted(self.nbytes, size)

    def _applied(self, extent: Extent) -> tuple[int, ...]:
        mask = self._masks.get(extent.start, 0)
        return tuple(number for at, number in enumerate(self._filters) if not mask >> at & 1)

    def _in_parts(self, extent: Extent) -> Pipeline | None:
        """What reads this chunk, if parts of it can be read."""
        filters = self._applied(extent)
        return self._raw if not filters else self._blosc if filters == (BLOSC,) else None

    def _place(self, box: Box, out: Array) -> Bytes | None:
        """Where the chunk can be decoded to without a copy; None if only a part is wanted, or not as it is stored."""
        if shape_of(box) == self.shape and self._stored_dtype.isnative and out.flags.c_contiguous:
            return out.reshape(-1).view(np.uint8)
        return None

    def _undone(self, stored: Bytes, filters: Sequence[int], place: Bytes | None) -> Bytes:
        """The stored bytes after undoing the filters, the last written first: as many as a chunk has."""
        for at in range(len(filters) - 1, -1, -1):
            if filters[at] == FLETCHER32:
                stored = _checked(stored)
                continue
            decode = _decoder(filters[at])
            assert decode is not None
            into = place
            if into is None or FLETCHER32 in filters[:at]:
                into = scratch("decoded", self.nbytes + CHECKSUM * filters[:at].count(FLETCHER32))
            decode(stored, into)
            stored = into
        if len(stored) != self.nbytes:
            raise CorruptChunkError(f"{len(stored)} bytes are stored of a chunk of {self.nbytes}")
        return stored


def _checked(stored: Bytes) -> Bytes:
    """The bytes before the checksum, if it is theirs."""
    if len(stored) > CHECKSUM:
        halves = stored[-CHECKSUM:]
        for order in ((0, 1, 2, 3), (1, 0, 3, 2)):  # early versions of HDF5 on little-endian machines swapped them
            halves[:] = halves[list(order)]
            try:
                Fletcher32().decode(stored)
            except RuntimeError:
                continue
            return stored[:-CHECKSUM]
    raise CorruptChunkError(f"its {len(stored)} bytes do not have the fletcher32 checksum that is stored with them")


@cache
def _decoder(number: int) -> Callable[[Bytes, Bytes], None] | None:
    """Decodes stored bytes of one filter to exactly as many as the second holds; None if that cannot be done here."""
    if number == DEFLATE:
        return _deflate
    if number == ZSTD:
        return native.zstd if native.available() else None
    try:
        imagecodecs = extras.load("imagecodecs")
    except MissingExtraError:
        return None
    return {LZF: _by_imagecodecs(imagecodecs, "lzf"), LZ4: _by_imagecodecs(imagecodecs, "lz4h5")}.get(number)


def _deflate(stored: Bytes, into: Bytes) -> None:
    _check_size(inflate(stored, into), into, "deflate")


def _by_imagecodecs(imagecodecs: ModuleType, codec: str) -> Callable[[Bytes, Bytes], None]:
    def decode(stored: Bytes, into: Bytes) -> None:
        try:
            found = getattr(imagecodecs, f"{codec}_decode")(stored, out=into)
        except (RuntimeError, ValueError) as error:
            raise CorruptChunkError(f"{codec}: {error}, of {len(into)} bytes") from error
        _check_size(len(found), into, codec)

    return decode


def _check_size(found: int, into: Bytes, codec: str) -> None:
    if found != len(into):
        raise CorruptChunkError(f"{codec} gives {found} bytes of the {len(into)} that a chunk has")

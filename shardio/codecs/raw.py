"""Uncompressed chunks: the rows of a box are read straight to where they belong, or with the holes between them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from shardio.blocks import copy_stretch, stretches
from shardio.box import Box
from shardio.codecs.base import Array, Counted, Extent, Pipeline, Share, in_turn, scratch
from shardio.errors import CorruptChunkError

JOB = 1 << 20
"""Bytes that one job reads, straight to where they belong; several threads copy faster than one."""
STRETCH = 1 << 20
"""Bytes that are read at most, with holes, before what is wanted of them is copied."""


class RawPipeline(Pipeline):
    """A chunk stored as it is.

    Attributes:
        swap: the stored bytes of an element are not in native order.
    """

    def __init__(
        self, shape: Sequence[int], dtype: np.dtype[Any], order: Sequence[int] | None = None, *, swap: bool = False
    ) -> None:
        super().__init__(shape, dtype, order)
        self.swap = swap

    def block(self, extent: Extent) -> int | None:
        """See Pipeline.block."""
        return 1

    def read(self, extent: Extent, box: Box, out: Array, share: Share = in_turn) -> Counted | None:
        """See Pipeline.read."""
        if extent.stop is not None and extent.stop - extent.start != self.nbytes:
            raise CorruptChunkError(f"it has {extent.stop - extent.start} bytes; expected are {self.nbytes}")
        box, out, shape = self.stored(box, out)
        starts, size, along = stretches(box, shape)
        nbytes = size * out.itemsize
        if len(starts) == 1 and nbytes <= JOB and out.flags.c_contiguous:
            into = out.reshape(-1).view(np.uint8).data
            if not extent.store.read_into(extent.key, extent.start + int(starts[0]) * out.itemsize, into):
                return None
            if self.swap:
                out.byteswap(inplace=True)
            return Counted(nbytes, nbytes)
        hole = int(starts[1] - starts[0]) * out.itemsize - nbytes if len(starts) > 1 else 0
        if out[(0,) * along].flags.c_contiguous and not 0 < hole < extent.store.gap:
            jobs = self._straight(extent, box, out, starts, along)
        else:
            jobs = self._with_holes(extent, box, out, shape, starts, size)
        found = share(list(jobs))
        if None in found:
            return None
        if self.swap:
            out.byteswap(inplace=True)
        return Counted(out.nbytes, sum(found))

    def _straight(self, extent: Extent, box: Box, out: Array, starts: Array, along: int) -> Iterator[Any]:
        """Jobs that read stretches into `out`."""
        ranges: list[tuple[int, int]] = []
        into: list[memoryview] = []
        room = JOB
        outer = itertools.product(*[range(span.size) for span in box[:along]])
        for first, index in zip((starts * out.itemsize + extent.start).tolist(), outer, strict=True):
            piece = np.asarray(out[index]).reshape(-1).view(np.uint8).data
            done = 0
            while done < len(piece):
                part = piece[done : done + room]
                ranges.append((first + done, first + done + len(part)))
                into.append(part)
                done, room = done + len(part), room - len(part)
                if not room:
                    yield partial(_fill, extent, ranges, into)
                    ranges, into, room = [], [], JOB
        if ranges:
            yield partial(_fill, extent, ranges, into)

    def _with_holes(
        self, extent: Extent, box: Box, out: Array, shape: tuple[int, ...], starts: Array, size: int
    ) -> Iterator[Any]:
        """Jobs that read stretches and the small holes between them elsewhere, and copy from there."""
        most, gap = max(1, STRETCH // out.itemsize), max(1, extent.store.gap // out.itemsize)
        first, last = None, 0
        for start in starts.tolist():
            if first is not None and (start - last >= gap or start + size - first > most):
                yield partial(self._copied, extent, first, last, box, out, shape)
                first = None
            first, last = start if first is None else first, start + size
            while last - first > most:
                yield partial(self._copied, extent, first, first + most, box, out, shape)
                first += most
        if first is not None:
            yield partial(self._copied, extent, first, last, box, out, shape)

    def _copied(
        self, extent: Extent, first: int, last: int, box: Box, out: Array, shape: tuple[int, ...]
    ) -> int | None:
        """Read the elements first..last and copy those inside the box; the bytes read."""
        nbytes = (last - first) * out.itemsize
        begin = extent.start + first * out.itemsize
        buffer = scratch("stored", nbytes, begin)
        if _fill(extent, [(begin, begin + nbytes)], [buffer.data]) is None:
            return None
        copy_stretch(buffer.view(out.dtype), first, shape, box, out)
        return nbytes


def _fill(extent: Extent, ranges: list[tuple[int, int]], into: list[memoryview]) -> int | None:
    """Read ranges of a chunk; how many bytes, None if it is absent."""
    return sum(map(len, into)) if extent.store.read_ranges(extent.key, ranges, into) else None

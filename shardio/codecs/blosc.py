"""Blosc chunks, of which only the blocks that a box touches are fetched and decoded, on several threads if many.

A blosc buffer is a header of 16 bytes, a table of where each block begins, and the blocks. A few blocks become a buffer
of their own, with a header and a table made here. All of a small chunk is decoded as it is, by one call.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from shardio.aligned import LINE
from shardio.blocks import copy_stretch
from shardio.box import Box, slices
from shardio.codecs import native
from shardio.codecs.base import (
    OVERHEAD,
    Array,
    Bytes,
    Counted,
    Extent,
    Pipeline,
    Share,
    fetched_whole,
    in_turn,
    scratch,
)
from shardio.codecs.blosc_units import Job, Unit, dense_dims, jobs_of
from shardio.errors import CorruptChunkError

HEADER = struct.Struct("<4B3I")
AT_ONCE = 4 << 20
"""Decoded bytes of a chunk that is decoded by one call if all its blocks are wanted; larger ones are shared out."""
MEMCPYED, NOT_SPLIT = 0x2, 0x10


class Head(NamedTuple):
    """A chunk's header, checked.

    Attributes:
        flags, typesize: the codec, the shuffle, bytes of an element.
        block: decoded bytes of a block; the last can be shorter.
        blocks: how many there are.
        stored: bytes of the chunk as stored, header included.
        fetched: what was fetched to know this, perhaps the table of blocks, too.
    """

    flags: int
    typesize: int
    block: int
    blocks: int
    stored: int
    fetched: bytes | memoryview


class Table(NamedTuple):
    """Where each block lies in the chunk, checked.

    Attributes:
        starts, ends: of each block.
        fetched: bytes that were fetched to know this and the header.
        ascending: the blocks lie one after the other; several threads may have written them in another order.
    """

    starts: list[int]
    ends: list[int]
    fetched: int
    ascending: bool


class BloscPipeline(Pipeline):
    """A chunk compressed by blosc alone.

    Attributes:
        swap: the stored bytes of an element are not in native order.
    """

    def __init__(
        self, shape: Sequence[int], dtype: np.dtype[Any], order: Sequence[int] | None = None, *, swap: bool = False
    ) -> None:
        super().__init__(shape, dtype, order)
        self.swap = swap
        self._ahead = HEADER.size + 4  # bytes that hold the header and the table, going by the last chunk

    def block(self, extent: Extent) -> int | None:
        """See Pipeline.block."""
        head = self._head(extent)
        if head is None:
            return None
        return 0 if head.block % self.dtype.itemsize else head.block

    def read(self, extent: Extent, box: Box, out: Array, share: Share = in_turn) -> Counted | None:
        """See Pipeline.read."""
        box, out, shape = self.stored(box, out)
        small = self.nbytes <= AT_ONCE
        if small and box == self._everything:
            counted = self._all_at_once(extent, box, out, shape)
        else:
            head = self._head(extent)
            if head is None:
                return None
            jobs = jobs_of(box, shape, self.dtype.itemsize, head.block, dense_dims(out))
            touched = sum(unit.last - unit.first for job in jobs for unit in job)
            if small and touched == head.blocks:
                counted = self._all_at_once(extent, box, out, shape, len(head.fetched))
            else:
                table = self._table(extent, head)
                parts = share([partial(self._decode, extent, head, table, job, box, out, shape) for job in jobs])
                counted = sum(parts, Counted(0, table.fetched))
        if counted is not None and self.swap:
            out.byteswap(inplace=True)
        return counted

    def _head(self, extent: Extent) -> Head | None:
        """A chunk's header; None if it is absent."""
        found = _fetch(extent, self._ahead)
        return None if found is None else self._checked(found, extent)

    def _checked(self, found: bytes | memoryview, extent: Extent) -> Head:
        """The header of a chunk whose first bytes are given."""
        if len(found) < HEADER.size:
            raise CorruptChunkError(f"it has {len(found)} bytes, too few for blosc's header")
        version, _, flags, typesize, nbytes, block, stored = HEADER.unpack_from(found)
        most = 2 * self.nbytes + OVERHEAD
        if extent.stop is not None:
            most = min(most, extent.stop - extent.start)
        if nbytes != self.nbytes or stored > most:
            raise CorruptChunkError(
                f"blosc's header says {nbytes} bytes in {stored}; expected are {self.nbytes} in at most {most}"
            )
        if version != 2 or not typesize:
            raise CorruptChunkError(f"blosc's header says version {version}, elements of {typesize} bytes")
        blocks = -(-nbytes // block) if 0 < block <= nbytes else 0
        if not blocks or 4 * blocks > max(4 * 255, nbytes):  # less than one element is stored as blocks of a byte
            raise CorruptChunkError(f"blosc's header says blocks of {block} bytes in a chunk of {nbytes}")
        return Head(flags, typesize, block, blocks, stored, found)

    def _table(self, extent: Extent, head: Head) -> Table:
        """The table of a chunk's blocks."""
        if head.flags & MEMCPYED:
            starts = list(range(HEADER.size, HEADER.size + self.nbytes, head.block))
            return Table(starts, [*starts[1:], HEADER.size + self.nbytes], len(head.fetched), True)
        begin, fetched = HEADER.size + 4 * head.blocks, len(head.fetched)
        found = head.fetched
        if fetched < begin:
            self._ahead = begin
            again = _fetch(extent, begin)
            if again is None or len(again) < begin:
                raise CorruptChunkError("it ends within blosc's table of blocks")
            found, fetched = again, fetched + len(again)
        starts = list(struct.unpack_from(f"<{head.blocks}i", found, HEADER.size))
        in_file = sorted(starts)
        if in_file[0] < begin or in_file[-1] >= head.stored:
            raise CorruptChunkError(
                f"blosc's table says blocks at {in_file[0]} to {in_file[-1]} of {head.stored} bytes"
            )
        if in_file == starts:
            return Table(starts, [*starts[1:], head.stored], fetched, True)
        after = dict(zip(in_file, [*in_file[1:], head.stored], strict=True))
        return Table(starts, [after[start] for start in starts], fetched, False)

    def _all_at_once(
        self, extent: Extent, box: Box, out: Array, shape: tuple[int, ...], fetched: int = 0
    ) -> Counted | None:
        """Fetch the whole chunk, of which some bytes were fetched before, and decode it; None if it is absent."""
        stored = fetched_whole(extent, self.nbytes)
        if stored is None:
            return None
        if self._checked(stored.data, extent).stored > len(stored):
            raise CorruptChunkError("it ends before its last block")
        place = out.reshape(-1).view(np.uint8) if box == self._everything and out.flags.c_contiguous else None
        into = scratch("decoded", self.nbytes) if place is None else place
        native.blosc(stored, into)
        if place is None:
            out[...] = into.view(self.dtype).reshape(shape)[slices(box)]
        return Counted(self.nbytes, len(stored) + fetched)

    def _decode(
        self, extent: Extent, head: Head, table: Table, job: Job, box: Box, out: Array, shape: tuple[int, ...]
    ) -> Counted:
        """Fetch and decode some blocks."""
        sizes = [_stored_bytes(table, unit) for unit in job]
        heads = [HEADER.size + 4 * (unit.last - unit.first) for unit in job]
        buffer = scratch("stored", sum(sizes) + sum(heads) + LINE * len(job))
        ranges: list[tuple[int, int, memoryview]] = []
        frames: list[Bytes] = []
        at = 0
        for unit, size, begin in zip(job, sizes, heads, strict=True):
            at += (extent.start + table.starts[unit.first] - begin - at) % LINE  # see shardio.aligned
            frame = buffer[at : at + begin + size]
            ranges += self._frame(head, table, unit, frame, begin, extent.start)
            frames.append(frame)
            at += begin + size
        if not table.ascending:
            ranges.sort(key=lambda part: part[0])
        if not extent.store.read_ranges(extent.key, [part[:2] for part in ranges], [part[2] for part in ranges]):
            raise CorruptChunkError("it vanished while it was read")
        decoded = 0
        for unit, frame in zip(job, frames, strict=True):
            nbytes = self._decoded_bytes(head, unit)
            decoded += nbytes
            if unit.place is None:
                into = scratch("decoded", nbytes)
            else:
                into = np.asarray(out[unit.place]).reshape(-1).view(np.uint8)[unit.span]
            if head.flags & MEMCPYED:
                into[:] = frame[len(frame) - nbytes :]
            else:
                native.blosc(frame, into)
            if unit.place is None:
                copy_stretch(into.view(self.dtype), unit.first * head.block // self.dtype.itemsize, shape, box, out)
        return Counted(decoded, sum(sizes))

    def _decoded_bytes(self, head: Head, unit: Unit) -> int:
        return min(unit.last * head.block, self.nbytes) - unit.first * head.block

    def _frame(
        self, head: Head, table: Table, unit: Unit, frame: Bytes, begin: int, offset: int
    ) -> list[tuple[int, int, memoryview]]:
        """Write header and table of a buffer that holds only some blocks; the ranges that are still to be fetched."""
        numbers = range(unit.first, unit.last)
        nbytes, flags, block = self._decoded_bytes(head, unit), head.flags, head.block
        if nbytes < block:  # the last block alone; blosc never splits it
            flags, block = flags | NOT_SPLIT, nbytes
        if table.ascending:
            shift = begin - table.starts[unit.first]
            starts = [table.starts[at] + shift for at in numbers]
            parts = [(offset + table.starts[unit.first], offset + table.ends[unit.last - 1], frame[begin:].data)]
        else:
            starts, parts, to = [], [], begin
            for at in numbers:
                size = table.ends[at] - table.starts[at]
                parts.append((offset + table.starts[at], offset + table.ends[at], frame[to : to + size].data))
                starts.append(to)
                to += size
        struct.pack_into(
            f"<4B3I{len(starts)}i", frame.data, 0, 2, 1, flags, head.typesize, nbytes, block, len(frame), *starts
        )
        return parts


def _stored_bytes(table: Table, unit: Unit) -> int:
    if table.ascending:
        return table.ends[unit.last - 1] - table.starts[unit.first]
    return sum(table.ends[at] - table.starts[at] for at in range(unit.first, unit.last))


def decode_whole(stored: Bytes, into: Bytes) -> None:
    """Decode a blosc buffer of exactly `into`'s size."""
    if len(stored) < HEADER.size:
        raise CorruptChunkError(f"{len(stored)} bytes are too few for blosc's header")
    *_, nbytes, _, size = HEADER.unpack_from(stored.data)
    if nbytes != len(into) or size > len(stored):
        raise CorruptChunkError(
            f"blosc's header says {nbytes} bytes in {size}; expected are {len(into)} in {len(stored)}"
        )
    native.blosc(stored, into)


def _fetch(extent: Extent, nbytes: int) -> bytes | memoryview | None:
    """The first bytes of a chunk, fewer if it is shorter; None if it is absent."""
    stop = extent.start + nbytes
    return extent.store.read(extent.key, extent.start, stop if extent.stop is None else min(stop, extent.stop))

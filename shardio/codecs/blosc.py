"""Blosc chunks, of which only the blocks that a box touches are fetched and decoded, on several threads if many.

A blosc buffer is a header of 16 bytes, a table of where each block begins, and the blocks. A few blocks become a buffer
of their own, with a header and a table made here, so that nothing of the stored header reaches the C library unchecked.
"""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from shardio.blocks import copy_stretch, stretches, touched
from shardio.box import Box
from shardio.codecs import native
from shardio.codecs.base import Array, Bytes, Counted, Extent, Pipeline, Share, in_turn, scratch
from shardio.errors import CorruptChunkError

JOB = 2 << 20
"""Decoded bytes of one job: few enough to stay in a core's cache, and to share a chunk out evenly."""
HEADER = struct.Struct("<4B3I")
MEMCPYED, NOT_SPLIT = 0x2, 0x10


class Table(NamedTuple):
    """A chunk's header and table, checked.

    Attributes:
        flags, typesize: as in the header; the codec, the shuffle, bytes of an element.
        block: decoded bytes of a block; the last can be shorter.
        starts, ends: where each block lies in the chunk.
        fetched: bytes that were fetched to know all this.
        ascending: the blocks lie one after the other; several threads may have written them in another order.
    """

    flags: int
    typesize: int
    block: int
    starts: list[int]
    ends: list[int]
    fetched: int
    ascending: bool


class Unit(NamedTuple):
    """Blocks first..last of a chunk; decoded into `into`, or elsewhere and copied if that is None."""

    first: int
    last: int
    into: Bytes | None


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
        table = self._table(extent)
        if table is None:
            return None
        return 0 if table.block % self.dtype.itemsize else table.block

    def read(self, extent: Extent, box: Box, out: Array, share: Share = in_turn) -> Counted | None:
        """See Pipeline.read."""
        table = self._table(extent)
        if table is None:
            return None
        box, out, shape = self.stored(box, out)
        jobs = self._jobs(table, box, out, shape)
        counts = share([partial(self._decode, extent, table, job, box, out, shape) for job in jobs])
        if self.swap:
            out.byteswap(inplace=True)
        return sum(counts, Counted(0, table.fetched))

    def _table(self, extent: Extent) -> Table | None:
        """A chunk's header and table; None if it is absent."""
        head = _fetch(extent, self._ahead)
        if head is None:
            return None
        if len(head) < HEADER.size:
            raise CorruptChunkError(f"it has {len(head)} bytes, too few for blosc's header")
        version, _, flags, typesize, nbytes, block, stored = HEADER.unpack_from(head)
        size = None if extent.stop is None else extent.stop - extent.start
        if nbytes != self.nbytes or (size is not None and stored > size):
            raise CorruptChunkError(
                f"blosc's header says {nbytes} bytes in {stored}; expected are {self.nbytes} in {size or 'any number'}"
            )
        if version != 2 or not typesize:
            raise CorruptChunkError(f"blosc's header says version {version}, elements of {typesize} bytes")
        blocks = -(-nbytes // block) if 0 < block <= nbytes else 0
        begin = HEADER.size + 4 * blocks
        if not blocks or begin > HEADER.size + max(4, nbytes):
            raise CorruptChunkError(f"blosc's header says blocks of {block} bytes in a chunk of {nbytes}")
        if flags & MEMCPYED:
            starts = list(range(HEADER.size, HEADER.size + nbytes, block))
            return Table(flags, typesize, block, starts, [*starts[1:], HEADER.size + nbytes], len(head), True)
        fetched = len(head)
        if fetched < begin:
            self._ahead = begin
            head = _fetch(extent, begin)
            if head is None or len(head) < begin:
                raise CorruptChunkError("it ends within blosc's table of blocks")
            fetched += len(head)
        starts = list(struct.unpack_from(f"<{blocks}i", head, HEADER.size))
        in_file = sorted(starts)
        if in_file[0] < begin or in_file[-1] >= stored:
            raise CorruptChunkError(f"blosc's table says blocks at {in_file[0]} to {in_file[-1]} of {stored} bytes")
        ascending = in_file == starts
        after = dict(zip(in_file, [*in_file[1:], stored], strict=True))
        return Table(flags, typesize, block, starts, [after[start] for start in starts], fetched, ascending)

    def _jobs(self, table: Table, box: Box, out: Array, shape: tuple[int, ...]) -> Iterator[list[Unit]]:
        """The blocks that a box touches, in jobs of about JOB decoded bytes."""
        if table.block % self.dtype.itemsize:
            whole = math.prod(shape) * self.dtype.itemsize
            yield [Unit(0, -(-whole // table.block), None)]
            return
        most = max(1, JOB // table.block)
        job: list[Unit] = []
        blocks = 0
        for first, last, into in _units(box, shape, out, table.block // self.dtype.itemsize):
            for at in range(first, last, most):
                end = min(at + most, last)
                part = None if into is None else into[(at - first) * table.block : (end - first) * table.block]
                job.append(Unit(at, end, part))
                blocks += end - at
                if blocks >= most:
                    yield job
                    job, blocks = [], 0
        if job:
            yield job

    def _decode(
        self, extent: Extent, table: Table, job: list[Unit], box: Box, out: Array, shape: tuple[int, ...]
    ) -> Counted:
        """Fetch and decode some blocks."""
        sizes = [self._stored_bytes(table, unit) for unit in job]
        buffer = scratch("stored", sum(sizes) + sum(HEADER.size + 4 * (unit.last - unit.first) for unit in job))
        ranges: list[tuple[int, int, memoryview]] = []
        frames: list[Bytes] = []
        at = 0
        for unit, size in zip(job, sizes, strict=True):
            begin = HEADER.size + 4 * (unit.last - unit.first)
            frame = buffer[at : at + begin + size]
            ranges += self._frame(table, unit, frame, begin, extent.start)
            frames.append(frame)
            at += begin + size
        if not table.ascending:
            ranges.sort(key=lambda part: part[0])
        if not extent.store.read_ranges(extent.key, [part[:2] for part in ranges], [part[2] for part in ranges]):
            raise CorruptChunkError("it vanished while it was read")
        decoded = 0
        for unit, frame in zip(job, frames, strict=True):
            nbytes = self._decoded_bytes(table, unit)
            decoded += nbytes
            into = scratch("decoded", nbytes) if unit.into is None else unit.into
            if table.flags & MEMCPYED:
                into[:] = frame[len(frame) - nbytes :]
            else:
                native.blosc(frame, into)
            if unit.into is None:
                first = unit.first * table.block // self.dtype.itemsize
                copy_stretch(into.view(self.dtype), first, shape, box, out)
        return Counted(decoded, sum(sizes))

    def _decoded_bytes(self, table: Table, unit: Unit) -> int:
        return min(unit.last * table.block, self.nbytes) - unit.first * table.block

    def _stored_bytes(self, table: Table, unit: Unit) -> int:
        if table.ascending:
            return table.ends[unit.last - 1] - table.starts[unit.first]
        return sum(table.ends[at] - table.starts[at] for at in range(unit.first, unit.last))

    def _frame(
        self, table: Table, unit: Unit, frame: Bytes, begin: int, offset: int
    ) -> list[tuple[int, int, memoryview]]:
        """Write header and table of a buffer that holds only some blocks; the ranges that are still to be fetched."""
        numbers = range(unit.first, unit.last)
        nbytes, flags, block = self._decoded_bytes(table, unit), table.flags, table.block
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
            f"<4B3I{len(starts)}i", frame.data, 0, 2, 1, flags, table.typesize, nbytes, block, len(frame), *starts
        )
        return parts


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


def _units(box: Box, shape: tuple[int, ...], out: Array, block: int) -> Iterator[Unit]:
    """The blocks (of `block` elements) that a box touches, ascending, with where they belong if that is one piece."""
    starts, size, along = stretches(box, shape)
    directs = _directs(box, shape, out, block, starts, size, along)
    direct = next(directs, None)
    for first, last in touched(starts, size, block):
        while direct is not None and direct.first < last:
            if first < direct.first:
                yield Unit(first, direct.first, None)
            yield direct
            first = direct.last
            direct = next(directs, None)
        if first < last:
            yield Unit(first, last, None)


def _directs(
    box: Box, shape: tuple[int, ...], out: Array, block: int, starts: Array, size: int, along: int
) -> Iterator[Unit]:
    """The blocks that lie whole in one stretch, where a stretch is in one piece in `out`."""
    if min(block, math.prod(shape)) > size or not out[(0,) * along].flags.c_contiguous:
        return
    total = math.prod(shape)
    outer = itertools.product(*[range(span.size) for span in box[:along]])
    for start, index in zip(starts.tolist(), outer, strict=True):
        first, stop = -(-start // block), start + size
        last = -(-stop // block) if stop == total else stop // block
        if first < last:
            piece = np.asarray(out[index]).reshape(-1)[first * block - start : last * block - start]
            yield Unit(first, last, piece.view(np.uint8))

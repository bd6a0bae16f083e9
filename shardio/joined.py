"""JoinedSource: a variable of several grids as one list of cells.

A slab of the joined cells is read chunk by chunk, and only chunks that hold one of its cells: neither the whole of a
grid is read, nor chunks that a mask empties.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from shardio.box import Box, Span, shape_of, slices
from shardio.cells import Cells, Piece
from shardio.codecs.base import Counted, Share, in_turn, scratch
from shardio.decode import Decode
from shardio.source import Source
from shardio.tasks import MAX_BYTES

Array = np.ndarray[Any, np.dtype[Any]]

CELL = "cell"
"""Name of the joined dim."""
ROWS_BYTES = 1 << 20
"""Bytes of one read where any rows can be read alone: what a mask leaves out within them is read, too."""


@dataclass(frozen=True, eq=False)
class Field:
    """One part's array of a joined variable.

    Attributes:
        source: the array.
        axes: places of its spatial dims.
        cells: those that are taken.
    """

    source: Source
    axes: tuple[int, ...]
    cells: Cells

    def leading(self, values: Sequence[Any]) -> tuple[Any, ...]:
        """What is said of every dim, without the spatial ones."""
        return tuple(value for at, value in enumerate(values) if at not in self.axes)

    @cached_property
    def alone(self) -> tuple[int, ...]:
        """Extent along the other dims of what can be read alone."""
        return self.leading((1,) * len(self.source.shape) if self.source.partial else self.source.chunks)

    @cached_property
    def unit(self) -> tuple[int, ...]:
        """Extent along the spatial dims of what is read at once: a chunk; of one in one piece, about ROWS_BYTES."""
        chunks = tuple(self.source.chunks[at] for at in self.axes)
        if not self.source.partial or any(map(int.__lt__, chunks, self.cells.shape)):
            return chunks
        across = self.cells.shape[1:]
        row = max(1, math.prod(across) * self.source.dtype.itemsize)
        return (max(1, ROWS_BYTES // row), *across)

    @property
    def depth(self) -> int:
        """How many joined arrays lie below."""
        return self.source.depth if isinstance(self.source, JoinedSource) else 0

    def read(self, leading: Box, cells: Span, out: Array, decode: bool, share: Share) -> Counted:
        """Put cells into `out` [..., cell], as stored or decoded."""
        counted = Counted()
        for piece in self.cells.pieces(*cells, self.unit):
            nbytes = math.prod(shape_of(piece.box)) * self.source.dtype.itemsize
            for part in self._parts(leading, nbytes):
                place = tuple(Span(a - b.start, z - b.start) for (a, z), b in zip(part, leading, strict=True))
                counted += self._read(part, piece, out[slices(place)], decode, share)
        return counted

    def _parts(self, leading: Box, nbytes: int) -> Iterator[Box]:
        """A box of the other dims in parts that end between chunks, each of about MAX_BYTES if one is of `nbytes`."""
        units = [-(-stop // size) - start // size for (start, stop), size in zip(leading, self.alone, strict=True)]
        at = max(range(len(units)), key=units.__getitem__, default=0)
        if math.prod(shape_of(leading)) * nbytes <= MAX_BYTES or not units or units[at] < 2:
            yield leading
            return
        (start, stop), size = leading[at], self.alone[at]
        middle = (start // size + units[at] // 2) * size
        for half in (Span(start, middle), Span(middle, stop)):
            yield from self._parts((*leading[:at], half, *leading[at + 1 :]), nbytes)

    def _read(self, leading: Box, piece: Piece, out: Array, decode: bool, share: Share) -> Counted:
        source = self.source
        spans, space = iter(leading), dict(zip(self.axes, piece.box, strict=True))
        box = tuple(space[at] if at in space else next(spans) for at in range(len(source.dims)))
        shape = shape_of(box)
        held = scratch(f"joined {self.depth}", math.prod(shape) * source.dtype.itemsize)
        stored = held.view(source.dtype).reshape(shape)
        counted = source.read_counted(box, stored, share)
        if decode:
            values = np.empty(shape, out.dtype)
            source.decode.apply(stored, values)
            stored = values
        last = np.moveaxis(stored, self.axes, range(-len(self.axes), 0))
        out[..., piece.places] = last.reshape(*last.shape[: -len(self.axes)], -1)[..., piece.cells]
        return counted


class JoinedSource(Source):
    """One variable on the cells of all parts: [..., cell], the dims of the parts without their spatial ones."""

    def __init__(self, name: str, fields: Sequence[Field]) -> None:
        self._fields = fields
        first = fields[0]
        sources = [field.source for field in fields]
        # Packed alike, values pass as they are stored; else each part is decoded here.
        self._decoded = len({(source.dtype, source.decode) for source in sources}) > 1
        wide = any(source.dtype.itemsize > 4 for source in sources)
        shape = first.leading(first.source.shape)
        total = sum(field.cells.count for field in fields)
        chunks = [
            min(size, math.lcm(*rows)) for size, *rows in zip(shape, *(field.alone for field in fields), strict=True)
        ]
        # Cells of a band of stored chunks from one side of the grid to the other. Chunks are cut where the joined ones
        # end, and then decoded twice; so if a band is most of the cells, all are one chunk.
        band = max(min(field.cells.count, field.unit[0] * math.prod(field.cells.shape[1:])) for field in fields)
        kept = ("units", "long_name", "standard_name")
        super().__init__(
            name,
            dims=(*first.leading(first.source.dims), CELL),
            shape=(*shape, total),
            chunks=(*chunks, band if 2 * band <= total else total),
            dtype=np.dtype(np.float64 if wide else np.float32) if self._decoded else first.source.dtype,
            attrs={k: v for k, v in first.source.attrs.items() if k in kept or not self._decoded},
            block=int(all(source.partial for source in sources)),
            decode=Decode() if self._decoded else first.source.decode,
        )

    @property
    def depth(self) -> int:
        """How many joined arrays lie one in the other, this one counted."""
        return 1 + max(field.depth for field in self._fields)

    @property
    def requests(self) -> int:
        """See Source.requests."""
        return max(field.source.requests for field in self._fields)

    @property
    def fetched_together(self) -> bool:
        """See Source.fetched_together."""
        return any(field.source.fetched_together for field in self._fields)

    def read_into(self, box: Box, out: Array) -> None:
        """See Source.read_into."""
        self.read_counted(box, out)

    def read_counted(self, box: Box, out: Array, share: Share = in_turn) -> Counted:
        """See Source.read_counted."""
        *leading, wanted = box
        counted, first = Counted(), 0
        for field in self._fields:
            here = Span(*(min(max(at - first, 0), field.cells.count) for at in wanted))
            if here.size and out.size:
                place = out[..., first + here.start - wanted.start : first + here.stop - wanted.start]
                counted += field.read(tuple(leading), here, place, self._decoded, share)
            first += field.cells.count
        return counted

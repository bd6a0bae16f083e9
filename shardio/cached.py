"""An array read through a cache of its decoded time steps, so that a chunk of many steps is decoded once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from shardio.box import Box, Span, shape_of, slices
from shardio.cache import Entry, RowCache
from shardio.codecs.base import Counted, Share, in_turn
from shardio.source import Layout, Source

Array = np.ndarray[Any, np.dtype[Any]]


class CachedSource(Source):
    """An array whose chunks hold many rows along one dim, read through a `RowCache`: other rows come from memory.

    What is asked for is decoded together with the rows of the same chunks that will be asked for next, as far as the
    budget allows.

    Args:
        source: the array.
        dim: the dim along which rows are kept (time).
        cache: where; shared by several arrays.
        number: tells the arrays of one cache apart.
    """

    def __init__(self, source: Source, dim: str, cache: RowCache, number: int) -> None:
        super().__init__(
            source.name,
            dims=source.dims,
            shape=source.shape,
            chunks=source.chunks,
            dtype=source.dtype,
            attrs=source.attrs,
            block=source.block,
            order=source.order,
            decode=source.decode,
        )
        self.source, self.cache, self.number = source, cache, number
        self._axis = source.dims.index(dim)

    @property
    def layout(self) -> Layout:
        """That of the array itself, so that plans are the same."""
        return self.source.layout

    @property
    def requests(self) -> int:
        """See Source.requests."""
        return self.source.requests

    @property
    def fetched_together(self) -> bool:
        """See Source.fetched_together."""
        return self.source.fetched_together

    def read_into(self, box: Box, out: Array) -> None:
        """See Source.read_into."""
        self.read_counted(box, out)

    def read_counted(self, box: Box, out: Array, share: Share = in_turn) -> Counted:
        """See Source.read_counted; what comes from memory counts nothing."""
        counted = Counted()
        if 0 in shape_of(box):
            return counted
        axis, (start, stop) = self._axis, box[self._axis]
        extent, length = self.chunks[axis], self.shape[axis]
        for number in range(start // extent, -(-stop // extent)):
            chunk = range(number * extent, min((number + 1) * extent, length))
            rows = range(max(start, chunk.start), min(stop, chunk.stop))
            counted += self._read_rows(rows, chunk, box, out, share)
        return counted

    def _read_rows(self, rows: range, chunk: range, box: Box, out: Array, share: Share) -> Counted:
        """Rows of one chunk: copied from memory or decoded."""
        rest = _without(box, self._axis)
        first = box[self._axis].start
        found, absent, made = self.cache.look_up(self.number, rows, rest, chunk, self.dtype)
        counted = Counted()
        try:
            if absent:
                counted = self._decode_rows(absent, made, box, out, share)
            again = [entry.row for entry in found if not self.cache.wait(entry)]
            for entry in found:
                if entry.ready:
                    within = tuple(Span(a - b, z - b) for (a, z), (b, _) in zip(rest, entry.rest, strict=True))
                    self._row(out, entry.row - first)[...] = entry.data[slices(within)]
        finally:
            self.cache.release(found)
        for row in again:  # another thread failed to decode it: the error is to be this one's as well
            counted += self._read_rows(range(row, row + 1), chunk, box, out, share)
        return counted

    def _decode_rows(self, absent: Sequence[int], made: Sequence[Entry], box: Box, out: Array, share: Share) -> Counted:
        """Decode the rows asked for and those worth keeping, by one read."""
        failed = True
        first = box[self._axis].start
        asked = Span(absent[0], absent[-1] + 1)
        kept = [entry.row for entry in made]
        span = Span(min(asked.start, *kept, asked.start), max(asked.stop, *(row + 1 for row in kept), asked.stop))
        try:
            if span == asked:
                target = self._rows(out, Span(asked.start - first, asked.stop - first))
                counted = self._fetch(asked, box, target, made, share)
            else:
                shape = shape_of(_with(box, self._axis, span))
                with self.cache.scratch(shape, self.dtype) as scratch:
                    counted = self._fetch(span, box, scratch, made, share)
                    for row in absent:
                        self._row(out, row - first)[...] = self._row(scratch, row - span.start)
            failed = False
            return counted
        finally:
            self.cache.done(made, failed=failed)

    def _fetch(self, span: Span, box: Box, target: Array, made: Sequence[Entry], share: Share) -> Counted:
        """Read rows into `target` and copy those to keep."""
        counted = self.source.read_counted(_with(box, self._axis, span), target, share)
        for entry in made:
            entry.data[...] = self._row(target, entry.row - span.start)
        return counted

    def _row(self, values: Array, row: int) -> Array:
        at: Any = (*[slice(None)] * self._axis, row, ...)
        part: Array = values[at]
        return part

    def _rows(self, values: Array, rows: Span) -> Array:
        at: Any = (*[slice(None)] * self._axis, rows.slice(), ...)
        part: Array = values[at]
        return part


def _without(box: Box, axis: int) -> Box:
    return (*box[:axis], *box[axis + 1 :])


def _with(box: Box, axis: int, span: Span) -> Box:
    return (*box[:axis], span, *box[axis + 1 :])

"""ChunkedSource: an array of chunks whose stored bytes are found and decoded here, each only as far as wanted."""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Callable, Iterator
from functools import cached_property, partial
from typing import Any

import numpy as np

from shardio.box import Box, Span
from shardio.bytes.base import ByteStore
from shardio.bytes.fetched import Fetched, Stretch
from shardio.codecs.base import Counted, Extent, Pipeline, Share, in_turn
from shardio.errors import CorruptChunkError, MissingChunkError
from shardio.source import Source

TRIED = 64
"""Chunks that are looked at to see what can be decoded alone, until one is found."""
LARGER = 1 << 20
"""Stored bytes that a chunk fetched with others has at most beyond twice those of its values."""
Number = tuple[int, ...]


class ChunkedSource(Source):
    """An array on a grid of chunks, from index 0 on, all of `pipeline.shape`.

    Args:
        store: holds the stored bytes.
        pipeline: reads one chunk.
        fill: gives what an absent chunk holds, if it is not an error.
        strict: an absent chunk is an error.
        others: as for Source; shape, dims, attrs, ...
    """

    def __init__(
        self,
        name: str,
        store: ByteStore,
        *,
        pipeline: Pipeline,
        fill: Callable[[], Any],
        strict: bool,
        **others: Any,
    ) -> None:
        super().__init__(name, chunks=pipeline.shape, dtype=pipeline.dtype, **others)
        self._store = store
        order = pipeline.order
        self.order = () if order == tuple(range(len(order))) else order
        self.pipeline = pipeline
        self._fill = fill
        self._strict = strict

    @property
    def requests(self) -> int:
        """See Source.requests."""
        return self._store.requests

    @abstractmethod
    def locate(self, number: Number) -> Extent | None:
        """Where a chunk lies, by its number along each dim; None if it is known to be absent."""

    @abstractmethod
    def describe(self, number: Number) -> str:
        """A chunk and its store, for errors: "'x/c/0/0' in era5.zarr"."""

    @property
    def block(self) -> int:
        """See Layout.block; a chunk is looked at for it, once."""
        return self._sampled

    @cached_property
    def _sampled(self) -> int:
        grid = [-(-size // chunk) for size, chunk in zip(self.shape, self.chunks, strict=True)]
        count = int(np.prod(grid, dtype=np.int64))
        for at in range(min(count, TRIED)):
            number = tuple(int(n) for n in np.unravel_index(at * count // min(count, TRIED), grid)) if grid else ()
            try:
                extent = self.locate(number)
                block = None if extent is None else self.pipeline.block(extent)
            except CorruptChunkError:
                continue
            if block is not None:
                return block
        return 0

    def read_into(self, box: Box, out: np.ndarray[Any, Any]) -> None:
        """See Source.read_into."""
        self.read_counted(box, out)

    def read_counted(self, box: Box, out: np.ndarray[Any, Any], share: Share = in_turn) -> Counted:
        """See Source.read_counted. Several chunks, and parts of a large one, are read at once."""
        if not out.size:
            return Counted()
        first = tuple([start // size for (start, _), size in zip(box, self.chunks, strict=True)])
        last = tuple([(stop - 1) // size for (_, stop), size in zip(box, self.chunks, strict=True)])
        if first == last:
            inner = [
                Span(start - at * size, stop - at * size)
                for (start, stop), at, size in zip(box, first, self.chunks, strict=True)
            ]
            return self._read_part(first, tuple(inner), out, share)
        numbers = list(self.numbers(box))
        extents = self._fetched(numbers) if self.fetched_together else {}
        jobs = [partial(self._read_chunk, number, box, out, share, extents.get(number)) for number in numbers]
        return sum(share(jobs), Counted())

    def numbers(self, box: Box) -> Iterator[Number]:
        """Numbers of the chunks that a box touches."""
        if any(start >= stop for start, stop in box):
            return iter(())
        return itertools.product(*[range(a // n, -(-b // n)) for (a, b), n in zip(box, self.chunks, strict=True)])

    def _fetched(self, numbers: list[Number]) -> dict[Number, Extent]:
        """Chunks that are fetched together: those that decode as a whole, or are small enough for it to be no loss."""
        wanted: dict[Number, Extent] = {}
        for number in numbers:
            try:
                extent = self.locate(number)
            except CorruptChunkError:  # reported when the chunk is read
                continue
            size = 0 if extent is None or extent.stop is None else extent.stop - extent.start
            most = extent.store.gap if extent is not None and self.block else 2 * self.pipeline.nbytes + LARGER
            if extent is not None and 0 < size <= most:
                wanted[number] = extent
        if not wanted:
            return {}
        store = next(iter(wanted.values())).store
        held = Fetched(store, [Stretch(extent.key, extent.start, extent.stop or 0) for extent in wanted.values()])
        return {number: extent._replace(store=held) for number, extent in wanted.items()}

    def _read_chunk(
        self, number: Number, box: Box, out: np.ndarray[Any, Any], share: Share, extent: Extent | None = None
    ) -> Counted:
        """Read what a chunk has of a box."""
        inner, place = [], []
        for (start, stop), at, size in zip(box, number, self.chunks, strict=True):
            corner, end = at * size, at * size + size
            low, high = start if start > corner else corner, stop if stop < end else end
            inner.append(Span(low - corner, high - corner))
            place.append(slice(low - start, high - start))
        return self._read_part(number, tuple(inner), out[tuple(place)], share, extent)

    def _read_part(
        self, number: Number, inner: Box, out: np.ndarray[Any, Any], share: Share, extent: Extent | None = None
    ) -> Counted:
        """Read a box counted from a chunk's corner."""
        try:
            extent = extent or self.locate(number)
            counted = None if extent is None else self.pipeline.read(extent, inner, out, share)
        except CorruptChunkError as error:
            raise CorruptChunkError(
                f"chunk {number} of {self.name!r} ({self.describe(number)}) cannot be decoded: {error}; "
                f"check or rewrite that chunk"
            ) from error
        if counted is not None:
            return counted
        if self._strict:
            raise missing_chunk(self.describe(number))
        out[...] = self._fill()
        return Counted()


def missing_chunk(where: str) -> MissingChunkError:
    """The error for an absent chunk, such as "'x/c/0/0' in era5.zarr"."""
    chunk, _, store = where.rpartition(" in ")
    return MissingChunkError(
        f"chunk {chunk} is not in {store}: it was lost, or never written because it held nothing but fill values; "
        f"restore it, or open the store with open_store(..., missing='fill') to read the array's fill value there"
    )

"""Which HDF5 datasets can be read without the HDF5 library, and where their bytes lie in the file."""

from __future__ import annotations

import itertools
import math
import threading
from array import array
from bisect import bisect_left
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from shardio.box import Box
from shardio.bytes import ByteStore
from shardio.chunked import ChunkedSource
from shardio.codecs.base import Counted, Extent, Pipeline, Share, in_turn
from shardio.codecs.hdf5 import FilteredPipeline, known
from shardio.codecs.raw import RawPipeline
from shardio.errors import CorruptChunkError
from shardio.source import Source

Number = tuple[int, ...]


class ChunkTable:
    """Where the chunks of a dataset lie: 24 bytes for each that was written.

    HDF5 is asked once, on first use, for all of them; to find a single one it walks over all those before it.

    Attributes:
        masks: by the first byte of a chunk, the filters that were not applied to it (bit i: filter i), where any.
    """

    def __init__(self, dataset: h5py.Dataset) -> None:
        self._dataset = dataset
        self._chunks = dataset.chunks
        self._grid = tuple(-(-size // chunk) for size, chunk in zip(dataset.shape, dataset.chunks, strict=True))
        self._numbers, self._starts, self._sizes = array("q"), array("q"), array("q")
        self._lock = threading.Lock()
        self._read = False
        self._doubtful = False
        self.masks: dict[int, int] = {}

    def place(self, number: Number) -> tuple[int, int] | None:
        """First byte and the byte behind the last one of a chunk, by its number along each dim; None if unwritten."""
        self.load()
        flat = 0
        for at, size in zip(number, self._grid, strict=True):
            flat = flat * size + at
        row = bisect_left(self._numbers, flat)
        if row == len(self._numbers) or self._numbers[row] != flat:
            return None
        return self._starts[row], self._starts[row] + self._sizes[row]

    def doubtful(self) -> bool:
        """Are there chunks at the edge that may be stored without filters? (HDF5 can be told to; it sets no mask.)"""
        self.load()
        return self._doubtful

    def example(self) -> tuple[int, int] | None:
        """The place of a chunk that all filters were applied to; None if there is none."""
        self.load()
        places = zip(self._starts, self._sizes, strict=True)
        return next(((start, start + size) for start, size in places if start not in self.masks), None)

    def load(self) -> None:
        """Ask HDF5, if it was not asked yet."""
        if self._read:
            return
        with self._lock:
            if self._read:
                return
            filtered = self._dataset.id.get_create_plist().get_nfilters() > 0
            nbytes = math.prod(self._chunks) * self._dataset.dtype.itemsize
            whole = tuple(size // chunk for size, chunk in zip(self._dataset.shape, self._chunks, strict=True))

            def add(found: h5py.h5d.StoreInfo) -> None:
                flat, inside = 0, True
                for at, chunk, size, full in zip(found.chunk_offset, self._chunks, self._grid, whole, strict=True):
                    flat = flat * size + at // chunk
                    inside = inside and at // chunk < full
                self._numbers.append(flat)
                self._starts.append(found.byte_offset)
                self._sizes.append(found.size)
                if found.filter_mask:
                    self.masks[found.byte_offset] = found.filter_mask
                elif filtered and not inside and found.size == nbytes:
                    self._doubtful = True

            try:
                self._dataset.id.chunk_iter(add)
                if any((np.asarray(column) < 0).any() for column in (self._numbers, self._starts, self._sizes)):
                    raise ValueError("a chunk begins before the file does")
            except Exception as error:  # HDF5 has errors of many kinds
                for emptied in (self._numbers, self._starts, self._sizes):
                    del emptied[:]
                raise CorruptChunkError(
                    f"the table of the chunks of {self._dataset.name!r} in {self._dataset.file.filename} cannot be "
                    f"read: {error}; fetch or write the file again"
                ) from error
            order = np.argsort(np.asarray(self._numbers), kind="stable")
            if (np.diff(order) < 0).any():
                for column in ("_numbers", "_starts", "_sizes"):
                    setattr(self, column, array("q", np.asarray(getattr(self, column))[order].tobytes()))
            self._read = True

    def missing(self, box: Box) -> Iterator[Number]:
        """Numbers of the chunks under a box that were never written."""
        numbers = (range(a // chunk, -(-b // chunk)) for (a, b), chunk in zip(box, self._chunks, strict=True))
        return (number for number in itertools.product(*numbers) if self.place(number) is None)


def file_of(root: h5py.File) -> Path | None:
    """The file behind an open HDF5 file, if its bytes may be read beside HDF5: local, complete, not being written."""
    if root.driver != "sec2" or root.mode != "r" or root.swmr_mode or root.userblock_size:
        return None
    path = Path(root.filename).absolute()
    return path if path.is_file() else None


def plain(dataset: h5py.Dataset) -> bool:
    """Are the elements stored as numpy has them, in one byte order or the other?"""
    dtype, stored = dataset.dtype, dataset.id.get_type()
    if dtype.kind not in "iufb" or dtype.itemsize > 8:
        return False
    if isinstance(stored, h5py.h5t.TypeEnumID):
        stored = stored.get_super()
    return bool(stored == h5py.h5t.py_create(np.dtype("i1" if dtype.kind == "b" else dtype.str)))


def filters_of(dataset: h5py.Dataset) -> list[int] | None:
    """Numbers of a dataset's filters in the order of writing; None if one shuffles other units than elements."""
    settings, numbers = dataset.id.get_create_plist(), []
    for at in range(settings.get_nfilters()):
        number, _, values, _ = settings.get_filter(at)
        if number == h5py.h5z.FILTER_SHUFFLE and values[:1] not in ((), (dataset.dtype.itemsize,)):
            return None
        numbers.append(number)
    return numbers


def pipeline_of(dataset: h5py.Dataset) -> tuple[Pipeline, ChunkTable | None] | None:
    """What decodes a dataset's chunks, and where they lie (None if it is one contiguous piece).

    None for what HDF5 itself must read: compact, external and virtual datasets, elements that numpy does not have, and
    filters that are not known here.
    """
    if dataset.is_virtual or dataset.external or not dataset.size or not plain(dataset):
        return None
    native, swap = dataset.dtype.newbyteorder("="), not dataset.dtype.isnative
    if dataset.chunks is None:
        contiguous = dataset.id.get_create_plist().get_layout() == h5py.h5d.CONTIGUOUS
        return (RawPipeline(dataset.shape, native, swap=swap), None) if contiguous else None
    filters = filters_of(dataset)
    if filters is None or not known(filters):
        return None
    table = ChunkTable(dataset)
    return FilteredPipeline(dataset.chunks, dataset.dtype, filters, table.masks), table


class StoredSource(ChunkedSource):
    """A dataset read from the file's bytes; HDF5 says where they lie, and is not asked to read.

    Args:
        library: the same dataset, read by HDF5.
        pipeline: decodes its chunks.
        table: where its chunks lie; None if it is contiguous.
        store, key: the file.
        strict: what was never written is an error.
        default_missing: see Decode.from_attrs.
    """

    def __init__(
        self,
        library: Source,
        dataset: h5py.Dataset,
        pipeline: Pipeline,
        table: ChunkTable | None,
        store: ByteStore,
        key: str,
        strict: bool,
        default_missing: float | None,
    ) -> None:
        super().__init__(
            library.name,
            store,
            pipeline=pipeline,
            fill=lambda: dataset.fillvalue,
            strict=strict,
            dims=library.dims,
            shape=library.shape,
            attrs=library.attrs,
            default_missing=default_missing,
        )
        self._library = library
        self._table = table
        self._key = key
        self._start = dataset.id.get_offset() if table is None else None

    @cached_property
    def block(self) -> int:
        """See Layout.block; chunks that a filter was not applied to decode less than that."""
        if self._table is None:
            return 1
        if not (isinstance(self.pipeline, FilteredPipeline) and self.pipeline.in_parts) or self._table.doubtful():
            return 0
        place = self._table.example()
        try:
            return 1 if place is None else self.pipeline.block(Extent(self._store, self._key, *place)) or 0
        except CorruptChunkError:
            return 0

    @property
    def fetched_together(self) -> bool:
        """See Source.fetched_together."""
        return self._table is not None and self._store.requests > 1

    def locate(self, number: Number) -> Extent | None:
        """See ChunkedSource.locate."""
        if self._table is None:
            start = self._start
            return None if start is None else Extent(self._store, self._key, start, start + self.pipeline.nbytes)
        place = self._table.place(number)
        return None if place is None else Extent(self._store, self._key, *place)

    def describe(self, number: Number) -> str:
        """See ChunkedSource.describe."""
        return f"{self.name!r} {number} in {self._store.url}/{self._key}"

    def read_counted(self, box: Box, out: np.ndarray[Any, Any], share: Share = in_turn) -> Counted:
        """See Source.read_counted."""
        return self._library.read_counted(box, out) if self._doubtful() else super().read_counted(box, out, share)

    def _doubtful(self) -> bool:
        return self._table is not None and self._table.doubtful()

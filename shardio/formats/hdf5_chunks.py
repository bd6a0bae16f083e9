"""Which HDF5 datasets can be read without the HDF5 library, and where their bytes lie in the file."""

from __future__ import annotations

import itertools
import math
import threading
from array import array
from bisect import bisect_left
from collections.abc import Iterator
from pathlib import Path

import h5py
import numpy as np

from shardio.box import Box

MAX_CHUNKS = 1 << 22
"""Chunks of one dataset whose places are kept in memory at most, 24 bytes each; larger ones stay with HDF5."""


class ChunkTable:
    """Where the chunks of a dataset lie, asked of HDF5 once, on first use: HDF5 itself seeks from the first one on.

    Attributes:
        masks: by the first byte of a chunk, the filters that were not applied to it (bit i: filter i), where any.
        doubtful: are there chunks at the edge that look as if they were stored without filters, and none says so?
            (HDF5 can be asked to do that, and keeps no mask then.)
    """

    def __init__(self, dataset: h5py.Dataset) -> None:
        self._dataset = dataset
        self._chunks = dataset.chunks
        self._grid = tuple(-(-size // chunk) for size, chunk in zip(dataset.shape, dataset.chunks, strict=True))
        self._numbers, self._starts, self._sizes = array("q"), array("q"), array("q")
        self._lock = threading.Lock()
        self._read = False
        self.masks: dict[int, int] = {}
        self.doubtful = False

    def place(self, number: tuple[int, ...]) -> tuple[int, int] | None:
        """First byte and the byte behind the last one of a chunk, by its number along each dim; None if unwritten."""
        self.load()
        flat = 0
        for at, size in zip(number, self._grid, strict=True):
            flat = flat * size + at
        row = bisect_left(self._numbers, flat)
        if row == len(self._numbers) or self._numbers[row] != flat:
            return None
        return self._starts[row], self._starts[row] + self._sizes[row]

    def load(self) -> None:
        """Ask HDF5, if it was not asked yet."""
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
                    self.doubtful = True

            self._dataset.id.chunk_iter(add)
            order = np.argsort(np.asarray(self._numbers), kind="stable")
            if (np.diff(order) < 0).any():
                for column in ("_numbers", "_starts", "_sizes"):
                    setattr(self, column, array("q", np.asarray(getattr(self, column))[order].tobytes()))
            self._read = True

    def missing(self, box: Box) -> Iterator[tuple[int, ...]]:
        """Numbers of the chunks under a box that were never written."""
        numbers = (range(a // chunk, -(-b // chunk)) for (a, b), chunk in zip(box, self._chunks, strict=True))
        return (number for number in itertools.product(*numbers) if self.place(number) is None)


def table_of(dataset: h5py.Dataset) -> ChunkTable | None:
    """The table of a chunked dataset, not yet read; None if it has too many chunks."""
    grid = (-(-size // chunk) for size, chunk in zip(dataset.shape, dataset.chunks, strict=True))
    return ChunkTable(dataset) if math.prod(grid) <= MAX_CHUNKS else None


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

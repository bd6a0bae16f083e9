"""For tests of readers: SourceContract, what every format must pass, and CountingStore, which counts what is read."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from zarr.abc.store import ByteRequest
from zarr.abc.store import Store as ZarrStore
from zarr.core.buffer import Buffer, BufferPrototype
from zarr.storage import WrapperStore

from shardio.box import Box, Span, slices, whole
from shardio.formats.zarr import METADATA
from shardio.partition import Partition
from shardio.plan import plan
from shardio.read import OwnReader
from shardio.source import Source, Store

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, eq=False)
class Expected:
    """What another library says of one array.

    Attributes:
        dims: names of the dims.
        stored: the stored values.
        decoded: the physical values, NaN where missing; None where they are no numbers.
    """

    dims: tuple[str, ...]
    stored: Array
    decoded: Array | None


class SourceContract:
    """The tests that every format must pass.

    Subclass it in a test file, with two fixtures: `store`, an opened Store, and `expected`, name -> Expected by the
    format's own library (all arrays that matter, not necessarily all).
    """

    def test_describes_what_is_stored(self, store: Store, expected: Mapping[str, Expected]) -> None:
        """Names, dims, shapes, and dtypes in native byte order."""
        assert set(expected) <= set(store), "arrays are not listed"
        for name, truth in expected.items():
            source = store[name]
            assert source.name == name
            assert source.dims == truth.dims, name
            assert source.shape == truth.stored.shape, name
            assert len(source.chunks) == len(source.shape), name
            if truth.stored.dtype.kind in "iufcb":
                assert source.dtype == truth.stored.dtype.newbyteorder("="), name
                assert source.dtype.isnative, name

    def test_reads_the_same_values(self, store: Store, expected: Mapping[str, Expected]) -> None:
        """The whole array, and random boxes of it, into C-contiguous and strided buffers."""
        random = np.random.default_rng(0)
        for name, truth in expected.items():
            source = store[name]
            _assert_equal(source.read(), truth.stored, name)
            for _ in range(8):
                box = random_box(random, source.shape)
                _assert_equal(source.read(box), truth.stored[slices(box)], f"{name} {box}")
                spread = np.zeros([2 * span.size for span in box], dtype=source.dtype)
                every_second: tuple[Any, ...] = (*(slice(0, None, 2) for _ in box), ...)
                strided = spread[every_second]
                source.read_into(box, strided)
                _assert_equal(strided, truth.stored[slices(box)], f"{name} {box} into a strided buffer")

    def test_reads_from_several_threads(self, store: Store, expected: Mapping[str, Expected]) -> None:
        """Boxes of all arrays at once, from four threads."""
        random = np.random.default_rng(1)
        tasks = [(name, random_box(random, store[name].shape)) for name in expected for _ in range(6)]
        with ThreadPoolExecutor(4) as pool:
            values = list(pool.map(lambda task: store[task[0]].read(task[1]), tasks))
        for (name, box), found in zip(tasks, values, strict=True):
            _assert_equal(found, expected[name].stored[slices(box)], f"{name} {box}")

    def test_decodes(self, store: Store, expected: Mapping[str, Expected]) -> None:
        """Into float32 and float64, with a mask of what is missing."""
        with OwnReader(threads=1) as reader:
            for name, truth in expected.items():
                if truth.decoded is None:
                    continue
                source = store[name]
                everything = plan(Partition(()), source.layout)
                for dtype in (torch.float32, torch.float64):
                    found, valid = reader.read(source, everything, dtype=dtype, mask=True)
                    assert found.is_contiguous()
                    missing = np.isnan(truth.decoded)
                    np.testing.assert_array_equal(valid.numpy(), ~missing, err_msg=name)
                    assert_decoded(found.numpy(), truth.decoded, source, name)


def assert_decoded(found: Array, truth: Array, source: Source, what: str = "") -> None:
    """Assert that decoded values are right to the accuracy of their dtype (and of packed values' range)."""
    np.testing.assert_array_equal(np.isnan(found), np.isnan(truth), err_msg=what)
    magnitude = abs(source.decode.offset) + (np.nanmax(np.abs(truth)) if np.isfinite(truth).any() else 0)
    floats = [values.dtype for values in (found, truth) if values.dtype.kind == "f"]
    accuracy = 2 * max(float(np.finfo(dtype).eps) for dtype in floats)
    tolerance = accuracy * float(magnitude) if source.decode.packed else 0.0
    np.testing.assert_allclose(found, truth, rtol=accuracy, atol=tolerance, err_msg=what)


def random_box(random: np.random.Generator, shape: tuple[int, ...]) -> Box:
    """A box within an array, rarely empty along a dim."""
    box = []
    for span in whole(shape):
        start, stop = sorted(random.integers(0, span.stop + 1, size=2).tolist())
        box.append(Span(start, stop))
    return tuple(box)


def _assert_equal(found: Array, truth: Array, what: str) -> None:
    assert found.shape == truth.shape, what
    if truth.dtype.kind in "iufcbM":
        np.testing.assert_array_equal(found, truth, err_msg=what)
    else:
        assert found.tolist() == truth.tolist(), what


class CountingStore(WrapperStore[ZarrStore]):
    """A zarr store that counts what is got from it, metadata left out; what zarr reopens of it counts together.

    Attributes:
        gets: key -> number of gets that found something.
    """

    def __init__(self, store: ZarrStore) -> None:
        super().__init__(store)
        self.gets: Counter[str] = Counter()
        self._sizes: Counter[str] = Counter()
        self._counting = threading.Lock()

    def _with_store(self, store: ZarrStore) -> Self:
        other = type(self)(store)
        other.gets, other._sizes, other._counting = self.gets, self._sizes, self._counting
        return other

    async def get(self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None) -> Buffer | None:
        """As the wrapped store's, counted."""
        found = await self._store.get(key, prototype, byte_range)
        if found is not None and key.rsplit("/", 1)[-1] not in METADATA:
            with self._counting:
                self.gets[key] += 1
                self._sizes[key] += len(found)
        return found

    @property
    def bytes(self) -> int:
        """Bytes that those gets gave."""
        return self._sizes.total()

    def reset(self) -> None:
        """Count from zero again."""
        self.gets.clear()
        self._sizes.clear()

"""Where a box lies in a chunk stored as one line of elements: stretches, and the blocks they touch. Pure arithmetic."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from shardio.box import Box, slices

Array = np.ndarray[Any, np.dtype[Any]]


def stretches(box: Box, shape: Sequence[int]) -> tuple[Array, int, int]:
    """A box of a C-ordered array as stretches of elements that follow each other.

    Returns:
        The first element of each stretch, ascending; how many elements each has; the dim along which it runs (the
        dims after it are read whole).
    """
    along, inner = max(len(shape) - 1, 0), 1
    while along > 0 and box[along] == (0, shape[along]):
        inner *= shape[along]
        along -= 1
    if not shape:
        return np.zeros(1, np.int64), 1, 0
    size = box[along].size * inner
    starts: Any = box[along].start * inner  # a number as long as there is one stretch
    step = inner * shape[along]
    for dim in range(along - 1, -1, -1):
        first, last = box[dim]
        if last - first == 1:
            starts = starts + first * step
        else:
            starts = np.add.outer(np.arange(first * step, last * step, step), starts).ravel()
        step *= shape[dim]
    return starts if isinstance(starts, np.ndarray) else np.array([starts]), size, along


def touched(starts: Array, size: int, block: int) -> list[tuple[int, int]]:
    """The blocks (of `block` elements) that stretches touch, as ranges first..last of them that do not meet."""
    first, last = starts // block, -(-(starts + size) // block)
    if len(starts) == 1:
        return [(int(first[0]), int(last[0]))]
    breaks = np.flatnonzero(first[1:] > last[:-1])
    begin = first[np.concatenate(([0], breaks + 1))]
    end = last[np.concatenate((breaks, [len(last) - 1]))]
    return list(zip(begin.tolist(), end.tolist(), strict=True))


@lru_cache(4096)
def decoded_bytes(box: Box, shape: tuple[int, ...], order: tuple[int, ...], itemsize: int, block: int) -> int:
    """Bytes that are decoded to read a box of a chunk, by blocks of `block` bytes (0: the chunk is one)."""
    total = math.prod(shape) * itemsize
    if not block or (block != 1 and block % itemsize):
        return total
    box, shape = tuple(box[dim] for dim in order), tuple(shape[dim] for dim in order)
    starts, size, _ = stretches(box, shape)
    if block == 1:
        return len(starts) * size * itemsize
    return sum(min(last * block, total) - first * block for first, last in touched(starts, size, block // itemsize))


def copy_stretch(flat: Array, first: int, shape: Sequence[int], box: Box, out: Array) -> None:
    """Of a C-ordered array's elements first, first + 1, ... in `flat`, copy those inside a box to where they belong.

    Args:
        flat: the elements, [n].
        first: number of the first of them in the array.
        shape: of the array, at least one dim.
        box: a box of it.
        out: what is to hold the box.
    """
    (start, stop), last = box[0], first + len(flat)
    if len(shape) == 1:
        low, high = max(first, start), min(last, stop)
        if low < high:
            out[low - start : high - start] = flat[low - first : high - first]
        return
    inner = math.prod(shape[1:])
    row, into = divmod(first, inner)
    if into or len(flat) < inner:  # a part of a row
        end = min(last, (row + 1) * inner)
        if start <= row < stop:
            copy_stretch(flat[: end - first], into, shape[1:], box[1:], out[row - start])
        if end < last:
            copy_stretch(flat[end - first :], end, shape, box, out)
        return
    rows = len(flat) // inner
    low, high = max(row, start), min(row + rows, stop)
    if low < high:
        whole = flat[(low - row) * inner : (high - row) * inner].reshape(high - low, *shape[1:])
        out[low - start : high - start] = whole[(slice(None), *slices(box[1:]))]
    if rows * inner < len(flat):
        copy_stretch(flat[rows * inner :], first + rows * inner, shape, box, out)

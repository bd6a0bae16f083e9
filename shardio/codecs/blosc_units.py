"""Which blocks of a blosc chunk a box touches, in jobs, and where each is decoded to. Pure arithmetic."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from shardio.blocks import stretches, touched
from shardio.box import Box
from shardio.codecs.base import Array

JOB = 2 << 20
"""Decoded bytes of one job: few enough to stay in a core's cache, and to share a chunk out evenly."""
KEPT_ROWS = 4096
"""Rows of a box up to which its jobs are kept; each can be a unit or two of 250 bytes."""


class Unit(NamedTuple):
    """Blocks first..last of a chunk.

    Attributes:
        place: what of the output they are decoded straight into, as an index along its first dims; None if they are
            decoded elsewhere and copied.
        span: the bytes of that.
    """

    first: int
    last: int
    place: tuple[int, ...] | None = None
    span: slice = slice(0, 0)


Job = tuple[Unit, ...]


def dense_dims(out: Array) -> int:
    """How many of the last dims of an array lie in one piece of memory."""
    nbytes, dims = out.itemsize, 0
    for size, stride in zip(reversed(out.shape), reversed(out.strides), strict=True):
        if size > 1 and stride != nbytes:
            break
        nbytes, dims = nbytes * size, dims + 1
    return dims


def jobs_of(box: Box, shape: tuple[int, ...], itemsize: int, block: int, dense: int) -> tuple[Job, ...]:
    """The blocks (of `block` bytes) that a box touches, in jobs of about JOB decoded bytes.

    `dense` is how many of the last dims of the output lie in one piece. The same for all chunks that are read alike,
    so those of few rows are kept.
    """
    rows = math.prod([span.size for span in box[:-1]])
    return (_kept if rows <= KEPT_ROWS else _jobs_of)(box, shape, itemsize, block, dense)


def _jobs_of(box: Box, shape: tuple[int, ...], itemsize: int, block: int, dense: int) -> tuple[Job, ...]:
    if block % itemsize:
        return ((Unit(0, -(-math.prod(shape) * itemsize // block)),),)
    most = max(1, JOB // block)
    jobs: list[Job] = []
    job: list[Unit] = []
    blocks = 0
    for unit in _units(box, shape, itemsize, block, dense):
        for at in range(unit.first, unit.last, most):
            end = min(at + most, unit.last)
            low = unit.span.start + (at - unit.first) * block
            job.append(Unit(at, end, unit.place, slice(low, min(low + (end - at) * block, unit.span.stop))))
            blocks += end - at
            if blocks >= most:
                jobs.append(tuple(job))
                job, blocks = [], 0
    return (*jobs, tuple(job)) if job else tuple(jobs)


_kept = lru_cache(64)(_jobs_of)


def _units(box: Box, shape: tuple[int, ...], itemsize: int, block: int, dense: int) -> Iterator[Unit]:
    """The blocks that a box touches, ascending."""
    starts, size, along = stretches(box, shape)
    elements = block // itemsize
    directs = _directs(box, shape, itemsize, elements, starts, size, along) if len(shape) - along <= dense else iter(())
    direct = next(directs, None)
    for first, last in touched(starts, size, elements):
        while direct is not None and direct.first < last:
            if first < direct.first:
                yield Unit(first, direct.first)
            yield direct
            first = direct.last
            direct = next(directs, None)
        if first < last:
            yield Unit(first, last)


def _directs(
    box: Box, shape: tuple[int, ...], itemsize: int, block: int, starts: Array, size: int, along: int
) -> Iterator[Unit]:
    """The blocks (of `block` elements) that lie whole in one stretch, where a stretch is in one piece in the output."""
    total = math.prod(shape)
    if min(block, total) > size:
        return
    outer = itertools.product(*[range(span.size) for span in box[:along]])
    for start, index in zip(starts.tolist(), outer, strict=True):
        first, stop = -(-start // block), start + size
        last = -(-stop // block) if stop == total else stop // block
        if first < last:
            low, high = first * block - start, min(last * block, total) - start
            yield Unit(first, last, index, slice(low * itemsize, high * itemsize))

"""Which outputs a rank computes and which input rows it reads, where an op slides along a cut dim: integers only.

All ranks derive the extents of all ranks, so an output's layout needs no communication. A rank owns an output if the
centre of what it reads lies in the rank's rows: "same" convolutions keep the sizes, and shards need not start at a
multiple of the stride.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise

__all__ = ["Reach", "Rows", "adaptive_spans", "resized_sizes", "slide", "span_touches", "spread"]

Rows = tuple[int, int]
"""``(start, stop)`` of global rows; may leave the dim where an op pads it."""


@dataclass(frozen=True)
class Reach:
    """One cut dim of an op: what every rank along the mesh axis holds, reads and makes.

    Attributes:
        axis: the mesh axis that cuts.
        dim: the tensor dim.
        sizes: input rows that each rank holds.
        windows: input rows that each rank reads.
        out_sizes: output rows that each rank makes.
    """

    axis: int
    dim: int
    sizes: tuple[int, ...]
    windows: tuple[Rows, ...]
    out_sizes: tuple[int, ...]

    @cached_property
    def is_local(self) -> bool:
        """Whether every rank reads just what it holds."""
        rows = zip(_blocks(self.sizes), self.windows, self.out_sizes, strict=True)
        return all(own == window or (own[0] == own[1] and out == 0) for own, window, out in rows)

    def outputs(self, rank: int) -> Rows:
        """The global output rows that a rank makes."""
        return _blocks(self.out_sizes)[rank]


def _blocks(sizes: Sequence[int]) -> list[Rows]:
    return list(pairwise((0, *accumulate(sizes))))


def _owned(sizes: Sequence[int], out_length: int, first_output: Callable[[int], int]) -> tuple[int, ...]:
    """Output rows per rank where input row ``b`` is the first of a rank and ``first_output(b)`` its first output.

    What lies before the first row or behind the last goes to the ranks that hold those; empty ranks stay empty.
    """
    edges, length = [0], sum(sizes)
    for edge in list(accumulate(sizes))[:-1]:
        first = 0 if edge == 0 else out_length if edge == length else first_output(edge)
        edges.append(min(max(first, edges[-1]), out_length))
    return tuple(stop - start for start, stop in pairwise((*edges, out_length)))


@lru_cache(maxsize=1024)
def slide(
    sizes: tuple[int, ...], out_length: int, kernel: int, stride: int, padding: int, dilation: int
) -> tuple[tuple[int, ...], tuple[Rows, ...]]:
    """Convolution and pooling: output ``j`` reads rows ``j * stride - padding + dilation * t``, ``0 <= t < kernel``.

    Returns:
        Outputs per rank, and the rows that each rank reads.
    """
    span = dilation * (kernel - 1)
    out_sizes = _owned(sizes, out_length, lambda edge: -(-(edge + padding - span // 2) // stride))
    windows = tuple(
        (start * stride - padding, (stop - 1) * stride - padding + span + 1) if stop > start else (0, 0)
        for start, stop in _blocks(out_sizes)
    )
    return out_sizes, windows


@lru_cache(maxsize=1024)
def spread(
    sizes: tuple[int, ...], out_length: int, kernel: int, stride: int, padding: int, dilation: int
) -> tuple[tuple[int, ...], tuple[Rows, ...], tuple[int, ...]]:
    """Transposed convolution: input ``i`` adds to outputs ``i * stride - padding + dilation * t``, ``0 <= t < kernel``.

    Returns:
        Outputs per rank, the rows that each rank reads, and where its outputs start in what those rows make.
    """
    span = dilation * (kernel - 1)
    out_sizes = _owned(sizes, out_length, lambda edge: edge * stride - padding + span // 2)
    windows, trims = [], []
    for start, stop in _blocks(out_sizes):
        if stop == start:
            windows.append((0, 0))
            trims.append(0)
            continue
        first = (start + padding - span) // stride
        last = max((stop - 1 + padding) // stride, -(-(stop - 1 + padding - span) // stride))
        windows.append((first, last + 1))
        trims.append(start - (first * stride - padding))
    return out_sizes, tuple(windows), tuple(trims)


@lru_cache(maxsize=1024)
def resized_sizes(sizes: tuple[int, ...], out_length: int) -> tuple[int, ...]:
    """Rows per rank after resizing the dim: edges move in proportion, halves as strided convolutions round them.

    Doubling what was halved gives the sizes back where they were even.
    """
    length = sum(sizes)
    if out_length >= length:
        return _owned(sizes, out_length, lambda edge: edge * out_length // length)
    return _owned(sizes, out_length, lambda edge: -(-edge * out_length // length))


def adaptive_spans(length: int, count: int) -> tuple[Rows, ...]:
    """Input rows of each of ``count`` adaptive pooling outputs."""
    return tuple((j * length // count, -(-(j + 1) * length // count)) for j in range(count))


@lru_cache(maxsize=1024)
def span_touches(sizes: tuple[int, ...], spans: tuple[Rows, ...]) -> tuple[Rows, ...]:
    """For every rank, the outputs ``(first, stop)`` whose input rows, rising from output to output, meet its rows."""
    found = []
    for start, stop in _blocks(sizes):
        met = [j for j, (first, last) in enumerate(spans) if max(first, start) < min(last, stop)]
        found.append((met[0], met[-1] + 1) if met else (0, 0))
    return tuple(found)

"""Half-open spans and boxes of indices: the words in which partition, plan and reader speak."""

from __future__ import annotations

from collections.abc import Sequence
from types import EllipsisType
from typing import NamedTuple


class Span(NamedTuple):
    """The indices start, start + 1, ..., stop - 1 along one dimension."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        """Number of indices."""
        return self.stop - self.start

    def slice(self) -> slice:
        """The same as a slice."""
        return slice(self.start, self.stop)


Box = tuple[Span, ...]
"""One span per dimension of an array, in the array's own order."""


def whole(shape: Sequence[int]) -> Box:
    """The box that covers an array of this shape."""
    return tuple(Span(0, size) for size in shape)


def shape_of(box: Box) -> tuple[int, ...]:
    """Extent of a box along each dimension."""
    return tuple(span.size for span in box)


def slices(box: Box) -> tuple[slice | EllipsisType, ...]:
    """A box as the index of a numpy array; the trailing ellipsis makes it give an array for no dims, too."""
    return (*(span.slice() for span in box), ...)

"""Which cells of a grid are taken, in a list row by row, and in which chunks a stretch of that list lies."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from shardio.box import Box, Span, shape_of

Array = np.ndarray[Any, np.dtype[Any]]

LISTS = 64
"""Slabs whose cells each part remembers by chunk; every time step asks for the same ones again."""


class Piece(NamedTuple):
    """Cells of one chunk: the box [y, x] around them, which of its cells they are, and where they go."""

    box: Box
    cells: Array
    places: Array


class Cells:
    """The cells that are taken of one grid, row by row, found by chunk.

    Attributes:
        shape: of the grid.
        count: cells taken.
        pieces: called with (start, stop, unit): those from start to stop, by unit (rows along each dim) of the grid.
    """

    def __init__(self, shape: tuple[int, ...], keep: Array | None) -> None:
        self.shape = shape
        self._kept = None if keep is None else np.flatnonzero(keep)
        self.count = math.prod(shape) if self._kept is None else self._kept.size
        self.pieces = lru_cache(LISTS)(self._pieces)

    def numbers(self, start: int, stop: int) -> Array:
        """Of the cells taken, those from start to stop: their numbers among all of the grid."""
        return np.arange(start, stop) if self._kept is None else self._kept[start:stop]

    def _pieces(self, start: int, stop: int, unit: tuple[int, ...]) -> tuple[Piece, ...]:
        along = np.unravel_index(self.numbers(start, stop), self.shape)
        units = [-(-size // step) for size, step in zip(self.shape, unit, strict=True)]
        owner = np.ravel_multi_index([at // step for at, step in zip(along, unit, strict=True)], units)
        order = np.argsort(owner, kind="stable")
        edges = np.flatnonzero(np.diff(owner[order])) + 1
        return tuple(self._piece(along, places) for places in np.split(order, edges))

    def _piece(self, along: Sequence[Array], places: Array) -> Piece:
        here = [at[places] for at in along]
        box = tuple(Span(int(at.min()), int(at.max()) + 1) for at in here)
        inside = [at - span.start for at, span in zip(here, box, strict=True)]
        return Piece(box, np.ravel_multi_index(inside, shape_of(box)), places)

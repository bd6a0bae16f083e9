"""Several grids as one list of cells: a fine grid and what it leaves of a coarse one, with any holes.

A slab of the joined cells is read chunk by chunk, and only chunks that hold one of its cells: neither the whole of a
grid is read, nor what the mask leaves out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from shardio.box import Box, Span, shape_of, slices
from shardio.cf import Grid, decoded, find_grid
from shardio.codecs.base import Counted, Share, in_turn
from shardio.decode import Decode
from shardio.errors import DimensionError, NoVariableError
from shardio.roles import degrees
from shardio.source import Source, Store

Array = np.ndarray[Any, np.dtype[Any]]

ROWS_BYTES = 1 << 20
"""Bytes of one read where any rows can be read alone: holes smaller than that are read with what is around them."""
LISTS = 64
"""Slabs whose cells each part remembers by chunk; every time step asks for the same ones again."""


@dataclass(frozen=True, eq=False)
class GridPart:
    """A grid to join.

    Attributes:
        store: an opened store.
        keep: [y, x] bools, True for the cells that are taken; None for all.
        spatial: names of the (y, x) dims, where they are not recognised; of one dim where its cells are a list already.
    """

    store: Store
    keep: Array | None = None
    spatial: Sequence[str] | None = None


class Piece(NamedTuple):
    """Cells of one chunk: the box [y, x] around them, which of its cells they are, and where they go."""

    box: Box
    cells: Array
    places: Array


class Cells:
    """The cells of one part in the order of its rows, found by chunk."""

    def __init__(self, shape: tuple[int, ...], keep: Array | None) -> None:
        self.shape = shape
        self._kept = None if keep is None else np.flatnonzero(keep)
        self.count = math.prod(shape) if self._kept is None else self._kept.size
        self.pieces = lru_cache(LISTS)(self._pieces)

    def numbers(self, start: int, stop: int) -> Array:
        """Of the cells taken, those from start to stop: their numbers among all, row by row."""
        return np.arange(start, stop) if self._kept is None else self._kept[start:stop]

    def _pieces(self, start: int, stop: int, unit: tuple[int, ...]) -> tuple[Piece, ...]:
        """The cells from start to stop, by unit (cells along each dim) of the grid."""
        along = np.unravel_index(self.numbers(start, stop), self.shape)
        units = [-(-size // step) for size, step in zip(self.shape, unit, strict=True)]
        owner = np.ravel_multi_index([at // step for at, step in zip(along, unit, strict=True)], units)
        order = np.argsort(owner, kind="stable")
        edges = np.flatnonzero(np.diff(owner[order])) + 1
        return tuple(self._piece(along, places) for places in np.split(order, edges) if places.size)

    def _piece(self, along: Sequence[Array], places: Array) -> Piece:
        here = [at[places] for at in along]
        box = tuple(Span(int(at.min()), int(at.max()) + 1) for at in here)
        inside = [at - span.start for at, span in zip(here, box, strict=True)]
        return Piece(box, np.ravel_multi_index(inside, shape_of(box)), places)


class JoinedSource(Source):
    """One variable on the cells of all parts: [..., cell], the dims of the parts without their spatial ones."""

    def __init__(self, name: str, dim: str, parts: Sequence[tuple[Source, tuple[str, ...], Cells]]) -> None:
        self._parts = [(source, tuple(map(source.dims.index, space)), cells) for source, space, cells in parts]
        leads = {self._lead(source.dims, axes) + self._lead(source.shape, axes) for source, axes, _ in self._parts}
        if len(leads) > 1:
            raise DimensionError(
                f"{name!r} cannot be joined: beside their spatial dims, the parts have "
                f"{' and '.join(str(lead) for lead in sorted(leads, key=str))}; they must be alike"
            )
        first, axes, _ = self._parts[0]
        # Packed alike, values pass as they are stored; else each part is decoded here.
        self._alike = len({(source.dtype, source.decode) for source, _, _ in self._parts}) == 1
        wide = any(source.dtype.itemsize > 4 for source, _, _ in self._parts)
        total = sum(cells.count for _, _, cells in self._parts)
        chunks = zip(*(self._lead(_units(source), axes) for source, axes, _ in self._parts), strict=True)
        shape = self._lead(first.shape, axes)
        dtype = first.dtype if self._alike else np.dtype(np.float64 if wide else np.float32)
        # Cells that are read together: as many as the largest chunk brings, which is cut by none of them if it is most.
        step = max(min(cells.count, math.prod(self._unit(source, axes))) for source, axes, cells in self._parts)
        super().__init__(
            name,
            dims=(*self._lead(first.dims, axes), dim),
            shape=(*shape, total),
            chunks=(
                *(min(size, math.lcm(*sizes)) for size, sizes in zip(shape, chunks, strict=True)),
                step if 2 * step <= total else total,
            ),
            dtype=dtype,
            attrs=first.attrs if self._alike else {k: v for k, v in first.attrs.items() if k in ("units", "long_name")},
            block=int(all(source.partial for source, _, _ in self._parts)),
            decode=first.decode if self._alike else Decode(),
        )

    @staticmethod
    def _lead(values: Sequence[Any], axes: tuple[int, ...]) -> tuple[Any, ...]:
        return tuple(value for at, value in enumerate(values) if at not in axes)

    @staticmethod
    def _unit(source: Source, axes: tuple[int, ...]) -> tuple[int, ...]:
        """What is read of a part at once, along its spatial dims."""
        if not source.partial:
            return tuple(source.chunks[at] for at in axes)
        across = tuple(source.shape[at] for at in axes[1:])
        return (max(1, ROWS_BYTES // max(1, math.prod(across) * source.dtype.itemsize)), *across)

    @property
    def requests(self) -> int:
        """See Source.requests."""
        return max(source.requests for source, _, _ in self._parts)

    @property
    def fetched_together(self) -> bool:
        """See Source.fetched_together."""
        return any(source.fetched_together for source, _, _ in self._parts)

    def read_into(self, box: Box, out: Array) -> None:
        """See Source.read_into."""
        self.read_counted(box, out)

    def read_counted(self, box: Box, out: Array, share: Share = in_turn) -> Counted:
        """See Source.read_counted."""
        *lead, wanted = box
        counted, first = Counted(), 0
        for source, axes, cells in self._parts:
            start, stop = (min(max(at - first, 0), cells.count) for at in wanted)
            if stop > start:
                place = out[..., first + start - wanted.start : first + stop - wanted.start]
                for piece in cells.pieces(start, stop, self._unit(source, axes)):
                    counted += self._read(source, axes, tuple(lead), piece, place, share)
            first += cells.count
        return counted

    def _read(
        self, source: Source, axes: tuple[int, ...], lead: Box, piece: Piece, out: Array, share: Share
    ) -> Counted:
        spans = iter(lead)
        space = dict(zip(axes, piece.box, strict=True))
        box = tuple(space[at] if at in space else next(spans) for at in range(len(source.dims)))
        stored = np.empty(shape_of(box), source.dtype)
        counted = source.read_counted(box, stored, share)
        if not self._alike:
            values = np.empty(stored.shape, self.dtype)
            source.decode.apply(stored, values)
            stored = values
        last = np.moveaxis(stored, axes, range(-len(axes), 0))
        out[..., piece.places] = last.reshape(*last.shape[: -len(axes)], -1)[..., piece.cells]
        return counted


def _units(source: Source) -> tuple[int, ...]:
    """What can be read alone along each dim."""
    return (1,) * len(source.shape) if source.partial else source.chunks


class HeldSource(Source):
    """A small array in memory."""

    def __init__(self, name: str, dims: tuple[str, ...], values: Array, attrs: dict[str, Any]) -> None:
        super().__init__(
            name, dims=dims, shape=values.shape, chunks=values.shape, dtype=values.dtype, attrs=attrs, block=1
        )
        self._values = values

    def read_into(self, box: Box, out: Array) -> None:
        """See Source.read_into."""
        out[...] = self._values[slices(box)]


def join(parts: Sequence[Store | GridPart], *, dim: str = "cell") -> Store:
    """Join grids to one list of cells, each grid row by row, one after the other.

    The store that comes of it is read like any other: `find_grid`, `plan` and `DomainDataLoader` find its spatial dim.
    It has the variables that all parts have, in the first one's order, their coordinates along other dims as in the
    first part, and "latitude" and "longitude" [cell] where all parts have them. Where the parts are packed in different
    ways or of different dtypes, values come decoded as float32, or float64 if a part has 8-byte values.

    Args:
        parts: opened stores, or `GridPart` where a mask chooses cells. Closing the joined store closes them.
        dim: name of the new dim.

    Raises:
        DimensionError: a mask is not of its grid's shape or keeps nothing; the parts have other times, levels or dims.
        NoVariableError: there is no part, or no variable that all of them have.
    """
    given = [part if isinstance(part, GridPart) else GridPart(part) for part in parts]
    if not given:
        raise NoVariableError("there is nothing to join: no part was given")
    grids = [find_grid(part.store, spatial=part.spatial) for part in given]
    cells = [_cells(part, grid) for part, grid in zip(given, grids, strict=True)]
    url = " + ".join(part.store.url for part in given)
    names = [name for name in grids[0].variables if all(name in grid.variables for grid in grids)]
    if not names:
        raise NoVariableError(f"{url}: no variable is in all parts; these have {[grid.variables for grid in grids]}")
    _check_alike(url, grids)
    sources: dict[str, Source] = {}
    for name in names:
        of_parts = zip(given, grids, cells, strict=True)
        sources[name] = JoinedSource(
            name, dim, [(part.store[name], grid.spatial, kept) for part, grid, kept in of_parts]
        )
    known = {along for source in sources.values() for along in source.dims}
    first = {name: source for name, source in given[0].store.items() if source.dims and set(source.dims) <= known}
    places = _places(given, grids, cells, dim)
    closers = tuple(part.store.close for part in given)
    return Store(url, {**first, **places, **sources}, {}, "joined", closers, frozenset((*first, *places)))


def _cells(part: GridPart, grid: Grid) -> Cells:
    shape = tuple(grid.sizes[along] for along in grid.spatial)
    if part.keep is None:
        return Cells(shape, None)
    keep = np.asarray(part.keep)
    if keep.shape != shape or keep.dtype != np.bool_:
        raise DimensionError(
            f"the mask of {part.store.url} is {keep.dtype} {keep.shape}, but its grid is {grid.spatial} {shape}; "
            f"a bool for every cell is needed"
        )
    if not keep.any():
        raise DimensionError(f"the mask of {part.store.url} keeps no cell; leave that part out")
    return Cells(shape, keep)


def _check_alike(url: str, grids: Sequence[Grid]) -> None:
    """The parts' times and levels, where they tell them, must be the same."""
    for grid in grids[1:]:
        for what in ("times", "levels"):
            ours, theirs = (getattr(each, what) for each in (grids[0], grid))
            one, other = (None if each is None else getattr(each, "values", each) for each in (ours, theirs))
            if one is not None and other is not None and not np.array_equal(one, other):
                raise DimensionError(
                    f"{url}: the parts have different {what} ({len(one)} from {one[0]} to {one[-1]}, and {len(other)} "
                    f"from {other[0]} to {other[-1]}); choose the same in each before joining"
                )


def _places(parts: Sequence[GridPart], grids: Sequence[Grid], cells: Sequence[Cells], dim: str) -> dict[str, Source]:
    """Latitude and longitude of every cell, where all parts tell them."""
    found: dict[str, Source] = {}
    for name, role, units in (("latitude", "y", "degrees_north"), ("longitude", "x", "degrees_east")):
        values = [_degrees(part.store, grid, kept, role) for part, grid, kept in zip(parts, grids, cells, strict=True)]
        told = [each for each in values if each is not None]
        if len(told) == len(parts):
            found[name] = HeldSource(name, (dim,), np.concatenate(told), {"units": units, "standard_name": name})
    return found


def _degrees(store: Store, grid: Grid, cells: Cells, role: str) -> Array | None:
    """Latitude ("y") or longitude ("x") of the cells taken, from an array on the grid or along one of its dims."""
    numbers = cells.numbers(0, cells.count)
    for source in store.values():
        if degrees(source) == role and source.dims and set(source.dims) <= set(grid.spatial):
            along = dict(zip(grid.spatial, np.unravel_index(numbers, cells.shape), strict=True))
            return decoded(source)[tuple(along[dim] for dim in source.dims)]
    return None

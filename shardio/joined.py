"""Several grids as one list of cells: a fine grid and what it leaves of a coarse one, with any holes.

A slab of the joined cells is read chunk by chunk, and only chunks that hold one of its cells: neither the whole of a
grid is read, nor chunks that a mask empties.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np
import xarray as xr

from shardio.box import Box, Span, shape_of, slices
from shardio.cf import Grid, decoded, find_grid, horizontal
from shardio.codecs.base import Counted, Share, in_turn, scratch
from shardio.decode import Decode
from shardio.errors import DecodeError, DimensionError, NoVariableError
from shardio.formats.xarray import XarraySource
from shardio.labels import labels
from shardio.roles import coordinate
from shardio.source import Source, Store, open_store
from shardio.tasks import MAX_BYTES
from shardio.times import decode_times

Array = np.ndarray[Any, np.dtype[Any]]

CELL = "cell"
"""Name of the joined dim."""
ROWS_BYTES = 1 << 20
"""Bytes of one read where any rows can be read alone: what a mask leaves out within them is read, too."""
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


@dataclass(frozen=True, eq=False)
class Field:
    """One part's array of a joined variable.

    Attributes:
        source: the array.
        axes: places of its spatial dims.
        cells: those that are taken.
    """

    source: Source
    axes: tuple[int, ...]
    cells: Cells

    def leading(self, values: Sequence[Any]) -> tuple[Any, ...]:
        """What is said of every dim, without the spatial ones."""
        return tuple(value for at, value in enumerate(values) if at not in self.axes)

    @cached_property
    def alone(self) -> tuple[int, ...]:
        """Extent along the other dims of what can be read alone."""
        return self.leading((1,) * len(self.source.shape) if self.source.partial else self.source.chunks)

    @cached_property
    def unit(self) -> tuple[int, ...]:
        """Extent along the spatial dims of what is read at once: a chunk; of one in one piece, about ROWS_BYTES."""
        chunks = tuple(self.source.chunks[at] for at in self.axes)
        if not self.source.partial or any(map(int.__lt__, chunks, self.cells.shape)):
            return chunks
        across = self.cells.shape[1:]
        row = max(1, math.prod(across) * self.source.dtype.itemsize)
        return (max(1, ROWS_BYTES // row), *across)

    @property
    def depth(self) -> int:
        """How many joined arrays lie below."""
        return self.source.depth if isinstance(self.source, JoinedSource) else 0

    def read(self, leading: Box, cells: Span, out: Array, decode: bool, share: Share) -> Counted:
        """Put cells into `out` [..., cell], as stored or decoded."""
        counted = Counted()
        for piece in self.cells.pieces(*cells, self.unit):
            nbytes = math.prod(shape_of(piece.box)) * self.source.dtype.itemsize
            for part in self._parts(leading, nbytes):
                place = tuple(Span(a - b.start, z - b.start) for (a, z), b in zip(part, leading, strict=True))
                counted += self._read(part, piece, out[slices(place)], decode, share)
        return counted

    def _parts(self, leading: Box, nbytes: int) -> Iterator[Box]:
        """A box of the other dims in parts that end between chunks, each of about MAX_BYTES if one is of `nbytes`."""
        units = [-(-stop // size) - start // size for (start, stop), size in zip(leading, self.alone, strict=True)]
        at = max(range(len(units)), key=units.__getitem__, default=0)
        if math.prod(shape_of(leading)) * nbytes <= MAX_BYTES or not units or units[at] < 2:
            yield leading
            return
        (start, stop), size = leading[at], self.alone[at]
        middle = (start // size + units[at] // 2) * size
        for half in (Span(start, middle), Span(middle, stop)):
            yield from self._parts((*leading[:at], half, *leading[at + 1 :]), nbytes)

    def _read(self, leading: Box, piece: Piece, out: Array, decode: bool, share: Share) -> Counted:
        source = self.source
        spans, space = iter(leading), dict(zip(self.axes, piece.box, strict=True))
        box = tuple(space[at] if at in space else next(spans) for at in range(len(source.dims)))
        shape = shape_of(box)
        held = scratch(f"joined {self.depth}", math.prod(shape) * source.dtype.itemsize)
        stored = held.view(source.dtype).reshape(shape)
        counted = source.read_counted(box, stored, share)
        if decode:
            values = np.empty(shape, out.dtype)
            source.decode.apply(stored, values)
            stored = values
        last = np.moveaxis(stored, self.axes, range(-len(self.axes), 0))
        out[..., piece.places] = last.reshape(*last.shape[: -len(self.axes)], -1)[..., piece.cells]
        return counted


class JoinedSource(Source):
    """One variable on the cells of all parts: [..., cell], the dims of the parts without their spatial ones."""

    def __init__(self, name: str, fields: Sequence[Field]) -> None:
        self._fields = fields
        first = fields[0]
        sources = [field.source for field in fields]
        # Packed alike, values pass as they are stored; else each part is decoded here.
        self._decoded = len({(source.dtype, source.decode) for source in sources}) > 1
        wide = any(source.dtype.itemsize > 4 for source in sources)
        shape = first.leading(first.source.shape)
        total = sum(field.cells.count for field in fields)
        chunks = [
            min(size, math.lcm(*rows)) for size, *rows in zip(shape, *(field.alone for field in fields), strict=True)
        ]
        # Cells of a band of stored chunks from one side of the grid to the other. Chunks are cut where the joined ones
        # end, and then decoded twice; so if a band is most of the cells, all are one chunk.
        band = max(min(field.cells.count, field.unit[0] * math.prod(field.cells.shape[1:])) for field in fields)
        kept = ("units", "long_name", "standard_name")
        super().__init__(
            name,
            dims=(*first.leading(first.source.dims), CELL),
            shape=(*shape, total),
            chunks=(*chunks, band if 2 * band <= total else total),
            dtype=np.dtype(np.float64 if wide else np.float32) if self._decoded else first.source.dtype,
            attrs={k: v for k, v in first.source.attrs.items() if k in kept or not self._decoded},
            block=int(all(source.partial for source in sources)),
            decode=Decode() if self._decoded else first.source.decode,
        )

    @property
    def depth(self) -> int:
        """How many joined arrays lie one in the other, this one counted."""
        return 1 + max(field.depth for field in self._fields)

    @property
    def requests(self) -> int:
        """See Source.requests."""
        return max(field.source.requests for field in self._fields)

    @property
    def fetched_together(self) -> bool:
        """See Source.fetched_together."""
        return any(field.source.fetched_together for field in self._fields)

    def read_into(self, box: Box, out: Array) -> None:
        """See Source.read_into."""
        self.read_counted(box, out)

    def read_counted(self, box: Box, out: Array, share: Share = in_turn) -> Counted:
        """See Source.read_counted."""
        *leading, wanted = box
        counted, first = Counted(), 0
        for field in self._fields:
            here = Span(*(min(max(at - first, 0), field.cells.count) for at in wanted))
            if here.size and out.size:
                place = out[..., first + here.start - wanted.start : first + here.stop - wanted.start]
                counted += field.read(tuple(leading), here, place, self._decoded, share)
            first += field.cells.count
        return counted


def join(parts: Sequence[Any], *, variables: Sequence[str] | None = None) -> Store:
    """Join grids to one list of cells, each grid row by row, one after the other.

    The store that comes of it is read like any other: `find_grid`, `plan` and `DomainDataLoader` know its dim "cell".
    It has the variables that all parts have, in the first one's order, the first part's arrays along their other dims,
    and "latitude" and "longitude" [cell] where all parts have them. With on_bad="fill", a corrupt stored chunk blanks
    the joined chunk that it lies in, which can be all cells. Parts that are packed in different ways or are of
    different dtypes come decoded as float32, or float64 if one has 8-byte values.

    Args:
        parts: stores (opened, or what `open_store` takes), or `GridPart` where a mask chooses cells. Closing the joined
            store closes them.
        variables: names of those wanted; by default all that lie on every part's grid.

    Raises:
        NoVariableError: there is no part, or no variable that all of them have.
        DimensionError: a mask is not of its grid's shape or keeps nothing; the parts differ in the dims beside space,
            or in times, levels or names along them.
        DecodeError: they state different units.
        TypeError: `parts` is no list.
    """
    if not isinstance(parts, (list, tuple)):
        raise TypeError(f"join takes a list of stores, but was given a {type(parts).__name__}")
    given = [part if isinstance(part, GridPart) else GridPart(open_store(part)) for part in parts]
    if not given:
        raise NoVariableError("there is nothing to join: no part was given")
    grids = [find_grid(part.store, variables=variables, spatial=part.spatial) for part in given]
    cells = [_cells(part, grid) for part, grid in zip(given, grids, strict=True)]
    url = " + ".join(part.store.url for part in given)
    names = [name for name in grids[0].variables if all(name in grid.variables for grid in grids)]
    if not names:
        raise NoVariableError(f"{url}: no variable is in all parts; these have {[grid.variables for grid in grids]}")
    sources: dict[str, Source] = {}
    for name in names:
        fields = []
        for part, grid, taken in zip(given, grids, cells, strict=True):
            source = part.store[name]
            fields.append(Field(source, tuple(map(source.dims.index, grid.spatial)), taken))
        _check_alike(name, given, fields)
        sources[name] = JoinedSource(name, fields)
    sizes = {dim: size for source in sources.values() for dim, size in _sizes(source).items() if dim != CELL}
    for dim, size in sizes.items():
        _check_entries(dim, size, [part.store for part in given])
    along = {name: source for name, source in given[0].store.items() if _lies_along(source, sizes)}
    places = _places(given, grids, cells)
    closers = tuple(part.store.close for part in given)
    return Store(url, {**along, **places, **sources}, {}, "joined", closers, frozenset((*along, *places)))


def _cells(part: GridPart, grid: Grid) -> Cells:
    shape = tuple(grid.sizes[dim] for dim in grid.spatial)
    if part.keep is None:
        return Cells(shape, None)
    keep: Any = part.keep
    if isinstance(keep, xr.DataArray) and set(keep.dims) == set(grid.spatial):
        keep = keep.transpose(*grid.spatial)
    keep = np.asarray(keep)
    if keep.shape != shape or keep.dtype != np.bool_:
        raise DimensionError(
            f"the mask of {part.store.url} is {keep.dtype} {keep.shape}, but its grid is {grid.spatial} {shape}; "
            f"a bool for every cell is needed"
        )
    if not keep.any():
        raise DimensionError(f"the mask of {part.store.url} keeps no cell; leave that part out")
    return Cells(shape, keep)


def _check_alike(name: str, parts: Sequence[GridPart], fields: Sequence[Field]) -> None:
    """The parts of a variable must have the same dims beside space, and the same units where they state them."""
    urls = [part.store.url for part in parts]
    others = [
        dict(zip(field.leading(field.source.dims), field.leading(field.source.shape), strict=True)) for field in fields
    ]
    if CELL in others[0]:
        raise DimensionError(f"{name!r} has the dim {CELL!r} beside space, which is what the joined one is called")
    for url, other in zip(urls, others, strict=True):
        if list(other.items()) != list(others[0].items()):
            raise DimensionError(
                f"{name!r} has {others[0] or 'no dims'} beside space in {urls[0]}, but {other or 'none'} in {url}; "
                f"make them alike, or leave it out with variables="
            )
    _check_units(name, urls, [field.source for field in fields], "convert one, or leave it out with variables=")


def _check_units(name: str, urls: Sequence[str], sources: Sequence[Source], todo: str) -> None:
    told = [(url, str(unit)) for url, source in zip(urls, sources, strict=True) if (unit := source.attrs.get("units"))]
    for url, unit in told:
        if unit != told[0][1]:
            raise DecodeError(f"{name!r} is in {told[0][1]!r} in {told[0][0]}, but in {unit!r} in {url}; {todo}")


def _check_entries(dim: str, size: int, stores: Sequence[Store]) -> None:
    """The entries of a dim must be the same in all stores that tell them."""
    told = [(store, entries) for store in stores if (entries := _entries(store, dim, size)) is not None]
    for store, entries in told[1:]:
        first, ours = told[0]
        if ours.dtype.kind == entries.dtype.kind == "f":
            same = np.isclose(ours, entries, rtol=1e-6, atol=0, equal_nan=True)  # of float32 in one, float64 in another
        else:
            same = np.array([mine == its for mine, its in zip(ours.tolist(), entries.tolist(), strict=True)])
        if not same.all():
            at = int(np.argmin(same))
            raise DimensionError(
                f"dim {dim!r} is not the same in all parts: entry {at} is {ours[at]} in {first.url}, but {entries[at]} "
                f"in {store.url}; choose the same in each before joining"
            )
    numbers = [(s.url, c) for s in stores if (c := coordinate(s, dim, size)) is not None and decode_times(c) is None]
    _check_units(dim, [url for url, _ in numbers], [source for _, source in numbers], "convert one")


def _entries(store: Store, dim: str, size: int) -> Array | None:
    """The times (as texts), values or texts along a dim; None if nothing tells them."""
    source = coordinate(store, dim, size)
    axis = None if source is None else decode_times(source)
    if axis is not None:
        calendar = "" if axis.values.dtype.kind == "M" else f" ({axis.calendar})"
        return np.array([f"{axis.label(at)}{calendar}" for at in range(len(axis))])
    if source is not None and source.dtype.kind in "iuf":
        return decoded(source)
    texts = labels(store, dim, size)
    return None if texts is None else np.array(texts)


def _lies_along(source: Source, sizes: Mapping[str, int]) -> bool:
    """Whether an array lies along these dims alone; or holds the names along one, as rows of single characters."""
    if source.dims and _sizes(source).items() <= sizes.items():
        return True
    return source.name in sizes and source.dims[:1] == (source.name,) and source.dtype.kind in "SU"


def _sizes(source: Source) -> dict[str, int]:
    return dict(zip(source.dims, source.shape, strict=True))


def _places(parts: Sequence[GridPart], grids: Sequence[Grid], cells: Sequence[Cells]) -> dict[str, Source]:
    """Latitude and longitude of every cell, where all parts tell them."""
    found: dict[str, Source] = {}
    for name, role, units in (("latitude", "y", "degrees_north"), ("longitude", "x", "degrees_east")):
        told = []
        for part, grid, taken in zip(parts, grids, cells, strict=True):
            source = horizontal(part.store, grid, role)
            if source is not None:
                at = np.unravel_index(taken.numbers(0, taken.count), taken.shape)
                told.append(decoded(source)[tuple(at[grid.spatial.index(dim)] for dim in source.dims)])
        if len(told) == len(parts):
            attrs = {"units": units, "standard_name": name}
            found[name] = XarraySource(name, xr.Variable((CELL,), np.concatenate(told), attrs))
    return found

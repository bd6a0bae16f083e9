"""`join`: several grids as one store of cells, if their variables, names, times and units fit each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xarray as xr

from shardio.cells import Cells
from shardio.cf import Grid, decoded, find_grid, horizontal
from shardio.errors import DecodeError, DimensionError, NoVariableError
from shardio.formats.xarray import XarraySource
from shardio.joined import CELL, Field, JoinedSource
from shardio.labels import labels
from shardio.roles import coordinate
from shardio.source import Source, Store, open_store
from shardio.times import decode_times

Array = np.ndarray[Any, np.dtype[Any]]


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
    found = [(store.url, source) for store in stores if (source := coordinate(store, dim, size)) is not None]
    numbers = [(url, source) for url, source in found if " since " not in str(source.attrs.get("units", ""))]
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

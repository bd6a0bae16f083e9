"""Any xarray.Dataset that the user has opened: read lazily, box by box, through the dataset's own backend."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import xarray as xr

from shardio.box import Box, shape_of, slices
from shardio.source import Format, Missing, Source, Store


class XarraySource(Source):
    """One variable of an xarray.Dataset, as that dataset decodes it."""

    def __init__(self, name: str, variable: xr.Variable, chunks: tuple[int, ...] | None = None) -> None:
        chunks = _chunks(variable) if chunks is None else chunks
        super().__init__(
            name,
            dims=tuple(map(str, variable.dims)),
            shape=variable.shape,
            chunks=variable.shape if chunks is None else chunks,
            dtype=variable.dtype,
            attrs={str(key): value for key, value in variable.attrs.items()},
            block=int(chunks is None),
        )
        self._variable = variable

    def read_into(self, box: Box, out: np.ndarray[Any, Any]) -> None:
        """See Source.read_into."""
        if 0 not in shape_of(box):
            out[...] = self._variable[slices(box)].values


def open_xarray(source: xr.Dataset | xr.DataArray, *, missing: Missing = "raise") -> Store:
    """Wrap an open dataset; what it does about missing chunks is settled already, so `missing` changes nothing.

    Closing the store leaves the dataset open: who opened it closes it.
    """
    dataset = source if isinstance(source, xr.Dataset) else source.to_dataset(name=source.name or "array")
    url = str(dataset.encoding.get("source", "<xarray.Dataset>"))
    return dataset_store(dataset, url=url, format="xarray", owned=False)


def dataset_store(
    dataset: xr.Dataset,
    *,
    url: str,
    format: str,
    chunks: Mapping[str, tuple[int, ...]] | None = None,
    owned: bool = True,
) -> Store:
    """A Store of a dataset's variables; `chunks` names decode units that the dataset does not tell itself.

    Closing the store closes the dataset if it is `owned`.
    """
    sources = {
        str(name): XarraySource(str(name), variable, (chunks or {}).get(str(name)))
        for name, variable in dataset.variables.items()
    }
    attrs = {str(key): value for key, value in dataset.attrs.items()}
    closers = (dataset.close,) if owned else ()
    return Store(url, sources, attrs, format, closers, frozenset(map(str, dataset.coords)))


def _chunks(variable: xr.Variable) -> tuple[int, ...] | None:
    """The decode unit that a variable tells: dask's chunks if regular, or its file's; None if it tells none."""
    if variable.chunks is not None:
        first = tuple(sizes[0] if sizes else 1 for sizes in variable.chunks)
        regular = all(set(sizes[:-1]) <= {sizes[0]} and sizes[-1] <= sizes[0] for sizes in variable.chunks if sizes)
        return first if regular else None
    sizes = variable.encoding.get("chunksizes") or variable.encoding.get("chunks")
    if sizes is None or len(sizes) != variable.ndim or not math.prod(sizes):
        return None
    return tuple(int(size) for size in sizes)


FORMAT = Format("xarray", open_xarray, (), lambda source: isinstance(source, (xr.Dataset, xr.DataArray)))

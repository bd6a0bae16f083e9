"""GRIB through xarray's cfgrib engine (extra `grib`); one message, a whole field, is decoded at once."""

from __future__ import annotations

from typing import Any

import xarray as xr

from shardio import extras
from shardio.errors import ReadError
from shardio.formats.xarray import dataset_store
from shardio.location import local_path, starts_with
from shardio.source import Format, Missing, Store

FIELD_DIMS = ("latitude", "longitude", "y", "x", "values")
"""Dims that cfgrib gives to the values of one message."""


def open_grib(source: Any, *, missing: Missing = "raise", backend_kwargs: dict[str, Any] | None = None) -> Store:
    """Open a GRIB file; no index file is written beside it. Absent messages are NaN, whatever `missing` says.

    Args:
        source: path.
        missing: see open_store.
        backend_kwargs: passed to cfgrib, such as {"filter_by_keys": {"typeOfLevel": "surface"}}.

    Raises:
        MissingExtraError: cfgrib is not installed.
        ReadError: cfgrib cannot make one dataset of the file.
    """
    extras.load("cfgrib")
    path = str(local_path(source))
    try:
        dataset = xr.open_dataset(path, engine="cfgrib", backend_kwargs={"indexpath": "", **(backend_kwargs or {})})
    except Exception as error:  # cfgrib and eccodes raise errors of many kinds
        raise ReadError(
            f"{path}: cfgrib cannot open it as one dataset ({type(error).__name__}: {error}); choose messages with "
            f"backend_kwargs={{'filter_by_keys': {{...}}}}"
        ) from error
    chunks = {
        str(name): tuple(n if dim in FIELD_DIMS else 1 for dim, n in zip(variable.dims, variable.shape, strict=True))
        for name, variable in dataset.data_vars.items()
    }
    return dataset_store(dataset, url=path, format="grib", chunks=chunks)


FORMAT = Format(
    "grib", open_grib, (".grib", ".grib2", ".grib1", ".grb", ".grb2"), lambda source: starts_with(source, b"GRIB")
)

"""One file per stored format; each file's row in the format table is added by `load_all`."""

from __future__ import annotations

from shardio.source import FORMATS, Format


def load_all() -> None:
    """Fill the format table with the formats that come with shardio (once)."""
    from shardio.formats import grib, hdf5, icechunk, netcdf3, references, xarray, zarr

    for module in (references, zarr, hdf5, netcdf3, grib, xarray, icechunk):
        row: Format = module.FORMAT
        FORMATS.setdefault(row.name, row)

"""The optional libraries: one row each, imported on first use, and named by their extra when missing."""

from __future__ import annotations

import importlib
from types import ModuleType

from shardio.errors import MissingExtraError

# library as imported -> (distribution, extra of this project, what it is for)
EXTRAS: dict[str, tuple[str, str, str]] = {
    "hdf5plugin": ("hdf5plugin", "hdf5", "HDF5 filters such as blosc, bitshuffle, lz4 and zstd"),
    "imagecodecs": ("imagecodecs", "fast", "fast decoders of deflate, lzf and lz4"),
    "scipy.io": ("scipy", "netcdf", "NetCDF-3 files"),
    "cftime": ("cftime", "netcdf", "calendars such as 360_day and noleap"),
    "matplotlib": ("matplotlib", "plot", "pictures of plans"),
    "obstore": ("obstore", "remote", "HTTP and object stores"),
    "pyarrow.parquet": ("pyarrow", "references", "references in Parquet files"),
    "icechunk": ("icechunk", "icechunk", "Icechunk repositories"),
    "cfgrib": ("cfgrib", "grib", "GRIB files"),
}


def load(library: str) -> ModuleType:
    """Import an optional library, or raise MissingExtraError that says how to get it."""
    distribution, extra, purpose = EXTRAS[library]
    try:
        return importlib.import_module(library)
    except ImportError as error:
        raise MissingExtraError(
            f"{purpose} need the library {distribution!r}, which cannot be imported ({error}); "
            f"install it with: pip install 'shardtensor[{extra}]'"
        ) from error

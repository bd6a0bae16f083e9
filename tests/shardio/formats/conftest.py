"""What the formats' own libraries say of a store, as the contract wants to hear it."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import xarray as xr

from shardio.testing import Expected

Stored = Mapping[str, tuple[tuple[str, ...], np.ndarray]]


@pytest.fixture
def beside_xarray() -> Callable[..., dict[str, Expected]]:
    """(stored by the format's library, xarray.open_dataset's arguments) -> expected, decoded by xarray."""

    def expected(stored: Stored, *args: Any, **kwargs: Any) -> dict[str, Expected]:
        found = {}
        with xr.open_dataset(*args, decode_times=False, decode_coords=False, **kwargs) as dataset:
            for name, (dims, values) in stored.items():
                numeric = name in dataset.variables and dataset[name].dtype.kind in "iufb"
                decoded = dataset[name].values if numeric else None
                if numeric and values.dtype.kind == "f":  # as netCDF4 masks what was never written; xarray does not
                    decoded = np.where(values == values.dtype.type(9.969209968386869e36), np.nan, decoded)
                found[name] = Expected(dims, values, decoded)
        return found

    return expected

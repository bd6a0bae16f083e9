"""The training script as a user starts it: one process, several ranks, killed and resumed, on real files."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import checkpoint
import numpy as np
import pytest
import torch
import xarray as xr
from programs import start

pytestmark = pytest.mark.timeout(900)  # programs are started, several at once

QUICK = ("--steps", "12", "--batch", "4", "--width", "8", "--save-every", "4", "--held-out", "0.4", "--seed", "3")


def result(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "report.json").read_text())
    return found


@pytest.fixture(scope="module")
def unbroken(weather_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a training in one process."""
    folder = tmp_path_factory.mktemp("unbroken")
    output = start(folder / "log.txt", "weather/train.py", "--out", folder, "--data", weather_store, *QUICK).finish()
    assert "6 hours ahead" in output
    return folder


def test_one_process_reports_what_it_did(unbroken: Path, weather_store: Path) -> None:
    found = result(unbroken)
    assert len(found["losses"]) == 12
    assert found["rmse"] != found["rmse_persistence"], "it learned something"
    with xr.open_zarr(weather_store) as data:
        for name, error in found["rmse_persistence"].items():
            held_out = data[name].values[24:].astype(np.float64)  # from the midnight on, a lead of 3 steps
            assert error == pytest.approx(np.sqrt(np.mean((held_out[4:] - held_out[1:-3]) ** 2)), rel=1e-4)
    (rank,) = found["ranks"]
    assert rank["needed"] == rank["samples"] * found["sample_bytes"]
    assert (unbroken / "forecast.png").stat().st_size > 1000
    assert (unbroken / "loss.png").stat().st_size > 1000


@pytest.mark.parametrize("ranks", [1, 2])
def test_killed_and_resumed_is_as_unbroken(ranks: int, unbroken: Path, weather_store: Path, tmp_path: Path) -> None:
    options = ("weather/train.py", "--out", tmp_path, "--data", weather_store, "--compare", unbroken, *QUICK)
    run = start(tmp_path / "log.txt", *options, ranks=ranks)
    deadline = time.monotonic() + 300
    while not (tmp_path / checkpoint.NAME).exists() and time.monotonic() < deadline:
        assert not any(process.poll() for process in run.processes), run.log.read_text()
        time.sleep(0.02)
    run.kill()
    saved = checkpoint.load(tmp_path)
    assert saved is not None
    assert not (tmp_path / "report.json").exists(), "it was to be killed before its end"
    assert saved["step"] < 12
    start(tmp_path / "log.txt", *options, "--resume", ranks=ranks).finish()
    ours, theirs = checkpoint.load(tmp_path), checkpoint.load(unbroken)
    assert ours is not None
    assert theirs is not None
    assert ours["step"] == theirs["step"] == 12
    if ranks == 1:
        assert ours["losses"] == theirs["losses"]
        assert all(torch.equal(weight, theirs["model"][name]) for name, weight in ours["model"].items())
    else:
        apart = result(tmp_path)["difference_to_one_process"]
        assert apart["steps"] == 12
        assert apart["loss"] < 1e-4
        assert apart["weights"] < 1e-4


def test_two_groups_of_two_ranks(unbroken: Path, weather_store: Path, tmp_path: Path) -> None:
    options = ("weather/train.py", "--out", tmp_path, "--data", weather_store, "--compare", unbroken, *QUICK)
    start(tmp_path / "log.txt", *options, "--domain", "2", torchrun=4).finish()
    found = result(tmp_path)
    assert found["difference_to_one_process"]["loss"] < 1e-4
    assert found["difference_to_one_process"]["weights"] < 1e-4
    rows = [rank["needed"] / rank["samples"] / found["sample_bytes"] for rank in found["ranks"]]
    assert rows == pytest.approx([10 / 19, 9 / 19, 10 / 19, 9 / 19])


def test_it_beats_persistence_on_real_weather(shared_data: Path, tmp_path: Path) -> None:
    series = shared_data / "weather-series" / "era5-2mt-2019-03-uk.grib"
    if not series.exists():
        pytest.skip(f"{series} is not there")
    start(tmp_path / "log.txt", "weather/train.py", "--out", tmp_path, "--data", series, "--steps", "60").finish()
    found = result(tmp_path)
    assert found["lead"] == "6 hours"
    assert found["rmse"]["t2m"] < 0.85 * found["rmse_persistence"]["t2m"]

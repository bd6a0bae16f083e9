"""The smallest program and the demo, from their start to their end."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from programs import start

pytestmark = pytest.mark.timeout(900)  # programs are started, several at once


def test_minimal_gives_the_same_losses_on_any_number_of_ranks(weather_store: Path, tmp_path: Path) -> None:
    alone = start(tmp_path / "alone.txt", "minimal.py", weather_store).finish()
    shared = start(tmp_path / "shared.txt", "minimal.py", weather_store, torchrun=3).finish()
    losses = [[float(loss) for loss in re.findall(r"loss ([0-9.]+)", said)] for said in (alone, shared)]
    assert len(losses[0]) == 2
    assert losses[1] == pytest.approx(losses[0], abs=2e-4)
    assert "rows here 7" in shared


def test_the_demo_runs_to_its_report(weather_store: Path, tmp_path: Path) -> None:
    options = ("--steps", "6", "--compare-steps", "4", "--width", "8", "--held-out", "0.4")
    said = start(tmp_path / "log.txt", "weather/demo.py", "--data", weather_store, "--out", tmp_path, *options).finish()
    assert "Largest difference to one process over the first 4 steps" in said
    found = json.loads((tmp_path / "weather" / "report.json").read_text())
    assert len(found["losses"]) == 6
    assert len(found["ranks"]) == 2
    assert found["difference_to_one_process"]["weights"] < 1e-4
    for picture in ("forecast.png", "loss.png"):
        assert (tmp_path / "weather" / picture).stat().st_size > 1000

"""The examples are programs, not a package: their folder joins the path, as it does when one of them is started."""

import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1] / "examples" / "weather"), str(HERE)]


@pytest.fixture(scope="session")
def weather_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small store of shallow-water weather: 36 times, two hours apart, 19 x 24 cells."""
    from make_store import write_store
    from shallow_water import Settings

    path = tmp_path_factory.mktemp("weather") / "weather.zarr"
    return write_store(path, Settings(rows=19, columns=24, step=900.0), times=36, spin_up_days=0.5)

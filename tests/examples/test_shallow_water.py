"""The solver keeps mass and energy, repeats itself, and moves."""

import numpy as np
import pytest
from shallow_water import Settings, ShallowWater

SMALL = Settings(rows=31, columns=48, step=600.0)


def test_mass_is_kept_to_rounding() -> None:
    water = ShallowWater(SMALL)
    start = water.start()
    later = water.advance(start, 200)
    assert np.abs(later.depth - start.depth).max() > 10  # m: it did move
    assert water.mass(later) == pytest.approx(water.mass(start), rel=1e-13)


def test_the_scheme_itself_neither_makes_nor_loses_energy() -> None:
    water = ShallowWater(SMALL)
    state = water.advance(water.start(), 150)
    change = water.change(state)
    rate = (water.energy(state.plus(10.0, change)) - water.energy(state.plus(-10.0, change))) / 20  # m5/s3
    parts = abs(float((state.depth * water._kinetic(state) * water.area).sum()))
    assert abs(rate) * 86400 < 1e-6 * parts


def test_energy_stays_bounded() -> None:
    water = ShallowWater(SMALL)
    state = water.start()
    first = water.energy(state)
    for _ in range(10):
        state = water.advance(state, 144)
        assert water.energy(state) == pytest.approx(first, rel=0.05)
        assert state.depth.min() > 0
        assert 20 < np.abs(state.u).max() < 150


def test_the_jet_is_in_balance() -> None:
    water = ShallowWater(Settings(rows=61, columns=16, mountain_height=0.0))
    state = water._jet
    assert np.abs(water.change(state).v).max() < 0.02 * np.abs(water._coriolis_face * np.abs(state.u).max()).max()
    later = water.advance(state, 100)
    assert np.abs(later.u - state.u).max() < 1.0  # m/s in half a day; the jet itself blows at 80 m/s


def test_the_same_seed_gives_the_same_weather() -> None:
    runs = [list(ShallowWater(SMALL).run(4, every=3600, spin_up=7200)) for _ in range(2)]
    other = next(ShallowWater(Settings(rows=31, columns=48, step=600.0, seed=1)).run(1))
    for one, two in zip(*runs, strict=True):
        assert all(np.array_equal(one[name], two[name]) for name in one)
    assert not np.array_equal(runs[0][0]["geopotential"], other["geopotential"])


def test_the_tracer_keeps_its_bounds() -> None:
    water = ShallowWater(SMALL)
    last = list(water.run(5, every=86400))[-1]["specific_humidity"]
    assert last.min() >= 0
    assert last.max() < 1.1 * water.saturation.max()


def test_bad_settings_are_told() -> None:
    with pytest.raises(ValueError, match="8 x 8 cells"):
        ShallowWater(Settings(rows=3))
    with pytest.raises(ValueError, match="runs dry"):
        ShallowWater(Settings(depth=100.0))
    with pytest.raises(ValueError, match="multiple of the time step"):
        next(ShallowWater(SMALL).run(2, every=1000))
    with pytest.raises(FloatingPointError, match="smaller `step`"), np.errstate(all="ignore"):
        list(ShallowWater(Settings(rows=31, columns=48, step=7200.0)).run(200, every=7200))

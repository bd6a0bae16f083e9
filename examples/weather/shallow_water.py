"""A rotating shallow-water atmosphere over mountains, with a humidity tracer: the demo's own weather.

The fluid layer covers a band of latitudes of the sphere, periodic in longitude, with walls in the north and south.
Staggered C grid [rows, columns]: depth and tracer at cell centres, u at western faces, v at northern faces. The scheme
is Sadourny's energy-conserving one (1975) in vector-invariant form, third-order Runge-Kutta in time, with a
scale-selective diffusion that damps grid noise. Depth moves in flux form, so mass is conserved to rounding. A slow
relaxation towards an unstable jet keeps the weather going. Row 0 is the northernmost row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Fields = dict[str, NDArray[np.float32]]

EARTH_RADIUS = 6.371e6  # m
EARTH_ROTATION = 7.292e-5  # rad/s
GRAVITY = 9.80616  # m/s2


@dataclass(frozen=True)
class Settings:
    """What to simulate; the defaults are the demo's."""

    rows: int = 73
    columns: int = 144
    north: float = 70.0  # degrees, centre of row 0
    south: float = 16.0  # degrees, centre of the last row
    depth: float = 1000.0  # m, mean depth of the layer
    jet: float = 80.0  # m/s, speed of the jet that the flow is drawn to
    jet_latitude: float = 43.0  # degrees
    jet_width: float = 4.5  # degrees
    mountains: int = 7
    mountain_height: float = 120.0  # m, of the highest
    relaxation: float = 3.0  # days for the flow to return to the jet
    evaporation: float = 2.0  # days for the air over sea to fill with vapour, and over land to rain out
    step: float = 450.0  # s, one time step
    seed: int = 0


@dataclass(frozen=True)
class State:
    """The flow at one time: depth and tracer x depth [rows, columns], u [rows, columns], v [rows + 1, columns]."""

    depth: Array
    u: Array
    v: Array
    vapour: Array

    def plus(self, scale: float, change: State) -> State:
        return State(
            self.depth + scale * change.depth,
            self.u + scale * change.u,
            self.v + scale * change.v,
            self.vapour + scale * change.vapour,
        )


def _east(field: Array) -> Array:
    return np.concatenate([field[:, 1:], field[:, :1]], axis=1)  # several times faster than np.roll


def _west(field: Array) -> Array:
    return np.concatenate([field[:, -1:], field[:, :-1]], axis=1)


def _faces(field: Array) -> Array:
    """Means at the northern faces of all rows [rows + 1, columns] of a field at rows; at the walls, its edge value."""
    return 0.5 * (np.concatenate([field[:1], field]) + np.concatenate([field, field[-1:]]))


class ShallowWater:
    """The grid, the orography and the equations of one set of `Settings`."""

    def __init__(self, settings: Settings) -> None:
        if settings.rows < 8 or settings.columns < 8:
            raise ValueError(f"the solver needs 8 x 8 cells or more, got {settings.rows} x {settings.columns}")
        self.settings = settings
        self.latitude = np.linspace(settings.north, settings.south, settings.rows)
        self.longitude = np.arange(settings.columns) * (360.0 / settings.columns)
        spacing = np.radians((settings.north - settings.south) / (settings.rows - 1))
        centre = np.radians(self.latitude)[:, None]
        face = np.concatenate([centre[:1] + spacing / 2, centre - spacing / 2])
        self._dy = EARTH_RADIUS * spacing
        self._dx = EARTH_RADIUS * np.cos(centre) * np.radians(360.0 / settings.columns)
        self._dx_face = EARTH_RADIUS * np.cos(face) * np.radians(360.0 / settings.columns)
        self._coriolis_face = 2 * EARTH_ROTATION * np.sin(face)
        self._per_dx, self._per_dx_face = 1 / self._dx, 1 / self._dx_face
        self.area = np.broadcast_to(self._dx * self._dy, (settings.rows, settings.columns))
        rng = np.random.default_rng(settings.seed)
        self.orography = self._mountains(rng)
        self.land = (self.orography > 0.12 * settings.mountain_height).astype(np.float64)
        self.saturation = np.broadcast_to(0.02 * np.cos(centre) ** 3, self.area.shape)
        self._jet = self._balanced_jet()
        self._waves = rng.standard_normal((12, 3))  # amplitude and phases of the first disturbance

    def _mountains(self, rng: np.random.Generator) -> Array:
        """Smooth hills of random place, width and height [rows, columns], in m, flat beside the walls."""
        config = self.settings
        lat, lon = self.latitude[:, None], self.longitude[None]
        field = np.zeros((config.rows, config.columns))
        for number in range(config.mountains):
            middle = rng.uniform(config.south + 12, config.north - 12), rng.uniform(0, 360)
            width = rng.uniform(5, 11), rng.uniform(9, 24)
            away = (lon - middle[1] + 180) % 360 - 180
            height = config.mountain_height if number == 0 else config.mountain_height * rng.uniform(0.3, 0.9)
            field += height * np.exp(-(((lat - middle[0]) / width[0]) ** 2) - (away / width[1]) ** 2)
        return field

    def _balanced_jet(self) -> State:
        """A zonal jet in geostrophic balance with its depth."""
        config = self.settings
        speed = config.jet * np.exp(-(((self.latitude - config.jet_latitude) / config.jet_width) ** 2))[:, None]
        u = np.broadcast_to(speed, self.area.shape).copy()
        curvature = np.tan(np.radians(self.latitude))[:, None] / EARTH_RADIUS
        coriolis = 2 * EARTH_ROTATION * np.sin(np.radians(self.latitude))[:, None]
        slope = -speed * (coriolis + speed * curvature) / GRAVITY  # towards the north, m/m
        surface = np.zeros((config.rows, 1))
        surface[1:] = np.cumsum(-self._dy * 0.5 * (slope[1:] + slope[:-1]), axis=0)
        depth = np.broadcast_to(surface, self.area.shape) - self.orography
        depth = depth + config.depth - np.average(depth, weights=self.area)
        if depth.min() <= 0:
            raise ValueError(
                f"the layer runs dry: a mean depth of {config.depth} m is too little for a jet of {config.jet} m/s and "
                f"mountains of {config.mountain_height} m; raise `depth` or lower the others"
            )
        return State(depth, u, np.zeros((config.rows + 1, config.columns)), depth * self.saturation)

    def start(self) -> State:
        """The jet with a smooth random disturbance of its depth, the same for the same seed."""
        lat, lon = np.radians(self.latitude)[:, None], np.radians(self.longitude)[None]
        bump = np.zeros(self.area.shape)
        for number, (amplitude, north, east) in enumerate(self._waves, start=1):
            bump += amplitude * np.cos(number * lon + np.pi * east) * np.cos(3 * lat + np.pi * north)
        envelope = np.exp(-(((self.latitude - self.settings.jet_latitude) / 12) ** 2))[:, None]
        bump = 12.0 * bump * envelope
        depth = self._jet.depth + bump - np.average(bump, weights=self.area)
        return State(depth, self._jet.u, self._jet.v, depth * self.saturation)

    def mass(self, state: State) -> float:
        """Volume of the layer, in m3."""
        return float((state.depth * self.area).sum())

    def energy(self, state: State) -> float:
        """Kinetic plus potential energy over density, in m5/s2."""
        kinetic = 0.5 * state.depth * self._kinetic(state)
        potential = 0.5 * GRAVITY * ((state.depth + self.orography) ** 2 - self.orography**2)
        return float(((kinetic + potential) * self.area).sum())

    def _kinetic(self, state: State) -> Array:
        """u2 + v2 at the centres, in m2/s2."""
        cos_v2 = self._dx_face * state.v**2
        return 0.5 * (state.u**2 + _east(state.u) ** 2) + 0.5 * (cos_v2[:-1] + cos_v2[1:]) * self._per_dx

    def _divergence(self, east: Array, north: Array) -> Array:
        """Of fluxes through western faces [rows, columns] and northern faces [rows + 1, columns]."""
        flow = self._dx_face * north
        return (_east(east) - east + (flow[:-1] - flow[1:]) * (1 / self._dy)) * self._per_dx

    def _smooth(self, field: Array) -> Array:
        """Grid-scale Laplacian in units of the cell (each row and column weighs the same), no flux at the walls."""
        padded = np.concatenate([field[:1], field, field[-1:]])
        return _east(field) + _west(field) + padded[:-2] + padded[2:] - 4 * field

    def change(self, state: State) -> State:
        """The time derivative of a state, per second."""
        config = self.settings
        flux_u = 0.5 * (state.depth + _west(state.depth)) * state.u
        flux_v = _faces(state.depth) * state.v
        # Potential vorticity at the north-western corners [rows + 1, columns].
        along = np.concatenate([np.zeros((1, config.columns)), self._dx * state.u, np.zeros((1, config.columns))])
        turn = (state.v - _west(state.v) - (along[:-1] - along[1:]) * (1 / self._dy)) * self._per_dx_face
        turn[0] = turn[-1] = 0.0  # free slip
        corner = _faces(0.5 * (state.depth + _west(state.depth)))
        vorticity = (turn + self._coriolis_face) / corner
        head = 0.5 * self._kinetic(state) + GRAVITY * (state.depth + self.orography)
        crossing = self._dx_face * vorticity * 0.5 * (flux_v + _west(flux_v))
        du = (0.5 * (crossing[:-1] + crossing[1:]) - head + _west(head)) * self._per_dx
        turning = vorticity * _faces(flux_u)
        dv = -0.5 * (turning + _east(turning))
        dv[1:-1] -= (head[:-1] - head[1:]) * (1 / self._dy)
        dv[0] = dv[-1] = 0.0
        humidity = state.vapour / state.depth
        carried = 0.5 * (humidity + _west(humidity)) * flux_u, _faces(humidity) * flux_v
        return State(
            -self._divergence(flux_u, flux_v),
            du,
            dv,
            -self._divergence(*carried),
        )

    def _settle(self, state: State) -> State:
        """Once a step: diffuse grid noise, return slowly to the jet, evaporate over sea and rain over land."""
        config = self.settings
        back = config.step / (config.relaxation * 86400)
        moist = config.step / (config.evaporation * 86400)
        v = state.v.copy()
        v[1:-1] -= 0.005 * self._smooth(self._smooth(state.v))[1:-1]
        u = state.u - 0.005 * self._smooth(self._smooth(state.u))
        depth = state.depth + back * (self._jet.depth - state.depth)
        humidity = state.vapour / state.depth
        humidity = humidity - 0.005 * self._smooth(self._smooth(humidity))
        humidity = humidity + moist * ((1 - self.land) * self.saturation - humidity)
        humidity = np.clip(humidity, 0.0, None)
        return State(depth, u + back * (self._jet.u - u), v * (1 - back), depth * humidity)

    def advance(self, state: State, steps: int = 1) -> State:
        """`steps` time steps of third-order Runge-Kutta (Wicker and Skamarock)."""
        for _ in range(steps):
            third = state.plus(self.settings.step / 3, self.change(state))
            half = state.plus(self.settings.step / 2, self.change(third))
            state = self._settle(state.plus(self.settings.step, self.change(half)))
        return state

    def fields(self, state: State) -> Fields:
        """What a weather archive would hold, at cell centres [rows, columns]."""
        u = 0.5 * (state.u + _east(state.u))
        v = 0.5 * (state.v[:-1] + state.v[1:])
        height = state.depth + self.orography
        raw = {
            "u_component_of_wind": u,
            "v_component_of_wind": v,
            "geopotential": GRAVITY * height,
            "specific_humidity": state.vapour / state.depth,
        }
        return {name: field.astype(np.float32) for name, field in raw.items()}

    def run(self, times: int, *, every: float = 3600.0, spin_up: float = 0.0) -> Iterator[Fields]:
        """`times` sets of fields, `every` seconds apart, after `spin_up` seconds that are not shown."""
        stride = round(every / self.settings.step)
        if stride < 1 or abs(stride * self.settings.step - every) > 1e-6 * every:
            raise ValueError(f"`every` must be a multiple of the time step of {self.settings.step} s, got {every} s")
        np.empty(2**21)  # once a large array was freed, glibc keeps memory for the small ones: three times faster
        state = self.advance(self.start(), round(spin_up / self.settings.step))
        for number in range(times):
            if number:
                state = self.advance(state, stride)
            if not np.isfinite(state.u).all():
                hours = number * every / 3600
                raise FloatingPointError(f"the flow blew up before hour {hours:.0f}; use a smaller `step`")
            yield self.fields(state)

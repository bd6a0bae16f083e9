"""Samples on a list of cells: an irregular grid, or several grids joined; cut over ranks along that one dim."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr
from torch.distributed.device_mesh import DeviceMesh

from shardio import GridPart, Store, join, open_store
from shardsets import DomainDataLoader
from shardtensor.testing import Ranks

TIMES, CELLS = 7, 29
VALUES = np.random.default_rng(0).normal(280, 9, (TIMES, 2, CELLS)).astype(np.float32)


def write(folder: Path, kind: str) -> None:
    """The same values as a list of cells, or as a grid of 4 x 5 and 9 cells of one of 2 x 7."""
    times = np.datetime64("2020-01-01", "ns") + np.arange(TIMES) * np.timedelta64(6, "h")
    coords: dict[str, Any] = {"time": times, "level": ("level", [500.0, 850.0], {"units": "hPa"})}
    if kind == "cells":
        field = (("time", "level", "cell"), VALUES)
        xr.Dataset({"t": field}, coords).to_zarr(folder / "one.zarr", encoding={"t": {"chunks": (1, 2, 10)}})
        return
    fine, coarse = VALUES[..., :20].reshape(TIMES, 2, 4, 5), np.full((TIMES, 2, 2, 7), np.nan, np.float32)
    keep = np.zeros((2, 7), bool)
    keep[:, 1:6] = True
    keep[1, 3] = False
    coarse[..., keep] = VALUES[..., 20:]
    for name, values in (("one", fine), ("two", coarse)):
        data = xr.Dataset({"t": (("time", "level", "lat", "lon"), values)}, coords)
        data.to_zarr(folder / f"{name}.zarr", encoding={"t": {"chunks": (1, 2, *values.shape[2:])}})
    np.save(folder / "keep.npy", keep)


def opened(folder: str) -> Store:
    one = open_store(Path(folder) / "one.zarr")
    if not (Path(folder) / "two.zarr").exists():
        return one
    return join([one, GridPart(open_store(Path(folder) / "two.zarr"), np.load(Path(folder) / "keep.npy"))])


def load(mesh: DeviceMesh | None, folder: str, options: dict[str, Any]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    with opened(folder) as store, DomainDataLoader(store, mesh, lead=2, **options) as loader:
        batches = list(loader)
        if mesh is not None:
            batches = [{key: batch[key].full_tensor() for key in ("input", "target")} for batch in batches]
        return [(batch["input"], batch["target"]) for batch in batches]


@pytest.mark.parametrize("read", ["own", "collective", "auto"])
@pytest.mark.parametrize("kind", ["cells", "joined"])
def test_values_are_those_of_the_cells(ranks: Ranks, tmp_path: Path, kind: str, read: str) -> None:
    write(tmp_path, kind)
    for found in ranks.run(load, str(tmp_path), {"read": read}, mesh=(3,)):
        assert len(found) == TIMES - 2
        for at, (one, other) in enumerate(found):
            np.testing.assert_array_equal(one[0], VALUES[at])
            np.testing.assert_array_equal(other[0], VALUES[at + 2])


@pytest.mark.parametrize("mesh", [None, (2,)])
def test_normalized_by_statistics_of_all_cells(ranks: Ranks, tmp_path: Path, mesh: Any) -> None:
    write(tmp_path, "joined")
    options = {"statistics": "compute", "batch_size": 2}
    alone = mesh is None
    found = [load(None, str(tmp_path), options)] if alone else ranks.run(load, str(tmp_path), options, mesh=mesh)
    mean, std = (getattr(VALUES, what)((0, 2), dtype=np.float64, keepdims=True)[0] for what in ("mean", "std"))
    for one, _ in (batch for batches in found for batch in batches[:1]):
        np.testing.assert_allclose(one, (VALUES[:2] - mean) / std, atol=1e-5)


def test_a_transform_sees_the_cells_beside_the_slab(ranks: Ranks, tmp_path: Path) -> None:
    write(tmp_path, "cells")

    def check(mesh: DeviceMesh) -> None:
        def differences(batch: dict[str, Any]) -> dict[str, Any]:
            assert batch["slab"].dims == ("cell",)
            field = batch["input"]
            inner = field[..., 1:-1] * 2 - field[..., :-2] - field[..., 2:]
            return {**batch, "input": torch.nn.functional.pad(inner, (1, 1))}

        found, _ = load(mesh, str(tmp_path), {"halo": 1, "transform": differences})[0]
        inner = VALUES[0, :, 1:-1] * 2 - VALUES[0, :, :-2] - VALUES[0, :, 2:]
        np.testing.assert_allclose(found[0][:, 1:-1], inner, rtol=1e-6)

    ranks.run(check, mesh=(2,))


def test_denormalized_is_what_was_stored(tmp_path: Path) -> None:
    write(tmp_path, "cells")
    with opened(str(tmp_path)) as store, DomainDataLoader(store, statistics="compute", target_steps=3) as loader:
        batch = next(iter(loader))
        assert loader.statistics is not None
        back = loader.statistics.denormalized(batch["target"])
        np.testing.assert_allclose(back[0].reshape(3, 2, CELLS), VALUES[1:4], rtol=1e-6)

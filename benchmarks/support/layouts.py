"""The stores that the benchmarks of reading read: a sample of 20 channels of float32, laid out as people have them."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numcodecs
import numpy as np
import zarr
from zarr.codecs import BloscCodec, ZstdCodec

CHANNELS = 20


class Layout(NamedTuple):
    """How the sample is stored.

    Attributes:
        text: for people.
        kind: "zarr2", "zarr3" or "hdf5".
        chunks: given the grid (rows, columns).
        options: of the library that writes it.
        readers: the existing readers to run beside.
    """

    text: str
    kind: str
    chunks: Callable[[int, int], tuple[int, ...]]
    options: Callable[[], dict[str, Any]]
    readers: tuple[str, ...] = ("tensorstore", "zarrs", "zarr")


def field_chunk(rows: int, columns: int) -> tuple[int, ...]:
    return (1, 1, rows, columns)


def sample_chunk(rows: int, columns: int) -> tuple[int, ...]:
    return (1, CHANNELS, rows, columns)


def band_chunk(rows: int, columns: int) -> tuple[int, ...]:
    return (1, 1, -(-rows // 8), columns)


def hdf5_blosc() -> dict[str, Any]:
    import hdf5plugin

    return dict(hdf5plugin.Blosc("lz4", 5, hdf5plugin.Blosc.SHUFFLE))


LAYOUTS = {
    "L1": Layout("zarr v2, a field a chunk, blosc-lz4", "zarr2", field_chunk, lambda: blosc("lz4")),
    "L2": Layout("zarr v3, a sample a chunk, zstd", "zarr3", sample_chunk, lambda: {"compressors": ZstdCodec(level=3)}),
    "L2b": Layout("zarr v2, a sample a chunk, blosc-zstd", "zarr2", sample_chunk, lambda: blosc("zstd", 3)),
    "L3": Layout(
        "zarr v3, shards of 64 rows, zstd",
        "zarr3",
        lambda rows, columns: (1, CHANNELS, 64, columns),
        lambda: {"compressors": ZstdCodec(level=3), "shards": True},
    ),
    "L4": Layout(
        "zarr v3, chunks of 128 x 256, blosc-zstd",
        "zarr3",
        lambda rows, columns: (1, CHANNELS, 128, 256),
        lambda: {"compressors": BloscCodec(cname="zstd", clevel=5, shuffle="shuffle")},
    ),
    "L5": Layout("zarr v3, a sample a chunk, uncompressed", "zarr3", sample_chunk, lambda: {"compressors": None}),
    "L6": Layout("HDF5 contiguous", "hdf5", lambda rows, columns: (), dict, ("h5py",)),
    "L7": Layout(
        "HDF5, a field a chunk, gzip + shuffle",
        "hdf5",
        field_chunk,
        lambda: {"compression": "gzip", "compression_opts": 4, "shuffle": True},
        ("h5py",),
    ),
    "L8": Layout("HDF5, an eighth of a field a chunk, blosc-lz4", "hdf5", band_chunk, hdf5_blosc, ("h5py",)),
    "L8b": Layout(
        "HDF5, an eighth of a field a chunk, lzf + shuffle",
        "hdf5",
        band_chunk,
        lambda: {"compression": "lzf", "shuffle": True},
        ("h5py",),
    ),
}


def blosc(name: str, level: int = 5) -> dict[str, Any]:
    return {"compressors": numcodecs.Blosc(name, clevel=level, shuffle=numcodecs.Blosc.SHUFFLE)}


def sample(rows: int, columns: int, packed: bool) -> np.ndarray:
    """[1, CHANNELS, rows, columns]: temperatures with an atmosphere's spectrum, packed as in GRIB if asked."""
    normal = np.random.default_rng(0).normal
    wave = np.hypot(np.fft.fftfreq(rows, 1 / rows)[:, None], np.fft.rfftfreq(columns, 1 / columns))
    amplitude = np.where(wave > 0, np.maximum(wave, 1) ** -2.0, 0)
    fields = np.empty((1, CHANNELS, rows, columns), np.float32)
    for channel in range(CHANNELS):
        waves = amplitude * (normal(size=wave.shape) + 1j * normal(size=wave.shape))
        values = np.fft.irfft2(waves, s=(rows, columns))
        values *= 20 / values.std()
        if packed:
            step = 2.0 ** np.ceil(np.log2(np.ptp(values) / (2**16 - 1)))
            values = np.float32(values.min()) + np.float32(step) * np.round((values - values.min()) / step)
        fields[0, channel] = 280 + values
    return fields


def write(folder: Path, name: str, values: Callable[[], np.ndarray], grid: tuple[int, int]) -> Path:
    """Write a layout, if the folder does not have it yet."""
    layout = LAYOUTS[name]
    path = folder / f"{name}.{'h5' if layout.kind == 'hdf5' else 'zarr'}"
    if path.exists():
        return path
    data, options, temporary = values(), layout.options(), path.with_suffix(".part")
    if layout.kind == "hdf5":
        with h5py.File(temporary, "w") as file:
            file.create_dataset("x", data=data, chunks=layout.chunks(*grid) or None, **options)
    else:
        chunks = layout.chunks(*grid)
        if options.pop("shards", False):
            options["shards"] = (1, CHANNELS, -(-grid[0] // 64) * 64, grid[1])
        group = zarr.open_group(temporary, mode="w", zarr_format=int(layout.kind[-1]))
        group.create_array("x", shape=data.shape, dtype="f4", chunks=chunks, **options)[:] = data
    return temporary.rename(path)


def stored_bytes(path: Path) -> int:
    """Bytes of the array in the store."""
    if path.is_file():
        with h5py.File(path) as file:
            return int(file["x"].id.get_storage_size())
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file() and "zarr" not in file.name[:5])


def grid_of(text: str) -> tuple[int, int]:
    """The rows and columns in a text such as 721x1440."""
    rows, _, columns = text.partition("x")
    return int(rows), int(columns)


def names_of(given: list[str], parser: argparse.ArgumentParser) -> list[str]:
    """The layouts asked for; an error if there is no such one."""
    unknown = set(given) - set(LAYOUTS)
    if unknown:
        parser.error(f"no layout {', '.join(sorted(unknown))}: choose from {', '.join(LAYOUTS)}")
    return given

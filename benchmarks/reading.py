"""What reading a rank's slab costs, layout by layout: ours beside the best existing readers, in the same run.

    python benchmarks/reading.py                              # all layouts, in a temporary folder
    python benchmarks/reading.py L1 L7 --repeats 3
    python benchmarks/reading.py --grid 1024x1792 --folder /data/layouts --out runs/reading

One sample is 20 channels of float32 on the grid, read into a preallocated tensor. Slabs: all rows, and 1/2, 1/4, 1/8
of them with a halo of 3 rows, from the page cache. The readers take turns in varying order, so that what else the
machine does hits all alike, and all cores are busy before each, as in training (an idle virtual core takes milliseconds
to wake); the tables show medians, the JSON file quartiles too. "two ranks": two processes at once, one core and one
half each, until both are done. The fields have a spectrum like the atmosphere's (energy falls with the third power of
the wave number) in all the digits of float32, as models write them and as regridding leaves them; with --packed they
are rounded to 16 bits as GRIB packs them, which compresses better and decodes more slowly.

Peers that are not installed (extra "bench": tensorstore, zarrs) are left out.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import multiprocessing
import os
import platform
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
import zarr
from support.layouts import CHANNELS, LAYOUTS, grid_of, names_of, sample, stored_bytes, write
from support.timing import CORES, alternating, cell, spin, summary, table
from zarr.buffer.cpu import NDBuffer

from shardio import Cut, OwnReader, Partition, Span, open_store, plan
from shardio.partition import even

HALO, VARIABLES = 3, 200
PARTS = (1, 2, 4, 8)
Read = Callable[[int, int, np.ndarray], None]
"""Reads rows start..stop of all channels into an array [CHANNELS, stop - start, columns]."""


# Readers


def ours(path: Path, rows: int, parts: int, rank: int, threads: int | None, counted: dict[str, int]) -> Read:
    source = open_store(path)["x"]
    row_dim = source.dims[2]
    partition = Partition((Cut(row_dim, "domain", even(rows, parts)),))
    mine = plan(partition, source.layout, halo=HALO)[rank]
    reader = OwnReader(threads)

    def read(start: int, stop: int, out: np.ndarray) -> None:
        reader.read(source, mine, index={source.dims[0]: 0}, out=torch.from_numpy(out))
        counted["stored"] = reader.stats.bytes_stored
        counted["reads"] = counted.get("reads", 0) + 1

    return read


def by_tensorstore(path: Path, threads: int | None) -> Read:
    import tensorstore

    driver = "zarr3" if (path / "zarr.json").exists() else "zarr"
    limits = {} if threads is None else {"data_copy_concurrency": {"limit": threads}}
    store = tensorstore.open(
        {"driver": driver, "kvstore": {"driver": "file", "path": str(path / "x")}},
        read=True,
        context=tensorstore.Context(limits),
    ).result()

    def read(start: int, stop: int, out: np.ndarray) -> None:
        tensorstore.array(out, copy=False).write(store[0, :, start:stop]).result()

    return read


def by_zarr(path: Path, threads: int | None, pipeline: str | None = None) -> Read:
    settings: dict[str, Any] = {} if pipeline is None else {"codec_pipeline.path": pipeline}
    if threads is not None:
        settings["threading.max_workers"] = threads
    with zarr.config.set(settings):
        array = zarr.open_group(path, mode="r")["x"]

    def read(start: int, stop: int, out: np.ndarray) -> None:
        box = (slice(0, 1), slice(None), slice(start, stop), slice(None))  # an int instead makes zarrs slow
        array.get_basic_selection(box, out=NDBuffer.from_numpy_array(out[None]))

    return read


def by_h5py(path: Path, threads: int | None) -> Read:
    if importlib.util.find_spec("hdf5plugin") is not None:
        importlib.import_module("hdf5plugin")
    with h5py.File(path) as file:
        chunks = file["x"].chunks
    # Room for two chunks, so that none is decoded twice in one read; more would keep the sample from read to read.
    room = {} if chunks is None else {"rdcc_nbytes": 2 * 4 * int(np.prod(chunks)), "rdcc_nslots": 521}
    dataset = h5py.File(path, **room)["x"]

    def read(start: int, stop: int, out: np.ndarray) -> None:
        dataset.read_direct(out, np.s_[0, :, start:stop])

    return read


PEERS: dict[str, Callable[[Path, int | None], Read]] = {
    "tensorstore": by_tensorstore,
    "zarrs": partial(by_zarr, pipeline="zarrs.ZarrsCodecPipeline"),
    "zarr": by_zarr,
    "h5py": by_h5py,
}


def span(rows: int, parts: int, rank: int) -> tuple[int, int]:
    """The rows of a rank, halo included."""
    sizes = even(rows, parts)
    start = sum(sizes[:rank])
    return max(0, start - HALO), min(rows, start + sizes[rank] + HALO)


def readers(
    name: str, path: Path, grid: tuple[int, int], parts: int, rank: int, threads: int | None, counted: dict[str, int]
) -> dict[str, Callable[[], None]]:
    """By name, a call that reads the rank's slab. All of them deliver the same values, which is checked here."""
    start, stop = span(grid[0], parts, rank)
    found = {"ours": ours(path, grid[0], parts, rank, threads, counted)}
    for peer in LAYOUTS[name].readers:
        if importlib.util.find_spec(peer) is not None:
            found[peer] = PEERS[peer](path, threads)
    calls, first = {}, None
    for reader, read in found.items():
        out = torch.empty((CHANNELS, stop - start, grid[1])).numpy()
        read(start, stop, out)
        if first is not None and not np.array_equal(out, first):
            raise RuntimeError(f"{reader} reads other values from {path} than {next(iter(found))}")
        first = out if first is None else first
        calls[reader] = partial(read, start, stop, out)
    return calls


# Measuring


def slabs(name: str, path: Path, grid: tuple[int, int], repeats: int) -> dict[str, Any]:
    """Each slab by each reader, and what ours fetched of the slab's share of the stored bytes."""
    row: dict[str, Any] = {}
    for parts in PARTS:
        counted: dict[str, int] = {}
        calls = readers(name, path, grid, parts, parts // 2, None, counted)
        row[f"1/{parts}"] = {reader: summary(times) for reader, times in alternating(calls, repeats).items()}
        start, stop = span(grid[0], parts, parts // 2)
        share = stored_bytes(path) * (stop - start) / grid[0]
        row[f"1/{parts}"]["fetched"] = counted["stored"] / counted["reads"] / share
    return row


def rank_of_two(name: str, path: Path, grid: tuple[int, int], rank: int, repeats: int, meet: Any, results: Any) -> None:
    """One of two processes: all readers in turn, each when the other rank begins with it, too."""
    torch.set_num_threads(1)
    calls = readers(name, path, grid, 2, rank, 1, {})

    def both_ready() -> None:
        meet.wait(120)
        spin()

    results.put(alternating(calls, repeats, both_ready))


def two_ranks(name: str, path: Path, grid: tuple[int, int], repeats: int) -> dict[str, Any]:
    """Both halves at once on two processes: by reader, the time until both are done."""
    context = multiprocessing.get_context("spawn")
    meet, results = context.Barrier(2), context.Queue()
    arguments = [(name, path, grid, rank, repeats, meet, results) for rank in (0, 1)]
    ranks = [context.Process(target=rank_of_two, args=one) for one in arguments]
    for process in ranks:
        process.start()
    first, second = (results.get(timeout=600) for _ in ranks)
    for process in ranks:
        process.join()
    return {reader: summary(list(map(max, first[reader], second[reader]))) for reader in first}


def tiny(path: Path, name: str, repeats: int) -> dict[str, Any]:
    """Microseconds to read 8 neighbouring values, many times in a row."""
    source = open_store(path)["x"]
    columns = slice(100, 108)
    out = np.empty((1, 1, 1, 8), np.float32)
    box = (Span(0, 1), Span(3, 4), Span(50, 51), Span(100, 108))
    calls: dict[str, Callable[[], Any]] = {"ours": lambda: source.read_into(box, out)}
    if LAYOUTS[name].kind == "hdf5":
        dataset = h5py.File(path)["x"]
        calls["h5py"] = lambda: dataset.read_direct(out, np.s_[0:1, 3:4, 50:51, columns])
    else:
        import tensorstore

        driver = LAYOUTS[name].kind.replace("zarr2", "zarr")
        store = tensorstore.open({"driver": driver, "kvstore": {"driver": "file", "path": str(path / "x")}}).result()
        array = zarr.open_group(path, mode="r")["x"]
        calls["tensorstore"] = lambda: store[0:1, 3:4, 50:51, columns].read().result()
        calls["zarr"] = lambda: array[0:1, 3:4, 50:51, columns]
    in_row = {reader: in_a_row(call) for reader, call in calls.items()}
    times = alternating({reader: call for reader, (call, _) in in_row.items()}, repeats)
    return {reader: summary([time * 1e3 / in_row[reader][1] for time in times[reader]]) for reader in calls}


def in_a_row(call: Callable[[], Any]) -> tuple[Callable[[], None], int]:
    """As many calls as take about 20 ms, as one, and how many they are."""
    call()
    start = time.perf_counter()
    call()
    count = max(1, int(0.02 / (time.perf_counter() - start)))

    def all_of_them() -> None:
        for _ in range(count):
            call()

    return all_of_them, count


def opening(folder: Path, repeats: int) -> dict[str, Any]:
    """Milliseconds to open a store of 200 variables and have all of them at hand."""
    rows: dict[str, Any] = {}
    for kind in ("zarr2", "zarr3", "hdf5"):
        path = folder / f"many-{kind}"
        if not path.exists():
            temporary = path.with_suffix(".part")
            if kind == "hdf5":
                with h5py.File(temporary, "w") as file:
                    for at in range(VARIABLES):
                        file.create_dataset(f"v{at}", data=np.zeros((4, 8), np.float32), chunks=(1, 8))
            else:
                group = zarr.open_group(temporary, mode="w", zarr_format=int(kind[-1]))
                for at in range(VARIABLES):
                    group.create_array(f"v{at}", shape=(4, 8), chunks=(1, 8), dtype="f4")[:] = 0
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # consolidated metadata is not in version 3's specification
                    zarr.consolidate_metadata(temporary)
            temporary.rename(path)
        calls: dict[str, Callable[[], Any]] = {"ours": partial(open_all, path)}
        if kind == "hdf5":
            calls["h5py"] = partial(open_by_h5py, path)
        else:
            calls["zarr"] = partial(open_by_zarr, path)
            if importlib.util.find_spec("tensorstore") is not None:
                calls["tensorstore"] = partial(open_by_tensorstore, path, kind)
        for call in calls.values():
            call()
        rows[kind] = {reader: summary(times) for reader, times in alternating(calls, repeats).items()}
    return rows


def open_all(path: Path) -> None:
    with open_store(path) as store:
        if len([source.shape for source in store.values()]) != VARIABLES:
            raise RuntimeError(f"{path} has {len(store)} arrays, not {VARIABLES}")


def open_by_h5py(path: Path) -> None:
    with h5py.File(path) as file:
        for name in file:
            file[name].shape  # noqa: B018


def open_by_zarr(path: Path) -> None:
    for _, array in zarr.open_group(path, mode="r").members():
        array.shape  # noqa: B018


def open_by_tensorstore(path: Path, kind: str) -> None:
    import tensorstore

    driver = kind.replace("zarr2", "zarr")
    futures = [
        tensorstore.open({"driver": driver, "kvstore": {"driver": "file", "path": str(path / f"v{at}")}}, read=True)
        for at in range(VARIABLES)
    ]
    for future in futures:
        future.result()


# Showing


def best(row: dict[str, Any]) -> str | None:
    """The quickest of the existing readers."""
    peers = [reader for reader in row if reader in PEERS]
    return min(peers, key=lambda reader: row[reader]["median"]) if peers else None


def versus(row: dict[str, Any]) -> list[str]:
    """Ours, the best existing reader, and how many times longer it takes."""
    peer = best(row)
    if peer is None:
        return [cell(row["ours"]), "", ""]
    return [cell(row["ours"]), f"{peer} {cell(row[peer])}", f"{row[peer]['median'] / row['ours']['median']:.2f}"]


def report(results: dict[str, Any]) -> Iterator[str]:
    """The tables, as Markdown."""
    facts = results["facts"]
    yield (
        f"{facts['grid'][0]} x {facts['grid'][1]}, {CHANNELS} channels of float32"
        f"{' of 16 bits' if facts['packed'] else ''}, {facts['cores']} cores, "
        f"load {facts['load'][0]:.1f} before and {facts['load'][1]:.1f} after; medians of {facts['repeats']} "
        f"(lower to upper quartile). {', '.join(f'{name} {found}' for name, found in facts['versions'].items())}."
    )
    rows = []
    for name, row in results["slabs"].items():
        for slab, found in row.items():
            rows.append([f"{name}: {LAYOUTS[name].text}", slab, *versus(found), f"{found['fetched']:.2f}"])
    yield table(["layout", "slab", "ours, ms", "best existing, ms", "ratio", "bytes fetched / the slab's"], rows)
    if results["two ranks"]:
        rows = [[f"{name}: {LAYOUTS[name].text}", *versus(row)] for name, row in results["two ranks"].items()]
        yield "Two ranks at once, one core each, a half each, until both are done:"
        yield table(["layout", "ours, ms", "best existing, ms", "ratio"], rows)
    rows = [[f"{name}: {LAYOUTS[name].text}", *versus(row)] for name, row in results["tiny"].items()]
    yield "8 neighbouring values:"
    yield table(["layout", "ours, us", "best existing, us", "ratio"], rows)
    rows = [[kind, *versus(row)] for kind, row in results["opening"].items()]
    yield f"Opening {VARIABLES} variables (Zarr: consolidated):"
    yield table(["format", "ours, ms", "best existing, ms", "ratio"], rows)


def measured(names: Sequence[str], folder: Path, grid: tuple[int, int], packed: bool, repeats: int) -> dict[str, Any]:
    """All of it."""
    values = cache(partial(sample, *grid, packed))
    paths = {name: write(folder, name, values, grid) for name in names}
    values.cache_clear()
    before = os.getloadavg()[0]
    slab_rows = {}
    for name, path in paths.items():
        slab_rows[name] = slabs(name, path, grid, repeats)
        print(name, *(f"{slab} {' '.join(versus(row))};" for slab, row in slab_rows[name].items()), flush=True)
    results = {
        "slabs": slab_rows,
        "two ranks": {name: two_ranks(name, path, grid, repeats) for name, path in paths.items()},
        "tiny": {name: tiny(paths[name], name, repeats) for name in ("L5", "L6") if name in paths},
        "opening": opening(folder, repeats),
    }
    libraries = ("torch", "numpy", "zarr", "tensorstore", "zarrs", "h5py", "imagecodecs")
    facts = {
        "grid": grid,
        "packed": packed,
        "repeats": repeats,
        "cores": CORES,
        "machine": platform.platform(),
        "load": [before, os.getloadavg()[0]],
        "versions": {name: version(name) for name in libraries if importlib.util.find_spec(name) is not None},
        "unit": "ms; tiny: us",
    }
    return {"facts": facts, **results}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("layouts", nargs="*", help=f"some of {', '.join(LAYOUTS)}; default: all")
    parser.add_argument("--grid", type=grid_of, default=(721, 1440), help="ROWSxCOLUMNS; default: 721x1440")
    parser.add_argument("--packed", action="store_true", help="values of 16 bits, as GRIB packs them")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--folder", type=Path, help="keep the layouts here, about 1 GB, and use those that are there")
    parser.add_argument("--out", type=Path, help="write PATH.json and PATH.md, too")
    options = parser.parse_args()
    names = names_of(options.layouts, parser) or list(LAYOUTS)
    with tempfile.TemporaryDirectory() as temporary:
        kind = f"{options.grid[0]}x{options.grid[1]}{'-packed' if options.packed else ''}"
        folder = (options.folder or Path(temporary)) / kind
        folder.mkdir(parents=True, exist_ok=True)
        results = measured(names, folder, options.grid, options.packed, options.repeats)
    text = "\n\n".join(report(results))
    print(text)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")
        options.out.with_suffix(".md").write_text(text + "\n")


if __name__ == "__main__":
    main()

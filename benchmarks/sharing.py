"""What a sample costs the ranks of one machine when each decodes for itself, and when they decode each chunk once.

    python benchmarks/sharing.py                              # L1, L2, L2b, L7, L8 on two ranks, in a temporary folder
    python benchmarks/sharing.py L2 --ranks 4 --repeats 3
    python benchmarks/sharing.py --folder /data/layouts --out runs/sharing

The layouts are those of reading.py. Each rank has one thread and reads its rows with a halo of 3 into a preallocated
tensor, read="own" and read="collective" in turn, one sample, and as many samples at once as there are ranks; a time is
that of the last rank to be done, from when all have begun. Bytes are those decoded by all ranks, as multiples of the
sample. The last columns are what read="auto" chose, and why.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import platform
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from support.layouts import CHANNELS, LAYOUTS, grid_of, names_of, sample, write
from support.timing import CORES, cell, spin, summary, table
from torch.distributed.device_mesh import init_device_mesh

from shardio import Cut, OwnReader, Partition, Request, Source, open_store, plan
from shardio.collective import CollectiveReader, Group
from shardio.partition import even

HALO = 3
READS = ("own", "collective")
SHARED = ("L1", "L2", "L2b", "L7", "L8")
"""Layouts whose chunks several ranks need parts of."""


def request(source: Source, ranks: int, rank: int) -> Request:
    """One rank's slab of the sample."""
    partition = Partition((Cut(source.dims[2], "domain", even(source.shape[2], ranks)),))
    plans, index = plan(partition, source.layout, halo=HALO), {source.dims[0]: 0}
    mine = plans[rank].at(index)
    return Request(source, mine, torch.empty(mine.result_shape), None, plans, index)


def timed(read: Callable[[], Any]) -> tuple[float, float]:
    """Milliseconds of wall and of processor time of a read that all ranks begin together."""
    dist.barrier()
    spin()
    start, used = time.perf_counter(), time.process_time()
    read()
    return (time.perf_counter() - start) * 1e3, (time.process_time() - used) * 1e3


def measured(path: Path, group: Group, ranks: int, rank: int, repeats: int) -> dict[str, Any]:
    """Both ways to read one layout, on one rank, by number of samples."""
    with (
        ExitStack() as stack,
        OwnReader(1) as own,
        CollectiveReader(group, threads=1) as together,
        CollectiveReader(group, auto=True, threads=1) as auto,
    ):
        samples = [stack.enter_context(open_store(path))["x"] for _ in range(ranks)]
        found: dict[str, Any] = {}
        for count in (1, ranks):
            one, other = ([request(source, ranks, rank) for source in samples[:count]] for _ in range(2))
            reads = {"own": partial(own.read_all, one), "collective": partial(together.read_all, other)}
            before = {"own": own.stats.bytes_fetched, "collective": together.stats.bytes_fetched}
            for read in reads.values():
                read()
            after = {"own": own.stats.bytes_fetched, "collective": together.stats.bytes_fetched}
            if not all(torch.equal(a.out, b.out) for a, b in zip(one, other, strict=True)):
                raise RuntimeError(f"{path}: rank {rank} reads other values together than alone")
            times = {name: [timed(read) for _ in range(repeats)] for name, read in reads.items()}
            found[str(count)] = {
                "wall": {name: [wall for wall, _ in both] for name, both in times.items()},
                "processor": {name: [processor for _, processor in both] for name, both in times.items()},
                "decoded": {name: after[name] - before[name] for name in reads},
            }
        auto.choose([request(samples[0], ranks, rank)])
        chosen = auto.modes["x"]
    return {"samples": found, "auto": [chosen.read, chosen.why]}


def on_rank(rank: int, ranks: int, meet: str, paths: dict[str, Path], repeats: int, results: Any) -> None:
    """All layouts on one rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("domain",))
    group = Group.join(mesh, rank, timeout=120)
    found = {}
    for number, (name, path) in enumerate(paths.items()):
        if number:
            group.begin(number)
        found[name] = measured(path, group, ranks, rank, repeats)
    results.put((rank, found))
    group.close()
    dist.destroy_process_group()


def all_ranks(paths: dict[str, Path], ranks: int, repeats: int) -> dict[str, Any]:
    """By layout: wall and processor times, bytes decoded, what auto chose."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        arguments = [(rank, ranks, f"{folder}/meet", paths, repeats, results) for rank in range(ranks)]
        processes = [context.Process(target=on_rank, args=one) for one in arguments]
        for process in processes:
            process.start()
        by_rank = dict(results.get(timeout=1200) for _ in processes)
        for process in processes:
            process.join()
    return {name: joined([by_rank[rank][name] for rank in range(ranks)]) for name in paths}


def joined(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """What the ranks measured as one: the last one's time, and the sum of what all took of processors and decoded."""
    rows: dict[str, Any] = {}
    for count in ranks[0]["samples"]:
        found = [rank["samples"][count] for rank in ranks]
        rows[count] = {
            kind: {
                read: summary([combine(times) for times in zip(*(one[kind][read] for one in found), strict=True)])
                for read in READS
            }
            for kind, combine in (("wall", max), ("processor", sum))
        }
        rows[count]["decoded"] = {read: sum(one["decoded"][read] for one in found) for read in READS}
    return {"samples": rows, "auto": ranks[0]["auto"]}


def report(facts: dict[str, Any], rows: dict[str, Any]) -> str:
    """The table, as Markdown."""
    nbytes = CHANNELS * facts["grid"][0] * facts["grid"][1] * 4
    lines = []
    for name, row in rows.items():
        for count, found in row["samples"].items():
            wall, processor = found["wall"], found["processor"]
            lines.append(
                [
                    f"{name}: {LAYOUTS[name].text}",
                    count,
                    *(cell(wall[read]) for read in READS),
                    f"{wall['own']['median'] / wall['collective']['median']:.2f}",
                    f"{processor['own']['median'] / processor['collective']['median']:.2f}",
                    *(f"{found['decoded'][read] / nbytes / int(count):.2f}" for read in READS),
                ]
            )
    chosen = "\n".join(f"- {name}: {row['auto'][0]}, because {row['auto'][1]}" for name, row in rows.items())
    head = ["layout", "samples", "own, ms", "collective, ms", "ratio", "of processor time", "own decodes", "collective"]
    return (
        f"{facts['grid'][0]} x {facts['grid'][1]}, {CHANNELS} channels of float32, {facts['ranks']} ranks on "
        f"{facts['cores']} cores; medians of {facts['repeats']} (lower to upper quartile).\n\n{table(head, lines)}\n\n"
        f"read='auto' chose for one sample:\n\n{chosen}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("layouts", nargs="*", help=f"some of {', '.join(LAYOUTS)}; default: {', '.join(SHARED)}")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--grid", type=grid_of, default=(721, 1440), help="ROWSxCOLUMNS; default: 721x1440")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--folder", type=Path, help="keep the layouts here, and use those that are there")
    parser.add_argument("--out", type=Path, help="write PATH.json and PATH.md, too")
    options = parser.parse_args()
    names: Sequence[str] = names_of(options.layouts, parser) or SHARED
    with tempfile.TemporaryDirectory() as temporary:
        folder = (options.folder or Path(temporary)) / f"{options.grid[0]}x{options.grid[1]}"
        folder.mkdir(parents=True, exist_ok=True)
        values = cache(partial(sample, *options.grid, False))
        rows = all_ranks(
            {name: write(folder, name, values, options.grid) for name in names}, options.ranks, options.repeats
        )
    facts = {
        "grid": options.grid,
        "ranks": options.ranks,
        "repeats": options.repeats,
        "cores": CORES,
        "machine": platform.platform(),
        "unit": "ms",
    }
    text = report(facts, rows)
    print(text)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.with_suffix(".json").write_text(json.dumps({"facts": facts, "rows": rows}, indent=1) + "\n")
        options.out.with_suffix(".md").write_text(text + "\n")


if __name__ == "__main__":
    main()

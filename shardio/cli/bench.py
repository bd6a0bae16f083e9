"""`shardio bench`: what the ranks of a mesh get when all of them read at once on this machine."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Annotated, cast

import typer
from rich.table import Table

from shardio.bench import Measured, Mode, measure
from shardio.cf import Grid, find_grid
from shardio.cli.mesh import cut_grid, sample_variables
from shardio.cli.shell import (
    FormatName,
    Halo,
    How,
    MeshOption,
    MissingOption,
    Periodic,
    Shards,
    StoreArgument,
    Threads,
    Variables,
    console,
    opened,
    say,
)
from shardio.location import is_url
from shardio.source import Missing
from shardio.team import usable_cores


def bench(
    source: StoreArgument,
    mesh: MeshOption = "2",
    halo: Halo = 0,
    shards: Shards = None,
    how: How = "even",
    periodic: Periodic = None,
    variables: Variables = None,
    samples: Annotated[int, typer.Option(min=1, help="Time steps that each group of ranks reads.")] = 8,
    read: Annotated[str, typer.Option(help="'own', 'collective' or 'both'.")] = "both",
    threads: Threads = None,
    missing: MissingOption = "raise",
    format: FormatName = None,
) -> None:
    """Measure what the ranks of a mesh get: MB/s and ms per sample, with every rank a process of this machine.

    Each sample is one time step, read into float32 buffers, by all ranks at once, twice. The first reading comes from
    the disk or the network unless something has read the store lately: the page cache is left as it is.
    """
    if read not in ("own", "collective", "both"):
        raise ValueError(f"--read {read!r} is not known; it is 'own', 'collective' or 'both'")
    with opened(source, missing, format) as store:
        grid = find_grid(store, variables=variables)
        slabs = cut_grid(store, grid, mesh, variables=variables, shards=shards, how=how, halo=halo, periodic=periodic)
        plans = {name: slabs.plan(store[name]) for name in sample_variables(store, grid, variables)}
    rows = _rows(grid, slabs.mesh.groups, samples)
    ranks = slabs.partition.ranks * slabs.mesh.groups
    cores = usable_cores()
    each = threads or max(1, cores // ranks)
    modes: tuple[Mode, ...] = ("own", "collective") if read == "both" else (cast(Mode, read),)
    say(f"mesh {slabs.mesh}: {ranks} processes on the {cores} cores of this machine, {each} reading thread(s) each")
    for mode in modes:
        found = measure(
            source,
            plans,
            rows,
            time=grid.time,
            mode=mode,
            threads=each,
            missing=cast(Missing, missing),
            format=format,
        )
        console().print(_table(mode, found))
        say(_summary(mode, found))
    origin = (
        "over the network" if is_url(source) else "from the disk, or from the page cache if something read it lately"
    )
    say(f"first: each sample for the first time, {origin}; again: the same samples a second time, nothing kept between")
    if len(modes) > 1:
        say("collective was measured after own, on the same samples: its first reading finds them in the page cache")


def _rows(grid: Grid, groups: int, samples: int) -> list[list[int]]:
    """For each group, rows spread evenly over the time axis, different from the other groups' as far as there are."""
    if grid.time is None:
        return [[0] * samples] * groups
    size, count = grid.sizes[grid.time], samples * groups
    return [[(number * groups + group) * size // count for number in range(samples)] for group in range(groups)]


def _table(mode: str, found: Sequence[Measured]) -> Table:
    table = Table("rank", title=f"{mode}: medians of {len(found[0].first)} samples", title_justify="left")
    for label in ("needed MB", "decoded MB", "fetched MB", "first ms", "again ms", "again MB/s"):
        table.add_column(label, justify="right")
    for rank in found:
        again = statistics.median(rank.again)
        table.add_row(
            str(rank.rank),
            *(f"{count / 1e6:.3f}" for count in (rank.needed, rank.decoded)),
            f"{rank.stored / 1e6:.3f}" if rank.stored else "-",
            f"{1e3 * statistics.median(rank.first):.2f}",
            f"{1e3 * again:.2f}",
            f"{rank.needed / 1e6 / again:.0f}",
        )
    return table


def _summary(mode: str, found: Sequence[Measured]) -> str:
    """What the slowest rank of each group allows: a training step waits for it."""
    rates = []
    for times in ("first", "again"):
        seconds = max(sum(getattr(rank, times)) for rank in found)
        samples = sum(len(getattr(rank, times)) for rank in found if rank.part == 0)
        nbytes = sum(rank.needed * len(getattr(rank, times)) for rank in found)
        rates.append(f"{times} {samples / seconds:.1f} samples/s, {nbytes / 1e6 / seconds:.0f} MB/s")
    return f"{mode}, all ranks together: {'; '.join(rates)}"

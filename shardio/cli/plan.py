"""`shardio plan`: what each rank would read, alone or together, before any training starts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from shardio.cf import find_grid
from shardio.cli.mesh import Slabs, cut_grid, sample_variables
from shardio.cli.shell import (
    FormatName,
    Halo,
    How,
    MeshOption,
    Periodic,
    Shards,
    StoreArgument,
    Variables,
    console,
    opened,
    say,
    without_secrets,
)
from shardio.collective import BUDGET
from shardio.collective.exchange import Wanted, exchange
from shardio.picture import draw
from shardio.plan import Plan
from shardio.source import Layout
from shardio.statistics import contiguous


def plan(
    source: StoreArgument,
    mesh: MeshOption = "2",
    halo: Halo = 0,
    shards: Shards = None,
    how: How = "even",
    periodic: Periodic = None,
    variables: Variables = None,
    steps: Annotated[int, typer.Option(min=1, help="Consecutive time steps of a sample.")] = 1,
    png: Annotated[Path | None, typer.Option(help="Draw the cuts on the chunk grid into this file.")] = None,
    format: FormatName = None,
) -> None:
    """Show what each rank would read of a sample, and how much more than it needs.

    "own": each rank reads all chunks that its slab touches. "collective": the ranks that share a sample read each
    chunk once and send each other the parts. Bytes are those of decoded chunks, in the stored dtype.
    """
    with opened(source, "fill", format) as store:
        grid = find_grid(store, variables=variables)
        slabs = cut_grid(store, grid, mesh, variables=variables, shards=shards, how=how, halo=halo, periodic=periodic)
        groups: dict[Layout, tuple[Plan, list[str]]] = {}
        names = sample_variables(store, grid, variables)
        for name in names:
            layout = store[name].layout
            if layout not in groups:
                groups[layout] = (slabs.sample_plan(store[name], grid, steps), [])
            groups[layout][1].append(name)
        say(f"mesh {slabs.mesh}; {_cuts(slabs)}; a sample is {steps} time step(s)")
        found = loads([(planned, len(alike)) for planned, alike in groups.values()])
        for (planned, alike), of_group in zip(groups.values(), found, strict=True):
            console().print(_table(slabs, planned, of_group, _title(alike, planned.layout)))
        total = [sum(of_rank, Load()) for of_rank in zip(*found, strict=True)]
        if len(groups) > 1:
            console().print(_table(slabs, planned, total, f"all {len(names)} variables"))
        say(_summary(total))
        if png is not None:
            largest, alike = max(groups.values(), key=lambda group: group[0].bytes_fetched)
            shown = _names(alike) if len(groups) == 1 else f"{_names(alike)} (bytes: all {len(names)} variables)"
            draw(
                largest,
                png,
                spatial=grid.spatial,
                loads=[(load.needed, load.own, load.collective) for load in total],
                title=f"{Path(without_secrets(store.url)).name}: {shown} on mesh {slabs.mesh}, halo {halo}",
                coordinates=grid.coordinates,
                units={dim: str(store[dim].attrs.get("units", "")) for dim in grid.coordinates if dim in store},
            )
            say(f"drawn to {png}")


@dataclass(frozen=True)
class Load:
    """What one rank reads of a sample's arrays.

    Attributes:
        needed: bytes of its slabs, halo included, in the stored dtype.
        own_chunks, own: chunks and bytes decoded when it reads for itself.
        chunks, collective: the same when the ranks share the chunks.
        received: bytes that then come from other ranks.
        values: elements of its slabs.
        largest: bytes of the largest single chunk.
        shared: bytes that it holds for other ranks at once.
    """

    needed: int = 0
    own_chunks: int = 0
    own: int = 0
    chunks: int = 0
    collective: int = 0
    received: int = 0
    values: int = 0
    largest: int = 0
    shared: int = 0

    def __add__(self, other: Load) -> Load:
        sums = {key: value + getattr(other, key) for key, value in vars(self).items()}
        return Load(**sums | {key: max(getattr(self, key), getattr(other, key)) for key in ("largest", "shared")})


def loads(groups: Sequence[tuple[Plan, int]]) -> list[list[Load]]:
    """What every rank reads of so many arrays planned alike, [group][rank]; together, as CollectiveReader does it."""
    wanted: list[Wanted] = []
    group_of: list[int] = []
    for number, (planned, arrays) in enumerate(groups):
        for _ in range(arrays):
            parts = dict(enumerate(planned.ranks))
            wanted.append(Wanted(len(wanted), planned.layout, parts, planned.partition.dims))
            group_of.append(number)
    ranks = len(groups[0][0].ranks)
    together = exchange(wanted, range(ranks), BUDGET)
    held = [max((sizes[rank] for sizes in together.sizes), default=0) for rank in range(ranks)]
    found = []
    for planned, arrays in groups:
        chunk = math.prod(planned.layout.chunks) * planned.layout.itemsize
        found.append(
            [
                Load(
                    needed=arrays * plan.bytes_needed,
                    own_chunks=arrays * plan.chunk_count,
                    own=arrays * plan.bytes_fetched,
                    values=arrays * math.prod(plan.shape),
                    largest=0 if planned.layout.partial else chunk,
                    shared=held[rank],
                )
                for rank, plan in enumerate(planned.ranks)
            ]
        )
    for unit in together.units:
        of_group = found[group_of[unit.array]]
        of_group[unit.owner] += Load(chunks=unit.chunks, collective=unit.decoded)
        for need in unit.needs:
            if need.part != unit.owner:
                of_group[need.part] += Load(received=need.elements * wanted[unit.array].layout.itemsize)
    return found


def _table(slabs: Slabs, planned: Plan, found: Sequence[Load], title: str) -> Table:
    table = Table(title=title, title_justify="left")
    rows = planned.rows()
    cuts = [dim for dim in rows[0] if dim in slabs.partition.dims]
    table.add_column("rank")
    for dim in cuts:
        table.add_column(dim)
    for label in (
        *("needed MB", "own chunks", "MB", "x", "memory MB"),
        *("collective chunks", "MB", "x", "received MB", "memory MB"),
    ):
        table.add_column(label, justify="right")
    for part, (row, load) in enumerate(zip(rows, found, strict=True)):
        ranks = ", ".join(map(str, slabs.mesh.ranks_of(slabs.partition, part)))
        table.add_row(
            ranks,
            *(row[dim] for dim in cuts),
            _mb(load.needed),
            str(load.own_chunks),
            _mb(load.own),
            _ratio(load.own, load.needed),
            _mb(4 * load.values + load.largest),
            str(load.chunks),
            _mb(load.collective),
            _ratio(load.collective, load.needed),
            _mb(load.received),
            _mb(4 * load.values + load.largest + load.shared),
        )
    return table


def _summary(found: Sequence[Load]) -> str:
    total = sum(found, Load())
    return (
        f"per sample the ranks that share it decode {_mb(total.own)} MB reading for themselves "
        f"({_ratio(total.own, total.needed)} x what they need), {_mb(total.collective)} MB collectively "
        f"({_ratio(total.collective, total.needed)} x)\n"
        f"memory: the slab as float32, the largest chunk, and what is held for other ranks; "
        f"a loader holds one slab more for each sample it reads ahead"
    )


def _cuts(slabs: Slabs) -> str:
    cuts = (
        ", ".join(f"{cut.dim} over {cut.axis} ({len(cut.sizes)})" for cut in slabs.partition.cuts) or "nothing is cut"
    )
    around = f", {', '.join(slabs.periodic)} periodic" if slabs.periodic else ""
    return f"{cuts}, halo {slabs.halo}{around}"


def _title(names: Sequence[str], layout: Layout) -> str:
    dims = ", ".join(f"{dim} {size}" for dim, size in zip(layout.dims, layout.shape, strict=True))
    chunks = "contiguous" if contiguous(layout) else "chunks " + " x ".join(map(str, layout.chunks))
    return f"{_names(names)}{f' ({len(names)} arrays)' if len(names) > 1 else ''}: {dims}; {chunks}"


def _names(names: Sequence[str]) -> str:
    shown = ", ".join(names[:6])
    return shown if len(names) <= 6 else f"{shown} and {len(names) - 6} more"


def _mb(count: int) -> str:
    return f"{count / 1e6:.3f}" if count < 1e8 else f"{count / 1e6:.0f}"


def _ratio(one: int, other: int) -> str:
    return f"{one / other:.2f}" if other else "-"

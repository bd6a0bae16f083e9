"""`shardio rechunk`: copy a store into a Zarr store whose chunks suit slabs."""

from __future__ import annotations

from typing import Annotated, cast

import typer
from rich.table import Table

from shardio.cf import find_grid
from shardio.cli.mesh import Slabs, cut_grid
from shardio.cli.shell import (
    FormatName,
    Halo,
    MissingOption,
    Periodic,
    Scheduler,
    Shards,
    StoreArgument,
    Threads,
    Variables,
    cluster,
    console,
    opened,
    progress,
    say,
)
from shardio.errors import DestinationError, DimensionError, ShardIOError
from shardio.rechunk import CODECS, ZarrFormat
from shardio.rechunk import rechunk as copy
from shardio.slab_chunks import Chunking, named, sharded, slab_chunks
from shardio.source import Store
from shardio.statistics import contiguous


def rechunk(
    source: StoreArgument,
    destination: Annotated[str, typer.Argument(help="Path of the new Zarr store.", metavar="DST")],
    for_mesh: Annotated[str, typer.Option("--for-mesh", "-m", help="The ranks that will read it; see shardio plan.")],
    halo: Halo = 0,
    shards: Shards = None,
    periodic: Periodic = None,
    variables: Variables = None,
    chunks: Annotated[
        str | None, typer.Option(help="Chunk extents that are not left to the rule: 'time=1,latitude=91'; -1 is all.")
    ] = None,
    codec: Annotated[str, typer.Option(help=", ".join(CODECS))] = CODECS[0],
    zarr_format: Annotated[int, typer.Option("--zarr-format", help="3, with shards; or 2, a file per chunk.")] = 3,
    no_shards: Annotated[bool, typer.Option("--no-shards", help="A file per chunk in Zarr 3, too.")] = False,
    threads: Threads = None,
    scheduler: Scheduler = None,
    missing: MissingOption = "raise",
    format: FormatName = None,
) -> None:
    """Copy a store into a Zarr store whose chunks suit the slabs of a mesh. Interrupted, it goes on when run again.

    Chunks hold one time step (several where a field has less than 64 KiB), all levels, and as many rows as let no rank
    read more than 1.25 times what it needs, but 64 KiB to 16 MiB. In Zarr 3 they lie in shards of whole time steps,
    about 64 MiB each. Stored values, packing and attributes are copied as they are. The new store appears at DST once
    it has been read back and compared.
    """
    if zarr_format not in (2, 3):
        raise DestinationError(f"Zarr format {zarr_format} is not known; it is 2 or 3")
    with opened(source, missing, format) as store:
        grid = find_grid(store, variables=variables)
        slabs = cut_grid(store, grid, for_mesh, variables=variables, shards=shards, halo=halo, periodic=periodic)
        wanted = _extents(chunks, store)
        chosen = {
            name: _chunking(store, name, slabs, grid.time, wanted, zarr_format == 3 and not no_shards)
            for name in _copied(store, variables, grid.variables)
        }
        table = Table("array", "shape", "chunks before", "chunks", "shards", title_justify="left")
        for name, found in chosen.items():
            before = "contiguous" if contiguous(store[name]) else _text(store[name].chunks)
            files = "-" if found.shards is None else _text(found.shards)
            table.add_row(name, _text(store[name].shape), before, _text(found.chunks), files)
        console().print(table)
        with progress("copying") as copied, progress("reading back") as checked:
            count = copy(
                store,
                destination,
                chosen,
                codec=codec,
                zarr_format=cast(ZarrFormat, zarr_format),
                threads=threads,
                cluster=cluster(scheduler, source, missing, format),
                copied=copied,
                checked=checked,
            )
    say(f"{destination}: {count} parts copied, all read back and found equal")


def _copied(store: Store, variables: list[str] | None, usable: tuple[str, ...]) -> list[str]:
    """All arrays; or those named, with every array that is not a variable on their grid (coordinates, bounds)."""
    if not variables:
        return list(store)
    dims = {dim for name in usable for dim in store[name].dims}
    try:
        others = set(find_grid(store).variables)
    except ShardIOError:
        others = set(usable)
    return [name for name in store if name in usable or (name not in others and set(store[name].dims) <= dims)]


def _chunking(store: Store, name: str, slabs: Slabs, time: str | None, wanted: dict[str, int], files: bool) -> Chunking:
    layout = store[name].layout
    chosen = slab_chunks(layout, slabs.partition, halo=slabs.halo, periodic=slabs.periodic, time=time)
    if set(slabs.partition.dims) <= set(layout.dims):
        chosen = named(layout, chosen, wanted)
        return sharded(layout, chosen, time) if files else Chunking(chosen)
    return Chunking(chosen)


def _extents(text: str | None, store: Store) -> dict[str, int]:
    """What --chunks says: dim -> rows."""
    if text is None:
        return {}
    dims = {dim for source in store.values() for dim in source.dims}
    found = {}
    for item in text.split(","):
        dim, _, size = item.partition("=")
        if dim not in dims or not size.lstrip("-").isdigit() or int(size) == 0:
            raise DimensionError(
                f"--chunks {item!r} is not understood; write DIM=ROWS with a dim of {sorted(dims)}, -1 for all rows"
            )
        found[dim] = int(size)
    return found


def _text(sizes: tuple[int, ...]) -> str:
    return " x ".join(map(str, sizes)) or "scalar"

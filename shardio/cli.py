"""The command `shardio`: look into a store, see the plan of a partition, compute statistics."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from shardio.cf import Grid, find_grid
from shardio.decode import Decode
from shardio.errors import ShardIOError
from shardio.partition import make_partition
from shardio.plan import plan
from shardio.source import Store, open_store
from shardio.statistics import compute

app = typer.Typer(
    help="Look into a store, see what ranks would read of it, compute its statistics.",
    no_args_is_help=True,
    add_completion=False,
)


class Missing(StrEnum):
    """What to do about chunks that were never written."""

    RAISE = "raise"
    FILL = "fill"


StoreArgument = Annotated[str, typer.Argument(help="Path or URL of a store.", metavar="STORE")]
Variables = Annotated[list[str] | None, typer.Option("--variable", "-v", help="A variable; may be repeated.")]
FormatName = Annotated[str | None, typer.Option("--format", help="By default found from content and ending.")]


@contextmanager
def _opened(source: str, format: str | None, missing: Missing = Missing.FILL) -> Iterator[Store]:
    """The store; an error of ours, or of the disk or network, becomes one line and exit code 1."""
    try:
        with open_store(source, format=format, missing="fill" if missing is Missing.FILL else "raise") as store:
            yield store
    except (ShardIOError, OSError) as error:
        Console(stderr=True).print(f"[red]{type(error).__name__}[/red]: ", end="")
        Console(stderr=True).print(str(error), markup=False, highlight=False)
        raise typer.Exit(1) from None


@app.command()
def inspect(source: StoreArgument, format: FormatName = None) -> None:
    """Show a store's arrays, the grid they lie on, and its times."""
    with _opened(source, format) as store:
        table = Table("array", "dims", "dtype", "chunks", "MB", "decode", title=f"{store.url} ({store.format})")
        for name, array in store.items():
            dims = ", ".join(f"{dim} {size}" for dim, size in zip(array.dims, array.shape, strict=True))
            chunks = "contiguous" if array.partial else " x ".join(map(str, array.chunks))
            table.add_row(name, dims, str(array.dtype), chunks, f"{array.nbytes / 1e6:.3f}", _decoding(array.decode))
        console = Console()
        console.print(table)
        try:
            _describe(console, find_grid(store))
        except ShardIOError as error:
            console.print(f"no grid: {error}", markup=False)


@app.command("plan")
def show_plan(
    source: StoreArgument,
    ranks: Annotated[int, typer.Option(help="Ranks to cut over.")] = 2,
    dim: Annotated[str | None, typer.Option(help="Dim to cut; by default the first spatial one.")] = None,
    how: Annotated[str, typer.Option(help="Partition: 'even' or 'aligned'.")] = "even",
    halo: Annotated[int, typer.Option(help="Rows beyond the own ones, on both sides.")] = 0,
    variables: Variables = None,
    format: FormatName = None,
) -> None:
    """Show what each rank would read of one time step of each variable, and how much more than it needs."""
    with _opened(source, format) as store:
        grid = find_grid(store, variables=variables)
        cut = dim or grid.spatial[0]
        for name in grid.variables:
            array = store[name]
            chunks = dict(zip(array.dims, array.chunks, strict=True))
            partition = make_partition(
                {cut: "domain"}, sizes=grid.sizes, ranks={"domain": ranks}, how=how, chunks=chunks
            )
            index = {grid.time: 0} if grid.time in array.dims and grid.time is not None else None
            planned = plan(partition, array.layout, halo=halo, periodic=set(grid.periodic) & {cut}, index=index)
            rows = planned.rows()
            table = Table(*rows[0], title=f"{name}: {planned.amplification:.2f} x the bytes needed")
            for row in rows:
                table.add_row(*row.values())
            Console().print(table)


@app.command()
def stats(
    source: StoreArgument,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Default: STORE's name + .stats.json.")] = None,
    variables: Variables = None,
    start: Annotated[int | None, typer.Option(help="First time step that counts.")] = None,
    stop: Annotated[int | None, typer.Option(help="Time step before which to stop.")] = None,
    threads: Annotated[int | None, typer.Option(help="Threads; by default all cores.")] = None,
    missing: Annotated[Missing, typer.Option(help="Chunks never written: an error, or fill values.")] = Missing.RAISE,
    format: FormatName = None,
) -> None:
    """Compute mean, standard deviation and range of every variable and level, and write them to a JSON file."""
    path = output or Path(f"{Path(source.rstrip('/')).name}.stats.json")
    if not path.parent.is_dir():  # said before the work, not after it
        raise typer.BadParameter(f"there is no folder {str(path.parent)!r}", param_hint="--output")
    with _opened(source, format, missing) as store:
        grid = find_grid(store, variables=variables)
        with Progress(console=Console(stderr=True)) as progress:
            bar = progress.add_task("reading", total=None)
            found = compute(
                store,
                grid=grid,
                time=slice(start, stop),
                threads=threads,
                done=lambda count, total: progress.update(bar, completed=count, total=total),
            )
        table = Table("variable", "count", "mean", "std", "minimum", "maximum")
        for name, entry in found.variables.items():
            numbers = (entry.mean, entry.std, entry.minimum, entry.maximum)
            table.add_row(name, str(entry.count), *(f"{number:.6g}" for number in numbers))
        Console().print(table)
        found.to_json(path)
        Console().print(f"written to {path}")


def _decoding(decode: Decode) -> str:
    return ", ".join(f"{key}={value}" for key, value in vars(decode).items() if value != getattr(Decode(), key))


def _describe(console: Console, grid: Grid) -> None:
    console.print(f"variables: {', '.join(grid.variables)}", markup=False)
    roles = {"time": grid.time, "level": grid.level, "y": grid.spatial[0], "x": grid.spatial[-1]}
    console.print("dims: " + ", ".join(f"{role} = {dim} {grid.sizes[dim]}" for role, dim in roles.items() if dim))
    for label, dims in (("descending", grid.descending), ("periodic", grid.periodic), ("other", tuple(grid.other))):
        if dims:
            console.print(f"{label}: {', '.join(dims)}")
    if grid.times is not None and len(grid.times):
        axis = grid.times
        step = f"{axis.months} month(s)" if axis.months else f"{axis.step:g} s" if axis.step else "none"
        console.print(
            f"times: {len(axis)}, {axis.label(0)} to {axis.label(-1)}, step {step}, "
            f"{len(axis.gaps)} gaps, calendar {axis.calendar}",
            markup=False,
        )

"""`shardio stats`: mean, standard deviation and range of every channel, written to a JSON file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from shardio.cf import find_grid
from shardio.cli.shell import (
    FormatName,
    Level,
    MissingOption,
    Scheduler,
    StoreArgument,
    Threads,
    Variables,
    cluster,
    console,
    opened,
    progress,
    say,
)
from shardio.errors import DimensionError
from shardio.labels import labels
from shardio.statistics import VariableStatistics, compute, statistics_file


def stats(
    source: StoreArgument,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Default: STORE's name + .stats.json.")] = None,
    variables: Variables = None,
    start: Annotated[int | None, typer.Option(help="First time step that counts.")] = None,
    stop: Annotated[int | None, typer.Option(help="Time step before which to stop.")] = None,
    level: Level = None,
    threads: Threads = None,
    scheduler: Scheduler = None,
    missing: MissingOption = "raise",
    format: FormatName = None,
) -> None:
    """Compute mean, standard deviation and range of every variable and level, and write them to a JSON file.

    Every chunk is read once. Missing and infinite values do not count, and are counted.
    """
    path = output or statistics_file(source)
    if not path.parent.is_dir():  # said before the work, not after it
        raise typer.BadParameter(f"there is no folder {str(path.parent)!r}", param_hint="--output")
    with opened(source, missing, format) as store:
        grid = find_grid(store, variables=variables, level=level)
        if grid.time is None and (start is not None or stop is not None):
            raise DimensionError("--start and --stop choose time steps, but the store has no time dim; leave them out")
        names = None if grid.level is None else labels(store, grid.level, grid.sizes[grid.level])
        with progress("reading") as done:
            found = compute(
                store,
                grid=grid,
                time=None if start is None and stop is None else slice(start, stop),
                threads=threads,
                cluster=cluster(scheduler, source, missing, format),
                done=done,
            )
    table = Table("channel", "values", "mean", "std", "minimum", "maximum", "missing", "infinite")
    for name, entry in found.variables.items():
        _row(table, name, entry)
        for label, part in zip(names or map(str, range(len(entry.levels))), entry.levels, strict=False):
            _row(table, f"  {name}_{label}", part)
    found.to_json(path)
    console().print(table)
    say(f"written to {path}")


def _row(table: Table, label: str, entry: VariableStatistics) -> None:
    numbers = (entry.mean, entry.std, entry.minimum, entry.maximum)
    counts = (entry.missing, entry.infinite)
    table.add_row(escape(label), str(entry.count), *(f"{number:.6g}" for number in numbers), *map(str, counts))

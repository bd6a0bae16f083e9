"""`shardio verify`: read everything and report what is wrong."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.table import Table

from shardio.cli.shell import (
    FormatName,
    Scheduler,
    StoreArgument,
    Threads,
    Variables,
    cluster,
    console,
    opened,
    progress,
    say,
    without_secrets,
)
from shardio.verify import Report
from shardio.verify import verify as verify_store

SHOWN = 20


def verify(
    source: StoreArgument,
    variables: Variables = None,
    allow_nan: Annotated[bool, typer.Option("--allow-nan", help="NaN is counted, but nothing wrong.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    threads: Threads = None,
    scheduler: Scheduler = None,
    format: FormatName = None,
) -> None:
    """Read everything: report missing and corrupt chunks, NaN and Inf by channel, and odd time axes.

    Goes on after errors. The exit code is 1 if anything is wrong. Values that attributes declare missing are counted,
    and not wrong.
    """
    with opened(source, "raise", format) as store:
        with progress("reading") as done:
            report = verify_store(
                store,
                variables=variables,
                allow_nan=allow_nan,
                threads=threads,
                cluster=cluster(scheduler, source, "raise", format),
                done=done,
            )
        url = without_secrets(store.url)
    if as_json:
        typer.echo(without_secrets(json.dumps({"store": url, **report.as_dict()}, indent=2)))
    else:
        _show(url, report)
    if not report.sound:
        raise typer.Exit(1)


def _show(url: str, report: Report) -> None:
    table = Table("array", title=url, title_justify="left")
    for label in ("chunks", "MB", "missing", "corrupt", "NaN", "Inf", "declared missing"):
        table.add_column(label, justify="right")
    for name, found in report.arrays.items():
        total = found.total
        counts = (total.nan, total.inf, total.absent)
        table.add_row(
            name,
            str(found.chunks),
            f"{found.nbytes / 1e6:.3f}",
            str(found.missing),
            str(found.corrupt),
            *map(str, counts),
        )
        for channel, part in found.channels.items():
            if channel is not None and (part.nan or part.inf):
                table.add_row(f"  {name}_{channel}", *[""] * 4, *map(str, (part.nan, part.inf, part.absent)))
    console().print(table)
    for problem in report.problems[:SHOWN]:
        say(f"{problem.kind}: {problem.array}: {problem.message}")
    if len(report.problems) > SHOWN:
        say(f"... and {len(report.problems) - SHOWN} more; --json lists them")
    say("nothing is wrong" if report.sound else f"{len(report.problems)} problem(s)")

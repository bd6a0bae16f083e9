"""`shardio validate`: what a store lacks for training on it."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from shardio.cli.shell import FormatName, Level, StoreArgument, opened, say, without_secrets
from shardio.statistics import statistics_file
from shardio.validate import CHECKS
from shardio.validate import validate as validate_store


def validate(
    source: StoreArgument,
    level: Level = None,
    statistics: Annotated[
        Path | None, typer.Option("--stats", help="What `shardio stats` wrote; by default where it writes it.")
    ] = None,
    invariants: Annotated[
        list[str] | None, typer.Option("--invariant", help="A field without time that must be there; may be repeated.")
    ] = None,
    without: Annotated[
        list[str] | None, typer.Option("--without", help=f"Leave out: {', '.join(CHECKS)}; may be repeated.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the checks as JSON.")] = False,
    format: FormatName = None,
) -> None:
    """Tell what training takes and the store lacks: places, times, names of channels, statistics, invariants.

    Metadata and coordinates are read, and fields without time; `verify` reads everything. The exit code is 1 if
    anything is missing.
    """
    unknown = [name for name in without or () if name not in CHECKS]
    if unknown:
        text = f"there is no check {unknown[0]!r}; there are: {', '.join(CHECKS)}"
        raise typer.BadParameter(text, param_hint="--without")
    with opened(source, "raise", format) as store:
        checks = validate_store(
            store,
            level=level,
            statistics=statistics or statistics_file(source),
            invariants=invariants or (),
            without=without or (),
        )
    missing = [check for check in checks if not check.ok]
    if as_json:
        typer.echo(without_secrets(json.dumps([asdict(check) for check in checks], indent=2)))
    else:
        for check in checks:
            say(f"{'ok     ' if check.ok else 'MISSING'}  {check.what}: {check.found}")
            if check.todo:
                say(f"         -> {check.todo}")
        say(f"{len(missing)} of {len(checks)} missing" if missing else "nothing is missing")
    if missing:
        raise typer.Exit(1)

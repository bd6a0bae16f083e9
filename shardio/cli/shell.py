"""What the commands share: their common options, one line for an error, a wide console, a progress bar."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Annotated, Any, cast

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from shardio.location import visible
from shardio.source import Missing, Store, open_store
from shardio.work import Cluster, Done

StoreArgument = Annotated[str, typer.Argument(help="Path or URL of a store.", metavar="STORE")]
Variables = Annotated[list[str] | None, typer.Option("--variable", "-v", help="A variable; may be repeated.")]
Level = Annotated[str | None, typer.Option("--level", help="Dim of levels or channels, where it is not recognised.")]
MissingOption = Annotated[
    str, typer.Option("--missing", help="Chunks that were never written: 'raise' an error, or 'fill'.")
]
FormatName = Annotated[str | None, typer.Option("--format", help="By default found from content and ending.")]
MeshOption = Annotated[
    str,
    typer.Option("--mesh", "-m", help="Ranks: '4' share a sample, '2x2' is data x domain, or 'data=2,lat=2,lon=2'."),
]
Halo = Annotated[int, typer.Option("--halo", help="Rows beyond the own ones, on both sides of each cut dim.")]
Shards = Annotated[
    list[str] | None,
    typer.Option("--shard", "--dim", help="Dim to cut, or DIM=AXIS; by default the first spatial dim over 'domain'."),
]
How = Annotated[str, typer.Option("--partition", help="'even', or 'aligned' to chunks.")]
Periodic = Annotated[
    bool | None,
    typer.Option("--periodic/--not-periodic", help="Whether x goes around; by default as its coordinate tells."),
]
Threads = Annotated[int | None, typer.Option("--threads", help="Threads; by default all cores.")]
Scheduler = Annotated[
    str | None, typer.Option("--scheduler", help="Address of an existing dask cluster that does the work instead.")
]

PIPE_WIDTH = 160
"""Columns of a table that is written to a file or a pipe."""
_URL = re.compile(r"(?<![\w+.-])\w[\w+.-]{0,63}://[^\s'\"<>]+")


def without_secrets(text: str) -> str:
    """A text with its URLs as `visible` shows them: without users, passwords, tokens and signatures."""
    return _URL.sub(lambda found: visible(found[0]), text)


def console() -> Console:
    """For results, on standard output."""
    found = Console(highlight=False, soft_wrap=False)
    return found if found.is_terminal else Console(highlight=False, width=max(found.width, PIPE_WIDTH))


def say(text: str) -> None:
    """Print a line as it is, credentials left out."""
    console().print(without_secrets(text), markup=False, soft_wrap=True)


def plain_errors(command: Callable[..., None]) -> Callable[..., None]:
    """The command, with every error as one line on standard error and exit code 1."""

    @wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except (typer.Exit, typer.Abort, typer.BadParameter):
            raise
        except Exception as error:  # whatever a file library raises; a traceback helps nobody at a prompt
            text = " ".join(str(error).split()) or "no message"
            typer.echo(f"{type(error).__name__}: {without_secrets(text)}", err=True)
            raise typer.Exit(1) from None

    return run


def opened(source: str, missing: str = "raise", format: str | None = None) -> Store:
    """The store; `missing` and `format` are checked by open_store."""
    return open_store(source, missing=cast(Missing, missing), format=format)


def cluster(scheduler: str | None, source: str, missing: str, format: str | None) -> Cluster | None:
    """The cluster that was asked for."""
    return None if scheduler is None else Cluster(scheduler, source, cast(Missing, missing), format)


@contextmanager
def progress(label: str) -> Iterator[Done]:
    """A bar on standard error, if that is a terminal; call what it gives with (done, in all)."""
    errors = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal) as bar:
        task = bar.add_task(label, total=None)

        def done(count: int, total: int) -> None:
            bar.update(task, completed=count, total=total)

        yield done

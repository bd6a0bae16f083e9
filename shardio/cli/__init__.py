"""The command `shardio`: look into a store, see what ranks would read, measure it, check it, lay it out anew."""

from typing import Annotated

import typer

from shardio import __version__
from shardio.cli.bench import bench
from shardio.cli.inspect import inspect
from shardio.cli.plan import plan
from shardio.cli.rechunk import rechunk
from shardio.cli.shell import plain_errors
from shardio.cli.stats import stats
from shardio.cli.validate import validate
from shardio.cli.verify import verify

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def show_version(wanted: bool) -> None:
    """Print the version and end, if asked."""
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def everywhere(
    version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Looks into stores of arrays, and prepares them for reading in slabs."""


for command in (inspect, plan, bench, stats, validate, verify, rechunk):
    app.command()(plain_errors(command))

__all__ = ["app"]

"""The command `shardio`: look into a store, see what ranks would read, measure it, check it, lay it out anew."""

import typer

from shardio.cli.bench import bench
from shardio.cli.inspect import inspect
from shardio.cli.plan import plan
from shardio.cli.rechunk import rechunk
from shardio.cli.shell import plain_errors
from shardio.cli.stats import stats
from shardio.cli.verify import verify

app = typer.Typer(
    help="Looks into stores of arrays, and prepares them for reading in slabs.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for command in (inspect, plan, bench, stats, verify, rechunk):
    app.command()(plain_errors(command))

__all__ = ["app"]

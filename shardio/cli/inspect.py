"""`shardio inspect`: the arrays of a store, the grid they lie on, and its times."""

from __future__ import annotations

from rich.table import Table

from shardio.cf import Grid, find_grid
from shardio.cli.shell import FormatName, StoreArgument, console, opened, say, without_secrets
from shardio.decode import Decode
from shardio.errors import ShardIOError
from shardio.statistics import contiguous


def inspect(source: StoreArgument, format: FormatName = None) -> None:
    """Show a store's arrays, the grid they lie on, and its times."""
    with opened(source, "fill", format) as store:
        title = f"{without_secrets(store.url)} ({store.format})"
        table = Table("array", "dims", "dtype", "chunks", "MB", "decode", title=title)
        for name, array in store.items():
            dims = ", ".join(f"{dim} {size}" for dim, size in zip(array.dims, array.shape, strict=True))
            chunks = "contiguous" if contiguous(array) else " x ".join(map(str, array.chunks))
            table.add_row(name, dims, str(array.dtype), chunks, f"{array.nbytes / 1e6:.3f}", _decoding(array.decode))
        console().print(table)
        try:
            _describe(find_grid(store))
        except ShardIOError as error:
            say(f"no grid: {error}")


def _decoding(decode: Decode) -> str:
    return ", ".join(f"{key}={value}" for key, value in vars(decode).items() if value != getattr(Decode(), key))


def _describe(grid: Grid) -> None:
    say(f"variables: {', '.join(grid.variables)}")
    space = zip(("y", "x") if len(grid.spatial) == 2 else ("cell",), grid.spatial, strict=True)
    roles = {"time": grid.time, "level": grid.level, **dict(space)}
    say("dims: " + ", ".join(f"{role} = {dim} {grid.sizes[dim]}" for role, dim in roles.items() if dim))
    for label, dims in (("descending", grid.descending), ("periodic", grid.periodic), ("other", tuple(grid.other))):
        if dims:
            say(f"{label}: {', '.join(dims)}")
    if grid.times is not None and len(grid.times):
        axis = grid.times
        step = f"{axis.months} month(s)" if axis.months else f"{axis.step:g} s" if axis.step else "none"
        say(
            f"times: {len(axis)}, {axis.label(0)} to {axis.label(-1)}, step {step}, "
            f"{len(axis.gaps)} gaps, calendar {axis.calendar}"
        )

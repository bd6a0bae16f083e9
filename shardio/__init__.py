"""shardio: every rank reads only its own slab of a stored array, plus halo."""

from importlib.metadata import version

from shardio.box import Box, Span
from shardio.cf import Grid, find_grid
from shardio.decode import Decode
from shardio.errors import ShardIOError
from shardio.join import GridPart, join
from shardio.partition import Cut, Partition, make_partition
from shardio.plan import Plan, RankPlan, plan
from shardio.read import OwnReader, ReadStats, Request, read
from shardio.source import Layout, Source, Store, open_store, register_format
from shardio.times import TimeAxis, decode_times

__all__ = [
    "Box",
    "Cut",
    "Decode",
    "Grid",
    "GridPart",
    "Layout",
    "OwnReader",
    "Partition",
    "Plan",
    "RankPlan",
    "ReadStats",
    "Request",
    "ShardIOError",
    "Source",
    "Span",
    "Store",
    "TimeAxis",
    "decode_times",
    "find_grid",
    "join",
    "make_partition",
    "open_store",
    "plan",
    "read",
    "register_format",
]

__version__ = version("shardtensor")

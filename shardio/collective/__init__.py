"""Collective reading: each chunk that a group of ranks needs is read and decoded by one of them, and shared."""

from __future__ import annotations

from typing import Literal

from shardio.collective.group import Group
from shardio.collective.reader import BUDGET, CollectiveReader
from shardio.read import OwnReader

__all__ = ["BUDGET", "CollectiveReader", "Group", "Read", "make_reader"]

Read = Literal["own", "collective", "auto"]
"""How the ranks that share samples read: each for itself, each chunk once, or by array whichever takes less time."""


def make_reader(
    read: Read, group: Group | None, *, threads: int | None = None, budget: int = BUDGET
) -> OwnReader | CollectiveReader:
    """The reader of one rank.

    Args:
        read: "own", "collective", or "auto", which is decided for each array by `CollectiveReader.choose`.
        group: the ranks that share samples (`Group.join`); None or a group of one reads "own" whatever `read` says.
        threads: see OwnReader.
        budget: see BUDGET.
    """
    if read not in ("own", "collective", "auto"):
        raise ValueError(f"read={read!r} is not known; it is 'own', 'collective' or 'auto'")
    if read == "own" or group is None or group.size == 1:
        return OwnReader(threads)
    return CollectiveReader(group, auto=read == "auto", threads=threads, budget=budget)

"""Executes a plan together with the other ranks of a group: every chunk is read once, by one of them."""

from __future__ import annotations

from collections.abc import Sequence

from shardio.collective.group import Group
from shardio.read import ReadStats, Request


class CollectiveReader:
    """Reads for one rank of a group; all its ranks call it with as many requests, of the same arrays in the same order.

    Attributes:
        stats: what this rank has read so far; what it took from other ranks is not in it.
    """

    stats: ReadStats

    def __init__(self, group: Group, *, auto: bool = False, threads: int | None = None, budget: int = 64 << 20) -> None:
        raise NotImplementedError

    def choose(self, requests: Sequence[Request]) -> None:
        """With `auto`: decide for each array of these requests (of one sample) how it is read, all ranks together."""

    def read_all(self, requests: Sequence[Request]) -> None:
        """Fill the buffers of several requests; an error of any rank is raised on all."""

    def close(self) -> None:
        """End the threads and give back the memory; the group stays."""

"""The shared memory of a group's ranks on one machine: two segments a rank, used in turn, that grow when needed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from shardio.collective.segment import Segment

Array = np.ndarray[Any, np.dtype[Any]]
GROWTH = 1 << 20
"""Segments have multiples of this many bytes."""


class Memory:
    """This rank's segments, and those of the other ranks that it sees.

    All ranks keep the same account of everybody's segments from the sizes that all of them compute, so nothing is said:
    a segment that is too small for a turn is replaced by one of another name.

    Args:
        name: of the group's reader.
        me: number of this rank.
        near: the ranks on this machine, this one included.
    """

    def __init__(self, name: str, me: int, near: Sequence[int]) -> None:
        self._name, self._me, self._near = name, me, near
        self._turn = -1
        self._held: dict[tuple[int, int], Segment] = {}
        self._account: dict[tuple[int, int], tuple[int, int]] = {}
        """(rank, slot) -> times it was made, size."""
        self._named: list[tuple[int, Segment]] = []
        """Own segments that still have a name, with the turn in which they were made."""

    def forget(self) -> None:
        """Start anew, with no segments."""
        for segment in self._held.values():
            segment.close()
        for (rank, slot), (made, _) in self._account.items():  # of a rank that ended before this one opened it
            Segment.remove(self._file(rank, slot, made))
        self._held, self._account, self._named, self._turn = {}, {}, [], -1

    def turn(self, sizes: Sequence[int]) -> None:
        """Go on to the next turn, for which every rank needs so many bytes; makes this rank's segment.

        The slot was last used two turns ago, so the caller must know that all ranks are done with that turn.
        """
        self._turn += 1
        slot = self._turn % 2
        for rank in self._near:
            made, size = self._account.get((rank, slot), (0, 0))
            if sizes[rank] > size:
                self._account[rank, slot] = (made + 1, -(-sizes[rank] // GROWTH) * GROWTH)
                old = self._held.pop((rank, slot), None)
                if old is not None:
                    old.close()
        named, size = self._account.get((self._me, slot), (0, 0))
        if named and (self._me, slot) not in self._held:
            segment = Segment.create(self._file(self._me, slot, named), size)
            self._held[self._me, slot] = segment
            self._named.append((self._turn, segment))

    def meet(self) -> None:
        """Open the others' new segments of this turn; called when all ranks have made theirs.

        Takes the names away from those that all have opened: own ones of the turn before.
        """
        slot = self._turn % 2
        for rank in self._near:
            made, size = self._account.get((rank, slot), (0, 0))
            if made and (rank, slot) not in self._held:
                self._held[rank, slot] = Segment.attach(self._file(rank, slot, made), size)
        self.unname(self._turn - 1)

    def unname(self, turn: int | None = None) -> None:
        """Take the names away from own segments of turns up to this one (default: all); every rank has opened them."""
        for made, segment in self._named:
            if turn is None or made <= turn:
                segment.unlink()
        self._named = [] if turn is None else [(made, segment) for made, segment in self._named if made > turn]

    def array(self, rank: int, turn: int, offset: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
        """A view into a rank's segment of a turn (this one or the one before)."""
        return self._held[rank, turn % 2].array(offset, dtype, shape)

    @property
    def now(self) -> int:
        """Number of this turn."""
        return self._turn

    def _file(self, rank: int, slot: int, made: int) -> str:
        return f"shardio-{self._name}-{rank}-{slot}-{made}"

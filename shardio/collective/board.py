"""Where ranks tell each other how far they are: in shared memory, or in the job's store between machines."""

from __future__ import annotations

import mmap
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TypeVar

import numpy as np
import torch.distributed as dist

from shardio.errors import RankLostError

T = TypeVar("T")

TEXT = 8192
"""Bytes of the longest text; more is cut off."""
SLOT = 16 + TEXT
BYTES = 3 * SLOT
"""Bytes of one rank's page of a `SharedBoard`."""


class Board(ABC):
    """What every rank has said in each step of each sequence; see Group."""

    @abstractmethod
    def put(self, sequence: int, step: int, text: str) -> None:
        """Say something; not before all ranks have said something in the step before."""

    @abstractmethod
    def missing(self, sequence: int, step: int) -> list[int]:
        """The ranks that have said nothing yet in a step."""

    @abstractmethod
    def texts(self, sequence: int, step: int) -> list[str]:
        """What each rank has said in a step in which none is missing."""

    @abstractmethod
    def stop(self, sequence: int, text: str) -> None:
        """Say that the sequence ends."""

    @abstractmethod
    def stopped(self, sequence: int) -> str | None:
        """What a rank has said when it ended this sequence, or a later one; None if none did."""

    @abstractmethod
    def close(self) -> None:
        """Let go of it."""


class SharedBoard(Board):
    """A page of shared memory per rank, which only that rank writes: two slots for steps in turn, one to stop.

    A slot is a tag (sequence and step, 0 for nothing), the length of the text, and the text. The tag is written last.

    Args:
        files: descriptor of each rank's file, of BYTES.
        me: number of this rank.
    """

    def __init__(self, files: Mapping[int, int], me: int) -> None:
        self._me, self._said = me, 0
        self._pages = {rank: mmap.mmap(descriptor, BYTES) for rank, descriptor in sorted(files.items())}
        self._heads = {rank: np.ndarray((3, 2), np.int64, page, 0, (SLOT, 8)) for rank, page in self._pages.items()}
        self._fence, self._writing = threading.Lock(), threading.Lock()

    def put(self, sequence: int, step: int, text: str) -> None:
        """See Board.put. What was said before the step before is overwritten."""
        self._write(self._said % 2, _tag(sequence, step), text)
        self._said += 1

    def missing(self, sequence: int, step: int) -> list[int]:
        """See Board.missing."""
        tag = _tag(sequence, step)
        return [rank for rank, head in self._heads.items() if tag not in (head[0, 0], head[1, 0])]

    def texts(self, sequence: int, step: int) -> list[str]:
        """See Board.texts."""
        tag = _tag(sequence, step)
        return [self._read(rank, 0 if head[0, 0] == tag else 1) for rank, head in self._heads.items()]

    def stop(self, sequence: int, text: str) -> None:
        """See Board.stop."""
        self._write(2, _tag(sequence, 0), text)

    def stopped(self, sequence: int) -> str | None:
        """See Board.stopped."""
        found = [rank for rank, head in self._heads.items() if head[2, 0] >= _tag(sequence, 0)]
        return self._read(found[0], 2) if found else None

    def close(self) -> None:
        """See Board.close."""
        self._heads = {}
        for page in self._pages.values():
            page.close()
        self._pages = {}

    def _write(self, slot: int, tag: int, text: str) -> None:
        if self._me not in self._pages:
            raise RankLostError("this rank has left the group that shares the reading; its loader was closed")
        data = text.encode()[:TEXT]
        with self._writing:
            head, at = self._heads[self._me], slot * SLOT + 16
            head[slot, 0] = 0
            self._pages[self._me][at : at + len(data)] = data
            head[slot, 1] = len(data)
            for _ in range(2):  # a lock released and taken keeps the order of writes on every kind of processor
                with self._fence:
                    pass
            head[slot, 0] = tag

    def _read(self, rank: int, slot: int) -> str:
        at = slot * SLOT + 16
        return self._pages[rank][at : at + int(self._heads[rank][slot, 1])].decode(errors="replace")


class StoreBoard(Board):
    """Keys in a store of torch.distributed; those that all have read are deleted.

    Args:
        store: of this group alone.
        size: number of ranks.
        me: number of this rank.
    """

    def __init__(self, store: dist.Store, size: int, me: int) -> None:
        self._store: dist.Store | None = store
        self._size, self._me = size, me
        self._keys: list[str] = []

    def put(self, sequence: int, step: int, text: str) -> None:
        """See Board.put."""
        key = f"{sequence}/{step}/{self._me}"
        self._call(lambda store: store.set(key, "." + text[:TEXT]))  # a value must not be empty
        self._keys.append(key)
        if len(self._keys) > 2:
            old = self._keys.pop(0)
            self._call(lambda store: store.delete_key(old))

    def missing(self, sequence: int, step: int) -> list[int]:
        """See Board.missing."""
        keys = [f"{sequence}/{step}/{rank}" for rank in range(self._size)]
        if self._call(lambda store: store.check(keys)):
            return []
        return [rank for rank, key in enumerate(keys) if not self._has(key)]

    def texts(self, sequence: int, step: int) -> list[str]:
        """See Board.texts."""
        keys = [f"{sequence}/{step}/{rank}" for rank in range(self._size)]
        return [value.decode(errors="replace")[1:] for value in self._call(lambda store: store.multi_get(keys))]

    def stop(self, sequence: int, text: str) -> None:
        """See Board.stop."""
        self._call(lambda store: store.set("stop", f"{sequence}\n{text[:TEXT]}"))

    def stopped(self, sequence: int) -> str | None:
        """See Board.stopped."""
        if not self._has("stop"):
            return None
        number, _, text = self._call(lambda store: store.get("stop")).decode(errors="replace").partition("\n")
        return text if int(number) >= sequence else None

    def close(self) -> None:
        """See Board.close."""
        self._store = None

    def _has(self, key: str) -> bool:
        return self._call(lambda store: store.check([key]))

    def _call(self, what: Callable[[dist.Store], T]) -> T:
        if self._store is None:
            raise RankLostError("this rank has left the group that shares the reading; its loader was closed")
        try:
            return what(self._store)
        except RuntimeError as error:  # the connection is gone
            raise RankLostError(f"the job's store, which rank 0 keeps, cannot be reached any more: {error}") from error


def _tag(sequence: int, step: int) -> int:
    return (sequence << 32 | step) + 1

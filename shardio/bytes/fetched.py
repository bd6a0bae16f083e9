"""Stretches of objects fetched together before they are decoded one by one, in as few requests as the store wants."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from shardio.bytes.base import ByteStore


class Stretch(NamedTuple):
    """Bytes start..stop of an object."""

    key: str
    start: int
    stop: int


class Fetched(ByteStore):
    """What was fetched of a store; each stretch can be read whole or in parts, nothing else can.

    Args:
        store: where to fetch from.
        stretches: what to fetch.
    """

    def __init__(self, store: ByteStore, stretches: Sequence[Stretch]) -> None:
        self.url = store.url
        self._held: dict[str, list[tuple[Stretch, memoryview]]] = {}
        for stretch in sorted(set(stretches)):
            part = memoryview(bytearray(stretch.stop - stretch.start))
            self._held.setdefault(stretch.key, []).append((stretch, part))
        for key, held in list(self._held.items()):
            if not store.read_ranges(key, [stretch[1:] for stretch, _ in held], [part for _, part in held]):
                del self._held[key]

    def size(self, key: str) -> int | None:
        """See ByteStore.size; the end of the last stretch."""
        held = self._held.get(key)
        return None if held is None else held[-1][0].stop

    def read(self, key: str, start: int = 0, stop: int | None = None) -> memoryview | None:
        """See ByteStore.read."""
        for stretch, part in self._held.get(key, ()):
            if stretch.start <= start <= (stretch.stop if stop is None else stop) <= stretch.stop:
                return part[start - stretch.start : None if stop is None else stop - stretch.start]
        return None

    def read_into(self, key: str, start: int, into: memoryview) -> bool:
        """See ByteStore.read_into."""
        found = self.read(key, start, start + len(into))
        if found is not None:
            into[:] = found
        return found is not None

    def folders(self, prefix: str) -> list[str]:
        """See ByteStore.folders; none are known here."""
        return []

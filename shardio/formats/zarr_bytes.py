"""A ByteStore as the zarr library wants a store, for arrays with codecs that only that library knows."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import Any, NoReturn

from zarr.abc.store import ByteRequest, OffsetByteRequest, RangeByteRequest
from zarr.abc.store import Store as ZarrStore
from zarr.core.buffer import Buffer, BufferPrototype

from shardio.bytes import ByteStore


class ZarrOfBytes(ZarrStore):
    """Read-only; lists folders only, which is what the zarr library needs to find arrays."""

    supports_writes = False
    supports_deletes = False
    supports_listing = True

    def __init__(self, store: ByteStore) -> None:
        super().__init__(read_only=True)
        self.bytes = store

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ZarrOfBytes) and other.bytes is self.bytes

    def __hash__(self) -> int:
        return hash(id(self.bytes))

    def __str__(self) -> str:
        return self.bytes.url

    async def get(self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None) -> Buffer | None:
        """As zarr's stores."""
        if byte_range is None:
            start, stop = 0, None
        elif isinstance(byte_range, RangeByteRequest):
            start, stop = byte_range.start, byte_range.end
        else:
            start = byte_range.offset if isinstance(byte_range, OffsetByteRequest) else -byte_range.suffix
            stop = None
        found = await asyncio.to_thread(self.bytes.read, key, start, stop)
        return None if found is None else prototype.buffer.from_bytes(bytes(found))

    async def get_partial_values(
        self, prototype: BufferPrototype, key_ranges: Iterable[tuple[str, ByteRequest | None]]
    ) -> list[Buffer | None]:
        """As zarr's stores."""
        return list(await asyncio.gather(*(self.get(key, prototype, wanted) for key, wanted in key_ranges)))

    async def exists(self, key: str) -> bool:
        """As zarr's stores."""
        return await asyncio.to_thread(self.bytes.size, key) is not None

    async def list_dir(self, prefix: str) -> AsyncIterator[str]:
        """Folders directly under a prefix."""
        for name in await asyncio.to_thread(self.bytes.folders, f"{prefix.rstrip('/')}/" if prefix else ""):
            yield name

    def list(self) -> AsyncIterator[str]:
        """Not needed to read."""
        return self._not_to_be_had("list all keys")

    def list_prefix(self, prefix: str) -> AsyncIterator[str]:
        """Not needed to read."""
        return self._not_to_be_had("list all keys")

    async def set(self, key: str, value: Buffer) -> None:
        """Not to be had."""
        self._not_to_be_had("write")

    async def delete(self, key: str) -> None:
        """Not to be had."""
        self._not_to_be_had("delete")

    def _not_to_be_had(self, what: str, *_: Any) -> NoReturn:
        raise NotImplementedError(f"{self.bytes.url} is opened for reading; it cannot {what}")

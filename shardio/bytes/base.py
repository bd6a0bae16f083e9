"""ByteStore: objects by key, read whole or in ranges, from several threads at once."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence


class ByteStore(ABC):
    """Objects by key. All methods are safe from several threads.

    An absent object is None or False, never an error. One that may not be read (EACCES, 403) is a ReadError, never
    absent. One that ends before the bytes asked for is a CorruptChunkError.

    Attributes:
        url: where it lies, for errors; never holds credentials.
        gap: ranges of one object that lie nearer than this many bytes are cheaper fetched as one.
        requests: requests worth having in flight at once.
        fetched: bytes fetched so far.
        requests_made: requests made so far.
    """

    url: str
    gap: int = 0
    requests: int = 1
    fetched: int = 0
    requests_made: int = 0

    @abstractmethod
    def size(self, key: str) -> int | None:
        """Bytes of an object; None if there is none."""

    @abstractmethod
    def read(self, key: str, start: int = 0, stop: int | None = None) -> bytes | memoryview | None:
        """Bytes start..stop of an object, to its end by default; a negative start counts from its end.

        Fewer come if the object ends before; None if there is no such object.
        """

    @abstractmethod
    def read_into(self, key: str, start: int, into: memoryview) -> bool:
        """Fill `into` (bytes, contiguous) with an object's bytes from `start`; False if there is no such object."""

    def read_ranges(self, key: str, ranges: Sequence[tuple[int, int]], into: Sequence[memoryview]) -> bool:
        """Fill one buffer per range (start, stop) of an object, as long as the range; False if there is no object.

        Ranges come sorted by start; those that continue each other are one request.
        """
        return all(self.read_into(key, start, part) for (start, _), part in zip(ranges, into, strict=True))

    @abstractmethod
    def folders(self, prefix: str) -> list[str]:
        """Names of the folders directly under a prefix, which is "" or ends in "/"."""

    def close(self) -> None:  # noqa: B027
        """Let go of files and connections."""

"""RemoteBytes: objects behind a URL, fetched in ranges, several at once, and again where a server or network fails."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from shardio.bytes.base import ByteStore
from shardio.bytes.client import Failure, connect
from shardio.errors import CorruptChunkError, NotAllowedError, ReadError
from shardio.location import visible
from shardio.team import unpinned

T = TypeVar("T")
PART = 16 << 20
"""Bytes of the largest request: what is larger is fetched as several at once, and only the part that fails again."""
FIRST_WAIT_S, LONGEST_WAIT_S = 0.1, 10.0
"""Seconds to wait before the first new try and before a late one; doubled each time, less up to half at random."""
LATENCY_S, BANDWIDTH = 0.03, 1e9
"""Assumed: seconds to a request's first byte (until a few small ones have told), bytes/s of all requests together."""
LEAST_GAP, MOST_GAP = 16 << 10, 4 << 20
"""Bounds of the gap between ranges over which they are fetched as one."""
SMALL = 64 << 10
"""Bytes of a request whose time tells the latency rather than the bandwidth."""


class Merged(NamedTuple):
    """Ranges fetched by one request: bytes start..stop, and which of them go where."""

    start: int
    stop: int
    pieces: list[tuple[int, memoryview]]


class RemoteBytes(ByteStore):
    """Objects under a URL: http(s), s3, gs, az and abfs through obstore, all other schemes through fsspec.

    One client per process serves all stores on the same server with the same options; it limits the requests in flight,
    and all of them wait, and fewer go at once, when the server says that there are too many (429, 503).

    `gap` is latency x bandwidth / requests in flight: the bytes that come in the time that a request more costs while
    others are under way. The latency is the least time of the first small requests.

    Args:
        url: root; user, password and query are used, but never shown.
        storage_options: options of obstore (access_key_id, endpoint, skip_signature, client_options, ...) or of fsspec
            (key, secret, token, endpoint_url, anon, client_kwargs, headers, ...), and four of our own: `retries`, new
            tries after a failure that may pass (10); `timeout`, seconds without a byte (30); `requests`, at once (32);
            `gap`, if it is not to be measured.

    Raises:
        ReadError: a server keeps failing, or fails for good; names the object, and the last status.
        NotAllowedError: it does not allow the object to be read (401, 403).
    """

    def __init__(self, url: str, storage_options: dict[str, Any] | None = None) -> None:
        self.url = visible(url)
        options = dict(storage_options or {})
        self._retries = int(options.pop("retries", 10))
        gap = options.pop("gap", None)
        self._client, self._prefix = connect(url, options)
        self.requests = self._client.requests
        self._small: list[float] = []
        self._lock = threading.Lock()
        self._measure = gap is None
        self.gap = _gap(LATENCY_S, self.requests) if gap is None else int(gap)

    def __repr__(self) -> str:
        return f"RemoteBytes({self.url!r})"

    def size(self, key: str) -> int | None:
        """See ByteStore.size."""
        path = self._path(key)
        return self._try(key, lambda: self._client.size(path))

    def read(self, key: str, start: int = 0, stop: int | None = None) -> memoryview | None:
        """See ByteStore.read."""
        path = self._path(key)
        if stop is not None and stop <= start:
            return memoryview(b"") if self.size(key) is not None else None
        if stop is None or stop - start <= PART:
            return self._try(key, lambda: self._client.get(path, start, stop))
        size = self.size(key)
        if size is None:
            return None
        buffer = memoryview(bytearray(max(0, min(stop, size) - start)))
        return buffer if not buffer or self.read_into(key, start, buffer) else None

    def read_into(self, key: str, start: int, into: memoryview) -> bool:
        """See ByteStore.read_into."""
        return self.read_ranges(key, ((start, start + len(into)),), (into,))

    def read_ranges(self, key: str, ranges: Sequence[tuple[int, int]], into: Sequence[memoryview]) -> bool:
        """See ByteStore.read_ranges; those nearer than `gap` are one request, several requests go at once."""
        parts = list(merged(ranges, into, self.gap))
        if len(parts) < 2:
            return all(self._fill(key, part) for part in parts)
        with unpinned():
            return all(self._client.pool.map(lambda part: self._fill(key, part), parts))

    def folders(self, prefix: str) -> list[str]:
        """Names of the folders directly under a prefix. Raises ReadError where the server cannot list."""
        if not self._client.lists:
            raise ReadError(
                f"{self.url} is behind HTTP, which cannot list what is under {prefix or '/'!r}, so its arrays are not "
                f"known: consolidate its metadata (zarr.consolidate_metadata), or name one array by group="
            )
        path = self._path(prefix)
        return self._try(prefix, lambda: self._client.folders(path)) or []

    def _path(self, key: str) -> str:
        if ".." in key and ".." in key.split("/"):
            raise ReadError(f"{key!r} leads out of {self.url}; nothing outside a store is read")
        return f"{self._prefix}/{key}" if self._prefix else key

    def _fill(self, key: str, part: Merged) -> bool:
        path = self._path(key)
        found = self._try(key, lambda: self._client.get(path, part.start, part.stop))
        if found is None:
            return False
        if len(found) < part.stop - part.start:
            raise CorruptChunkError(
                f"{key!r} in {self.url} ends at byte {part.start + len(found)}, but bytes {part.start} to {part.stop} "
                f"are needed: it is truncated; restore it"
            )
        stored = np.frombuffer(found, np.uint8)
        for start, piece in part.pieces:  # by numpy, which lets other threads run meanwhile
            np.copyto(np.frombuffer(piece, np.uint8), stored[start - part.start :][: len(piece)])
        return True

    def _try(self, key: str, call: Callable[[], T]) -> T | None:
        """The call's result, tried anew where it may help; None if there is no such object."""
        client = self._client
        if client.process != os.getpid():
            raise ReadError(
                f"{self.url} was opened in process {client.process} and is read in {os.getpid()}, which was forked "
                f"from it; connections do not survive that: open it in each process, or start them by spawn"
            )
        for attempt in range(self._retries + 1):
            wait = min(LONGEST_WAIT_S, FIRST_WAIT_S * 2**attempt) * random.uniform(0.5, 1)
            client.begin()
            failure: Failure | None = None
            try:
                began = time.monotonic()
                with unpinned():  # the client has threads of its own
                    found = call()
                self._count(len(found) if isinstance(found, memoryview) else 0, time.monotonic() - began)
                return found
            except Exception as error:  # both libraries raise errors of many kinds; their texts can hold credentials
                failure = client.failure(error)
                self._count(0, None)
            finally:
                client.end(failure is None, wait if failure is not None and failure.kind == "busy" else 0.0)
            if failure.kind == "absent":
                return None
            if failure.kind == "refused":
                raise NotAllowedError(
                    f"{key!r} in {self.url} is not allowed to be read ({failure.reason}); it may well be there: check "
                    f"storage_options (key and secret, token, anon=True for public data)"
                )
            if failure.kind == "final" or attempt == self._retries:
                tries = "" if failure.kind == "final" else f" after {attempt + 1} tries"
                raise ReadError(f"{key!r} in {self.url} cannot be read{tries}: {failure.reason}")
            if failure.kind == "again":
                time.sleep(wait)
        raise AssertionError("the last try returns or raises")

    def _count(self, nbytes: int, seconds: float | None) -> None:
        with self._lock:
            self.requests_made += 1
            self.fetched += nbytes
            if self._measure and seconds is not None and 0 < nbytes <= SMALL and len(self._small) < 8:
                self._small.append(seconds)
                if len(self._small) in (4, 8):
                    self.gap = _gap(min(self._small), self.requests)


def _gap(latency: float, requests: int) -> int:
    return int(min(MOST_GAP, max(LEAST_GAP, latency * BANDWIDTH / requests)))


def merged(ranges: Sequence[tuple[int, int]], into: Sequence[memoryview], gap: int) -> Iterator[Merged]:
    """Sorted ranges as few requests of PART bytes at most, those nearer than `gap` in one."""
    group: Merged | None = None
    for (first, last), buffer in zip(ranges, into, strict=True):
        for start in range(first, last, PART):
            stop = min(last, start + PART)
            piece = (start, buffer[start - first : stop - first])
            if group is not None and start - group.stop < gap and stop - group.start <= PART:
                group = Merged(group.start, max(group.stop, stop), [*group.pieces, piece])
                continue
            if group is not None:
                yield group
            group = Merged(start, stop, [piece])
    if group is not None:
        yield group

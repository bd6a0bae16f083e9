"""LocalBytes: files of a folder, read at offsets through descriptors that are held open."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path

from shardio.bytes.base import ByteStore
from shardio.errors import CorruptChunkError, NotAllowedError, ReadError
from shardio.limits import check_key

HELD = 128
"""Descriptors that one store holds open."""
MOST_PARTS = 1000
"""Buffers that one preadv fills; POSIX systems take 1024."""
PREADV = hasattr(os, "preadv")


class _File:
    """An open descriptor, and how many threads read from it."""

    def __init__(self, path: str) -> None:
        self.descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0))
        self.users = 0
        self.held = True


class LocalBytes(ByteStore):
    """Files under a folder; a key is a path in it, with "/"."""

    gap = 16 << 10  # a pread costs about as much as copying this many bytes

    def __init__(self, folder: str | os.PathLike[str], *, held: int = HELD) -> None:
        self.url = os.fspath(folder)
        self._folder = str(Path(folder)) + os.sep
        self._held = held
        self._files: dict[str, _File] = {}
        self._lock = threading.Lock()

    def size(self, key: str) -> int | None:
        """See ByteStore.size."""
        file = self._take(key)
        if file is None:
            return None
        try:
            return os.fstat(file.descriptor).st_size
        finally:
            self._give(file, 0)

    def read(self, key: str, start: int = 0, stop: int | None = None) -> memoryview | None:
        """See ByteStore.read."""
        file, done = self._take(key), 0
        if file is None:
            return None
        try:
            if start < 0 or stop is None:
                size = os.fstat(file.descriptor).st_size
                start = max(0, size + start) if start < 0 else start
                stop = size if stop is None else min(stop, size)
            buffer = memoryview(bytearray(max(0, stop - start)))
            done = self._fill(file, start, [buffer], key)
            return buffer[:done]
        finally:
            self._give(file, done)

    def read_into(self, key: str, start: int, into: memoryview) -> bool:
        """See ByteStore.read_into."""
        file, done = self._take(key), 0
        if file is None:
            return False
        try:
            done = self._fill(file, start, [into], key)
        finally:
            self._give(file, done)
        if done < len(into):
            raise self._truncated(key, start, start + len(into), done)
        return True

    def read_ranges(self, key: str, ranges: Sequence[tuple[int, int]], into: Sequence[memoryview]) -> bool:
        """See ByteStore.read_ranges."""
        file, total = self._take(key), 0
        if file is None:
            return False
        try:
            at = 0
            while at < len(ranges):
                after = at + 1
                while after < len(ranges) and ranges[after][0] == ranges[after - 1][1] and after - at < MOST_PARTS:
                    after += 1
                start, stop = ranges[at][0], ranges[after - 1][1]
                done = self._fill(file, start, list(into[at:after]), key)
                total += done
                if done < stop - start:
                    raise self._truncated(key, start, stop, done)
                at = after
            return True
        finally:
            self._give(file, total)

    def folders(self, prefix: str) -> list[str]:
        """See ByteStore.folders."""
        with os.scandir(self._folder + prefix) as found:
            return [entry.name for entry in found if entry.is_dir()]

    def _truncated(self, key: str, start: int, stop: int, done: int) -> CorruptChunkError:
        return CorruptChunkError(
            f"{key!r} in {self.url} ends at byte {start + done}, but bytes {start} to {stop} are needed: it is cut"
        )

    def close(self) -> None:
        """Close the descriptors; a read after this opens its own."""
        with self._lock:
            for file in self._files.values():
                self._drop(file)
            self._files.clear()

    def _take(self, key: str) -> _File | None:
        """The file of a key, opened if it is not; not closed until it is given back."""
        with self._lock:
            file = self._files.pop(key, None)
            if file is None:
                check_key(key, self.url)
                try:
                    file = _File(self._folder + key)
                except (FileNotFoundError, NotADirectoryError):
                    return None
                except ValueError as error:  # such as a zero byte
                    raise ReadError(f"{key!r} in {self.url} is no name of a file: {error}") from error
                except OSError as error:
                    kind = NotAllowedError if isinstance(error, PermissionError) else ReadError
                    raise kind(f"{key!r} in {self.url} cannot be opened: {error}; check its permissions") from error
            file.users += 1
            self._files[key] = file  # the last one used comes last
            if len(self._files) > self._held:
                self._drop(self._files.pop(next(iter(self._files))))
            return file

    def _give(self, file: _File, fetched: int) -> None:
        with self._lock:
            self.fetched += fetched
            self.requests_made += fetched > 0
            file.users -= 1
            if not file.held and not file.users:
                os.close(file.descriptor)

    def _drop(self, file: _File) -> None:
        """Close a file once nobody reads from it."""
        file.held = False
        if not file.users:
            os.close(file.descriptor)

    def _fill(self, file: _File, start: int, into: list[memoryview], key: str) -> int:
        """Fill the buffers with a file's bytes from `start`; how many came before its end."""
        try:
            return _preadv(file.descriptor, start, into) if PREADV else self._seek_and_read(file, start, into)
        except OSError as error:
            raise ReadError(f"{key!r} in {self.url} cannot be read from byte {start}: {error}") from error

    def _seek_and_read(self, file: _File, start: int, into: list[memoryview]) -> int:
        """The same where the system has no preadv (Windows)."""
        done = 0
        with self._lock:
            os.lseek(file.descriptor, start, os.SEEK_SET)
            for part in into:
                at = 0
                while at < len(part):
                    found = os.read(file.descriptor, min(len(part) - at, 64 << 20))
                    part[at : at + len(found)] = found
                    at, done = at + len(found), done + len(found)
                    if not found:
                        return done
        return done


def _preadv(descriptor: int, start: int, into: list[memoryview]) -> int:
    wanted = len(into[0]) if len(into) == 1 else sum(map(len, into))
    done = os.preadv(descriptor, into, start)
    while 0 < done < wanted:  # a signal, or more than 2 GiB
        rest, skip = [], done
        for part in into:
            rest.append(part[min(skip, len(part)) :])
            skip = max(0, skip - len(part))
        found = os.preadv(descriptor, rest, start + done)
        if not found:
            break
        done += found
    return done

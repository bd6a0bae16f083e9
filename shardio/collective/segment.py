"""Memory that processes of one machine share: files in memory without names, once every process has opened them."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any, Self

import numpy as np

from shardio.errors import ReadError

fcntl: ModuleType | None
try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

Array = np.ndarray[Any, np.dtype[Any]]
ALIGNED = 64
"""Arrays in a segment start at multiples of this many bytes."""


def folders() -> list[Path]:
    """Where such files can be: in memory, then on a disk (whose cache is memory as well)."""
    return [path for path in (Path("/dev/shm"), Path(tempfile.gettempdir())) if os.access(path, os.W_OK)]


class Segment:
    """A piece of shared memory. Its file has a name until `unlink`, and its memory lives until all have closed it."""

    def __init__(self, path: Path, descriptor: int, size: int) -> None:
        self.path, self.size = path, size
        self._memory = mmap.mmap(descriptor, size)

    @classmethod
    def create(cls, name: str, size: int) -> Self:
        """Make one of `size` bytes. Raises ReadError where there is no room; memory is taken now, not when written."""
        full: list[str] = []
        for folder in folders():
            path = folder / name
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                if hasattr(os, "posix_fallocate"):  # without it, a full file system kills the process that writes
                    os.posix_fallocate(descriptor, 0, size)
                else:
                    os.truncate(descriptor, size)
                return cls(path, descriptor, size)
            except OSError as error:
                path.unlink(missing_ok=True)
                if error.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT):
                    raise
                full.append(str(folder))
            finally:
                os.close(descriptor)
        raise ReadError(
            f"no room for {size / 1e6:.1f} MB of shared memory in {' or '.join(full) or 'any folder'}: enlarge it "
            f"(docker run --shm-size=...), lower the byte budget, or read with read='own'"
        )

    @classmethod
    def attach(cls, name: str, size: int) -> Self:
        """Open one that another process made."""
        for folder in folders():
            with contextlib.suppress(FileNotFoundError):
                descriptor = os.open(folder / name, os.O_RDWR)
                try:
                    return cls(folder / name, descriptor, size)
                finally:
                    os.close(descriptor)
        raise ReadError(f"shared memory {name} of another rank is not there; was it deleted?")

    @staticmethod
    def remove(name: str) -> None:
        """Take the name away from one that another process made, if it has one still."""
        for folder in folders():
            with contextlib.suppress(OSError):
                (folder / name).unlink(missing_ok=True)

    def array(self, offset: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
        """A view of some of it."""
        return np.ndarray(shape, dtype, self._memory, offset)

    def unlink(self) -> None:
        """Take its name away; who has it open keeps it."""
        with contextlib.suppress(OSError):  # Windows keeps names of open files
            self.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Let go of it; views that are still held keep the memory until they end."""
        self.unlink()
        with contextlib.suppress(BufferError):
            self._memory.close()


class Lifeline:
    """A locked file that shows other processes of the machine whether this one lives: the system unlocks it at its end.

    Args:
        name: of the file.
        size: bytes of the file, which can be mapped as shared memory too.

    Attributes:
        path: of the file, until `hide`.
        own: its descriptor.
        others: descriptors of those of other processes, by number.
    """

    def __init__(self, name: str, size: int) -> None:
        self.path = folders()[0] / name
        self.own = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        os.truncate(self.own, size)
        self.others: dict[int, int] = {}
        if fcntl is not None:
            fcntl.lockf(self.own, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def watch(self, others: dict[int, Path]) -> bool:
        """Open the files of other processes, by number; False if they cannot be seen from here."""
        try:
            for number, path in others.items():
                self.others[number] = os.open(path, os.O_RDWR)
        except OSError:
            return False
        return True

    def ended(self) -> list[int]:
        """Numbers of the processes watched that live no more."""
        return [number for number, descriptor in self.others.items() if self._unlocked(descriptor)]

    def _unlocked(self, descriptor: int) -> bool:
        if fcntl is None:
            return False
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return False
        fcntl.lockf(descriptor, fcntl.LOCK_UN)
        return True

    def hide(self) -> None:
        """Take the name away once all who watch have opened it."""
        with contextlib.suppress(OSError):
            self.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Count as ended."""
        self.hide()
        descriptors = (*([] if self.own < 0 else [self.own]), *self.others.values())
        self.own, self.others = -1, {}
        for descriptor in descriptors:
            os.close(descriptor)

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # of a loader that nobody closed; or the interpreter ends
            self.close()

"""A team of threads on which whoever has work for several lets idle ones help, also from within such work."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import Any

from shardio.errors import ReadError

_PINNED = threading.local()
"""`cores`: those that this thread keeps to, and all that it could use; absent or None if it keeps to none."""


class Team:
    """Called with jobs, it runs them on its threads and gives their results in order; waits until none runs any more.

    A job may itself call the team: then its thread works on those jobs, too, so nothing waits for a free thread.

    Attributes:
        threads: how many work at once; 1 is the caller's alone.
    """

    def __init__(self, threads: int | None = None) -> None:
        self.threads = usable_cores() if threads is None else threads
        if self.threads < 1:
            raise ValueError(f"threads={threads}; at least 1 is needed")
        self._mine = threading.local()
        self._process = os.getpid()
        self._pool = self._started() if self.threads > 1 else None
        self._outgrown: list[ThreadPoolExecutor] = []

    def _started(self) -> ThreadPoolExecutor:
        """Threads that keep apart: each has its share of the cores.

        Threads that wake each other, as those that take turns with the interpreter lock do, are otherwise put on one
        core by Linux, beside idle ones: reading a slab after a pause took 1.4 to 1.7 times as long.
        """
        cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
        threads, number = self.threads, count(os.getpid())  # not all processes of a machine begin at its first core

        def begin() -> None:
            self._mine.at_work = True
            if threads <= len(cores):
                own = cores[next(number) % threads :: threads]
                with contextlib.suppress(OSError):  # not allowed here: then the system places it
                    os.sched_setaffinity(0, own)
                    _PINNED.cores = own, cores

        return ThreadPoolExecutor(threads, "shardio-read", begin)

    def close(self) -> None:
        """End the threads."""
        for pool in (*self._outgrown, self._pool):
            if pool is not None:
                pool.shutdown(cancel_futures=True)

    def grow(self, threads: int) -> None:
        """Work with so many threads from now on, if they are more: waiting for a server takes no core."""
        if threads > self.threads:
            if self._pool is not None:
                self._outgrown.append(self._pool)  # others may be at work in it
            self.threads = threads
            self._pool = self._started()

    def __call__(self, jobs: Sequence[Callable[[], Any]]) -> list[Any]:
        """Run the jobs; the first error of any is raised once none of them runs any more.

        Raises ReadError in a process that was forked from the team's: its threads are not there, and never answer.
        """
        if self._pool is None or len(jobs) < 2:
            return [job() for job in jobs]
        if self._process != os.getpid():
            raise ReadError(
                f"a reader made in process {self._process} is used in {os.getpid()}, which was forked from it; threads "
                f"do not survive that: make the reader in each process, or start them by spawn"
            )
        results: list[Any] = [None] * len(jobs)
        waiting, errors = iter(range(len(jobs))), list[BaseException]()

        def work() -> None:
            for at in waiting:  # each number goes to one thread
                if errors:
                    return
                try:
                    results[at] = jobs[at]()
                except BaseException as error:
                    errors.append(error)

        within = getattr(self._mine, "at_work", False)
        helpers = [self._pool.submit(work) for _ in range(min(self.threads, len(jobs)) - within)]
        if within:
            work()
        for helper in helpers:
            while not (within and helper.cancel()) and not helper.done():
                try:
                    helper.result()
                except BaseException as error:  # Ctrl-C while waiting: no job is begun any more
                    errors.insert(0, error)
        if errors:
            raise errors[0]
        return results


@contextlib.contextmanager
def unpinned() -> Iterator[None]:
    """Any core for this thread meanwhile: around code that may start threads, which inherit the cores for good."""
    pinned: tuple[list[int], list[int]] | None = getattr(_PINNED, "cores", None)
    if pinned is None:
        yield
        return
    own, cores = pinned
    _PINNED.cores = None
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        _PINNED.cores = pinned
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, own)


def usable_cores() -> int:
    """Cores that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1

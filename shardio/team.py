"""A team of threads on which whoever has work for several lets idle ones help, also from within such work."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any


class Team:
    """Called with jobs, it runs them on the caller's thread and on idle ones, and gives their results in order.

    A job may itself call the team: the caller always works on its own jobs, so nothing waits for a free thread.

    Attributes:
        threads: how many work at once; 1 is the caller's alone.
    """

    def __init__(self, threads: int | None = None) -> None:
        self.threads = usable_cores() if threads is None else threads
        if self.threads < 1:
            raise ValueError(f"threads={threads}; at least 1 is needed")
        self._pool = ThreadPoolExecutor(self.threads, "shardio-read") if self.threads > 1 else None
        self._outgrown: list[ThreadPoolExecutor] = []

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
            self.threads, self._pool = threads, ThreadPoolExecutor(threads, "shardio-read")

    def __call__(self, jobs: Sequence[Callable[[], Any]]) -> list[Any]:
        """Run the jobs; the first error of any is raised once none of them runs any more."""
        if self._pool is None or len(jobs) < 2:
            return [job() for job in jobs]
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

        helpers = [self._pool.submit(work) for _ in range(min(self.threads, len(jobs)) - 1)]
        work()
        for helper in helpers:
            if not helper.cancel():
                helper.result()
        if errors:
            raise errors[0]
        return results


def usable_cores() -> int:
    """Cores that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1

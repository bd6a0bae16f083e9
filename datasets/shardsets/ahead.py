"""Reads batches on a background thread, a few before they are asked for."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

from torch.profiler import record_function

from shardsets.errors import BatchError

__all__ = ["Ahead"]

Batch = TypeVar("Batch")


class Ahead(Generic[Batch]):
    """Reads batches one after the other on a thread of its own, at most ``ahead`` before they are asked for.

    Which reads have begun follows from how many batches were asked for alone, so it is the same on all ranks.

    Attributes:
        waited: seconds that `next` waited.
    """

    def __init__(self, read: Callable[[list[int]], Batch], batches: Iterable[list[int]], ahead: int) -> None:
        self._read = read
        self._todo: Iterator[list[int]] = iter(batches)
        self._ahead = ahead
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="shardsets-ahead") if ahead else None
        self._flying: deque[Future[Batch]] = deque()
        self._stopped = False
        self._process = os.getpid()
        self.waited = 0.0
        self._fill()

    def _fill(self) -> None:
        while self._pool is not None and len(self._flying) < self._ahead:
            indices = next(self._todo, None)
            if indices is None:
                return
            self._flying.append(self._pool.submit(self._read, indices))

    def next(self) -> Batch:
        """The next batch.

        Raises:
            BatchError: `stop` was called, or this process was forked while batches were read ahead.
        """
        if self._forked():
            raise BatchError(
                f"this iteration began in process {self._process}, and {os.getpid()} was forked from it; the thread "
                f"that reads ahead does not survive that: make the loader in each process, or start them by spawn"
            )
        if self._stopped:
            raise BatchError("this iteration was ended: the loader was closed, given a state, or iterated over anew")
        begin = time.perf_counter()
        with record_function("shardsets.wait"):
            if self._pool is None:
                batch = self._read(next(self._todo))
            else:
                batch = self._flying.popleft().result()
                self._fill()
        self.waited += time.perf_counter() - begin
        return batch

    def stop(self, cancel: Callable[[], None] = lambda: None) -> None:
        """Drop what was read ahead, and wait for the read that runs.

        Args:
            cancel: called if a read may still run, to end its waiting for other ranks.
        """
        if self._stopped:
            return
        self._stopped = True
        self._todo = iter(())
        if self._pool is not None and not self._forked():
            if self._flying:
                cancel()
            self._pool.shutdown(cancel_futures=True)
            self._flying.clear()

    def _forked(self) -> bool:
        """Has the thread that reads ahead stayed behind in another process?"""
        return self._pool is not None and self._process != os.getpid()

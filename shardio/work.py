"""Runs one function over many parts of a store by dask: on threads here, or on the workers of an existing cluster."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, TypeVar

from dask.base import compute as compute_all
from dask.delayed import delayed

from shardio.errors import ClusterError
from shardio.source import Missing, Store, open_store

Part = TypeVar("Part")
Result = TypeVar("Result")
Done = Callable[[int, int], None]
"""Called with (parts done, parts in all), by one thread at a time."""

BATCH = 512
"""Parts that dask is given at once; the results of one batch are taken before the next is begun."""
CONNECT_S = 10
"""Seconds to wait for a cluster's scheduler."""


@dataclass(frozen=True)
class Cluster:
    """An existing `dask.distributed` cluster whose workers can open the store by themselves.

    Attributes:
        scheduler: address, such as "tcp://10.0.0.1:8786".
        source: path or URL of the store, as the workers reach it.
        missing, format: see open_store.
    """

    scheduler: str
    source: str
    missing: Missing = "raise"
    format: str | None = None


def run(
    function: Callable[[Store, Part], Result],
    store: Store,
    parts: Sequence[Part],
    *,
    threads: int | None = None,
    cluster: Cluster | None = None,
    done: Done | None = None,
) -> Iterator[Result]:
    """The function's result for every part, in the parts' order.

    Args:
        function: called as function(store, part); with a cluster it and the parts are sent to the workers.
        store: the opened store; the workers of a cluster open their own.
        parts: what to work on.
        threads: threads here; by default dask's choice, the cores.
        cluster: where to run instead.
        done: told as the work goes on.

    Raises the first error of the function, and ClusterError if the cluster cannot be reached.
    """
    batches = [parts[at : at + BATCH] for at in range(0, len(parts), BATCH)]
    count = _Count(len(parts), done)
    if cluster is None:
        for batch in batches:
            calls = [delayed(partial(_counted, function, store, part, count), pure=False)() for part in batch]
            yield from compute_all(*calls, scheduler="threads", num_workers=threads)
        return
    from distributed import Client  # half a second to import

    try:
        client = Client(cluster.scheduler, timeout=CONNECT_S, set_as_default=False)
    except (OSError, ValueError) as error:
        raise ClusterError(
            f"no dask scheduler answers at {cluster.scheduler!r}: {error}; check the address, or leave it out"
        ) from error
    with client:
        for batch in batches:
            futures = client.map(partial(_by_worker, function, cluster), batch, pure=False)
            try:
                for future in futures:
                    result = future.result()
                    count()
                    yield result
            finally:  # after an error, the others need not be done
                client.cancel(futures)


class _Count:
    """Counts finished parts and tells the caller."""

    def __init__(self, total: int, done: Done | None) -> None:
        self.total, self.done, self.count, self.lock = total, done, 0, threading.Lock()

    def __call__(self) -> None:
        with self.lock:
            self.count += 1
            if self.done is not None:
                self.done(self.count, self.total)


def _counted(function: Callable[[Store, Any], Any], store: Store, part: Any, count: _Count) -> Any:
    result = function(store, part)
    count()
    return result


_opening = threading.Lock()


@lru_cache(4)
def _opened(cluster: Cluster) -> Store:
    return open_store(cluster.source, missing=cluster.missing, format=cluster.format)


def _by_worker(function: Callable[[Store, Any], Any], cluster: Cluster, part: Any) -> Any:
    with _opening:  # so that two threads of a worker do not open it twice
        store = _opened(cluster)
    return function(store, part)

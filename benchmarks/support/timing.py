"""Calls that take turns, timed one by one, and tables of what came out."""

from __future__ import annotations

import gc
import hashlib
import os
import random
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
SPINNERS = ThreadPoolExecutor(CORES)


def spin(seconds: float = 0.01) -> None:
    """Keep a core busy, without the interpreter lock."""
    data, end = bytes(1 << 20), time.perf_counter() + seconds
    while time.perf_counter() < end:
        hashlib.sha256(data)


def wake() -> None:
    """Keep all cores busy for a moment."""
    list(SPINNERS.map(spin, [0.01] * CORES))


def alternating(
    calls: dict[str, Callable[[], Any]], repeats: int, ready: Callable[[], Any] = wake
) -> dict[str, list[float]]:
    """Milliseconds of single calls by name; they take turns in varying order, each when `ready` has returned."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    gc.collect()
    gc.disable()
    order, turns = list(calls.items()), random.Random(0)  # what ran before sets what lies in the caches
    for _ in range(repeats):
        turns.shuffle(order)
        for name, call in order:
            ready()
            start = time.perf_counter()
            call()
            times[name].append((time.perf_counter() - start) * 1e3)
    gc.enable()
    return times


def summary(times: Sequence[float]) -> dict[str, float]:
    """Median and quartiles."""
    low, middle, high = statistics.quantiles(times, n=4) if len(times) > 1 else [times[0]] * 3
    return {"median": middle, "low": low, "high": high}


def cell(found: dict[str, float]) -> str:
    return f"{found['median']:.3g} ({found['low']:.3g}-{found['high']:.3g})"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(
        ["| " + " | ".join(head) + " |", "|" + "---|" * len(head), *("| " + " | ".join(row) + " |" for row in rows)]
    )

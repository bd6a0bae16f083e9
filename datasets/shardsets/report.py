"""What a loader has done: what it skipped and filled, bytes, cache hits, time reading and waiting."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from shardio.cache import CacheStats
from shardsets.bad import BadData, Skipped
from shardsets.batches import Batches
from shardsets.judge import Judge
from shardsets.samples import SampleSet

__all__ = ["Report"]


@dataclass(frozen=True)
class Report:
    """What one rank's loader has done since it was made; what was skipped and filled is that of all ranks.

    Attributes:
        rank: this rank.
        steps: batches handed out.
        skips, fills: steps left out, and places filled with NaN.
        skipped, filled: the first thousand of them.
        left_out: samples that reach over irregular places of the time axis, which are not in the order at all.
        bytes_needed: of the slabs handed out and read ahead, as stored values.
        bytes_fetched: from the store, by this rank; None where a library fetches for us and does not say.
        bytes_decoded: by this rank.
        chunks: decoded by this rank.
        cache_hits, cache_misses: rows (one time of one array) served from memory, and decoded, where chunks hold
            several times.
        cache_bytes: held in memory now.
        seconds_reading: in the reading thread.
        seconds_waiting: that steps waited for the reader.
        reading: array -> how it is read ("own" or "collective") and why.
    """

    rank: int
    steps: int
    skips: int
    fills: int
    skipped: tuple[Skipped, ...]
    filled: tuple[BadData, ...]
    left_out: int
    bytes_needed: int
    bytes_fetched: int | None
    bytes_decoded: int
    chunks: int
    cache_hits: int
    cache_misses: int
    cache_bytes: int
    seconds_reading: float
    seconds_waiting: float
    reading: Mapping[str, str]

    @classmethod
    def of(cls, judge: Judge, batches: Batches, samples: SampleSet, *, steps: int, waited: float) -> Report:
        """What these have counted so far."""
        reader = batches.reader
        read = reader.reader.stats
        cached = CacheStats() if reader.cache is None else reader.cache.stats
        return cls(
            rank=judge.ranks.rank,
            steps=steps,
            skips=judge.skips,
            fills=judge.fills,
            skipped=tuple(judge.skipped),
            filled=tuple(judge.filled),
            left_out=samples.left_out,
            bytes_needed=read.bytes_needed,
            bytes_fetched=read.bytes_stored if read.bytes_stored or not read.bytes_fetched else None,
            bytes_decoded=read.bytes_fetched,
            chunks=read.chunks,
            cache_hits=cached.hits,
            cache_misses=cached.misses,
            cache_bytes=cached.bytes_held,
            seconds_reading=batches.seconds,
            seconds_waiting=waited,
            reading=reader.modes(),
        )

    @property
    def hit_rate(self) -> float:
        """Share of the rows that were served from memory; 0 where nothing is cached."""
        asked = self.cache_hits + self.cache_misses
        return self.cache_hits / asked if asked else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Plain data, as JSON takes it."""
        return {**asdict(self), "reading": dict(self.reading), "hit_rate": self.hit_rate}

    def __str__(self) -> str:
        lines = [
            f"rank {self.rank}: {self.steps} steps, {self.skips} skipped, {self.fills} filled, "
            f"{self.left_out} samples left out",
            f"needed {_mb(self.bytes_needed)}, fetched {_mb(self.bytes_fetched)}, decoded {_mb(self.bytes_decoded)} "
            f"in {self.chunks} chunks",
            f"reading {self.seconds_reading:.2f} s, steps waited {self.seconds_waiting:.2f} s",
        ]
        if self.cache_hits + self.cache_misses:
            lines.append(
                f"cache: {self.cache_hits} hits, {self.cache_misses} misses ({self.hit_rate:.1%} hits), "
                f"{_mb(self.cache_bytes)} held"
            )
        lines += [f"{name}: {how}" for name, how in self.reading.items()]
        lines += [
            f"skipped {list(step.samples)} of epoch {step.epoch}: {bad}"
            for step in self.skipped
            for bad in step.because
        ]
        lines += [f"filled {bad}" for bad in self.filled]
        return "\n".join(lines)


def _mb(nbytes: int | None) -> str:
    return "unknown" if nbytes is None else f"{nbytes / 1e6:.3f} MB"

"""One rank's batches as plain tensors: read, normalized, transformed, the halo cut off, bad values looked for."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.profiler import record_function

from shardsets.bad import BadData, reason_of
from shardsets.errors import SampleError
from shardsets.finite import Finite, Name
from shardsets.samples import SlabReader
from shardsets.statistics import ChannelStatistics

__all__ = ["FIELDS", "Batch", "Batches", "Transform"]

Transform = Callable[[dict[str, Any]], dict[str, Any]]
FIELDS = ("input", "target")


@dataclass
class Batch:
    """What reading one batch gave.

    Attributes:
        indices: sample numbers.
        values: the batch's dict; None where it could not be read.
        error: why not.
        bad: the bad data met.
        nonfinite: by field, how many cells of each sample and channel are NaN or infinite, [B, channels].
    """

    indices: list[int]
    values: dict[str, Any] | None = None
    error: Exception | None = None
    bad: list[BadData] = field(default_factory=list)
    nonfinite: dict[str, torch.Tensor] = field(default_factory=dict)


@dataclass
class Batches:
    """Makes this rank's batches.

    Attributes:
        reader: of the rank's slab.
        channels: their names.
        finite: what becomes of NaN and infinite values.
        fill: bad values stay in the batch, as NaN, and are told of.
        rank: of the whole program.
        dtype: of the fields.
        pin: put fields in page-locked memory.
        statistics, transform: see `DomainDataLoader`.
        seconds: spent reading so far.
    """

    reader: SlabReader
    channels: Sequence[str]
    finite: Finite
    fill: bool
    rank: int
    dtype: torch.dtype
    pin: bool
    statistics: ChannelStatistics | None
    transform: Transform | None
    seconds: float = 0.0

    def read(self, indices: list[int]) -> Batch:
        """One batch; called in the background. What goes wrong is in it."""
        batch = Batch(indices)
        begin = time.perf_counter()
        try:
            self._read(batch)
        except Exception as error:
            batch.values, batch.error = None, error
            if reason_of(error) is not None:
                batch.bad.append(self._bad(indices, error))
        self.seconds += time.perf_counter() - begin
        return batch

    def _read(self, batch: Batch) -> None:
        with record_function("shardsets.read"):
            values = self.reader.read(batch.indices, dtype=self.dtype, pin=self.pin)
        for at, error in self.reader.bad:
            batch.bad.append(self._bad([batch.indices[at]], error))
        with record_function("shardsets.prepare"):
            if self.statistics is not None:
                for name in FIELDS:
                    self.statistics.normalize_(values[name])
            if self.transform is not None:
                values = self.transform({**values, "slab": self.reader.slab})
                if not isinstance(values, dict) or any(name not in values for name in FIELDS):
                    raise SampleError("transform must return the batch, a dict with 'input' and 'target'")
                values.pop("slab", None)
            for name in FIELDS:
                values[name] = self._interior(values[name], name)
                self._look(batch, values[name], name)
        batch.values = values

    def _interior(self, values: torch.Tensor, name: str) -> torch.Tensor:
        """The rank's own rows, contiguous."""
        slab = self.reader.slab
        if tuple(values.shape[2:]) != slab.shape:
            raise SampleError(
                f"transform returned {name!r} with grid {tuple(values.shape[2:])}; it must keep the slab's "
                f"{slab.shape}, halo included (the loader cuts it off)"
            )
        for dim, (below, above) in enumerate(slab.halo):
            if below or above:
                values = values.narrow(2 + dim, below, slab.shape[dim] - below - above)
        return values.contiguous()

    def _look(self, batch: Batch, values: torch.Tensor, name: str) -> None:
        """Look for values that are not finite."""
        found, batch.nonfinite[name] = self.finite.check_(values, self.namer(batch, name), fill=self.fill)
        told = {sample for bad in batch.bad for sample in bad.samples}
        for at, error in found:
            if not self.fill:
                raise error
            if batch.indices[at] not in told:  # not the NaN that stands for a chunk already told of
                batch.bad.append(self._bad([batch.indices[at]], error))

    def namer(self, batch: Batch, name: str) -> Name:
        """What puts a (place in the batch, channel) of a field into words."""

        def named(sample: int, channel: int) -> tuple[str, str]:
            known = self.transform is None
            label = repr(self.channels[channel % len(self.channels)]) if known else f"channel {channel}"
            return f"{self.reader.describe(batch.indices[sample])}: {name!r}", label

        return named

    def beyond(self, batch: Batch, counts: Mapping[str, torch.Tensor], cells: int) -> list[tuple[BadData, Exception]]:
        """The samples that have too many values that are not finite.

        Args:
            batch: the batch.
            counts: `Batch.nonfinite`, of all ranks that share the samples together.
            cells: of the whole grid.
        """
        return [
            (self._bad([batch.indices[at]], error), error)
            for name in FIELDS
            for at, error in self.finite.beyond(counts[name], cells, self.namer(batch, name))
        ]

    def _bad(self, indices: Sequence[int], error: Exception) -> BadData:
        met = re.match(r"rank (\d+): ", str(error))  # told by another rank that shares the reading
        rank = int(met[1]) if met else self.rank
        return BadData(
            tuple(indices), tuple(map(self.reader.when, indices)), rank, reason_of(error) or "unknown", str(error)
        )

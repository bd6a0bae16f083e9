"""What the loader needs of a data set: its size, its channels, and this rank's part of any sample."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardio import OwnReader, Partition, ShardIOError
from shardio.cache import RowCache
from shardio.collective import CollectiveReader, Group, Read
from shardio.plan import Halo

__all__ = ["SampleSet", "Slab", "SlabReader"]


@dataclass(frozen=True, eq=False)
class Slab:
    """The part of the grid that a transform sees, halo included.

    Attributes:
        dims: names of the last dims of every field, e.g. ("latitude", "longitude").
        start: first row of the slab along each of them, counted in the whole grid; negative where a halo wraps around.
        shape: rows along each of them.
        halo: rows of halo (below, above) really there along each; fewer than asked at an edge that is not periodic.
        coordinates: the coordinate values of the slab's rows, where the store has them.
    """

    dims: tuple[str, ...]
    start: tuple[int, ...]
    shape: tuple[int, ...]
    halo: tuple[tuple[int, int], ...]
    coordinates: Mapping[str, torch.Tensor]


class SlabReader(ABC):
    """Reads one rank's part of the samples.

    Attributes:
        slab: which part.
        reader: what reads it; its ``stats`` count bytes.
        cache: decoded times kept in memory; None where nothing is kept.
        bad: what the last `read` has filled with NaN: (place in the batch, error).
    """

    slab: Slab
    reader: OwnReader | CollectiveReader
    cache: RowCache | None = None
    bad: Sequence[tuple[int, ShardIOError]] = ()

    @abstractmethod
    def read(self, indices: Sequence[int], *, dtype: torch.dtype, pin: bool) -> dict[str, Any]:
        """The samples as one batch of plain CPU tensors: ``input`` and ``target`` [B, channels, *slab.shape].

        Further entries are passed on to the user as they are.

        Args:
            indices: sample numbers.
            dtype: of the fields.
            pin: put the fields in page-locked memory.
        """

    def expect(self, batches: Sequence[Sequence[int]]) -> None:  # noqa: B027
        """Told before the samples of an epoch are read: the batches that `read` will be called with, in order."""

    def when(self, index: int) -> str:
        """The times of a sample, in words; "" where it has none."""
        return ""

    def describe(self, index: int) -> str:
        """Words that find a sample in its files, for errors."""
        return f"sample {index}"

    def modes(self) -> dict[str, str]:
        """Array -> how it is read, "own" or "collective", and why."""
        return {}

    def close(self) -> None:
        """End the reader's threads."""
        self.reader.close()


class SampleSet(ABC):
    """A data set that a `DomainDataLoader` can serve; independent of ranks.

    Attributes:
        channels: names of the channels of one step, in order.
        spatial: names of the dims that can be cut: the last dims of every field.
        sizes: their lengths.
        periodic: those that go around.
        chunk_rows: rows per stored chunk along each, for ``partition="aligned"``.
        left_out: samples that were left out because the time axis is irregular in them.
    """

    channels: tuple[str, ...]
    spatial: tuple[str, ...]
    sizes: Mapping[str, int]
    periodic: tuple[str, ...] = ()
    chunk_rows: Mapping[str, int] = {}
    left_out: int = 0

    @abstractmethod
    def __len__(self) -> int:
        """Number of samples."""

    @abstractmethod
    def slab_reader(
        self,
        partition: Partition,
        rank: int,
        halo: Halo,
        periodic: Sequence[str],
        *,
        read: Read = "own",
        group: Group | None = None,
        cache_bytes: int = 0,
        fill: bool = False,
    ) -> SlabReader:
        """What reads the part of one rank of the partition.

        Args:
            partition, rank, halo, periodic: see `shardio.plan`.
            read: how the ranks that share samples read (`shardio.collective.make_reader`).
            group: those ranks; needed unless ``read`` is "own". All of them call this at the same point.
            cache_bytes: budget for decoded times of chunks that hold several; 0 keeps none.
            fill: put NaN where chunks are absent or corrupt, and say so in `SlabReader.bad`.
        """

    def facts(self) -> Any:
        """What all ranks must agree on, picklable."""
        return (type(self).__name__, len(self), self.channels, self.spatial, dict(self.sizes))

    @abstractmethod
    def close(self) -> None:
        """Close the files that it opened."""

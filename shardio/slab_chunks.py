"""Chooses chunks that suit slabs: what ranks with a halo read of them is little more than what they need."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from shardio.partition import Cut, Partition
from shardio.plan import plan
from shardio.source import Layout

WASTE = 1.25
"""Rows read per row needed, along each cut dim, that the rank which is worst off may have."""
LEAST_BYTES = 64 << 10
"""Chunks are not made smaller than this for the sake of WASTE: opening them would cost more than it saves."""
MOST_BYTES = 16 << 20
"""Decoded bytes of a chunk at most, where rows can be divided."""
SHARD_BYTES = 64 << 20
"""Decoded bytes of a shard (a file that holds many chunks), where a single time step is not larger."""


@dataclass(frozen=True)
class Chunking:
    """How an array is to be laid out.

    Attributes:
        chunks: extent of a chunk, the unit that is decoded at once.
        shards: extent of a file that holds several chunks; None for a file per chunk.
    """

    chunks: tuple[int, ...]
    shards: tuple[int, ...] | None = None

    @property
    def unit(self) -> tuple[int, ...]:
        """What is written at once: a file."""
        return self.shards or self.chunks


def slab_chunks(
    layout: Layout, partition: Partition, *, halo: int = 0, periodic: Collection[str] = (), time: str | None = None
) -> tuple[int, ...]:
    """The chunks of an array for ranks that each read a slab of one time step.

    - one time step (several if the whole field of one has less than LEAST_BYTES); every other dim that is not cut
      whole;
    - along each cut dim the most rows with which no rank reads more than WASTE times the rows that it needs;
    - but not less than LEAST_BYTES, and not more than MOST_BYTES, for which first rows, then levels are divided.

    Arrays that lack a cut dim (coordinates) become one chunk of at most MOST_BYTES, divided along their first dims.
    """
    if not partition.cuts or not set(partition.dims) <= set(layout.dims):
        return _within(list(layout.shape), range(len(layout.shape)), layout.itemsize)
    chunks = [1 if dim == time else max(1, size) for dim, size in zip(layout.dims, layout.shape, strict=True)]
    cuts = {layout.dims.index(cut.dim): cut for cut in partition.cuts}
    for at in cuts:
        chunks[at] = 1
    for number, (at, cut) in enumerate(cuts.items()):
        other = [layout.shape[later] for later in list(cuts)[number + 1 :]]  # as if not divided
        row = math.prod(chunks) * math.prod(other) * layout.itemsize
        chunks[at] = _rows(cut, layout.shape[at], halo, cut.dim in periodic, row)
    small = LEAST_BYTES // (math.prod(chunks) * layout.itemsize)
    if time in layout.dims and small > 1:
        at = layout.dims.index(time)
        chunks[at] = max(1, min(small, layout.shape[at]))
    divided = [*cuts, *(at for at in range(len(chunks)) if at not in cuts)]
    return _within(chunks, divided, layout.itemsize)


def _rows(cut: Cut, size: int, halo: int, periodic: bool, row_bytes: int) -> int:
    """Rows per chunk along one cut dim; a row of a chunk has so many bytes."""
    candidates = sorted({-(-size // count) for count in range(1, size + 1)}, reverse=True)
    large = [rows for rows in candidates if rows * row_bytes >= min(LEAST_BYTES, size * row_bytes)]
    for rows in large:
        if worst_waste(cut, size, rows, halo, periodic) <= WASTE:
            return rows
    return large[-1]


def worst_waste(cut: Cut, size: int, rows: int, halo: int, periodic: bool) -> float:
    """Rows read per row needed by the rank that is worst off, with chunks of so many rows."""
    layout = Layout((cut.dim,), (size,), (rows,), 1)
    around = (cut.dim,) if periodic else ()
    planned = plan(Partition((cut,)), layout, halo=min(halo, size), periodic=around)
    return max(rank.amplification for rank in planned.ranks)


def _within(chunks: list[int], divided: Collection[int], itemsize: int) -> tuple[int, ...]:
    """Divide dims, in the order given, until a chunk has no more than MOST_BYTES."""
    chunks = [max(1, size) for size in chunks]
    for at in divided:
        rest = math.prod(chunks) // chunks[at] * itemsize
        chunks[at] = max(1, min(chunks[at], MOST_BYTES // max(1, rest)))
    return tuple(chunks)


def sharded(layout: Layout, chunks: tuple[int, ...], time: str | None = None) -> Chunking:
    """The chunks put into shards: whole time steps in one file, several where they are small, about SHARD_BYTES."""
    shards = [-(-size // chunk) * chunk for size, chunk in zip(layout.shape, chunks, strict=True)]
    if time in layout.dims:
        at = layout.dims.index(time)
        shards[at] = chunks[at]
        room = SHARD_BYTES // max(1, math.prod(shards) * layout.itemsize)
        shards[at] *= max(1, min(room, -(-layout.shape[at] // chunks[at])))
    shards = [max(1, shard) for shard in shards]
    return Chunking(chunks) if tuple(shards) == chunks else Chunking(chunks, tuple(shards))


def named(layout: Layout, chunks: tuple[int, ...], wanted: Mapping[str, int]) -> tuple[int, ...]:
    """The chunks with those along some dims replaced; -1 is the whole dim."""
    return tuple(
        max(1, size if wanted.get(dim, chunk) < 1 else min(wanted.get(dim, chunk), size))
        for dim, size, chunk in zip(layout.dims, layout.shape, chunks, strict=True)
    )

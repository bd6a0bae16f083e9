"""Partition + halo + chunk grid -> who fetches which chunk and where its parts go. Pure: no file is touched.

A box of an array is a product over its dims, and so is everything here: along each dim, a rank's rows are a list of
runs (rows first..first+size of the array land at row dest.. of the buffer), grouped by the chunk that holds them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, SupportsIndex

from shardio.box import Box, Span
from shardio.errors import DimensionError, HaloError, PartitionError
from shardio.partition import Partition
from shardio.runs import DimPlan, Piece, Run, selected, wrapped
from shardio.source import Layout

Halo = int | tuple[int, int] | Mapping[str, int | tuple[int, int]]
"""Rows below and above: one number for both sides, (below, above), or one of these per dim."""
Index = Mapping[str, SupportsIndex | slice | Sequence[int]]
"""Selection along dims that are not cut; an int drops the dim from the result, as in numpy."""


class ChunkPart(NamedTuple):
    """One chunk that a rank fetches: its number along each dim, and the runs it gives along each dim."""

    chunk: tuple[int, ...]
    runs: tuple[tuple[Run, ...], ...]


@dataclass(frozen=True)
class RankPlan:
    """What one rank reads of one array; see Plan."""

    rank: int
    layout: Layout
    dims: tuple[DimPlan, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the buffer, halo included, dims chosen by an int still there as 1."""
        return tuple(dim.extent for dim in self.dims)

    @property
    def result_dims(self) -> tuple[str, ...]:
        """Names of the dims of the result."""
        return tuple(dim.dim for dim in self.dims if not dim.dropped)

    @property
    def result_shape(self) -> tuple[int, ...]:
        """Shape of the result: as `shape` without the dims chosen by an int."""
        return tuple(dim.extent for dim in self.dims if not dim.dropped)

    @property
    def owned(self) -> Box:
        """What the rank owns, in the array."""
        return tuple(dim.owned for dim in self.dims)

    @property
    def interior(self) -> Box:
        """Where the owned part lies in the result."""
        return tuple(Span(dim.halo[0], dim.extent - dim.halo[1]) for dim in self.dims if not dim.dropped)

    @property
    def boxes(self) -> tuple[Box, ...]:
        """What the rank needs, halo included, in the array: one box, or more where it wraps or the index jumps."""
        spans = [[Span(run.source, run.source + run.size) for run in dim.runs] for dim in self.dims]
        return tuple(itertools.product(*spans))

    @property
    def chunks(self) -> tuple[tuple[int, ...], ...]:
        """Numbers of the chunks it fetches."""
        return tuple(part.chunk for part in self.parts())

    def parts(self) -> Iterator[ChunkPart]:
        """Every chunk to fetch, once, with where its parts go."""
        for pieces in itertools.product(*(dim.pieces for dim in self.dims)):
            yield ChunkPart(tuple(piece.chunk for piece in pieces), tuple(piece.runs for piece in pieces))

    @property
    def chunk_count(self) -> int:
        """Number of chunks it fetches."""
        return math.prod(len(dim.pieces) for dim in self.dims)

    @property
    def bytes_needed(self) -> int:
        """Bytes of the buffer, as stored values."""
        return math.prod(self.shape) * self.layout.itemsize

    @property
    def bytes_fetched(self) -> int:
        """Bytes that are decoded to fill the buffer: whole chunks, or what the layout can decode alone of them."""
        if self.layout.partial:
            return self.bytes_needed
        if not self.layout.block:
            return self.chunk_count * math.prod(self.layout.chunks) * self.layout.itemsize
        spans = [[_within(piece, dim.chunk) for piece in dim.pieces] for dim in self.dims]
        return sum(self.layout.decoded_bytes(box) for box in itertools.product(*spans))

    @property
    def amplification(self) -> float:
        """Bytes fetched per byte needed (below 1 where a wrapped halo or an index repeats rows)."""
        return self.bytes_fetched / self.bytes_needed if self.bytes_needed else 1.0

    def at(self, index: Index) -> RankPlan:
        """The same for a selection along dims that are neither cut nor have a halo."""
        known = {dim.dim for dim in self.dims}
        for dim in index:
            if dim not in known:
                raise DimensionError(f"index names dim {dim!r}, but the array's dims are {self.layout.dims}")
        return replace(
            self,
            dims=tuple(
                _chosen(plan, index[plan.dim], size) if plan.dim in index else plan
                for plan, size in zip(self.dims, self.layout.shape, strict=True)
            ),
        )


@dataclass(frozen=True)
class Plan:
    """Who reads what of one array, for every rank; the same on all of them, made without communication."""

    partition: Partition
    layout: Layout
    ranks: tuple[RankPlan, ...]

    def __getitem__(self, rank: int) -> RankPlan:
        self.partition.coordinate(rank)
        return self.ranks[rank]

    def at(self, index: Index) -> Plan:
        """The same for a selection along dims that are neither cut nor have a halo."""
        return replace(self, ranks=tuple(rank.at(index) for rank in self.ranks))

    def readers(self) -> dict[tuple[int, ...], tuple[int, ...]]:
        """Chunk -> the ranks that need a part of it."""
        readers: dict[tuple[int, ...], list[int]] = {}
        for plan in self.ranks:
            for chunk in plan.chunks:
                readers.setdefault(chunk, []).append(plan.rank)
        return {chunk: tuple(ranks) for chunk, ranks in sorted(readers.items())}

    @property
    def bytes_needed(self) -> int:
        """Bytes of all ranks' buffers."""
        return sum(rank.bytes_needed for rank in self.ranks)

    @property
    def bytes_fetched(self) -> int:
        """Bytes that all ranks decode when each reads for itself."""
        return sum(rank.bytes_fetched for rank in self.ranks)

    @property
    def amplification(self) -> float:
        """Bytes fetched per byte needed, over all ranks."""
        return self.bytes_fetched / self.bytes_needed if self.bytes_needed else 1.0

    def rows(self) -> list[dict[str, str]]:
        """A table of the plan: one row per rank, column -> text; dims that all ranks read whole are left out."""
        shown = {
            at
            for plan in self.ranks
            for at, dim in enumerate(plan.dims)
            if dim.dim in self.partition.dims or dim.halo != (0, 0)
        }
        return [
            {
                "rank": str(plan.rank),
                **{plan.dims[at].dim: _describe(plan.dims[at]) for at in sorted(shown)},
                "chunks": str(plan.chunk_count),
                "needed": f"{plan.bytes_needed / 1e6:.3f} MB",
                "fetched": f"{plan.bytes_fetched / 1e6:.3f} MB",
                "amplification": f"{plan.amplification:.2f}",
            }
            for plan in self.ranks
        ]

    def __str__(self) -> str:
        rows = self.rows()
        widths = {key: max(len(key), *(len(row[key]) for row in rows)) for key in rows[0]}
        lines = ["  ".join(key.rjust(width) for key, width in widths.items())]
        lines += ["  ".join(row[key].rjust(width) for key, width in widths.items()) for row in rows]
        return "\n".join(lines)


def plan(
    partition: Partition,
    layout: Layout,
    *,
    halo: Halo = 0,
    periodic: Collection[str] = (),
    index: Index | None = None,
) -> Plan:
    """Plan the reading of one array.

    Args:
        partition: who owns which rows; its dims must be dims of the array.
        layout: how the array is stored (`source.layout`).
        halo: rows beyond the owned ones; a number or pair applies to every cut dim, a mapping to any dim.
            At an edge that is not periodic it is clipped, and `DimPlan.halo` says how much was left.
        periodic: dims that continue at their other end.
        index: selection along other dims, by int, slice or list (see RankPlan.at).

    Raises:
        PartitionError: the partition does not fit the array.
        HaloError: a halo is negative, or wider than the dim.
        DimensionError: a name is not a dim of the array, or an index is out of range.
    """
    for name in periodic:
        if name not in layout.dims:
            raise DimensionError(f"periodic names dim {name!r}, but the array's dims are {layout.dims}")
    for cut in partition.cuts:
        if layout.dims.count(cut.dim) != 1:
            raise PartitionError(f"dim {cut.dim!r} is cut, but the array's dims are {layout.dims}; it must be one")
        size = layout.shape[layout.dims.index(cut.dim)]
        if cut.start < 0 or cut.total > size or (cut.start + cut.total > size and cut.dim not in periodic):
            raise PartitionError(
                f"dim {cut.dim!r} has {size} rows, but rows {cut.start} to {cut.start + cut.total} are cut; "
                f"the sizes {cut.sizes} must lie within it"
            )
    halos = _halo_per_dim(halo, partition, layout)
    uncut = [_dim_plan(at, layout, Span(0, size), (0, 0), False) for at, size in enumerate(layout.shape)]
    ranks = []
    for rank in range(partition.ranks):
        spans, dims = partition.spans(rank), list(uncut)
        for at, (dim, size) in enumerate(zip(layout.dims, layout.shape, strict=True)):
            if dim in spans or dim in halos:
                owned = spans.get(dim, Span(0, size))
                dims[at] = _dim_plan(at, layout, owned, halos.get(dim, (0, 0)), dim in periodic)
        ranks.append(RankPlan(rank, layout, tuple(dims)))
    planned = Plan(partition, layout, tuple(ranks))
    return planned.at(index) if index else planned


def _halo_per_dim(halo: Halo, partition: Partition, layout: Layout) -> dict[str, tuple[int, int]]:
    per_dim = halo if isinstance(halo, Mapping) else dict.fromkeys(partition.dims, halo)
    halos: dict[str, tuple[int, int]] = {}
    for dim, width in per_dim.items():
        if dim not in layout.dims:
            raise DimensionError(f"halo names dim {dim!r}, but the array's dims are {layout.dims}")
        low, high = (width, width) if isinstance(width, int) else width
        size = layout.shape[layout.dims.index(dim)]
        if not (0 <= low <= size and 0 <= high <= size):
            raise HaloError(f"halo {(low, high)} along dim {dim!r} of {size} rows; each side must be 0 to {size}")
        halos[dim] = (low, high)
    return halos


def _dim_plan(at: int, layout: Layout, owned: Span, halo: tuple[int, int], periodic: bool) -> DimPlan:
    """The plan of one dim; who owns no row reads no halo either."""
    size = layout.shape[at]
    low, high = halo if owned.size else (0, 0)
    if not periodic:
        low, high = min(low, owned.start), min(high, size - owned.stop)
    runs = wrapped(owned.start - low, owned.stop + high, size)
    return DimPlan(layout.dims[at], owned, (low, high), runs, layout.chunks[at])


def _chosen(plan: DimPlan, index: SupportsIndex | slice | Sequence[int], size: int) -> DimPlan:
    """The plan of a dim replaced by a selection along it."""
    if plan.owned != Span(0, size) or plan.halo != (0, 0):
        raise DimensionError(f"dim {plan.dim!r} is cut or has a halo, so it cannot be indexed as well")
    try:
        runs = selected(index, size)
    except IndexError as error:
        raise DimensionError(f"{error} along dim {plan.dim!r}: it has {size} rows") from None
    rows = sum(run.size for run in runs)
    owned = Span(runs[0].source, runs[0].source + rows) if runs else Span(0, 0)
    return DimPlan(plan.dim, owned, (0, 0), runs, plan.chunk, isinstance(index, SupportsIndex))


def _within(piece: Piece, chunk: int) -> Span:
    """What is read of a chunk along one dim, counted from its first row: all between the first and the last run."""
    first = piece.chunk * chunk
    return Span(min(run.source for run in piece.runs) - first, max(run.source + run.size for run in piece.runs) - first)


def _describe(dim: DimPlan) -> str:
    low, high = dim.halo
    halo = f" +{low}/{high}" if low or high else ""
    return f"{dim.owned.start}:{dim.owned.stop}{halo}"

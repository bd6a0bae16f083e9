"""The frozen Partition: every rank's rows along one or two dims, known to all ranks without communication."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from shardio.box import Span
from shardio.errors import PartitionError
from shardio.partition.aligned import aligned
from shardio.partition.even import even
from shardio.partition.explicit import explicit

Partitioner = Callable[[int, int, int], tuple[int, ...]]
"""(rows, ranks, rows per chunk) -> rows of each rank."""

PARTITIONERS: dict[str, Partitioner] = {"even": even, "aligned": aligned}


@dataclass(frozen=True)
class Cut:
    """How one dim is cut over one axis of the mesh.

    Attributes:
        dim: name of the array's dim.
        axis: name of the mesh axis.
        sizes: rows of each rank along that axis.
        start: first row of the array that the cut covers (0 unless only a window of the dim is used).
    """

    dim: str
    axis: str
    sizes: tuple[int, ...]
    start: int = 0

    def __post_init__(self) -> None:
        if not self.sizes:
            raise PartitionError(f"dim {self.dim!r} is cut into no part; give one size per rank")
        explicit(sum(self.sizes), self.sizes)

    @property
    def total(self) -> int:
        """Rows of all ranks."""
        return sum(self.sizes)

    def span(self, part: int) -> Span:
        """Rows of one rank, counted in the array."""
        start = self.start + sum(self.sizes[:part])
        return Span(start, start + self.sizes[part])


@dataclass(frozen=True)
class Partition:
    """Who owns what: one cut, or two on two axes; ranks are numbered with the last cut's axis fastest."""

    cuts: tuple[Cut, ...]

    def __post_init__(self) -> None:
        if len(self.cuts) > 2:
            raise PartitionError(f"{len(self.cuts)} dims are cut; one or two can be")
        for what, names in (("dim", [cut.dim for cut in self.cuts]), ("mesh axis", [cut.axis for cut in self.cuts])):
            if len(set(names)) != len(names):
                raise PartitionError(f"{what} {names[0]!r} is used twice; each cut needs its own")

    @property
    def mesh_shape(self) -> tuple[int, ...]:
        """Ranks along each cut's axis."""
        return tuple(len(cut.sizes) for cut in self.cuts)

    @property
    def ranks(self) -> int:
        """Number of ranks (1 if nothing is cut)."""
        return math.prod(self.mesh_shape)

    @property
    def dims(self) -> tuple[str, ...]:
        """Names of the cut dims."""
        return tuple(cut.dim for cut in self.cuts)

    def coordinate(self, rank: int) -> tuple[int, ...]:
        """Position of a rank along each cut's axis."""
        if not 0 <= rank < self.ranks:
            raise PartitionError(f"rank {rank} is not one of the {self.ranks} ranks of this partition")
        position: list[int] = []
        for parts in reversed(self.mesh_shape):
            rank, part = divmod(rank, parts)
            position.append(part)
        return tuple(reversed(position))

    def spans(self, rank: int) -> dict[str, Span]:
        """Rows that a rank owns along each cut dim, counted in the array."""
        return {cut.dim: cut.span(part) for cut, part in zip(self.cuts, self.coordinate(rank), strict=True)}

    def offsets(self, rank: int) -> dict[str, int]:
        """First row of a rank along each cut dim, counted from the start of the cut."""
        return {cut.dim: self.spans(rank)[cut.dim].start - cut.start for cut in self.cuts}

    def global_shape(self, dims: Sequence[str], shape: Sequence[int]) -> tuple[int, ...]:
        """Shape of the whole tensor whose uncut dims have the extents in `shape` (cut ones are replaced)."""
        totals = {cut.dim: cut.total for cut in self.cuts}
        return tuple(totals.get(dim, size) for dim, size in zip(dims, shape, strict=True))

    def local_shape(self, rank: int, dims: Sequence[str], shape: Sequence[int]) -> tuple[int, ...]:
        """Shape of a rank's own part, without halo."""
        spans = self.spans(rank)
        return tuple(spans[dim].size if dim in spans else size for dim, size in zip(dims, shape, strict=True))

    def sharding_shapes(
        self, rank: int, dims: Sequence[str], shape: Sequence[int], axes: Sequence[str] | None = None
    ) -> dict[int, tuple[tuple[int, ...], ...]]:
        """What `ShardTensor.from_local(..., sharding_shapes=...)` takes.

        Args:
            rank: the rank that asks; along the other axis, the shapes are those beside it.
            dims: the tensor's dims; those that are not cut may have any name.
            shape: the tensor's shape; extents of the cut dims are replaced.
            axes: the mesh's axis names, to number the axes; by default the cuts' axes in their order.

        Returns:
            Number of the mesh axis -> local shape of each rank along it.
        """
        axes = [cut.axis for cut in self.cuts] if axes is None else list(axes)
        own = self.local_shape(rank, dims, shape)
        shapes: dict[int, tuple[tuple[int, ...], ...]] = {}
        for cut in self.cuts:
            if cut.axis not in axes or cut.dim not in dims:
                raise PartitionError(
                    f"dim {cut.dim!r} is cut over axis {cut.axis!r}, but the tensor has dims {tuple(dims)} "
                    f"and the mesh axes {tuple(axes)}; name both"
                )
            at = list(dims).index(cut.dim)
            shapes[axes.index(cut.axis)] = tuple((*own[:at], rows, *own[at + 1 :]) for rows in cut.sizes)
        return shapes


def make_partition(
    shard: Mapping[str, str],
    *,
    sizes: Mapping[str, int],
    ranks: Mapping[str, int],
    how: str | Mapping[str, Sequence[int]] = "even",
    chunks: Mapping[str, int] | None = None,
) -> Partition:
    """Cut dims over mesh axes.

    Args:
        shard: dim -> mesh axis, one or two.
        sizes: dim -> rows.
        ranks: mesh axis -> ranks along it.
        how: "even", "aligned" (needs `chunks`), another name in PARTITIONERS, or dim -> rows of each rank.
        chunks: dim -> rows per chunk.

    Raises:
        PartitionError: more ranks than rows, sizes that do not add up, an unknown dim, axis or name.
    """
    return Partition(
        tuple(Cut(dim, axis, _cut(dim, axis, sizes, ranks, how, chunks or {})) for dim, axis in shard.items())
    )


def _cut(
    dim: str,
    axis: str,
    sizes: Mapping[str, int],
    ranks: Mapping[str, int],
    how: str | Mapping[str, Sequence[int]],
    chunks: Mapping[str, int],
) -> tuple[int, ...]:
    if dim not in sizes:
        raise PartitionError(f"dim {dim!r} is to be cut, but the array's dims are {tuple(sizes)}; name one of those")
    if axis not in ranks:
        raise PartitionError(f"mesh axis {axis!r} is not one of {tuple(ranks)}; name one of those")
    try:
        if not isinstance(how, str):
            if dim not in how:
                raise PartitionError(f"sizes are given for {tuple(how)} only; give them for this dim, too")
            return explicit(sizes[dim], how[dim], ranks[axis])
        if how not in PARTITIONERS:
            raise PartitionError(f"partition {how!r} is not known; known are {tuple(PARTITIONERS)}, or sizes per dim")
        if how == "aligned" and dim not in chunks:
            raise PartitionError("partition 'aligned' needs the chunk size of this dim (chunks=)")
        return PARTITIONERS[how](sizes[dim], ranks[axis], chunks.get(dim, 1))
    except PartitionError as error:
        raise PartitionError(f"dim {dim!r} over mesh axis {axis!r}: {error}") from None

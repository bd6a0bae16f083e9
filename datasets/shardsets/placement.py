"""Which mesh axis carries samples, which cut the grid, and where this rank stands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from shardio import Partition, make_partition
from shardsets.errors import SampleError
from shardsets.samples import SampleSet
from shardtensor import Cut, Replicate, ShardTensorSpec
from shardtensor.spec import DeviceMesh, Layout

__all__ = ["DATA_AXES", "Placement", "Shards", "place"]

Shards: TypeAlias = Mapping[str, str | None] | str | Sequence[str] | None

DATA_AXES = ("data", "ddp", "dp")
"""Names of a mesh axis over which samples differ; every other axis shares one sample."""


@dataclass(frozen=True)
class Placement:
    """This rank's part.

    Attributes:
        domain: the ranks that share one sample; None without a mesh.
        partition: who owns which rows.
        rank: this rank's number in the partition.
        groups: data groups.
        group: this rank's data group.
        counted: False on ranks that hold a copy of another rank's part (an axis that cuts nothing).
        axes: cut dims by mesh axis number of ``domain``.
    """

    domain: DeviceMesh | None
    partition: Partition
    rank: int
    groups: int
    group: int
    counted: bool
    axes: Mapping[int, str]

    def spec(self, local: torch.Tensor, spatial: Sequence[str]) -> ShardTensorSpec:
        """The spec of a field [B, C, *spatial] of which ``local`` is this rank's block, without communication."""
        assert self.domain is not None
        dims = {dim: local.dim() - len(spatial) + place for place, dim in enumerate(spatial)}
        cuts = {cut.dim: cut.sizes for cut in self.partition.cuts}
        layout: Layout = tuple(
            Cut(dims[self.axes[axis]], cuts[self.axes[axis]]) if axis in self.axes else Replicate()
            for axis in range(self.domain.ndim)
        )
        shape = list(local.shape)
        for dim, sizes in cuts.items():
            shape[dims[dim]] = sum(sizes)
        return ShardTensorSpec.of(self.domain, layout, shape, local.dtype)


def place(
    mesh: DeviceMesh | None,
    samples: SampleSet,
    shard: Shards,
    partition: str | Sequence[int] | Mapping[str, Sequence[int]],
) -> Placement:
    """Read the mesh and cut the grid.

    Args:
        mesh: with or without a data axis; None for one process and plain tensors.
        samples: the data set.
        shard: {dim: mesh axis, or None to leave it whole}; or dims, given to the axes in order; default: the first
            spatial dim over the first axis that is not the data axis. Without a mesh nothing is cut.
        partition: "even", "aligned", or rows per rank (of the one dim that is cut, or by dim).

    Raises:
        SampleError, PartitionError: dims or axes that do not exist, more ranks than rows, sizes that do not add up.
    """
    if mesh is None:
        return Placement(None, Partition(()), 0, 1, 0, True, {})
    names = mesh.mesh_dim_names or (("domain",) if mesh.ndim == 1 else None)
    if names is None:
        raise SampleError(
            f"the mesh {mesh} has {mesh.ndim} axes without names: name them (mesh_dim_names=) so that 'data' is known"
        )
    data = [name for name in names if name in DATA_AXES]
    if len(data) > 1:
        raise SampleError(f"the mesh has several data axes {data}; only one of {DATA_AXES} can be")
    domain_names = tuple(name for name in names if name not in data)
    where = dict(zip(names, mesh.get_coordinate() or (), strict=True))
    ranks = dict(zip(names, mesh.shape, strict=True))
    groups, group = (ranks[data[0]], where[data[0]]) if data else (1, 0)
    domain = None
    if domain_names:
        domain = mesh if not data else mesh[domain_names if len(domain_names) > 1 else domain_names[0]]
    shards = _shards(shard, samples, domain_names)
    cut = make_partition(
        shards,
        sizes={dim: samples.sizes[dim] for dim in shards},
        ranks=ranks,
        how=partition if isinstance(partition, str) else _sizes(partition, shards),
        chunks=samples.chunk_rows,
    )
    rank = 0
    for item in cut.cuts:
        rank = rank * len(item.sizes) + where[item.axis]
    counted = all(where[name] == 0 for name in domain_names if name not in shards.values())
    axes = {domain_names.index(axis): dim for dim, axis in shards.items()}
    return Placement(domain, cut, rank, groups, group, counted, axes)


def _shards(shard: Shards, samples: SampleSet, axes: Sequence[str]) -> dict[str, str]:
    if shard is None:
        return {samples.spatial[0]: axes[0]} if axes else {}
    if not isinstance(shard, Mapping):
        dims = [shard] if isinstance(shard, str) else list(shard)
        if len(dims) > len(axes):
            raise SampleError(
                f"shard names {dims}, but the mesh has only {len(axes)} axes beside the data axis: {tuple(axes)}"
            )
        shard = dict(zip(dims, axes, strict=False))
    named = dict(shard)
    for dim, axis in named.items():
        if dim not in samples.spatial:
            raise SampleError(f"shard names dim {dim!r}; dims that can be cut are {tuple(samples.spatial)}")
        if axis is not None and axis not in axes:
            raise SampleError(f"shard puts {dim!r} on mesh axis {axis!r}; axes for that are {tuple(axes) or 'none'}")
    return {dim: axis for dim, axis in named.items() if axis is not None}


def _sizes(
    partition: Sequence[int] | Mapping[str, Sequence[int]], shards: Mapping[str, str]
) -> Mapping[str, Sequence[int]]:
    if isinstance(partition, Mapping):
        return partition
    if len(shards) != 1:
        raise SampleError(
            f"partition={list(partition)} gives sizes for one dim, but {list(shards)} are cut: give {{dim: sizes}}"
        )
    return {next(iter(shards)): partition}

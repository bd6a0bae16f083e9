"""Who owns which part of a sharded tensor: integers only, no communication, the same on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple, TypeAlias

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard

from shardtensor.errors import LayoutError

__all__ = [
    "PENDING_SUM",
    "REPLICATE",
    "Cut",
    "DeviceMesh",
    "Layout",
    "Partial",
    "Placement",
    "Replicate",
    "Shard",
    "ShardTensorSpec",
    "TensorMeta",
    "chunk_sizes",
    "contiguous_stride",
    "even_sizes",
    "mesh_coordinate",
    "mesh_sizes",
    "replicate",
    "whole_spec",
]


class TensorMeta(NamedTuple):
    """Shape, stride and dtype of the whole (global) tensor."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Cut:
    """How one mesh axis cuts one tensor dim.

    The dim is seen as ``[outer, sum(sizes)]``; rank r of the axis holds ``[outer, sizes[r]]`` of it. ``outer`` is 1
    except where a view merged an uncut dim in front of the cut one: [B, S, C] -> [B * S, C] with S cut has outer B.
    """

    dim: int
    sizes: tuple[int, ...]
    outer: int = 1

    @property
    def length(self) -> int:
        """Global length of the cut dim."""
        return self.outer * sum(self.sizes)

    def moved(self, dim: int) -> Cut:
        """The same cut on another tensor dim."""
        return Cut(dim, self.sizes, self.outer)


AxisLayout: TypeAlias = Cut | Replicate | Partial
Layout: TypeAlias = tuple[AxisLayout, ...]

REPLICATE = Replicate()
PENDING_SUM = Partial("sum")
"""The objects that specs hold for these placements: comparing two distinct ones takes 2 us, one with itself nothing."""
_SHARED = {Replicate: REPLICATE, Partial: PENDING_SUM}


def _shared(entry: AxisLayout) -> AxisLayout:
    known = _SHARED.get(type(entry))
    return entry if known is None or known is entry or known != entry else known


@lru_cache(maxsize=64)
def replicate(ndim: int) -> Layout:
    """The layout that keeps the whole tensor on every rank of a mesh with ``ndim`` axes."""
    return (REPLICATE,) * ndim


@lru_cache(maxsize=256)
def mesh_sizes(mesh: DeviceMesh) -> tuple[int, ...]:
    """Number of ranks along every axis of the mesh."""
    return tuple(mesh.shape)


@lru_cache(maxsize=64)
def _shard(dim: int) -> Shard:
    return Shard(dim)


def mesh_coordinate(mesh: DeviceMesh) -> tuple[int, ...]:
    """This rank's place on every axis of the mesh.

    Raises:
        LayoutError: this rank is not part of the mesh.
    """
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise LayoutError(f"this rank is not part of {mesh}: build the tensor on the ranks of its mesh only")
    return tuple(coordinate)


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """Row-major stride of ``shape``; a dim of length 0 counts as 1, as torch does."""
    stride, step = [], 1
    for length in reversed(shape):
        stride.append(step)
        step *= max(length, 1)
    return tuple(reversed(stride))


def chunk_sizes(length: int, parts: int) -> tuple[int, ...]:
    """Sizes that ``torch.chunk`` and DTensor give: blocks of ``ceil(length / parts)``, the last ones may be empty."""
    step = -(-length // parts) if length else 0
    return tuple(max(0, min(step, length - rank * step)) for rank in range(parts))


def even_sizes(length: int, parts: int) -> tuple[int, ...]:
    """Balanced sizes, at most one row apart, the larger ones first: 721 over 4 is (181, 180, 180, 180)."""
    base, extra = divmod(length, parts)
    return tuple(base + (rank < extra) for rank in range(parts))


@dataclass(frozen=True)
class ShardTensorSpec:
    """Layout of one logical tensor over a device mesh; immutable, hashable, picklable.

    Attributes:
        mesh: the ranks that share the tensor.
        layout: one entry per mesh axis: a `Cut`, ``Replicate()`` or ``Partial(op)``.
        tensor_meta: shape, stride and dtype of the whole tensor.
    """

    mesh: DeviceMesh
    layout: Layout
    tensor_meta: TensorMeta

    def __post_init__(self) -> None:
        shape, ranks = self.tensor_meta.shape, mesh_sizes(self.mesh)
        if len(self.layout) != len(ranks):
            raise LayoutError(f"a layout of {len(self.layout)} entries {self.layout} for a mesh with {len(ranks)} axes")
        object.__setattr__(self, "layout", tuple(map(_shared, self.layout)))
        for axis, entry in enumerate(self.layout):
            if type(entry) is not Cut:
                continue
            fits = 0 <= entry.dim < len(shape) and entry.length == shape[entry.dim]
            if not fits or len(entry.sizes) != ranks[axis] or min(entry.sizes) < 0:
                raise LayoutError(self._misfit(axis, entry, ranks[axis]))

    def _misfit(self, axis: int, cut: Cut, ranks: int) -> str:
        shape = tuple(self.tensor_meta.shape)
        if len(cut.sizes) != ranks or min(cut.sizes) < 0:
            return f"sizes {cut.sizes} for mesh axis {axis} of {ranks} ranks: give one size >= 0 per rank"
        if not 0 <= cut.dim < len(shape):
            return f"mesh axis {axis} cuts dim {cut.dim}, but the tensor {shape} has {len(shape)} dims"
        times = f" x {cut.outer}" if cut.outer > 1 else ""
        return (
            f"shards {cut.sizes}{times} hold {cut.length} rows along dim {cut.dim}, but the tensor {shape} has "
            f"{shape[cut.dim]}. Give sizes that sum to the dim's length, one per rank of mesh axis {axis}"
        )

    @classmethod
    def of(
        cls,
        mesh: DeviceMesh,
        layout: Layout,
        shape: Sequence[int],
        dtype: torch.dtype,
        stride: tuple[int, ...] | None = None,
    ) -> ShardTensorSpec:
        """A spec for a tensor of ``shape`` (row-major unless ``stride`` is given)."""
        size = torch.Size(shape)
        try:
            return _spec_of(mesh, layout, size, dtype, stride)
        except TypeError:  # symbolic lengths have no hash
            return cls(mesh, layout, TensorMeta(size, contiguous_stride(size) if stride is None else stride, dtype))

    @property
    def shape(self) -> torch.Size:
        """Global shape."""
        return self.tensor_meta.shape

    @property
    def ndim(self) -> int:
        """Number of tensor dims."""
        return len(self.tensor_meta.shape)

    @property
    def dtype(self) -> torch.dtype:
        """Data type of the tensor."""
        return self.tensor_meta.dtype

    @cached_property
    def placements(self) -> tuple[Placement, ...]:
        """torch's own placements, one per mesh axis."""
        return tuple(_shard(entry.dim) if isinstance(entry, Cut) else entry for entry in self.layout)

    @cached_property
    def cuts(self) -> tuple[tuple[int, Cut], ...]:
        """The (mesh axis, cut) pairs of the axes that cut the tensor."""
        return tuple((axis, entry) for axis, entry in enumerate(self.layout) if isinstance(entry, Cut))

    @cached_property
    def partial_axes(self) -> tuple[int, ...]:
        """Mesh axes along which a reduction is pending."""
        return tuple(axis for axis, entry in enumerate(self.layout) if isinstance(entry, Partial))

    @cached_property
    def coordinate(self) -> tuple[int, ...]:
        """This rank's place on every mesh axis."""
        return mesh_coordinate(self.mesh)

    @cached_property
    def local_shape(self) -> torch.Size:
        """Shape of the block that this rank holds."""
        return self.shape_at(self.coordinate)

    def shape_at(self, coordinate: Sequence[int]) -> torch.Size:
        """Shape of the block held by the rank at ``coordinate`` of the mesh."""
        shape = list(self.tensor_meta.shape)
        for axis, cut in self.cuts:
            total = sum(cut.sizes)
            shape[cut.dim] = shape[cut.dim] * cut.sizes[coordinate[axis]] // total if total else 0
        return torch.Size(shape)

    def axis_of(self, dim: int) -> int | None:
        """The mesh axis that cuts tensor dim ``dim``, or None. See `axes_of` for dims cut by several axes."""
        for axis, cut in self.cuts:
            if cut.dim == dim:
                return axis
        return None

    def cut_of(self, dim: int) -> Cut | None:
        """The cut of tensor dim ``dim``, or None where the dim is whole on every rank."""
        axis = self.axis_of(dim)
        entry = None if axis is None else self.layout[axis]
        return entry if isinstance(entry, Cut) else None

    def axes_of(self, dim: int) -> tuple[int, ...]:
        """All mesh axes that cut tensor dim ``dim``."""
        return tuple(axis for axis, cut in self.cuts if cut.dim == dim)

    def local_cut(self, axis: int) -> Cut:
        """The cut of mesh axis ``axis`` as it stands inside the local block, other axes' cuts of the same dim applied.

        The local block's dim is ``[outer, sizes[own coordinate]]`` of the result.
        """
        cut = self.layout[axis]
        assert isinstance(cut, Cut)
        outer, sizes = cut.outer, cut.sizes
        for other_axis, other in self.cuts:
            if other_axis == axis or other.dim != cut.dim:
                continue
            mine, total = other.sizes[self.coordinate[other_axis]], sum(other.sizes) or 1
            if other.outer < cut.outer:
                outer = outer * mine // total
            else:
                sizes = tuple(size * mine // total for size in sizes)
        return Cut(cut.dim, sizes, outer)

    def sharding_shapes(
        self, mesh_dim: int | None = None
    ) -> dict[int, tuple[tuple[int, ...], ...]] | tuple[tuple[int, ...], ...]:
        """Local shapes of the ranks along each cutting mesh axis, this rank's other coordinates held.

        Args:
            mesh_dim: only this mesh axis.

        Raises:
            LayoutError: ``mesh_dim`` does not cut the tensor.
        """
        shapes = {axis: tuple(tuple(self.shape_at(at)) for at in self._along(axis)) for axis, _ in self.cuts}
        if mesh_dim is None:
            return shapes
        if mesh_dim not in shapes:
            raise LayoutError(f"mesh axis {mesh_dim} does not cut the tensor: placements are {self.placements}")
        return shapes[mesh_dim]

    def _along(self, axis: int) -> list[tuple[int, ...]]:
        here = self.coordinate
        return [(*here[:axis], rank, *here[axis + 1 :]) for rank in range(mesh_sizes(self.mesh)[axis])]

    def offsets(self, mesh_dim: int | None = None) -> tuple[int, ...] | int:
        """Where this rank's block starts in the whole tensor, per mesh axis; 0 on axes that do not cut it.

        For a cut with ``outer`` > 1 the offset counts inside one repeat.
        """
        starts = tuple(
            sum(entry.sizes[: self.coordinate[axis]]) if isinstance(entry, Cut) else 0
            for axis, entry in enumerate(self.layout)
        )
        return starts if mesh_dim is None else starts[mesh_dim]

    def with_layout(self, layout: Layout) -> ShardTensorSpec:
        """The same tensor, laid out otherwise."""
        return _in_layout(self, layout)

    def with_dtype(self, dtype: torch.dtype) -> ShardTensorSpec:
        """The same layout for another dtype."""
        if dtype == self.tensor_meta.dtype:
            return self
        return _in_dtype(self, dtype)

    def replicated(self) -> ShardTensorSpec:
        """The same tensor, whole on every rank."""
        return self.with_layout(replicate(len(self.layout)))

    @cached_property
    def is_plain(self) -> bool:
        """Whether a point-wise result has this very spec: no pending reduction, and strides without repeats or gaps."""
        return not self.partial_axes and self.is_dense

    @cached_property
    def is_dense(self) -> bool:
        """Whether the strides fill memory without repeats (expanded dims) or gaps (slices), in any order of dims."""
        shape, stride = self.tensor_meta.shape, self.tensor_meta.stride
        step = 1
        for length, own in sorted(zip(shape, stride, strict=True), key=lambda dim: (dim[1], dim[0])):
            if length > 1:
                if own != step:
                    return False
                step *= length
        return True

    @cached_property
    def broadcast_dims(self) -> tuple[int, ...]:
        """Dims that are expanded: stride 0, one stored row stands for all."""
        meta = self.tensor_meta
        return tuple(dim for dim, step in enumerate(meta.stride) if step == 0 and meta.shape[dim] > 1)

    @cached_property
    def resolved_layout(self) -> Layout:
        """The layout with pending reductions done: ``Partial`` becomes ``Replicate``."""
        if not self.partial_axes:
            return self.layout
        return tuple(REPLICATE if isinstance(entry, Partial) else entry for entry in self.layout)

    @cached_property
    def _hash(self) -> int:
        return hash((self.mesh, self.layout, self.tensor_meta))

    def __hash__(self) -> int:
        return self._hash

    def __deepcopy__(self, memo: dict[int, object]) -> ShardTensorSpec:
        return self

    def __reduce__(self) -> tuple[type, tuple[DeviceMesh, Layout, TensorMeta]]:
        return ShardTensorSpec, (self.mesh, self.layout, self.tensor_meta)


# Derived specs are one object for equal arguments, so that look-ups by spec find them by identity.


@lru_cache(maxsize=4096)
def _spec_of(
    mesh: DeviceMesh, layout: Layout, size: torch.Size, dtype: torch.dtype, stride: tuple[int, ...] | None
) -> ShardTensorSpec:
    """One object a spec: what follows from it (local shape, cuts, hash) is worked out once."""
    return ShardTensorSpec(mesh, layout, TensorMeta(size, contiguous_stride(size) if stride is None else stride, dtype))


@lru_cache(maxsize=4096)
def _in_layout(spec: ShardTensorSpec, layout: Layout) -> ShardTensorSpec:
    return ShardTensorSpec(spec.mesh, layout, spec.tensor_meta)


@lru_cache(maxsize=4096)
def _in_dtype(spec: ShardTensorSpec, dtype: torch.dtype) -> ShardTensorSpec:
    return ShardTensorSpec(spec.mesh, spec.layout, spec.tensor_meta._replace(dtype=dtype))


@lru_cache(maxsize=1024)
def whole_spec(mesh: DeviceMesh, shape: torch.Size, dtype: torch.dtype, stride: tuple[int, ...]) -> ShardTensorSpec:
    """The spec of a tensor that every rank holds whole."""
    return ShardTensorSpec.of(mesh, replicate(mesh.ndim), shape, dtype, stride)

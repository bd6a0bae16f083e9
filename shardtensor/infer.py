"""What placements and blocks mean: layouts and specs from what the caller and the ranks say, checked for agreement."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import torch
from torch.distributed.device_mesh import _mesh_resources

from shardtensor.comm.agree import gather_facts
from shardtensor.errors import LayoutError, RankDisagreementError
from shardtensor.spec import (
    AxisLayout,
    Cut,
    DeviceMesh,
    Layout,
    Partial,
    Placement,
    Replicate,
    Shard,
    ShardTensorSpec,
    chunk_sizes,
    contiguous_stride,
    mesh_sizes,
    replicate,
)

__all__ = ["current_mesh", "in_memory_order", "infer_spec", "layout_like"]


def current_mesh() -> DeviceMesh:
    """The mesh of the surrounding ``with mesh:``.

    Raises:
        LayoutError: there is none.
    """
    try:
        return _mesh_resources.get_current_mesh()
    except RuntimeError as error:
        raise LayoutError("no device mesh: pass device_mesh, or call this inside `with mesh:`") from error


def layout_like(
    spec: ShardTensorSpec,
    placements: Sequence[Placement],
    sizes: dict[int, Sequence[int]] | None = None,
    *,
    chunked: bool = False,
) -> Layout:
    """The layout that ``placements`` mean for this tensor.

    Sizes come from ``sizes`` (by mesh axis), else from the tensor where it is cut so already (unless ``chunked``),
    else from ``torch.chunk``.

    Raises:
        LayoutError: the placements do not fit mesh or tensor, or sizes name an axis that cuts nothing. (That sizes fit
            is for the spec to check that takes the layout.)
    """
    checked = _normalized(placements, spec.mesh, spec.ndim)
    layout: list[AxisLayout] = []
    for axis, (have, placement) in enumerate(zip(spec.layout, checked, strict=True)):
        named = sizes is not None and axis in sizes
        if named and not isinstance(placement, Shard):
            raise LayoutError(f"sizes name mesh axis {axis}, but its placement is {placement}, not Shard(dim)")
        if not isinstance(placement, Shard):
            layout.append(placement)  # type: ignore[arg-type]
        elif named:
            layout.append(Cut(placement.dim, tuple(map(int, sizes[axis]))))  # type: ignore[index]
        elif isinstance(have, Cut) and have.dim == placement.dim and not chunked:
            layout.append(have)
        else:
            layout.append(Cut(placement.dim, chunk_sizes(spec.shape[placement.dim], mesh_sizes(spec.mesh)[axis])))
    return tuple(layout)


def _normalized(placements: Sequence[Placement] | None, mesh: DeviceMesh, ndim: int) -> tuple[Placement, ...]:
    """Placements with dims counted from the front.

    Raises:
        LayoutError: not one placement per mesh axis, a dim that the tensor lacks, or one dim cut by two axes.
    """
    if placements is None:
        return (Replicate(),) * mesh.ndim
    if len(placements) != mesh.ndim:
        raise LayoutError(f"got {len(placements)} placements {tuple(placements)} for a mesh with {mesh.ndim} axes")
    found: list[Placement] = []
    for placement in placements:
        if type(placement) is not Shard:
            if not isinstance(placement, Replicate | Partial):
                raise LayoutError(f"placement {placement!r} is not supported: use Shard(dim), Replicate() or Partial()")
            found.append(placement)
            continue
        if not -ndim <= placement.dim < ndim:
            raise LayoutError(f"{placement!r} names a dim that a tensor with {ndim} dims does not have")
        found.append(Shard(placement.dim % ndim))
    dims = [placement.dim for placement in found if isinstance(placement, Shard)]
    if len(dims) != len(set(dims)):
        raise LayoutError(f"placements {tuple(found)} cut one dim along two mesh axes; cut two dims, or use a 1-D mesh")
    return tuple(found)


def infer_spec(
    local: torch.Tensor,
    mesh: DeviceMesh,
    placements: Sequence[Placement] | None,
    sharding_shapes: str | dict[int, Sequence[Sequence[int]]],
    global_shape: Sequence[int] | None,
) -> ShardTensorSpec:
    """The spec of the tensor of which every rank holds ``local``; see `ShardTensor.from_local`.

    What the ranks say is gathered first and judged by all of them alike, so that all raise or none.
    """
    if isinstance(sharding_shapes, str) and sharding_shapes not in ("infer", "chunk"):
        raise LayoutError(f"sharding_shapes is {sharding_shapes!r}: use 'infer', 'chunk' or a dict by mesh axis")
    if sharding_shapes == "chunk":
        if global_shape is None:
            raise LayoutError("sharding_shapes='chunk' needs global_shape, the shape of the whole tensor")
        return _chunk_spec(local, mesh, _normalized(placements, mesh, local.ndim), tuple(global_shape))
    claimed = None
    if isinstance(sharding_shapes, dict):
        claimed = {axis: tuple(tuple(shape) for shape in found) for axis, found in sharding_shapes.items()}
    said = None if placements is None else tuple(placements)
    fact = _Fact(tuple(local.shape), _memory_order(local), local.dtype, said, claimed)
    return _agreed_spec(gather_facts(fact, mesh), mesh)


class _Fact(NamedTuple):
    """What one rank says of a tensor: its block's shape and order of dims in memory, and the caller's arguments."""

    shape: tuple[int, ...]
    order: tuple[int, ...]
    dtype: torch.dtype
    placements: tuple[Placement, ...] | None
    claimed: dict[int, tuple[tuple[int, ...], ...]] | None


def _memory_order(x: torch.Tensor) -> tuple[int, ...]:
    """The dims from the slowest to the fastest in memory."""
    return tuple(sorted(range(x.dim()), key=lambda dim: -x.stride()[dim]))


def _stride_in(order: Sequence[int], shape: Sequence[int]) -> tuple[int, ...]:
    """Stride of a tensor without gaps whose dims lie in memory in this order."""
    dense = dict(zip(order, contiguous_stride([shape[dim] for dim in order]), strict=True))
    return tuple(dense[dim] for dim in range(len(shape)))


def in_memory_order(local: torch.Tensor, spec: ShardTensorSpec) -> torch.Tensor:
    """The block without gaps and with its dims ordered as the spec's strides say; a copy only where it is not so."""
    order = sorted(range(spec.ndim), key=lambda dim: -spec.tensor_meta.stride[dim])
    back = sorted(range(spec.ndim), key=order.__getitem__)
    return local.permute(order).contiguous().permute(back)


def _chunk_spec(
    local: torch.Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...], shape: tuple[int, ...]
) -> ShardTensorSpec:
    whole = ShardTensorSpec.of(mesh, replicate(mesh.ndim), shape, local.dtype)
    spec = whole.with_layout(layout_like(whole, placements))
    if spec.local_shape != local.shape:
        raise LayoutError(
            f"the rank at mesh coordinate {spec.coordinate} holds {tuple(local.shape)}, but torch.chunk of {shape} "
            f"gives it {tuple(spec.local_shape)}. Use sharding_shapes='infer' or give the shapes"
        )
    return spec


def _agreed_spec(facts: dict[tuple[int, ...], _Fact], mesh: DeviceMesh) -> ShardTensorSpec:
    """The spec that fits what every rank said, by mesh coordinate."""
    shapes = {at: fact.shape for at, fact in facts.items()}
    for what in ("dtype", "placements"):
        by_rank = {at: getattr(fact, what) for at, fact in facts.items()}
        if len({repr(said) for said in by_rank.values()}) > 1:
            raise RankDisagreementError(f"the ranks passed different {what}, by mesh coordinate: {by_rank}")
    if len({len(shape) for shape in shapes.values()}) > 1:
        raise RankDisagreementError(f"the ranks' blocks differ in their number of dims, by mesh coordinate: {shapes}")
    _check_claims(facts, mesh)
    first = next(iter(facts.values()))
    placements = _normalized(first.placements, mesh, len(first.shape))
    length = list(first.shape)
    layout: list[AxisLayout] = []
    for axis, placement in enumerate(placements):
        if not isinstance(placement, Shard):
            layout.append(placement)  # type: ignore[arg-type]
            continue
        along = [(0,) * axis + (rank,) + (0,) * (mesh.ndim - axis - 1) for rank in range(mesh_sizes(mesh)[axis])]
        sizes = tuple(shapes[at][placement.dim] for at in along)
        layout.append(Cut(placement.dim, sizes))
        length[placement.dim] = sum(sizes)
    largest = max(facts.values(), key=lambda fact: prod(fact.shape))  # its strides are the least ambiguous
    spec = ShardTensorSpec.of(mesh, tuple(layout), length, first.dtype, _stride_in(largest.order, length))
    wrong = {at: shape for at, shape in shapes.items() if tuple(spec.shape_at(at)) != shape}
    if wrong:
        expected = {at: tuple(spec.shape_at(at)) for at in wrong}
        raise RankDisagreementError(
            f"the ranks' blocks do not join into one tensor with placements {placements}: by mesh coordinate {wrong}, "
            f"where {expected} would fit. Blocks may differ only along the sharded dims"
        )
    return spec


def _check_claims(facts: dict[tuple[int, ...], _Fact], mesh: DeviceMesh) -> None:
    """What each rank was told of the shapes along a mesh axis must be what the ranks there hold."""
    for at, fact in facts.items():
        for axis, said in (fact.claimed or {}).items():
            if not 0 <= axis < mesh.ndim:
                raise LayoutError(f"sharding_shapes names mesh axis {axis}, but the mesh has axes 0 to {mesh.ndim - 1}")
            along = [(*at[:axis], rank, *at[axis + 1 :]) for rank in range(mesh_sizes(mesh)[axis])]
            held = tuple(facts[place].shape for place in along)
            if said != held:
                raise RankDisagreementError(
                    f"the rank at {at} was told sharding_shapes[{axis}] = {said}, but the ranks along that axis hold "
                    f"{held}. Give every rank the local shapes of all ranks along the axis"
                )

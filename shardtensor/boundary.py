"""Where tensors enter, leave and change layout: the differentiable steps between plain and sharded tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import _mesh_resources
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._dtensor_spec import TensorMeta as DTensorMeta

from shardtensor import tensor as sharded  # the class itself: used at call time only, the two modules need each other
from shardtensor.comm.agree import gather_facts
from shardtensor.errors import LayoutError, RankDisagreementError
from shardtensor.redistribute import redistribute_local
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
    mesh_sizes,
    replicate,
)

__all__ = ["FromDTensor", "FromLocal", "Redistribute", "ToDTensor", "ToLocal", "current_mesh", "infer_spec", "layout_like"]


def current_mesh() -> DeviceMesh:
    """The mesh of the surrounding ``with mesh:``."""
    return _mesh_resources.get_current_mesh()


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
        LayoutError: the placements or sizes do not fit mesh or tensor.
    """
    checked = normalized(placements, spec.mesh, spec.ndim)
    layout: list[AxisLayout] = []
    for axis, (have, placement) in enumerate(zip(spec.layout, checked, strict=True)):
        named = sizes is not None and axis in sizes
        if named and not isinstance(placement, Shard):
            raise LayoutError(f"sizes name mesh axis {axis}, but its placement is {placement}, not Shard(dim)")
        if not isinstance(placement, Shard):
            layout.append(placement)  # type: ignore[arg-type]
        elif named:
            layout.append(checked_cut(placement.dim, sizes[axis], spec, axis))  # type: ignore[index]
        elif isinstance(have, Cut) and have.dim == placement.dim and not chunked:
            layout.append(have)
        else:
            layout.append(Cut(placement.dim, chunk_sizes(spec.shape[placement.dim], mesh_sizes(spec.mesh)[axis])))
    return tuple(layout)


def checked_cut(dim: int, sizes: Sequence[int], spec: ShardTensorSpec, axis: int) -> Cut:
    """A cut with one size per rank of the mesh axis."""
    ranks = mesh_sizes(spec.mesh)[axis]
    if len(sizes) != ranks or any(size < 0 for size in sizes):
        raise LayoutError(f"got sizes {tuple(sizes)} for mesh axis {axis} of {ranks} ranks: give one size >= 0 per rank")
    return Cut(dim, tuple(int(size) for size in sizes))


def normalized(placements: Sequence[Placement] | None, mesh: DeviceMesh, ndim: int) -> tuple[Placement, ...]:
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
        if not isinstance(placement, Shard):
            if not isinstance(placement, Replicate | Partial):
                raise LayoutError(f"placement {placement} is not supported: use Shard(dim), Replicate() or Partial()")
            found.append(placement)
            continue
        if not -ndim <= placement.dim < ndim:
            raise LayoutError(f"{placement} names a dim that a tensor with {ndim} dims does not have")
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
        raise LayoutError(f"sharding_shapes is {sharding_shapes!r}: use 'infer', 'chunk' or a dict of shapes by mesh axis")
    if sharding_shapes == "chunk":
        if global_shape is None:
            raise LayoutError("sharding_shapes='chunk' needs global_shape, the shape of the whole tensor")
        return _chunk_spec(local, mesh, normalized(placements, mesh, local.ndim), tuple(global_shape))
    shapes = None
    if isinstance(sharding_shapes, dict):
        shapes = {axis: tuple(tuple(shape) for shape in found) for axis, found in sharding_shapes.items()}
    said = None if placements is None else tuple(placements)
    facts = gather_facts((tuple(local.shape), local.dtype, said, shapes), mesh)
    return _agreed_spec(facts, mesh)


def _chunk_spec(
    local: torch.Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...], shape: tuple[int, ...]
) -> ShardTensorSpec:
    whole = ShardTensorSpec.of(mesh, replicate(mesh.ndim), shape, local.dtype)
    spec = whole.with_layout(layout_like(whole, placements))
    if spec.local_shape != local.shape:
        raise LayoutError(
            f"this rank holds {tuple(local.shape)}, but torch.chunk of {shape} gives it {tuple(spec.local_shape)} at mesh "
            f"coordinate {spec.coordinate}. Use sharding_shapes='infer' or give the shapes"
        )
    return spec


def _agreed_spec(facts: dict[tuple[int, ...], Any], mesh: DeviceMesh) -> ShardTensorSpec:
    """The spec that fits what every rank said: (local shape, dtype, placements, shapes by mesh axis) by coordinate."""
    shapes = {at: shape for at, (shape, *_) in facts.items()}
    for item, what in ((1, "dtypes"), (2, "placements"), (3, "sharding_shapes")):
        if len({repr(fact[item]) for fact in facts.values()}) > 1:
            by_rank = {at: fact[item] for at, fact in facts.items()}
            raise RankDisagreementError(f"the ranks passed different {what}, by mesh coordinate: {by_rank}")
    if len({len(shape) for shape in shapes.values()}) > 1:
        raise RankDisagreementError(f"the ranks' blocks differ in their number of dims, by mesh coordinate: {shapes}")
    first, dtype, said, claimed = next(iter(facts.values()))
    placements = normalized(said, mesh, len(first))
    length = list(first)
    layout: list[AxisLayout] = []
    for axis, placement in enumerate(placements):
        if not isinstance(placement, Shard):
            layout.append(placement)  # type: ignore[arg-type]
            continue
        along = [(0,) * axis + (rank,) + (0,) * (mesh.ndim - axis - 1) for rank in range(mesh_sizes(mesh)[axis])]
        sizes = tuple(shapes[at][placement.dim] for at in along)
        if claimed is not None and axis in claimed and tuple(s[placement.dim] for s in claimed[axis]) != sizes:
            raise LayoutError(f"sharding_shapes[{axis}] is {claimed[axis]}, but the ranks hold {[shapes[a] for a in along]}")
        layout.append(Cut(placement.dim, sizes))
        length[placement.dim] = sum(sizes)
    spec = ShardTensorSpec.of(mesh, tuple(layout), length, dtype)
    wrong = {at: shape for at, shape in shapes.items() if tuple(spec.shape_at(at)) != shape}
    if wrong:
        expected = {at: tuple(spec.shape_at(at)) for at in wrong}
        raise RankDisagreementError(
            f"the ranks' blocks do not join into one tensor with placements {placements}: by mesh coordinate {wrong}, "
            f"where {expected} would fit. Blocks may differ only along the sharded dims"
        )
    return spec


def _coerced(grad: Any, spec: ShardTensorSpec, layout: Layout) -> torch.Tensor:
    """The local block of a gradient, in ``layout``; a plain gradient counts as replicated."""
    if isinstance(grad, sharded.ShardTensor):
        return grad._with_layout(layout).to_local()
    return redistribute_local(grad, spec.replicated(), layout)


class FromLocal(torch.autograd.Function):
    """Block -> sharded tensor; the gradient comes back as this rank's block."""

    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, spec: ShardTensorSpec) -> Any:
        ctx.spec = spec
        return sharded.wrap(local.detach(), spec)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return _coerced(grad, ctx.spec, ctx.spec.resolved_layout), None


class ToLocal(torch.autograd.Function):
    """Sharded tensor -> block; the gradients of the blocks become the gradient of the tensor."""

    @staticmethod
    def forward(ctx: Any, tensor: Any, grad_layout: Layout | None) -> torch.Tensor:
        ctx.spec = tensor._spec
        ctx.grad_layout = grad_layout
        local: torch.Tensor = tensor._local_tensor
        return local.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        spec, given = ctx.spec, ctx.grad_layout
        whole = FromLocal.apply(grad, spec.with_layout(spec.resolved_layout if given is None else given))
        return whole._with_layout(spec.resolved_layout), None


class Redistribute(torch.autograd.Function):
    """One layout -> another; the gradient goes back to the first."""

    @staticmethod
    def forward(ctx: Any, tensor: Any, layout: Layout) -> Any:
        ctx.spec = tensor._spec
        local = redistribute_local(tensor._local_tensor, tensor._spec, layout)
        return sharded.wrap(local, tensor._spec.with_layout(layout))

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        layout = ctx.spec.resolved_layout
        if not isinstance(grad, sharded.ShardTensor):
            grad = FromLocal.apply(grad, ctx.spec.replicated())
        return grad._with_layout(layout), None


class FromDTensor(torch.autograd.Function):
    """DTensor -> ShardTensor, sharing the block; the gradient comes back as a DTensor placed as the input."""

    @staticmethod
    def forward(ctx: Any, dtensor: DTensor, _: type) -> Any:
        mesh = dtensor.device_mesh
        placements = normalized(dtensor.placements, mesh, dtensor.ndim)
        whole = ShardTensorSpec.of(mesh, replicate(mesh.ndim), dtensor.shape, dtensor.dtype, dtensor.stride())
        ctx.spec = whole.with_layout(layout_like(whole, placements))
        return sharded.wrap(dtensor._local_tensor.detach(), ctx.spec)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        even = grad._with_layout(ctx.spec.resolved_layout)
        return ToDTensor.apply(even), None


class ToDTensor(torch.autograd.Function):
    """ShardTensor cut as ``torch.chunk`` does -> DTensor, sharing the block."""

    @staticmethod
    def forward(ctx: Any, tensor: Any) -> DTensor:
        ctx.spec = spec = tensor._spec
        meta = DTensorMeta(spec.shape, spec.tensor_meta.stride, spec.dtype)
        dspec = DTensorSpec(spec.mesh, spec.placements, tensor_meta=meta)
        return DTensor(tensor._local_tensor.detach(), dspec, requires_grad=False)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        tensor = FromDTensor.apply(grad, None) if isinstance(grad, DTensor) else grad
        return tensor._with_layout(ctx.spec.resolved_layout)

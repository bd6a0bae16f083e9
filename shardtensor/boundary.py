"""Where tensors enter, leave and change layout: the differentiable steps between plain and sharded tensors."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._dtensor_spec import TensorMeta as DTensorMeta

from shardtensor import comm
from shardtensor import tensor as sharded  # the class itself: used at call time only, the two modules need each other
from shardtensor.errors import LayoutError
from shardtensor.infer import layout_like
from shardtensor.redistribute import redistribute_local
from shardtensor.spec import Layout, ShardTensorSpec, mesh_sizes, replicate

__all__ = ["FromDTensor", "FromLocal", "Redistribute", "ToDTensor", "ToLocal", "in_layout"]


def in_layout(grad: Any, spec: ShardTensorSpec, layout: Layout) -> Any:
    """A gradient as sharded tensor in ``layout``, differentiable; a plain one is the same on every rank."""
    if not isinstance(grad, sharded.ShardTensor):
        grad = FromLocal.apply(grad, spec.replicated())
    return grad._with_layout(layout)


class FromLocal(torch.autograd.Function):
    """Block -> sharded tensor; the gradient comes back as this rank's block."""

    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, spec: ShardTensorSpec) -> Any:
        ctx.spec = spec
        for axis in spec.partial_axes:
            op = spec.layout[axis].reduce_op  # type: ignore[union-attr]
            if ctx.needs_input_grad[0] and op not in ("sum", "avg"):
                raise LayoutError(f"no gradient flows through Partial({op!r}): detach the block, or reduce it first")
        return sharded.wrap(local.detach(), spec)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        spec = ctx.spec
        local = in_layout(grad, spec, spec.resolved_layout).to_local()
        averaged = [axis for axis in spec.partial_axes if spec.layout[axis].reduce_op == "avg"]
        return local / prod(mesh_sizes(spec.mesh)[axis] for axis in averaged) if averaged else local, None


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


def moved_to(tensor: Any, layout: Layout) -> Any:
    """The tensor in another layout, outside autograd."""
    local = redistribute_local(tensor._local_tensor, tensor._spec, layout)
    if local.numel() * local.element_size() < local.untyped_storage().nbytes() and tensor._spec.is_dense:
        local = local.clone()  # a slice of the old block would keep all of it alive, and share its values
    return sharded.wrap(local, tensor._spec.with_layout(layout))


class Redistribute(torch.autograd.Function):
    """One layout -> another; the gradient goes back to the first."""

    @staticmethod
    def forward(ctx: Any, tensor: Any, layout: Layout) -> Any:
        ctx.spec = tensor._spec
        return moved_to(tensor, layout)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return in_layout(grad, ctx.spec, ctx.spec.resolved_layout), None


class FromDTensor(torch.autograd.Function):
    """DTensor -> ShardTensor, sharing the block; the gradient comes back as a DTensor placed as the input."""

    @staticmethod
    def forward(ctx: Any, dtensor: DTensor) -> Any:
        mesh = dtensor.device_mesh
        whole = ShardTensorSpec.of(mesh, replicate(mesh.ndim), dtensor.shape, dtensor.dtype, dtensor.stride())
        ctx.spec = whole.with_layout(layout_like(whole, dtensor.placements))
        return sharded.wrap(comm.finished(dtensor._local_tensor).detach(), ctx.spec)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return ToDTensor.apply(in_layout(grad, ctx.spec, ctx.spec.resolved_layout))


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
        tensor = FromDTensor.apply(grad) if isinstance(grad, DTensor) else grad
        return in_layout(tensor, ctx.spec, ctx.spec.resolved_layout)

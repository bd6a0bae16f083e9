"""Group norm: samples stay apart, and groups whose pixels lie on several ranks share their statistics."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch

from shardtensor.registry import rule
from shardtensor.rules.layouts import local_in, mesh_of, resolved, spec_of, uncut
from shardtensor.rules.moments import block_moments, merged_moments
from shardtensor.rules.reduction import accumulation_dtype, reduce_over
from shardtensor.spec import PENDING_SUM, REPLICATE, AxisLayout, Cut, Layout, ShardTensorSpec, mesh_sizes
from shardtensor.tensor import ShardTensor, wrap

__all__ = ["Groups"]

aten = torch.ops.aten


class Groups(NamedTuple):
    """How a group norm of [N, C, *] lies.

    Attributes:
        dims: the dims of the pixels.
        axes: mesh axes along which the pixels of a group are spread.
        n, groups, width: samples and groups in this rank's block, channels of a group.
        elements: elements of a whole group.
        out: the result: the input's layout, row-major.
        statistics: mean and rstd, [N, groups].
        affine: layout of weight and bias, [C], beside a block.
        affine_grad: their gradients: pending sums over samples and pixels.
    """

    dims: tuple[int, ...]
    axes: tuple[int, ...]
    n: int
    groups: int
    width: int
    elements: int
    out: ShardTensorSpec
    statistics: ShardTensorSpec
    affine: Layout
    affine_grad: ShardTensorSpec

    def by_group(self, tensor: torch.Tensor) -> torch.Tensor:
        """A block [n, channels, *] as [n, groups, channels of a group, pixels]."""
        pixels = tensor.shape[2:].numel()
        return tensor.reshape(self.n, self.groups, self.width, pixels)

    def of_channels(self, tensor: torch.Tensor) -> torch.Tensor:
        """Weight or bias [groups * width] beside blocks as `by_group` gives them."""
        return tensor.view(1, self.groups, self.width, 1)


@lru_cache(maxsize=1024)
def _splits_groups(spec: ShardTensorSpec, groups: int) -> bool:
    """Whether a cut of the channels goes through a group."""
    width = spec.shape[1] // groups
    cuts = [cut for _, cut in spec.cuts if cut.dim == 1]
    return len(cuts) > 1 or any(cut.outer > 1 or any(size % width for size in cut.sizes) for cut in cuts)


@lru_cache(maxsize=1024)
def _groups(spec: ShardTensorSpec, groups: int) -> Groups:
    samples, channels = spec.shape[:2]
    width = channels // groups
    statistics: list[AxisLayout] = []
    affine: list[AxisLayout] = []
    grads: list[AxisLayout] = []
    for entry in spec.layout:
        dim = entry.dim if isinstance(entry, Cut) else None
        if isinstance(entry, Cut) and dim == 1:
            statistics.append(Cut(1, tuple(size // width for size in entry.sizes)))
        else:
            statistics.append(entry if dim == 0 else REPLICATE)
        affine.append(entry.moved(0) if isinstance(entry, Cut) and dim == 1 else REPLICATE)
        grads.append(affine[-1] if dim is None or dim == 1 else PENDING_SUM)
    local = spec.local_shape
    ranks = mesh_sizes(spec.mesh)
    return Groups(
        tuple(range(2, spec.ndim)),
        tuple(axis for axis, cut in spec.cuts if cut.dim > 1 and ranks[axis] > 1),
        local[0],
        local[1] // width,
        width,
        width * spec.shape[2:].numel(),
        ShardTensorSpec.of(spec.mesh, spec.layout, spec.shape, spec.dtype),
        ShardTensorSpec.of(spec.mesh, tuple(statistics), (samples, groups), spec.dtype),
        tuple(affine),
        ShardTensorSpec.of(spec.mesh, tuple(grads), (channels,), spec.dtype),
    )


def _beside(tensor: torch.Tensor | None, plan: Groups) -> torch.Tensor | None:
    """The part of weight or bias that belongs to a block."""
    return None if tensor is None else local_in(tensor, plan.affine, plan.out.mesh)


def _ready(input: torch.Tensor, groups: int, *others: torch.Tensor | None) -> ShardTensor:
    """The input as a sharded tensor without pending reductions and with whole groups of channels on every rank."""
    if not isinstance(input, ShardTensor):
        return wrap(input, spec_of(input, mesh_of(*others)))
    input = resolved(input)
    return uncut(input, [1]) if _splits_groups(input._spec, groups) else input


@rule(aten.native_group_norm.default)
def native_group_norm(
    input: ShardTensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    N: int,
    C: int,
    HxW: int,
    group: int,
    eps: float,
) -> tuple[ShardTensor, ShardTensor, ShardTensor]:
    input = _ready(input, group, weight, bias)
    block, plan = input._local_tensor, _groups(input._spec, group)
    weight, bias = _beside(weight, plan), _beside(bias, plan)
    if not plan.axes:
        found = _whole_groups(block, weight, bias, plan, eps)
        return tuple(map(wrap, found, (plan.out, plan.statistics, plan.statistics)))  # type: ignore[return-value]
    centred, own = block_moments(plan.by_group(block), (2, 3))
    moments = merged_moments(own, plan.out, plan.dims, plan.axes, plan.width)
    mean, rstd = moments.centre + moments.rest, (moments.squares / plan.elements + eps).rsqrt()
    scale = rstd if weight is None else rstd * plan.of_channels(weight)
    shift = moments.shift_from(own) * scale
    out = centred.mul_(scale).add_(shift if bias is None else shift + plan.of_channels(bias))
    return (
        wrap(out.view(block.shape).to(block.dtype), plan.out),
        wrap(mean.view(plan.n, plan.groups), plan.statistics),
        wrap(rstd.view(plan.n, plan.groups), plan.statistics),
    )


def _whole_groups(
    block: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, plan: Groups, eps: float
) -> tuple[torch.Tensor, ...]:
    """The norm of a block that holds every pixel of its groups."""
    if not block.numel():
        nothing = block.new_full((plan.n, plan.groups), torch.nan)
        return torch.empty_like(block), nothing, nothing
    channels, pixels = plan.groups * plan.width, block.shape[2:].numel()
    return torch.native_group_norm(block.contiguous(), weight, bias, plan.n, channels, pixels, plan.groups, eps)


@rule(aten.native_group_norm_backward.default)
def native_group_norm_backward(
    grad_out: torch.Tensor,
    input: ShardTensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    N: int,
    C: int,
    HxW: int,
    group: int,
    output_mask: Sequence[bool],
) -> tuple[torch.Tensor | None, ...]:
    input = _ready(input, group, grad_out, mean, weight)
    block, plan = input._local_tensor, _groups(input._spec, group)
    mesh = plan.out.mesh
    grad = local_in(grad_out, plan.out.layout, mesh)
    mean, rstd = (local_in(item, plan.statistics.layout, mesh) for item in (mean, rstd))
    weight = _beside(weight, plan)
    if plan.axes or not block.numel():
        found = _spread_backward(grad, block, mean, rstd, weight, plan, output_mask)
    else:
        pixels, channels = block.shape[2:].numel(), plan.groups * plan.width
        blocks = (grad.contiguous(), block.contiguous(), mean, rstd, weight)
        found = aten.native_group_norm_backward.default(*blocks, plan.n, channels, pixels, plan.groups, output_mask)
    specs = (plan.out, plan.affine_grad, plan.affine_grad)
    return tuple(None if part is None else wrap(part, spec) for part, spec in zip(found, specs, strict=True))


def _spread_backward(
    grad: torch.Tensor,
    block: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    plan: Groups,
    output_mask: Sequence[bool],
) -> tuple[torch.Tensor | None, ...]:
    """Gradients where pixels are spread; both sums of every group travel in one all-reduce."""
    wide = accumulation_dtype(block.dtype)
    grad_NGDP = plan.by_group(grad).to(wide)
    per_group = (plan.n, plan.groups, 1, 1)
    normal_NGDP = (plan.by_group(block) - mean.view(per_group)) * rstd.view(per_group)
    along_NGD1 = (grad_NGDP * normal_NGDP).sum(3, True)
    plain_NGD1 = grad_NGDP.sum(3, True)
    dtype = block.dtype if weight is None else weight.dtype
    by_weight = along_NGD1.sum(0).flatten().to(dtype) if output_mask[1] else None
    by_bias = plain_NGD1.sum(0).flatten().to(dtype) if output_mask[2] else None
    if not output_mask[0]:
        return None, by_weight, by_bias
    if weight is not None:
        scale_1GD1 = plan.of_channels(weight)
        grad_NGDP, along_NGD1, plain_NGD1 = (part * scale_1GD1 for part in (grad_NGDP, along_NGD1, plain_NGD1))
    sums = torch.stack((plain_NGD1.sum(2, True), along_NGD1.sum(2, True)))
    plain, along = reduce_over(sums, plan.out, plan.axes, "sum") / plan.elements
    result = (grad_NGDP - plain).addcmul_(normal_NGDP, along, value=-1).mul_(rstd.view(per_group))
    return result.reshape(block.shape).to(block.dtype), by_weight, by_bias

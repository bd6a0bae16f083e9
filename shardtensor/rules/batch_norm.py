"""Batch norm, in all the ops torch has for it: statistics over the whole batch and all of space, wherever they lie.

Instance norm arrives here too, as batch norm of one sample with N * C channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from shardtensor.redistribute import redistribute_local
from shardtensor.registry import rule
from shardtensor.rules.layouts import local_in, mesh_of, replicated_result, resolved, spec_of
from shardtensor.rules.moments import block_moments, merged_moments
from shardtensor.rules.reduction import accumulation_dtype, reduce_over
from shardtensor.spec import PENDING_SUM, REPLICATE, AxisLayout, Cut, ShardTensorSpec, mesh_sizes
from shardtensor.tensor import ShardTensor, wrap

__all__ = ["Channels"]

aten = torch.ops.aten


class Channels(NamedTuple):
    """How a batch norm of [N, C, *] lies.

    Attributes:
        dims: all dims but the channels.
        axes: mesh axes along which the elements of a channel are spread.
        elements: elements of a whole channel.
        out: the result: the input's layout, row-major.
        channel: per channel values, [C], beside a block: statistics, weight and bias.
        pending: the same while the parts along ``axes`` wait to be summed.
        whole: whether each block is the whole tensor.
    """

    dims: tuple[int, ...]
    axes: tuple[int, ...]
    elements: int
    out: ShardTensorSpec
    channel: ShardTensorSpec
    pending: ShardTensorSpec
    whole: bool

    def beside(self, tensor: torch.Tensor | None) -> torch.Tensor | None:
        """The part of per-channel values that belongs to a block."""
        return None if tensor is None else local_in(tensor, self.channel.layout, self.out.mesh)

    def broadcast(self, values: torch.Tensor) -> torch.Tensor:
        """Per-channel values of a block, [c], as [1, c, 1, ...]."""
        return values.view(1, -1, *(1,) * (len(self.dims) - 1))


@lru_cache(maxsize=1024)
def _channels(spec: ShardTensorSpec) -> Channels:
    channel: list[AxisLayout] = []
    pending: list[AxisLayout] = []
    for entry in spec.layout:
        dim = entry.dim if isinstance(entry, Cut) else None
        channel.append(entry.moved(0) if isinstance(entry, Cut) and dim == 1 else REPLICATE)
        pending.append(channel[-1] if dim is None or dim == 1 else PENDING_SUM)
    shape, ranks = spec.shape, mesh_sizes(spec.mesh)
    return Channels(
        (0, *range(2, spec.ndim)),
        tuple(axis for axis, cut in spec.cuts if cut.dim != 1 and ranks[axis] > 1),
        shape[0] * shape[2:].numel(),
        ShardTensorSpec.of(spec.mesh, spec.layout, shape, spec.dtype),
        ShardTensorSpec.of(spec.mesh, tuple(channel), shape[1:2], spec.dtype),
        ShardTensorSpec.of(spec.mesh, tuple(pending), shape[1:2], spec.dtype),
        all(ranks[axis] == 1 for axis, _ in spec.cuts),
    )


def _ready(input: torch.Tensor, *others: torch.Tensor | None) -> ShardTensor:
    if isinstance(input, ShardTensor):
        return resolved(input)
    return wrap(input, spec_of(input, mesh_of(*others)))


@rule(aten.native_batch_norm.default, aten._native_batch_norm_legit.default)
def native_batch_norm(
    input: ShardTensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    input = _ready(input, weight, bias, running_mean)
    plan = _channels(input._spec)
    weight, bias = plan.beside(weight), plan.beside(bias)
    if training:
        return _training(input._local_tensor, weight, bias, running_mean, running_var, momentum, eps, plan)
    block, mean, variance = input._local_tensor, plan.beside(running_mean), plan.beside(running_var)
    out = torch.empty_like(block)
    if block.numel():
        out = torch.native_batch_norm(block, weight, bias, mean, variance, False, momentum, eps)[0]
    nothing = replicated_result(block.new_empty(0, dtype=accumulation_dtype(block.dtype)), plan.out.mesh)
    return wrap(out.contiguous(), plan.out), nothing, nothing


def _training(
    block: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    momentum: float,
    eps: float,
    plan: Channels,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    if plan.whole:
        running_mean, running_var = (plan.beside(running) for running in (running_mean, running_var))
        found = torch.native_batch_norm(block, weight, bias, running_mean, running_var, True, momentum, eps)
        return wrap(found[0].contiguous(), plan.out), wrap(found[1], plan.channel), wrap(found[2], plan.channel)
    centred, own = block_moments(block, plan.dims)
    moments = merged_moments(own, plan.out, plan.dims, plan.axes)
    mean, squares = moments.centre + moments.rest, moments.squares
    _update(running_mean, mean.flatten(), momentum, plan)
    _update(running_var, squares.flatten() / max(plan.elements - 1, 0), momentum, plan)
    rstd = (squares / plan.elements + eps).rsqrt()
    scale = rstd if weight is None else rstd * plan.broadcast(weight)
    shift = moments.shift_from(own) * scale
    out = centred.mul_(scale).add_(shift if bias is None else shift + plan.broadcast(bias))
    return (
        wrap(out.to(block.dtype).contiguous(), plan.out),
        wrap(mean.flatten(), plan.channel),
        wrap(rstd.flatten(), plan.channel),
    )


def _update(running: torch.Tensor | None, values: torch.Tensor, momentum: float, plan: Channels) -> None:
    """Move a running statistic, whole on every rank, towards the per-channel values of a block."""
    if running is None:
        return
    kept, layout = running, plan.channel.replicated().layout
    if isinstance(running, ShardTensor):
        kept, layout = running._local_tensor, running._spec.layout
    values = redistribute_local(values, plan.channel, layout).to(kept.dtype)
    kept.lerp_(values, momentum)


@rule(aten.native_batch_norm_backward.default)
def native_batch_norm_backward(
    grad_out: torch.Tensor,
    input: ShardTensor,
    weight: torch.Tensor | None,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    save_mean: torch.Tensor | None,
    save_invstd: torch.Tensor | None,
    train: bool,
    eps: float,
    output_mask: Sequence[bool],
) -> tuple[torch.Tensor | None, ...]:
    input = _ready(input, grad_out, weight, save_mean)
    block, plan = input._local_tensor, _channels(input._spec)
    wide = accumulation_dtype(block.dtype)
    grad = local_in(grad_out, plan.out.layout, plan.out.mesh).to(wide)
    weight = plan.beside(weight)
    mean, rstd = plan.beside(save_mean if train else running_mean), plan.beside(save_invstd if train else running_var)
    assert mean is not None
    assert rstd is not None
    if not train:
        rstd = (rstd + eps).rsqrt()
    mean, rstd = plan.broadcast(mean).to(wide), plan.broadcast(rstd).to(wide)
    normal = (block - mean) * rstd
    sums, spec = torch.stack((grad.sum(plan.dims), (grad * normal).sum(plan.dims))), plan.pending
    if train and output_mask[0]:  # the whole sums are needed at once: the weights' gradients are whole then, too
        sums, spec = reduce_over(sums, plan.out, plan.axes, "sum"), plan.channel
    dtype = block.dtype if weight is None else weight.dtype
    by_bias = wrap(sums[0].to(dtype), spec) if output_mask[2] else None
    by_weight = wrap(sums[1].to(dtype), spec) if output_mask[1] else None
    if not output_mask[0]:
        return None, by_weight, by_bias
    if train:
        plain, along = (plan.broadcast(part) for part in sums / plan.elements)
        grad = (grad - plain).addcmul_(normal, along, value=-1)
    scale = rstd if weight is None else rstd * plan.broadcast(weight)
    return wrap((grad * scale).to(block.dtype).contiguous(), plan.out), by_weight, by_bias


# Other names of the same --------------------------------------------------------------------------------------------


@rule(aten._native_batch_norm_legit.no_stats)
def batch_norm_no_stats(
    input: ShardTensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[torch.Tensor, ...]:
    return native_batch_norm(input, weight, bias, None, None, True, momentum, eps)


@rule(aten._native_batch_norm_legit_no_training.default)
def batch_norm_no_training(
    input: ShardTensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor,
    running_var: torch.Tensor,
    momentum: float,
    eps: float,
) -> tuple[torch.Tensor, ...]:
    return native_batch_norm(input, weight, bias, running_mean, running_var, False, momentum, eps)


def _with_reserve(found: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    out = found[0]
    assert isinstance(out, ShardTensor)
    reserve = torch.empty(0, dtype=torch.uint8, device=out.device)
    return *found, replicated_result(reserve, out._spec.mesh)


@rule(aten.cudnn_batch_norm.default)
def cudnn_batch_norm(
    input: ShardTensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    training: bool,
    exponential_average_factor: float,
    epsilon: float,
) -> tuple[torch.Tensor, ...]:
    statistics = (running_mean, running_var)
    return _with_reserve(
        native_batch_norm(input, weight, bias, *statistics, training, exponential_average_factor, epsilon)
    )


@rule(aten._batch_norm_with_update.default)
def batch_norm_with_update(
    input: ShardTensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor,
    running_var: torch.Tensor,
    momentum: float,
    eps: float,
) -> tuple[torch.Tensor, ...]:
    return _with_reserve(native_batch_norm(input, weight, bias, running_mean, running_var, True, momentum, eps))


@rule(aten._batch_norm_no_update.default)
def batch_norm_no_update(
    input: ShardTensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    momentum: float,
    eps: float,
) -> tuple[torch.Tensor, ...]:
    return _with_reserve(native_batch_norm(input, weight, bias, running_mean, running_var, False, momentum, eps))


@rule(aten.cudnn_batch_norm_backward.default)
def cudnn_batch_norm_backward(
    input: ShardTensor,
    grad_output: torch.Tensor,
    weight: torch.Tensor,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    save_mean: torch.Tensor | None,
    save_var: torch.Tensor | None,
    epsilon: float,
    reserveSpace: Any,
) -> tuple[torch.Tensor | None, ...]:
    statistics = (running_mean, running_var, save_mean, save_var)
    return native_batch_norm_backward(grad_output, input, weight, *statistics, True, epsilon, (True, True, True))


@rule(aten.batch_norm_backward.default)
def batch_norm_backward(
    grad_out: torch.Tensor,
    input: ShardTensor,
    weight: torch.Tensor,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    save_mean: torch.Tensor | None,
    save_var: torch.Tensor | None,
    update: bool,
    eps: float,
    output_mask: Sequence[bool],
    reserve: Any,
) -> tuple[torch.Tensor | None, ...]:
    statistics = (running_mean, running_var, save_mean, save_var)
    return native_batch_norm_backward(grad_out, input, weight, *statistics, update, eps, output_mask)

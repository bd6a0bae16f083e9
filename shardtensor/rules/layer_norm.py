"""Layer norm and RMS norm: rows that are whole on a rank need no exchange, cut rows share their statistics."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch

from shardtensor.registry import rule
from shardtensor.rules.layouts import local_in, mesh_of, resolved, spec_of
from shardtensor.rules.moments import block_moments, merged_moments
from shardtensor.rules.reduction import accumulation_dtype, reduce_over
from shardtensor.spec import PENDING_SUM, REPLICATE, AxisLayout, Cut, Layout, ShardTensorSpec, mesh_sizes
from shardtensor.tensor import ShardTensor, wrap

__all__ = ["Rows"]

aten = torch.ops.aten


class Rows(NamedTuple):
    """How a norm over the last dims lies.

    Attributes:
        dims: the normalized dims.
        axes: mesh axes that cut them.
        elements: length of a whole row.
        out: the result: the input's layout, row-major.
        statistics: mean and rstd, [..., 1, 1]: cut as the rows are spread, whole along ``axes``.
        affine: layout of weight and bias beside a block.
        affine_grad: the gradients of weight and bias: pending sums along the axes over which rows are spread.
    """

    dims: tuple[int, ...]
    axes: tuple[int, ...]
    elements: int
    out: ShardTensorSpec
    statistics: ShardTensorSpec
    affine: Layout
    affine_grad: ShardTensorSpec


@lru_cache(maxsize=1024)
def _rows(spec: ShardTensorSpec, normalized: int) -> Rows:
    first = spec.ndim - normalized
    affine: list[AxisLayout] = []
    grads: list[AxisLayout] = []
    statistics: list[AxisLayout] = []
    for entry in spec.layout:
        inside = isinstance(entry, Cut) and entry.dim >= first
        along = entry.moved(entry.dim - first) if isinstance(entry, Cut) and inside else REPLICATE
        affine.append(along)
        grads.append(PENDING_SUM if isinstance(entry, Cut) and not inside else along)
        statistics.append(REPLICATE if inside else entry)
    shape, dtype = spec.shape, spec.dtype
    ranks = mesh_sizes(spec.mesh)
    return Rows(
        tuple(range(first, spec.ndim)),
        tuple(axis for axis, cut in spec.cuts if cut.dim >= first and ranks[axis] > 1),
        shape[first:].numel(),
        ShardTensorSpec.of(spec.mesh, spec.layout, shape, dtype),
        ShardTensorSpec.of(spec.mesh, tuple(statistics), (*shape[:first], *(1,) * normalized), dtype),
        tuple(affine),
        ShardTensorSpec.of(spec.mesh, tuple(grads), shape[first:], dtype),
    )


def _beside(tensor: torch.Tensor | None, rows: Rows) -> torch.Tensor | None:
    """The part of weight or bias that belongs to a block."""
    return None if tensor is None else local_in(tensor, rows.affine, rows.out.mesh)


@rule(aten.native_layer_norm.default)
def native_layer_norm(
    input: ShardTensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
) -> tuple[ShardTensor, ShardTensor, ShardTensor]:
    input = _sharded(input, weight, bias)
    block = input._local_tensor
    rows = _rows(input._spec, len(normalized_shape))
    weight, bias = _beside(weight, rows), _beside(bias, rows)
    if not rows.axes:
        out, mean, rstd = torch.native_layer_norm(block, normalized_shape, weight, bias, eps)
        return wrap(out, rows.out), wrap(mean, rows.statistics), wrap(rstd, rows.statistics)
    centred, own = block_moments(block, rows.dims)
    moments = merged_moments(own, input._spec, rows.dims, rows.axes)
    mean, rstd = moments.centre + moments.rest, (moments.squares / rows.elements + eps).rsqrt()
    out = _scaled((centred + moments.shift_from(own)).mul_(rstd), weight, bias)
    return wrap(out.to(block.dtype).contiguous(), rows.out), wrap(mean, rows.statistics), wrap(rstd, rows.statistics)


def _sharded(input: torch.Tensor, *others: torch.Tensor | None) -> ShardTensor:
    """The input as a sharded tensor without pending reductions; where only a weight is sharded, as a replicated one."""
    if isinstance(input, ShardTensor):
        return resolved(input)
    return wrap(input, spec_of(input, mesh_of(*others)))


def _scaled(normal: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor:
    if weight is None:
        return normal if bias is None else normal + bias
    return normal * weight if bias is None else torch.addcmul(bias, normal, weight)


@rule(aten.native_layer_norm_backward.default)
def native_layer_norm_backward(
    grad_out: torch.Tensor,
    input: ShardTensor,
    normalized_shape: Sequence[int],
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    output_mask: Sequence[bool],
) -> tuple[torch.Tensor | None, ...]:
    input = _sharded(input, grad_out, mean, weight)
    rows = _rows(input._spec, len(normalized_shape))
    mesh = rows.out.mesh
    grad = local_in(grad_out, rows.out.layout, mesh)
    mean, rstd = (local_in(item, rows.statistics.layout, mesh) for item in (mean, rstd))
    blocks = (grad, input._local_tensor, normalized_shape, mean, rstd, _beside(weight, rows), _beside(bias, rows))
    if not rows.axes:
        found = aten.native_layer_norm_backward.default(*blocks, output_mask)
    else:
        found = _cut_backward(*blocks[:2], mean, rstd, blocks[5], bias is not None, rows, output_mask)
    specs = (rows.out, rows.affine_grad, rows.affine_grad)
    return tuple(None if part is None else wrap(part, spec) for part, spec in zip(found, specs, strict=True))


def _cut_backward(
    grad: torch.Tensor,
    block: torch.Tensor,
    mean: torch.Tensor | None,
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    has_bias: bool,
    rows: Rows,
    output_mask: Sequence[bool],
) -> tuple[torch.Tensor | None, ...]:
    """Gradients where rows are cut; both sums of every row travel in one all-reduce. No ``mean``: RMS norm."""
    wide = accumulation_dtype(block.dtype)
    grad = grad.to(wide)
    normal = (block.to(wide) if mean is None else block - mean) * rstd
    over = tuple(range(rows.dims[0]))
    by_weight = None
    if output_mask[1] and weight is not None:
        by_weight = _sum_over(grad * normal, over).to(weight.dtype)
    by_bias = (
        _sum_over(grad, over).to(block.dtype if weight is None else weight.dtype)
        if has_bias and output_mask[2]
        else None
    )
    if not output_mask[0]:
        return None, by_weight, by_bias
    inner = grad if weight is None else grad * weight
    along = (inner * normal).sum(rows.dims, True)
    plain = torch.zeros_like(along) if mean is None else inner.sum(rows.dims, True)
    plain, along = reduce_over(torch.stack((plain, along)), rows.out, rows.axes, "sum") / rows.elements
    return ((inner - plain - normal * along) * rstd).to(block.dtype).contiguous(), by_weight, by_bias


def _sum_over(block: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
    return block.sum(dims) if dims else block


@rule(aten._fused_rms_norm.default)
def fused_rms_norm(
    input: ShardTensor, normalized_shape: Sequence[int], weight: torch.Tensor | None, eps: float | None
) -> tuple[ShardTensor, ShardTensor]:
    """What ``F.rms_norm`` is on CUDA, and everywhere under ``inference_mode``."""
    input = _sharded(input, weight)
    block = input._local_tensor
    rows = _rows(input._spec, len(normalized_shape))
    weight = _beside(weight, rows)
    if not rows.axes:
        out, rstd = aten._fused_rms_norm.default(block, normalized_shape, weight, eps)
        return wrap(out, rows.out), wrap(rstd, rows.statistics)
    wide = block.to(accumulation_dtype(block.dtype))
    squares = reduce_over(wide.square().sum(rows.dims, True), rows.out, rows.axes, "sum")
    rstd = (squares / rows.elements + (torch.finfo(wide.dtype).eps if eps is None else eps)).rsqrt()
    return wrap(_scaled(wide * rstd, weight, None).to(block.dtype).contiguous(), rows.out), wrap(rstd, rows.statistics)


@rule(aten._fused_rms_norm_backward.default)
def fused_rms_norm_backward(
    grad_out: torch.Tensor,
    input: ShardTensor,
    normalized_shape: Sequence[int],
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    output_mask: Sequence[bool],
) -> tuple[torch.Tensor | None, ...]:
    input = _sharded(input, grad_out, rstd, weight)
    block = input._local_tensor
    rows = _rows(input._spec, len(normalized_shape))
    grad = local_in(grad_out, rows.out.layout, rows.out.mesh)
    rstd = local_in(rstd, rows.statistics.layout, rows.out.mesh)
    weight = _beside(weight, rows)
    if block.is_cuda and not rows.axes:  # the op has no CPU kernel
        found = aten._fused_rms_norm_backward.default(grad, block, normalized_shape, rstd, weight, output_mask)
    else:
        found = _cut_backward(grad, block, None, rstd, weight, False, rows, (*output_mask, False))[:2]
    specs = (rows.out, rows.affine_grad)
    return tuple(None if part is None else wrap(part, spec) for part, spec in zip(found, specs, strict=True))

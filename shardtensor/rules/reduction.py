"""Reductions: blocks are reduced where they lie, and a sum over cut dims stays pending until it is needed."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import torch

from shardtensor import comm
from shardtensor.errors import OpError
from shardtensor.registry import rule
from shardtensor.rules.layouts import aligned, resolved
from shardtensor.rules.memory import in_backward
from shardtensor.spec import (
    PENDING_SUM,
    REPLICATE,
    AxisLayout,
    Cut,
    Layout,
    Partial,
    ShardTensorSpec,
    contiguous_stride,
    mesh_sizes,
)
from shardtensor.tensor import ShardTensor, wrap

__all__ = ["Dims", "Reduced", "accumulation_dtype", "reduce_over", "reduced"]

aten = torch.ops.aten

Dims: TypeAlias = Sequence[int] | int | None
"""Dims as reductions take them: one, several, or None for all."""


class Reduced(NamedTuple):
    """What a reduction of a tensor leads to.

    Attributes:
        dims: the reduced dims, >= 0, sorted.
        axes: mesh axes that cut a reduced dim: along them every rank has only its part of the reduction.
        spec: the result once the parts are put together.
        pending: the result while the parts still wait to be summed: ``Partial("sum")`` along ``axes``.
        elements: how many elements of the whole tensor go into one result.
        still: dims of the result along which an expanded tensor stays expanded.
    """

    dims: tuple[int, ...]
    axes: tuple[int, ...]
    spec: ShardTensorSpec
    pending: ShardTensorSpec
    elements: int
    still: tuple[int, ...]


def reduced(spec: ShardTensorSpec, dims: Dims, keepdim: bool = False, *, empty_is_all: bool = True) -> Reduced:
    """The outcome of reducing a tensor of ``spec`` over ``dims``; the same on every rank.

    Args:
        dims: None means all; so does an empty list, unless ``empty_is_all`` is False.

    Raises:
        IndexError: a dim that the tensor does not have.
        OpError: a dim named twice.
    """
    if dims is None or (empty_is_all and not isinstance(dims, int) and not len(dims)):
        return _reduced(spec, None, keepdim)
    return _reduced(spec, (dims,) if isinstance(dims, int) else tuple(dims), keepdim)


@lru_cache(maxsize=4096)
def _reduced(spec: ShardTensorSpec, dims: tuple[int, ...] | None, keepdim: bool) -> Reduced:
    meta = spec.tensor_meta
    ndim = len(meta.shape)
    found = tuple(range(ndim)) if dims is None else _normalized(dims, ndim)
    ranks = mesh_sizes(spec.mesh)
    axes = tuple(axis for axis, cut in spec.cuts if cut.dim in found and ranks[axis] > 1)
    place, kept = {}, 0
    for dim in range(ndim):
        place[dim] = dim if keepdim else kept
        kept += dim not in found
    shape = [1 if dim in found else n for dim, n in enumerate(meta.shape) if keepdim or dim not in found]
    settled: list[AxisLayout] = []
    for entry in spec.layout:
        if not isinstance(entry, Cut):
            settled.append(entry)
        else:
            settled.append(REPLICATE if entry.dim in found else entry.moved(place[entry.dim]))
    waiting = tuple(PENDING_SUM if axis in axes else entry for axis, entry in enumerate(settled))
    count = 1
    for dim in found:
        count *= meta.shape[dim]
    return Reduced(
        found,
        axes,
        ShardTensorSpec.of(spec.mesh, tuple(settled), shape, meta.dtype),
        ShardTensorSpec.of(spec.mesh, waiting, shape, meta.dtype),
        count,
        tuple(place[dim] for dim in spec.broadcast_dims if dim not in found),
    )


def _normalized(dims: tuple[int, ...], ndim: int) -> tuple[int, ...]:
    bound = max(ndim, 1)
    for dim in dims:
        if not -bound <= dim < bound:
            raise IndexError(
                f"Dimension out of range (expected to be in range of [{-bound}, {bound - 1}], but got {dim})"
            )
    found = sorted(dim % bound for dim in dims)
    if len(set(found)) < len(found):
        raise OpError(f"dims {dims} of a tensor with {ndim} dims name one dim twice: name each dim once")
    return tuple(found) if ndim else ()


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which sums and statistics of ``dtype`` are kept: float32 for the half precisions, else itself."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


# Sums: linear, so that parts wait ----------------------------------------------------------------------------------


def _summable(tensor: ShardTensor) -> ShardTensor:
    """The tensor with pending reductions other than sums done."""
    spec = tensor._spec
    if not spec.partial_axes or all(spec.layout[axis] == PENDING_SUM for axis in spec.partial_axes):
        return tensor
    layout: Layout = tuple(
        REPLICATE if isinstance(entry, Partial) and entry != PENDING_SUM else entry for entry in spec.layout
    )
    return aligned(tensor, layout, spec.mesh)


def _sum(tensor: ShardTensor, dims: Dims, keepdim: bool, dtype: torch.dtype | None) -> ShardTensor:
    if not tensor._spec.is_plain:
        return _sum_of_rows(tensor, dims, keepdim, dtype)
    plan = reduced(tensor._spec, dims, keepdim)
    return wrap(torch.sum(tensor._local_tensor, plan.dims, keepdim, dtype=dtype), plan.pending)


def _sum_of_rows(
    tensor: ShardTensor, dims: Dims, keepdim: bool, dtype: torch.dtype | None, divisor: int = 1
) -> ShardTensor:
    """The sum, divided by ``divisor``, of a tensor that may be expanded: a row that is stored once is added once."""
    block = _summable(tensor)
    spec, local = block._spec, block._local_tensor
    plan = reduced(spec, dims, keepdim)
    times, still = 1, plan.still if in_backward() else ()  # elsewhere somebody may write to a part of the result
    for dim in spec.broadcast_dims:
        length = local.shape[dim]
        if length and (still or dim in plan.dims):
            local = local.narrow(dim, 0, 1)
            times *= length if dim in plan.dims else 1
    total = torch.sum(local, plan.dims, keepdim, dtype=dtype)
    if times != 1:
        total = total * times
    if divisor != 1:
        total = total / divisor if divisor else total * torch.nan
    if still:
        return wrap(total.expand(plan.pending.local_shape), _expanded(plan.pending, still))
    return wrap(total, plan.pending)


@lru_cache(maxsize=1024)
def _expanded(spec: ShardTensorSpec, dims: tuple[int, ...]) -> ShardTensorSpec:
    """The same tensor stored as one row along ``dims``."""
    stored = contiguous_stride([1 if dim in dims else length for dim, length in enumerate(spec.shape)])
    stride = tuple(0 if dim in dims else step for dim, step in enumerate(stored))
    return ShardTensorSpec.of(spec.mesh, spec.layout, spec.shape, spec.dtype, stride)


@rule(aten.sum.default)
def sum_all(self: ShardTensor, *, dtype: torch.dtype | None = None) -> ShardTensor:
    return _sum(self, None, False, dtype)


@rule(aten.sum.dim_IntList)
def sum_dims(self: ShardTensor, dim: Dims, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> ShardTensor:
    return _sum(self, dim, keepdim, dtype)


def _mean(tensor: ShardTensor, dims: Dims, keepdim: bool, dtype: torch.dtype | None) -> ShardTensor:
    target = dtype or tensor._spec.dtype
    if not (target.is_floating_point or target.is_complex):
        raise OpError(f"mean of {target}: means are floating or complex; pass dtype=torch.float32 or convert first")
    spec = tensor._spec
    plan = reduced(spec, dims, keepdim)
    if not spec.is_plain:
        total = _sum_of_rows(tensor, dims, keepdim, accumulation_dtype(target), plan.elements)
        return wrap(total._local_tensor.to(target), total._spec)
    if not plan.axes:
        return wrap(torch.mean(tensor._local_tensor, plan.dims, keepdim, dtype=dtype), plan.pending)
    # Each rank divides its own sum by the whole count: an empty block among others brings zero.
    part = torch.sum(tensor._local_tensor, plan.dims, keepdim, dtype=accumulation_dtype(target))
    part = part.div_(plan.elements) if plan.elements else part.fill_(torch.nan)
    return wrap(part.to(target), plan.pending)


@rule(aten.mean.default)
def mean_all(self: ShardTensor, *, dtype: torch.dtype | None = None) -> ShardTensor:
    return _mean(self, None, False, dtype)


@rule(aten.mean.dim)
def mean_dims(self: ShardTensor, dim: Dims, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> ShardTensor:
    return _mean(self, dim, keepdim, dtype)


@rule(aten.nansum.default)
def nansum(
    self: ShardTensor, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> ShardTensor:
    block = resolved(self)
    plan = reduced(block._spec, dim, keepdim)
    return wrap(torch.nansum(block._local_tensor, plan.dims, keepdim, dtype=dtype), plan.pending)


@rule(aten.count_nonzero.default, aten.count_nonzero.dim_IntList)
def count_nonzero(self: ShardTensor, dim: Dims = None) -> ShardTensor:
    block = resolved(self)
    plan = reduced(block._spec, dim)
    return wrap(torch.count_nonzero(block._local_tensor, plan.dims), plan.pending)


# Reductions whose parts are put together at once ----------------------------------------------------------------


def reduce_over(part: torch.Tensor, spec: ShardTensorSpec, axes: Sequence[int], op: str) -> torch.Tensor:
    """All-reduce the ranks' parts along ``axes`` of the mesh: "sum", "max", "min" or "product"."""
    for axis in axes:
        part = comm.all_reduce(part, op, comm.group_of(spec.mesh, axis))
    return part


@rule(aten.prod.default)
def prod_all(self: ShardTensor, *, dtype: torch.dtype | None = None) -> ShardTensor:
    block = resolved(self)
    plan = reduced(block._spec, None)
    part = torch.prod(block._local_tensor, dtype=dtype)
    return wrap(reduce_over(part, plan.spec, plan.axes, "product"), plan.spec)


@rule(aten.prod.dim_int)
def prod_dim(self: ShardTensor, dim: int, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> ShardTensor:
    block = resolved(self)
    plan = reduced(block._spec, dim, keepdim)
    part = torch.prod(block._local_tensor, dim, keepdim, dtype=dtype)
    return wrap(reduce_over(part, plan.spec, plan.axes, "product"), plan.spec)


def _boolean(op: Any, merge: str, tensor: ShardTensor, dims: Dims, keepdim: bool) -> ShardTensor:
    block = resolved(tensor)
    plan = reduced(block._spec, dims, keepdim, empty_is_all=False)
    part = op(block._local_tensor, plan.dims, keepdim)
    return wrap(reduce_over(part, plan.spec, plan.axes, merge), plan.spec)


@rule(aten.any.default, aten.any.dim, aten.any.dims)
def any_(self: ShardTensor, dim: Dims = None, keepdim: bool = False) -> ShardTensor:
    return _boolean(aten.any.dims, "max", self, dim, keepdim)


@rule(aten.all.default, aten.all.dim, aten.all.dims)
def all_(self: ShardTensor, dim: Dims = None, keepdim: bool = False) -> ShardTensor:
    return _boolean(aten.all.dims, "min", self, dim, keepdim)

"""Norms of all orders and the logarithm of summed exponentials, over cut and uncut dims."""

from __future__ import annotations

import math

import torch

from shardtensor import comm
from shardtensor.registry import rule
from shardtensor.rules.extremum import highest, lowest
from shardtensor.rules.layouts import resolved
from shardtensor.rules.reduction import Dims, accumulation_dtype, reduce_over, reduced
from shardtensor.spec import mesh_sizes
from shardtensor.tensor import ShardTensor, wrap

__all__ = ["linalg_vector_norm"]

aten = torch.ops.aten


@rule(aten.linalg_vector_norm.default)
def linalg_vector_norm(
    self: ShardTensor,
    ord: float = 2,
    dim: Dims = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> ShardTensor:
    """Norm of order ``ord`` over ``dim``: each rank's powers are summed, extremes and counts are put together."""
    block = resolved(self)
    plan = reduced(block._spec, dim, keepdim)
    local = block._local_tensor
    if not plan.axes:
        return wrap(torch.linalg.vector_norm(local, ord, plan.dims, keepdim, dtype=dtype), plan.spec)
    if math.isinf(ord):
        sizes = wrap((local if dtype is None else local.to(dtype)).abs(), block._spec)
        return highest(sizes, dim, keepdim) if ord > 0 else lowest(sizes, dim, keepdim)
    target = dtype or local.dtype
    if target.is_complex:
        local, target = local.abs(), torch.empty(0, dtype=target).abs().dtype
    # float64 holds the powers of every norm that the narrower dtypes can hold.
    powers = torch.zeros(plan.spec.local_shape, dtype=torch.float64, device=local.device)
    if local.numel():
        part = torch.linalg.vector_norm(local, ord, plan.dims, keepdim, dtype=accumulation_dtype(target))
        powers = part.double() if ord == 0 else part.double().pow(ord)
    total = reduce_over(powers, plan.spec, plan.axes, "sum")
    return wrap((total if ord == 0 else total.pow(1 / ord)).to(target), plan.spec)


def _ord(p: float | None) -> float:
    return 2 if p is None else p


@rule(aten.norm.Scalar)
def norm(self: ShardTensor, p: float | None = 2) -> ShardTensor:
    return linalg_vector_norm(self, _ord(p))


@rule(aten.norm.ScalarOpt_dtype)
def norm_dtype(self: ShardTensor, p: float | None, *, dtype: torch.dtype) -> ShardTensor:
    return linalg_vector_norm(self, _ord(p), dtype=dtype)


@rule(aten.norm.ScalarOpt_dim)
def norm_dim(self: ShardTensor, p: float | None, dim: Dims, keepdim: bool = False) -> ShardTensor:
    return linalg_vector_norm(self, _ord(p), dim, keepdim)


@rule(aten.norm.ScalarOpt_dim_dtype)
def norm_dim_dtype(self: ShardTensor, p: float | None, dim: Dims, keepdim: bool, *, dtype: torch.dtype) -> ShardTensor:
    return linalg_vector_norm(self, _ord(p), dim, keepdim, dtype=dtype)


@rule(aten.dist.default)
def dist(self: torch.Tensor, other: torch.Tensor, p: float = 2) -> torch.Tensor:
    return linalg_vector_norm(self - other, p)  # type: ignore[arg-type]


@rule(aten.logsumexp.default)
def logsumexp(self: ShardTensor, dim: Dims, keepdim: bool = False) -> ShardTensor:
    """Each rank's own logarithm is gathered and put together: no value is taken out of its range."""
    block = resolved(self)
    plan = reduced(block._spec, dim, keepdim)
    part = torch.logsumexp(block._local_tensor, plan.dims, keepdim)
    for axis in plan.axes:
        ranks, group = mesh_sizes(plan.spec.mesh)[axis], comm.group_of(plan.spec.mesh, axis)
        part = torch.logsumexp(comm.all_gather(part.unsqueeze(0), 0, (1,) * ranks, group), 0)
    return wrap(part, plan.spec)

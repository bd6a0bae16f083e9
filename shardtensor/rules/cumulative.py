"""Running sums, products and extrema. Sums over a cut dim exchange the blocks' totals; the others make it whole."""

from __future__ import annotations

import torch

from shardtensor import comm
from shardtensor.registry import rule
from shardtensor.rules.layouts import resolved, uncut
from shardtensor.rules.slices import one_cut
from shardtensor.spec import Layout, ShardTensorSpec, mesh_sizes
from shardtensor.tensor import ShardTensor, wrap

__all__ = ["cumsum"]

aten = torch.ops.aten


def _as_result(spec: ShardTensorSpec, layout: Layout, dtype: torch.dtype) -> ShardTensorSpec:
    return ShardTensorSpec.of(spec.mesh, layout, spec.shape, dtype, spec.tensor_meta.stride if spec.is_dense else None)


@rule(aten.cumsum.default)
def cumsum(self: ShardTensor, dim: int, *, dtype: torch.dtype | None = None) -> ShardTensor:
    """Running sum along ``dim``."""
    spec = self._spec
    dim = dim % max(spec.ndim, 1)
    if spec.axis_of(dim) is not None:
        self = one_cut(resolved(self), dim)
        spec = self._spec
    local = aten.cumsum.default(self._local_tensor, dim, dtype=dtype)
    axis = spec.axis_of(dim)
    if axis is not None:
        total = self._local_tensor.sum(dim, keepdim=True, dtype=local.dtype)
        ranks = mesh_sizes(spec.mesh)[axis]
        totals = comm.all_gather(total, dim, (1,) * ranks, comm.group_of(spec.mesh, axis))
        local = local + totals.narrow(dim, 0, spec.coordinate[axis]).sum(dim, keepdim=True)
    return wrap(local, _as_result(spec, spec.layout, local.dtype))


@rule(aten.cumprod.default)
def cumprod(self: ShardTensor, dim: int, *, dtype: torch.dtype | None = None) -> ShardTensor:
    """Running product along ``dim``, which is made whole."""
    self = uncut(self, [dim % max(self._spec.ndim, 1)])
    local = aten.cumprod.default(self._local_tensor, dim, dtype=dtype)
    return wrap(local, _as_result(self._spec, self._spec.layout, local.dtype))


@rule(aten.logcumsumexp.default)
def logcumsumexp(self: ShardTensor, dim: int) -> ShardTensor:
    """Logarithm of the running sum of exponentials along ``dim``, which is made whole."""
    self = uncut(self, [dim % max(self._spec.ndim, 1)])
    local = aten.logcumsumexp.default(self._local_tensor, dim)
    return wrap(local, _as_result(self._spec, self._spec.layout, local.dtype))


@rule(aten.cummax.default)
def cummax(self: ShardTensor, dim: int) -> tuple[ShardTensor, ShardTensor]:
    """Running maximum along ``dim``, which is made whole, and its places."""
    return _extremum(aten.cummax.default, self, dim)


@rule(aten.cummin.default)
def cummin(self: ShardTensor, dim: int) -> tuple[ShardTensor, ShardTensor]:
    """Running minimum along ``dim``, which is made whole, and its places."""
    return _extremum(aten.cummin.default, self, dim)


def _extremum(op: torch._ops.OpOverload, tensor: ShardTensor, dim: int) -> tuple[ShardTensor, ShardTensor]:
    tensor = uncut(tensor, [dim % max(tensor._spec.ndim, 1)])
    spec = tensor._spec
    values, places = op(tensor._local_tensor, dim)
    return (
        wrap(values, _as_result(spec, spec.layout, values.dtype)),
        wrap(places, _as_result(spec, spec.layout, places.dtype)),
    )

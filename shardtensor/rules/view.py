"""Reshapes: view, reshape, flatten, unflatten, and views of one dtype as another.

No bytes move where the cut falls between rows of the new dims. Where it does not ([13, 15] rows seen as 7 x 4), the
shards are first moved to the nearest edges that fit; the result then is a copy, not a view.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch

from shardtensor.redistribute import redistribute_local
from shardtensor.registry import rule
from shardtensor.rules.aliasing import moved
from shardtensor.rules.layouts import aligned, uncut
from shardtensor.rules.regroup import regroup
from shardtensor.spec import Cut, ShardTensorSpec
from shardtensor.tensor import ShardTensor, wrap

__all__ = ["reshaped"]

aten = torch.ops.aten


@rule(aten.view.default)
def view(self: ShardTensor, size: Sequence[int]) -> ShardTensor:
    """``Tensor.view``, and through it reshape, flatten, unflatten, view_as."""
    plan = regroup(self._spec, tuple(size))
    if plan.recut is not None:
        return moved(reshaped(self, size), self)
    local = self._local_tensor
    # A block of a strided view may need a copy where the whole would not; reshape costs 1 us more.
    return wrap(local.view(plan.block) if local.is_contiguous() else local.reshape(plan.block), plan.spec)


@rule(aten._unsafe_view.default)
def reshaped(self: ShardTensor, size: Sequence[int]) -> ShardTensor:
    """The tensor seen with other dims, cuts following; nobody writes through the result."""
    plan = regroup(self._spec, tuple(size))
    local = self._local_tensor
    if plan.recut is not None:
        flat, layout = plan.recut
        local = redistribute_local(local.reshape(flat.local_shape), flat, layout)
    return wrap(local.reshape(plan.block), plan.spec)


@rule(aten._reshape_alias.default)
def _reshape_alias(self: ShardTensor, size: Sequence[int], stride: Sequence[int]) -> ShardTensor:
    return view(self, size)


@rule(aten.view.dtype)
def view_dtype(self: ShardTensor, dtype: torch.dtype) -> ShardTensor:
    """The bytes read as another dtype: a wider one joins neighbours of the last dim, a narrower one splits them."""
    spec = self._spec
    if spec.partial_axes:
        self = aligned(self, spec.resolved_layout, spec.mesh)
    ratio = spec.dtype.itemsize / dtype.itemsize
    if ratio == 1:
        return wrap(self._local_tensor.view(dtype), self._spec)
    last = spec.ndim - 1
    if any((size * ratio) % 1 for _, cut in spec.cuts if cut.dim == last for size in cut.sizes):
        self = uncut(self, [last])
    local = self._local_tensor
    if local.stride()[-1] != 1:
        local = local.contiguous()
    return wrap(local.view(dtype), _scaled(self._spec, dtype))


@lru_cache(maxsize=1024)
def _scaled(spec: ShardTensorSpec, dtype: torch.dtype) -> ShardTensorSpec:
    """The spec with the last dim measured in another dtype."""
    old, new = spec.dtype.itemsize, dtype.itemsize
    last = spec.ndim - 1
    shape = [*spec.shape[:-1], spec.shape[-1] * old // new]
    layout = tuple(
        Cut(last, tuple(size * old // new for size in entry.sizes), entry.outer)
        if isinstance(entry, Cut) and entry.dim == last
        else entry
        for entry in spec.layout
    )
    return ShardTensorSpec.of(spec.mesh, layout, shape, dtype)


@rule(aten.view_as_real.default)
def view_as_real(self: ShardTensor) -> ShardTensor:
    """Complex [...] as real [..., 2]."""
    return wrap(aten.view_as_real.default(self._local_tensor), _with_parts(self._spec))


@rule(aten.view_as_complex.default)
def view_as_complex(self: ShardTensor) -> ShardTensor:
    """Real [..., 2] as complex [...]."""
    self = uncut(self, [self._spec.ndim - 1]) if self._spec.axis_of(self._spec.ndim - 1) is not None else self
    return wrap(aten.view_as_complex.default(self._local_tensor.contiguous()), _without_parts(self._spec))


@lru_cache(maxsize=1024)
def _with_parts(spec: ShardTensorSpec) -> ShardTensorSpec:
    stride = (*(2 * step for step in spec.tensor_meta.stride), 1)
    return ShardTensorSpec.of(spec.mesh, spec.layout, (*spec.shape, 2), spec.dtype.to_real(), stride)


@lru_cache(maxsize=1024)
def _without_parts(spec: ShardTensorSpec) -> ShardTensorSpec:
    stride = tuple(step // 2 for step in spec.tensor_meta.stride[:-1])
    return ShardTensorSpec.of(spec.mesh, spec.layout, spec.shape[:-1], spec.dtype.to_complex(), stride)

"""Fresh tensors made after a sharded one (new_zeros, zeros_like, ...), and aliases of it.

A fresh tensor of another shape keeps the cuts whose dims it shares. In a backward pass it takes the layout of the
tensor whose gradient it will hold, so that no gradient becomes whole on a rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any

import torch

from shardtensor.registry import rule
from shardtensor.rules.memory import in_backward, recall
from shardtensor.rules.pointwise import dense_stride, formatted
from shardtensor.spec import REPLICATE, AxisLayout, Cut, Layout, ShardTensorSpec, contiguous_stride
from shardtensor.tensor import ShardTensor, wrap

__all__ = ["fresh_spec"]

aten = torch.ops.aten


def fresh_spec(model: ShardTensorSpec, shape: torch.Size, stride: tuple[int, ...] | None = None) -> ShardTensorSpec:
    """The spec of a fresh tensor made after one of spec ``model``."""
    if in_backward() and (not model.cuts or shape != model.shape):
        layout = recall(model.mesh, shape)
        if layout is not None:
            return ShardTensorSpec.of(model.mesh, layout, shape, model.dtype, stride)
    return _shared(model, shape, stride)


@lru_cache(maxsize=4096)
def _shared(model: ShardTensorSpec, shape: torch.Size, stride: tuple[int, ...] | None) -> ShardTensorSpec:
    def kept(entry: AxisLayout) -> bool:
        return isinstance(entry, Cut) and len(shape) == model.ndim and shape[entry.dim] == model.shape[entry.dim]

    layout: Layout = tuple(entry if kept(entry) else REPLICATE for entry in model.layout)
    return ShardTensorSpec.of(model.mesh, layout, shape, model.dtype, stride)


@rule(aten.new_zeros.default)
def new_zeros(self: ShardTensor, size: Sequence[int], **options: Any) -> ShardTensor:
    spec = fresh_spec(self._spec, torch.Size(size))
    return wrap(aten.new_zeros.default(self._local_tensor, spec.local_shape, **options), spec)


@rule(aten.new_ones.default)
def new_ones(self: ShardTensor, size: Sequence[int], **options: Any) -> ShardTensor:
    spec = fresh_spec(self._spec, torch.Size(size))
    return wrap(aten.new_ones.default(self._local_tensor, spec.local_shape, **options), spec)


@rule(aten.new_empty.default)
def new_empty(self: ShardTensor, size: Sequence[int], **options: Any) -> ShardTensor:
    spec = fresh_spec(self._spec, torch.Size(size))
    return wrap(aten.new_empty.default(self._local_tensor, spec.local_shape, **options), spec)


@rule(aten.new_full.default)
def new_full(self: ShardTensor, size: Sequence[int], fill_value: Any, **options: Any) -> ShardTensor:
    spec = fresh_spec(self._spec, torch.Size(size))
    return wrap(aten.new_full.default(self._local_tensor, spec.local_shape, fill_value, **options), spec)


@rule(aten.new_empty_strided.default)
def new_empty_strided(self: ShardTensor, size: Sequence[int], stride: Sequence[int], **options: Any) -> ShardTensor:
    """The block has the dims in the order of ``stride``; a stride with repeats or gaps becomes row-major."""
    spec = fresh_spec(self._spec, torch.Size(size), tuple(stride))
    if not spec.is_dense:
        spec = formatted(spec, torch.contiguous_format)
    block = _block_stride(spec.local_shape, spec.tensor_meta.stride)
    return wrap(aten.new_empty_strided.default(self._local_tensor, spec.local_shape, block, **options), spec)


@lru_cache(maxsize=4096)
def _block_stride(shape: torch.Size, order: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a dense block whose dims lie in the order of the whole tensor's strides."""
    dims = sorted(range(len(shape)), key=lambda dim: -order[dim])
    stride = dict(zip(dims, contiguous_stride([shape[dim] for dim in dims]), strict=True))
    return tuple(stride[dim] for dim in range(len(shape)))


def like(op: torch._ops.OpOverload, self: ShardTensor, *args: Any, **options: Any) -> ShardTensor:
    """``zeros_like`` and its kin: fresh values in the layout of the tensor."""
    spec, local = self._spec, self._local_tensor
    if not spec.is_plain:
        spec = fresh_spec(spec, spec.shape, dense_stride(spec.shape, spec.tensor_meta.stride))
        block = _block_stride(spec.local_shape, spec.tensor_meta.stride)
        local = aten.new_empty_strided.default(local, spec.local_shape, block)
    return wrap(op(local, *args, **options), formatted(spec, options.get("memory_format")))


LIKE = [
    aten.empty_like.default,
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.full_like.default,
]


def alias(op: torch._ops.OpOverload, self: ShardTensor) -> ShardTensor:
    """The same values in the same memory, pending sums and expanded rows included."""
    return wrap(op(self._local_tensor), self._spec)


ALIASES = [aten.alias.default, aten.detach.default, aten.lift_fresh.default, aten._conj.default, aten._neg_view.default]

for _function, _ops in ((like, LIKE), (alias, ALIASES)):
    for _op in _ops:
        _entry = partial(_function, _op)
        _entry.__module__ = __name__
        rule(_op)(_entry)

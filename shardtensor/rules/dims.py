"""Views that only rename dims: permute, transpose, unsqueeze, squeeze, expand, diagonal. Cuts move along."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch.utils._mode_utils import no_dispatch

from shardtensor.errors import OpError
from shardtensor.registry import rule
from shardtensor.rules.aliasing import moved
from shardtensor.rules.layouts import uncut
from shardtensor.rules.view import reshaped
from shardtensor.spec import Cut, Layout, ShardTensorSpec
from shardtensor.tensor import ShardTensor, wrap

__all__ = ["counted", "moved_dims"]

aten = torch.ops.aten


def moved_dims(layout: Layout, place: Callable[[int], int]) -> Layout:
    """The layout with every cut of dim d on dim ``place(d)``."""
    return tuple(entry.moved(place(entry.dim)) if isinstance(entry, Cut) else entry for entry in layout)


def counted(dim: int, ndim: int) -> int:
    """The dim counted from the front.

    Raises:
        IndexError: there is no such dim.
    """
    if not -max(ndim, 1) <= dim < max(ndim, 1):
        raise IndexError(f"dim {dim} is out of range for a tensor with {ndim} dims: give {-ndim} <= dim < {ndim}")
    return dim % max(ndim, 1)


@lru_cache(maxsize=4096)
def _permuted(spec: ShardTensorSpec, dims: tuple[int, ...]) -> ShardTensorSpec:
    order = [counted(dim, spec.ndim) for dim in dims]
    shape, stride = spec.shape, spec.tensor_meta.stride
    return ShardTensorSpec.of(
        spec.mesh,
        moved_dims(spec.layout, order.index),
        [shape[dim] for dim in order],
        spec.dtype,
        tuple(stride[dim] for dim in order),
    )


@rule(aten.permute.default)
def permute(self: ShardTensor, dims: Sequence[int]) -> ShardTensor:
    return wrap(self._local_tensor.permute(tuple(dims)), _permuted(self._spec, tuple(dims)))


@lru_cache(maxsize=4096)
def _swapped(spec: ShardTensorSpec, dim0: int, dim1: int) -> ShardTensorSpec:
    order = list(range(spec.ndim))
    if order:
        dim0, dim1 = counted(dim0, spec.ndim), counted(dim1, spec.ndim)
        order[dim0], order[dim1] = dim1, dim0
    return _permuted(spec, tuple(order))


@rule(aten.transpose.int)
def transpose(self: ShardTensor, dim0: int, dim1: int) -> ShardTensor:
    return wrap(self._local_tensor.transpose(dim0, dim1), _swapped(self._spec, dim0, dim1))


@rule(aten.t.default)
def t(self: ShardTensor) -> ShardTensor:
    return wrap(self._local_tensor.t(), _swapped(self._spec, 0, self._spec.ndim - 1))


@lru_cache(maxsize=4096)
def _unsqueezed(spec: ShardTensorSpec, dim: int) -> ShardTensorSpec:
    dim = counted(dim, spec.ndim + 1)
    shape, stride = spec.shape, spec.tensor_meta.stride
    step = shape[dim] * stride[dim] if dim < spec.ndim else 1
    return ShardTensorSpec.of(
        spec.mesh,
        moved_dims(spec.layout, lambda old: old + (old >= dim)),
        (*shape[:dim], 1, *shape[dim:]),
        spec.dtype,
        (*stride[:dim], step, *stride[dim:]),
    )


@rule(aten.unsqueeze.default)
def unsqueeze(self: ShardTensor, dim: int) -> ShardTensor:
    return wrap(self._local_tensor.unsqueeze(dim), _unsqueezed(self._spec, dim))


@lru_cache(maxsize=4096)
def _squeezed(spec: ShardTensorSpec, dims: tuple[int, ...] | None) -> tuple[ShardTensorSpec | None, tuple[int, ...]]:
    """The spec without the dims of length 1, and these dims; None where one of them is cut (a rank then lacks it)."""
    asked = range(spec.ndim) if dims is None else [counted(dim, spec.ndim) for dim in dims] if spec.ndim else []
    gone = tuple(sorted(dim for dim in asked if spec.shape[dim] == 1))
    kept = [dim for dim in range(spec.ndim) if dim not in gone]
    if any(cut.dim in gone for _, cut in spec.cuts):
        return None, tuple(spec.shape[dim] for dim in kept)
    shape, stride = spec.shape, spec.tensor_meta.stride
    squeezed = ShardTensorSpec.of(
        spec.mesh,
        moved_dims(spec.layout, kept.index),
        [shape[dim] for dim in kept],
        spec.dtype,
        tuple(stride[dim] for dim in kept),
    )
    return squeezed, gone


def _squeeze(self: ShardTensor, dims: tuple[int, ...] | None) -> ShardTensor:
    spec, names = _squeezed(self._spec, dims)
    if spec is None:
        return moved(reshaped(self, names), self)
    return wrap(self._local_tensor.squeeze(names), spec)


@rule(aten.squeeze.default)
def squeeze(self: ShardTensor) -> ShardTensor:
    return _squeeze(self, None)


@rule(aten.squeeze.dim)
def squeeze_dim(self: ShardTensor, dim: int) -> ShardTensor:
    return _squeeze(self, (dim,))


@rule(aten.squeeze.dims)
def squeeze_dims(self: ShardTensor, dim: Sequence[int]) -> ShardTensor:
    return _squeeze(self, tuple(dim))


class _Expanded:
    """An expanded tensor: its spec, the shape of its block, and the cut dims that must be made whole first."""

    def __init__(self, spec: ShardTensorSpec, size: tuple[int, ...]) -> None:
        ahead = len(size) - spec.ndim
        old = (1,) * ahead + tuple(spec.shape)
        shape = [length if want == -1 else want for length, want in zip(old, size, strict=True)]
        grown = [dim for dim, (length, want) in enumerate(zip(old, shape, strict=True)) if length != want]
        self.whole = [cut.dim for _, cut in spec.cuts if cut.dim + ahead in grown]
        stride = [0] * ahead + list(spec.tensor_meta.stride)
        for dim in grown:
            stride[dim] = 0
        if not self.whole:
            layout = moved_dims(spec.layout, lambda dim: dim + ahead)
            self.spec = ShardTensorSpec.of(spec.mesh, layout, shape, spec.dtype, tuple(stride))
            self.block = self.spec.local_shape


@lru_cache(maxsize=4096)
def _expansion(spec: ShardTensorSpec, size: tuple[int, ...]) -> _Expanded:
    return _Expanded(spec, size)


@rule(aten.expand.default)
def expand(self: ShardTensor, size: Sequence[int], *, implicit: bool = False) -> ShardTensor:
    """``Tensor.expand``; a cut dim of length 1 is made whole before it is repeated."""
    plan = _expansion(self._spec, tuple(size))
    if plan.whole:
        return expand(uncut(self, plan.whole), size)
    return wrap(self._local_tensor.expand(plan.block), plan.spec)


@rule(aten.diagonal.default)
def diagonal(self: ShardTensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> ShardTensor:
    """The diagonal of two dims, as the last dim; both are made whole first."""
    pair = counted(dim1, self._spec.ndim), counted(dim2, self._spec.ndim)
    source = uncut(self, pair)
    local = aten.diagonal.default(source._local_tensor, offset, dim1, dim2)
    found = wrap(local, _diagonal(source._spec, offset, *pair))
    return found if source is self else moved(found, self)


@rule(aten.diagonal_backward.default)
def diagonal_backward(grad: ShardTensor, input_sizes: Sequence[int], offset: int, dim1: int, dim2: int) -> ShardTensor:
    """The gradient on the diagonal of two dims, zeros elsewhere."""
    ndim = len(input_sizes)
    pair = counted(dim1, ndim), counted(dim2, ndim)
    grad = uncut(grad, [ndim - 2])
    kept = [dim for dim in range(ndim) if dim not in pair]
    layout = moved_dims(grad._spec.layout, lambda dim: kept[dim])
    spec = ShardTensorSpec.of(grad._spec.mesh, layout, input_sizes, grad._spec.dtype)
    out = grad._local_tensor.new_zeros(spec.local_shape)
    out.diagonal(offset, dim1, dim2).copy_(grad._local_tensor)
    return wrap(out, spec)


@lru_cache(maxsize=1024)
def _diagonal(spec: ShardTensorSpec, offset: int, dim1: int, dim2: int) -> ShardTensorSpec:
    meta = torch.empty_strided(spec.shape, spec.tensor_meta.stride, device="meta").diagonal(offset, dim1, dim2)
    kept = [dim for dim in range(spec.ndim) if dim not in (dim1, dim2)]
    return ShardTensorSpec.of(spec.mesh, moved_dims(spec.layout, kept.index), meta.shape, spec.dtype, meta.stride())


def _in_place(op: Any, out_of_place: Callable[..., ShardTensor]) -> None:
    """Enter the rule of an op that renames the dims of the tensor itself; torch's own second derivatives use them."""

    @rule(op)
    def renamed(self: ShardTensor, *args: Any) -> ShardTensor:
        result = out_of_place(self, *args)
        with no_dispatch():  # the wrapper's own sizes and strides; it has no data to touch
            op(self, *args)
        self._local_tensor, self._spec = result._local_tensor, result._spec
        if self._is_view() and result._moved_view:
            moved(self, self)
        return self


_in_place(aten.t_.default, t)
_in_place(aten.transpose_.default, transpose)
_in_place(aten.squeeze_.default, squeeze)
_in_place(aten.squeeze_.dim, squeeze_dim)
_in_place(aten.squeeze_.dims, squeeze_dims)
_in_place(aten.unsqueeze_.default, unsqueeze)


@rule(
    aten.as_strided_.default,
    aten.resize_.default,
    aten.set_.source_Tensor,
)
def refused(self: ShardTensor, *args: Any, **kwargs: Any) -> ShardTensor:
    """In-place changes of what the elements are.

    Raises:
        OpError: always.
    """
    raise OpError(
        f"the shape of a sharded tensor {tuple(self._spec.shape)} cannot be changed in place: use the op without the "
        f"trailing underscore (x = x.as_strided(...))"
    )

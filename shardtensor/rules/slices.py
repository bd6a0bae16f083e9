"""Slices and selects on any dim: a slice of a cut dim stays where it lies (uneven, maybe empty); nothing is sent.

Backward formulas (``slice_backward``, ``select_backward``) know only the shape of what was sliced; `recall` gives them
the layout that it had.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch

from shardtensor.registry import rule
from shardtensor.rules.aliasing import moved
from shardtensor.rules.dims import counted, moved_dims
from shardtensor.rules.layouts import aligned, local_in, resolved, uncut
from shardtensor.rules.memory import in_backward, recall, remember
from shardtensor.rules.regroup import regroup
from shardtensor.rules.view import reshaped
from shardtensor.spec import REPLICATE, Cut, Layout, ShardTensorSpec, even_sizes, mesh_sizes
from shardtensor.tensor import ShardTensor, wrap

__all__ = ["Sliced", "one_cut", "one_cut_layout", "slice_", "sliced"]

aten = torch.ops.aten


class Sliced(NamedTuple):
    """A slice: the result's spec and the local rows ``start:stop:step`` of ``dim`` that this rank keeps."""

    spec: ShardTensorSpec
    dim: int
    start: int
    stop: int
    step: int


def one_cut(tensor: ShardTensor, dim: int) -> ShardTensor:
    """The tensor with at most one mesh axis cutting ``dim`` (>= 0), into consecutive rows."""
    layout = one_cut_layout(tensor._spec, dim)
    return tensor if layout is tensor._spec.layout else aligned(tensor, layout, tensor._spec.mesh)


@lru_cache(maxsize=4096)
def one_cut_layout(spec: ShardTensorSpec, dim: int) -> Layout:
    """The layout with at most one mesh axis cutting ``dim``, into consecutive rows; other dims as they are."""
    axes = spec.axes_of(dim)
    if not axes or (len(axes) == 1 and spec.cut_of(dim).outer == 1):  # type: ignore[union-attr]
        return spec.layout
    layout = [REPLICATE if axis in axes else entry for axis, entry in enumerate(spec.layout)]
    layout[axes[0]] = Cut(dim, even_sizes(spec.shape[dim], mesh_sizes(spec.mesh)[axes[0]]))
    return tuple(layout)


@lru_cache(maxsize=8192)
def sliced(spec: ShardTensorSpec, dim: int, start: int | None, end: int | None, step: int) -> Sliced:
    """What ``x[start:end:step]`` along ``dim`` (>= 0) keeps; the dim is cut into consecutive rows, or not at all."""
    length = spec.shape[dim]
    first, stop, _ = slice(start, end).indices(length)
    count = max(0, -(-(stop - first) // step))
    shape = [*spec.shape[:dim], count, *spec.shape[dim + 1 :]]
    stride = list(spec.tensor_meta.stride)
    stride[dim] *= step
    axis, cut = spec.axis_of(dim), spec.cut_of(dim)
    if axis is None or cut is None:
        result = ShardTensorSpec.of(spec.mesh, spec.layout, shape, spec.dtype, tuple(stride))
        return Sliced(result, dim, first, max(first, stop), step)
    edges = (0, *accumulate(cut.sizes))
    # Rows before each edge that the slice keeps.
    kept = [min(count, max(0, -(-(edge - first) // step))) for edge in edges]
    sizes = tuple(after - before for before, after in pairwise(kept))
    layout = (*spec.layout[:axis], Cut(dim, sizes), *spec.layout[axis + 1 :])
    result = ShardTensorSpec.of(spec.mesh, layout, shape, spec.dtype, tuple(stride))
    rank = spec.coordinate[axis]
    begin = first + kept[rank] * step - edges[rank] if sizes[rank] else 0
    return Sliced(result, dim, begin, begin + sizes[rank] * step, step)


def _part(local: torch.Tensor, part: Sliced) -> torch.Tensor:
    if part.step == 1:
        return local.narrow(part.dim, part.start, part.stop - part.start)
    found: torch.Tensor = aten.slice.Tensor(local, part.dim, part.start, part.stop, part.step)
    return found


@lru_cache(maxsize=8192)
def _direct(spec: ShardTensorSpec, dim: int, start: int | None, end: int | None, step: int) -> Sliced | None:
    """The slice, where the dim is cut into consecutive rows or not at all."""
    dim = counted(dim, spec.ndim)
    return sliced(spec, dim, start, end, step) if one_cut_layout(spec, dim) == spec.layout else None


@rule(aten.slice.Tensor)
def slice_(
    self: ShardTensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> ShardTensor:
    """``x[start:end:step]``, narrow, chunks: without communication."""
    if self.requires_grad:
        remember(self)
    part = _direct(self._spec, dim, start, end, step)
    if part is None:
        source = one_cut(self, dim % self._spec.ndim)
        part = sliced(source._spec, dim % self._spec.ndim, start, end, step)
        return moved(wrap(_part(source._local_tensor, part), part.spec), self)
    return wrap(_part(self._local_tensor, part), part.spec)


@lru_cache(maxsize=8192)
def _selected(spec: ShardTensorSpec, dim: int, index: int) -> ShardTensorSpec | None:
    """The spec of a row; None where the dim is cut."""
    dim = counted(dim, spec.ndim)
    if not -spec.shape[dim] <= index < spec.shape[dim]:
        raise IndexError(f"index {index} is out of range for dim {dim} of a tensor {tuple(spec.shape)}")
    if spec.axis_of(dim) is not None:
        return None
    shape, stride = spec.shape, spec.tensor_meta.stride
    return ShardTensorSpec.of(
        spec.mesh,
        moved_dims(spec.layout, lambda old: old - (old > dim)),
        (*shape[:dim], *shape[dim + 1 :]),
        spec.dtype,
        (*stride[:dim], *stride[dim + 1 :]),
    )


@rule(aten.select.int)
def select(self: ShardTensor, dim: int, index: int) -> ShardTensor:
    """``x[index]``: a row of a cut dim goes to every rank of the axis; in a backward pass it stays on its own."""
    if self.requires_grad:
        remember(self)
    spec = _selected(self._spec, dim, index)
    if spec is not None:
        return wrap(self._local_tensor.select(dim, index), spec)
    dim = dim % self._spec.ndim
    index = index % self._spec.shape[dim]
    row = slice_(self, dim, index, index + 1)
    shape = [*row._spec.shape[:dim], *row._spec.shape[dim + 1 :]]
    if in_backward() and regroup(row._spec, tuple(shape)).recut is None:
        return reshaped(row, shape)  # stays where it is, so that it can be written through
    return moved(select(uncut(row, [dim]), dim, 0), self)


def _like_source(grad: ShardTensor, shape: torch.Size, dim: int) -> Layout:
    """A layout for the gradient of a tensor of ``shape`` of which ``grad`` is a slice along ``dim``."""
    known = recall(grad._spec.mesh, shape)
    if known is not None:
        return known
    return tuple(
        REPLICATE if isinstance(entry, Cut) and entry.dim == dim and grad._spec.shape[dim] != shape[dim] else entry
        for entry in grad._spec.resolved_layout
    )


@rule(aten.slice_backward.default)
def slice_backward(grad: ShardTensor, input_sizes: list[int], dim: int, start: int, end: int, step: int) -> ShardTensor:
    """The gradient in its rows, zeros elsewhere, laid out as the sliced tensor was."""
    shape = torch.Size(input_sizes)
    dim = dim % len(shape)
    source = ShardTensorSpec.of(grad._spec.mesh, _like_source(grad, shape, dim), shape, grad._spec.dtype)
    source = source.with_layout(one_cut_layout(source, dim))
    part = sliced(source, dim, start, end, step)
    local = local_in(grad, part.spec.layout, source.mesh)
    out = local.new_zeros(source.local_shape)
    _part(out, part).copy_(local)
    return wrap(out, source)


@rule(aten.select_backward.default)
def select_backward(grad: ShardTensor, input_sizes: list[int], dim: int, index: int) -> ShardTensor:
    """The gradient in its row, zeros elsewhere, laid out as the selected tensor was."""
    shape = torch.Size(input_sizes)
    dim = dim % len(shape)
    index = index % shape[dim]
    known = recall(grad._spec.mesh, shape)
    if known is None:
        known = moved_dims(grad._spec.resolved_layout, lambda old: old + (old >= dim))
    source = ShardTensorSpec.of(grad._spec.mesh, known, shape, grad._spec.dtype)
    source = source.with_layout(one_cut_layout(source, dim))
    rest = tuple(REPLICATE if isinstance(e, Cut) and e.dim == dim else e for e in source.layout)
    local = local_in(grad, moved_dims(rest, lambda old: old - (old > dim)), source.mesh)
    out = local.new_zeros(source.local_shape)
    part = sliced(source, dim, index, index + 1, 1)
    row = _part(out, part)
    if row.shape[dim]:
        row.copy_(local.unsqueeze(dim))
    return wrap(out, source)


@rule(aten.slice_scatter.default)
def slice_scatter(
    self: ShardTensor, src: torch.Tensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> ShardTensor:
    """A copy with ``src`` written over a slice."""
    dim = dim % self.dim()
    target = _writable(self, src, dim)
    spec = target._spec
    part = sliced(spec, dim, start, end, step)
    out = target._local_tensor.clone(memory_format=torch.contiguous_format)
    _part(out, part).copy_(local_in(src, part.spec.layout, spec.mesh))
    return wrap(out, ShardTensorSpec.of(spec.mesh, spec.layout, spec.shape, spec.dtype))


@rule(aten.select_scatter.default)
def select_scatter(self: ShardTensor, src: torch.Tensor, dim: int, index: int) -> ShardTensor:
    """A copy with ``src`` written over a row."""
    dim = dim % self.dim()
    index = index % self.shape[dim]
    return slice_scatter(self, aten.unsqueeze.default(src, dim), dim, index, index + 1)


def _writable(target: torch.Tensor, src: torch.Tensor, dim: int) -> ShardTensor:
    """The tensor written to, its pending sums done; a plain one is cut as the sharded source is."""
    if isinstance(target, ShardTensor):
        return one_cut(resolved(target), dim)
    assert isinstance(src, ShardTensor)
    spec = src._spec
    layout = tuple(REPLICATE if isinstance(e, Cut) and e.dim == dim else e for e in spec.resolved_layout)
    return aligned(target, layout, spec.mesh)

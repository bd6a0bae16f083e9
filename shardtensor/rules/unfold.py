"""Sliding windows as a dim, ``x.unfold(dim, size, step)``: each rank makes the windows that start in its rows."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch

from shardtensor import comm
from shardtensor.registry import rule
from shardtensor.rules.aliasing import moved
from shardtensor.rules.layouts import local_in, resolved
from shardtensor.rules.memory import recall, remember
from shardtensor.rules.slices import one_cut, one_cut_layout
from shardtensor.spec import REPLICATE, Cut, Layout, ShardTensorSpec
from shardtensor.tensor import ShardTensor, wrap

__all__ = ["unfold"]

aten = torch.ops.aten


class _Unfolded(NamedTuple):
    """The result's spec, the mesh axis that cuts the dim, and the rows that each of its ranks needs."""

    spec: ShardTensorSpec
    axis: int | None
    windows: tuple[tuple[int, int], ...]


@lru_cache(maxsize=1024)
def _plan(spec: ShardTensorSpec, dim: int, size: int, step: int) -> _Unfolded:
    count = (spec.shape[dim] - size) // step + 1
    shape = [*spec.shape[:dim], count, *spec.shape[dim + 1 :], size]
    steps = spec.tensor_meta.stride
    stride = (*steps[:dim], steps[dim] * step, *steps[dim + 1 :], steps[dim])
    axis = spec.axis_of(dim)
    if axis is None:
        return _Unfolded(ShardTensorSpec.of(spec.mesh, spec.layout, shape, spec.dtype, stride), None, ())
    cut = spec.layout[axis]
    assert isinstance(cut, Cut)
    # Windows that start before each edge.
    starts = [min(count, -(-edge // step)) for edge in (0, *accumulate(cut.sizes))]
    windows = tuple(
        (first * step, (last - 1) * step + size) if last > first else (0, 0) for first, last in pairwise(starts)
    )
    sizes = tuple(last - first for first, last in pairwise(starts))
    layout = (*spec.layout[:axis], Cut(dim, sizes), *spec.layout[axis + 1 :])
    return _Unfolded(ShardTensorSpec.of(spec.mesh, layout, shape, spec.dtype, stride), axis, windows)


@rule(aten.unfold.default)
def unfold(self: ShardTensor, dimension: int, size: int, step: int) -> ShardTensor:
    """Windows of ``size`` rows, ``step`` apart, as a new last dim."""
    remember(self)
    dim = dimension % max(self._spec.ndim, 1)
    source = one_cut(resolved(self), dim)
    plan = _plan(source._spec, dim, size, step)
    local = source._local_tensor
    if plan.axis is None and source is self:
        return wrap(local.unfold(dim, size, step), plan.spec)
    if plan.axis is not None:
        cut = source._spec.layout[plan.axis]
        assert isinstance(cut, Cut)
        group = comm.group_of(source._spec.mesh, plan.axis)
        local = comm.halo_exchange(local, dim, cut.sizes, plan.windows, group)
        if not local.shape[dim]:
            return moved(wrap(local.new_empty(plan.spec.local_shape), plan.spec), self)
    return moved(wrap(local.unfold(dim, size, step), plan.spec), self)


@rule(aten.unfold_backward.default)
def unfold_backward(grad_in: ShardTensor, input_sizes: Sequence[int], dim: int, size: int, step: int) -> ShardTensor:
    """Every window's gradient added to the rows that it shows."""
    shape = torch.Size(input_sizes)
    dim = dim % max(len(shape), 1)
    mesh = grad_in._spec.mesh
    source = ShardTensorSpec.of(mesh, recall(mesh, shape) or _without(grad_in, len(shape), dim), shape, grad_in.dtype)
    source = source.with_layout(one_cut_layout(source, dim))
    plan = _plan(source, dim, size, step)
    local = local_in(grad_in, plan.spec.layout, mesh)
    window = list(source.local_shape)
    if plan.axis is not None:
        start, stop = plan.windows[source.coordinate[plan.axis]]
        window[dim] = stop - start
    total = aten.unfold_backward.default(local, window, dim, size, step) if local.numel() else local.new_zeros(window)
    if plan.axis is not None:
        cut = source.layout[plan.axis]
        assert isinstance(cut, Cut)
        total = comm.halo_reduce(total, dim, cut.sizes, plan.windows, comm.group_of(mesh, plan.axis))
    return wrap(total, source)


def _without(grad: ShardTensor, ndim: int, dim: int) -> Layout:
    return tuple(
        REPLICATE if isinstance(entry, Cut) and entry.dim in (dim, ndim) else entry
        for entry in grad._spec.resolved_layout
    )

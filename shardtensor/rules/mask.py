"""Masks as indices: ``x[mask]``, ``x[mask] = v``, masked_select, masked_scatter, nonzero.

The marked elements come in the order of the whole tensor, so the mask's first dim is the one that is cut; how many each
rank marks is told to all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch

from shardtensor import comm
from shardtensor.registry import rule
from shardtensor.rules.join import cat
from shardtensor.rules.layouts import local_in, mesh_of, operand_layout, spec_of, whole
from shardtensor.rules.memory import remember
from shardtensor.rules.view import reshaped
from shardtensor.rules.writing import write_back
from shardtensor.spec import (
    REPLICATE,
    AxisLayout,
    Cut,
    DeviceMesh,
    Layout,
    ShardTensorSpec,
    even_sizes,
    mesh_sizes,
    replicate,
)
from shardtensor.tensor import ShardTensor, wrap

__all__ = ["masked", "put_masked"]

aten = torch.ops.aten


class _Plan(NamedTuple):
    """Layouts of tensor and mask, and the mesh axis along which the mask is cut."""

    source: Layout
    mask: Layout
    axis: int | None


@lru_cache(maxsize=2048)
def _plan(spec: ShardTensorSpec, mask: ShardTensorSpec, dim: int) -> _Plan:
    """Cuts of masked dims (``mask.ndim`` ones from ``dim``) become one cut of the first of them."""
    dims = range(dim, dim + mask.ndim)
    source: list[AxisLayout] = []
    candidates: list[tuple[int, Cut]] = []
    for axis, entry in enumerate(spec.resolved_layout):
        other = mask.resolved_layout[axis]
        if isinstance(entry, Cut) and entry.dim not in dims:
            source.append(entry)
            continue
        if isinstance(entry, Cut):
            candidates.append((axis, entry))
        elif isinstance(other, Cut):
            candidates.append((axis, other.moved(other.dim + dim)))
        source.append(REPLICATE)
    theirs: list[AxisLayout] = [REPLICATE] * len(source)
    if not candidates:
        return _Plan(tuple(source), tuple(theirs), None)
    axis, cut = next(((at, c) for at, c in candidates if c.dim == dim and c.outer == 1), candidates[0])
    if cut.dim != dim or cut.outer != 1:
        cut = Cut(dim, even_sizes(spec.shape[dim], mesh_sizes(spec.mesh)[axis]))
    source[axis], theirs[axis] = cut, cut.moved(0)
    return _Plan(tuple(source), tuple(theirs), axis)


def _counts(local: torch.Tensor, count: int, axis: int, mesh: DeviceMesh) -> tuple[int, ...]:
    """The count of every rank of the axis."""
    ranks = mesh_sizes(mesh)[axis]
    mine = torch.tensor([count], device=local.device)
    return tuple(comm.all_gather(mine, 0, (1,) * ranks, comm.group_of(mesh, axis)).tolist())


def _result(
    spec: ShardTensorSpec, mask: ShardTensorSpec, dim: int, plan: _Plan, counts: tuple[int, ...]
) -> ShardTensorSpec:
    """The spec of ``x[mask]``: the masked dims are one, as long as there are marks."""
    shape = [*spec.shape[:dim], sum(counts), *spec.shape[dim + mask.ndim :]]
    layout = tuple(
        Cut(dim, counts)
        if axis == plan.axis
        else entry.moved(entry.dim if entry.dim < dim else entry.dim - mask.ndim + 1)
        if isinstance(entry, Cut)
        else entry
        for axis, entry in enumerate(plan.source)
    )
    return ShardTensorSpec.of(spec.mesh, layout, shape, spec.dtype)


def masked(tensor: torch.Tensor, mask: torch.Tensor, dim: int, mesh: DeviceMesh) -> ShardTensor:
    """``x[:, mask]`` with ``dim`` uncounted dims in front."""
    spec, marks = spec_of(tensor, mesh), spec_of(mask, mesh)
    plan = _plan(spec, marks, dim)
    local, mine = local_in(tensor, plan.source, mesh), local_in(mask, plan.mask, mesh)
    found = aten.index.Tensor(local, [None] * dim + [mine])
    count = found.shape[dim]
    counts = (count,) if plan.axis is None else _counts(local, count, plan.axis, mesh)
    return wrap(found, _result(spec, marks, dim, plan, counts))


def put_masked(
    tensor: torch.Tensor,
    mask: torch.Tensor,
    dim: int,
    values: torch.Tensor,
    accumulate: bool,
    mesh: DeviceMesh,
    *,
    spare: bool = False,
) -> ShardTensor:
    """A copy of x with ``values`` at ``x[:, mask]``; with ``spare``, a list of values may be longer than needed."""
    spec, marks = spec_of(tensor, mesh), spec_of(mask, mesh)
    plan = _plan(spec, marks, dim)
    mine = local_in(mask, plan.mask, mesh)
    count = int(mine.sum())
    counts = (count,) if plan.axis is None else _counts(mine, count, plan.axis, mesh)
    result = _result(spec, marks, dim, plan, counts)
    if spare and values.dim() == 1:
        values = aten.slice.Tensor(values, 0, 0, sum(counts))
    out = local_in(tensor, plan.source, mesh).clone(memory_format=torch.contiguous_format)
    own = local_in(values, operand_layout(result.layout, spec_of(values, mesh), result.shape), mesh)
    aten.index_put_.default(out, [None] * dim + [mine], own.to(out.dtype), accumulate)
    return wrap(out, ShardTensorSpec.of(mesh, plan.source, spec.shape, spec.dtype))


@rule(aten.masked_select.default)
def masked_select(self: torch.Tensor, mask: torch.Tensor) -> ShardTensor:
    """The marked elements, [marks]."""
    mesh = mesh_of(self, mask)
    if isinstance(self, ShardTensor):
        remember(self)
    shape = torch.broadcast_shapes(self.shape, mask.shape)
    if not shape:
        self, mask, shape = aten.unsqueeze.default(self, 0), aten.unsqueeze.default(mask, 0), torch.Size([1])
    return masked(aten.expand.default(self, shape), aten.expand.default(mask, shape), 0, mesh)


@rule(aten.masked_scatter.default)
def masked_scatter(self: torch.Tensor, mask: torch.Tensor, source: torch.Tensor) -> ShardTensor:
    """A copy with the marked elements overwritten by the first elements of ``source``, in order."""
    mesh = mesh_of(self, mask, source)
    values = aten.view.default(source.contiguous(), (-1,))
    return put_masked(self, aten.expand.default(mask, self.shape), 0, values, False, mesh, spare=True)


@rule(aten.masked_scatter_.default)
def masked_scatter_(self: torch.Tensor, mask: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    return write_back(self, masked_scatter(self, mask, source))


@rule(aten.nonzero.default)
def nonzero(self: ShardTensor) -> ShardTensor:
    """Places of the elements that are not zero, [marks, dims], cut as the first dim is."""
    spec = self._spec
    if not spec.ndim or not spec.cuts:
        places = aten.nonzero.default(whole(self, spec.mesh))
        return wrap(places, ShardTensorSpec.of(spec.mesh, replicate(spec.mesh.ndim), places.shape, places.dtype))
    plan = _plan(spec, spec, 0)
    assert plan.axis is not None
    local = local_in(self, plan.source, spec.mesh)
    cut = plan.source[plan.axis]
    assert isinstance(cut, Cut)
    places = aten.nonzero.default(local)
    places[:, 0] += sum(cut.sizes[: spec.coordinate[plan.axis]])
    counts = _counts(local, places.shape[0], plan.axis, spec.mesh)
    layout = tuple(Cut(0, counts) if axis == plan.axis else entry for axis, entry in enumerate(plan.source))
    return wrap(places, ShardTensorSpec.of(spec.mesh, layout, (sum(counts), spec.ndim), places.dtype))


@rule(aten.masked_scatter_backward.default)
def masked_scatter_backward(grad_output: torch.Tensor, mask: torch.Tensor, sizes: Sequence[int]) -> ShardTensor:
    """The source's gradient: the marked elements' in order, zeros for what was not needed."""
    taken = masked_select(grad_output, mask)
    spec = taken._spec
    missing = torch.Size(sizes).numel() - spec.shape[0]
    zeros = taken._local_tensor.new_zeros(missing)
    return reshaped(cat([taken, zeros], 0), sizes) if missing else reshaped(taken, sizes)

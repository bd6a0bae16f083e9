"""Element-wise addressing along one dim: gather, scatter, scatter_add, scatter_reduce, index_copy, index_fill.

Along a cut dim every rank serves the elements it holds: gather leaves a sum pending, scatter drops what falls
elsewhere. The index is made whole along that mesh axis, the tensor never.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from shardtensor.registry import rule
from shardtensor.rules.layouts import local_in, mesh_of, spec_of
from shardtensor.rules.memory import remember
from shardtensor.rules.slices import one_cut_layout
from shardtensor.rules.writing import write_back
from shardtensor.spec import PENDING_SUM, REPLICATE, AxisLayout, Cut, Layout, Replicate, ShardTensorSpec
from shardtensor.tensor import ShardTensor, wrap

__all__ = ["gather"]

aten = torch.ops.aten


class _Plan(NamedTuple):
    """Layouts of tensor, index (with source) and result; the mesh axis that cuts ``dim`` in the tensor."""

    tensor: Layout
    numbers: Layout
    result: Layout
    axis: int | None


@lru_cache(maxsize=4096)
def _plan(spec: ShardTensorSpec, index: ShardTensorSpec, dim: int, adds: bool | None) -> _Plan:
    """Plan a gather (``adds`` None: the result is laid out as the index) or a scatter (as the tensor).

    A scatter that adds leaves a sum pending where the index is cut along ``dim`` and the tensor whole.
    """
    tensor: list[AxisLayout] = []
    numbers: list[AxisLayout] = []
    result: list[AxisLayout] = []
    found, taken = None, {cut.dim for _, cut in spec.cuts}
    others = index.resolved_layout
    for axis, entry in enumerate(one_cut_layout(spec.with_layout(spec.resolved_layout), dim)):
        other = others[axis]
        rows: tuple[AxisLayout, AxisLayout, AxisLayout] = (REPLICATE, REPLICATE, REPLICATE)
        same = isinstance(entry, Cut) and entry.dim != dim and spec.shape[entry.dim] == index.shape[entry.dim]
        if isinstance(entry, Cut) and entry.dim == dim:
            found = axis
            rows = (entry, REPLICATE, PENDING_SUM if adds is None else entry)
        elif same:
            rows = (entry, entry, entry)
        elif not isinstance(other, Cut) or other.dim in taken:
            pass
        elif other.dim != dim and spec.shape[other.dim] == index.shape[other.dim]:
            rows = (other, other, other)
        elif other.dim == dim and adds is not False:
            rows = (PENDING_SUM, other, PENDING_SUM) if adds else (REPLICATE, other, other)
        tensor.append(rows[0])
        numbers.append(rows[1])
        result.append(rows[2])
    return _Plan(tuple(tensor), tuple(numbers), tuple(result), found)


def _own(index: torch.Tensor, spec: ShardTensorSpec, plan: _Plan, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers inside the own block of the cut dim, and which of them are."""
    assert plan.axis is not None
    cut = plan.tensor[plan.axis]
    assert isinstance(cut, Cut)
    if bool(((index < 0) | (index >= spec.shape[dim])).any()):
        raise IndexError(f"index out of range for dim {dim} of a tensor {tuple(spec.shape)}")
    rank = spec.coordinate[plan.axis]
    start, size = sum(cut.sizes[:rank]), cut.sizes[rank]
    return index - start, (index >= start) & (index < start + size)


@rule(aten.gather.default)
def gather(self: torch.Tensor, dim: int, index: torch.Tensor, *, sparse_grad: bool = False) -> ShardTensor:
    """``x.gather(dim, index)``."""
    mesh = mesh_of(self, index)
    if isinstance(self, ShardTensor):
        remember(self)
    spec, numbers = spec_of(self, mesh), spec_of(index, mesh)
    dim = dim % max(spec.ndim, 1)
    plan = _plan(spec, numbers, dim, None)
    result = ShardTensorSpec.of(mesh, plan.result, numbers.shape, spec.dtype)
    local, block = local_in(self, plan.tensor, mesh), local_in(index, plan.numbers, mesh)
    if plan.axis is None:
        return wrap(aten.gather.default(local, dim, block), result)
    places, mine = _own(block, spec, plan, dim)
    if not local.shape[dim]:
        return wrap(local.new_zeros(block.shape), result)
    found = aten.gather.default(local, dim, places.clamp(0, local.shape[dim] - 1))
    return wrap(torch.where(mine, found, torch.zeros((), dtype=found.dtype, device=found.device)), result)


def _scatter(
    op: Callable[..., torch.Tensor],
    self: torch.Tensor,
    dim: int,
    index: torch.Tensor,
    source: Any,
    adds: bool,
    **options: Any,
) -> ShardTensor:
    """Run a scatter on the own block, longer by one row along a cut ``dim``: what belongs elsewhere falls there."""
    mesh = mesh_of(self, index, source)
    spec, numbers = spec_of(self, mesh), spec_of(index, mesh)
    dim = dim % max(spec.ndim, 1)
    if isinstance(source, torch.Tensor):
        for at, length in enumerate(numbers.shape):
            if source.shape[at] != length:
                source = aten.slice.Tensor(source, at, 0, length)
    numbers = _cut_like_source(numbers, spec_of(source, mesh)) if isinstance(source, torch.Tensor) else numbers
    plan = _plan(spec, numbers, dim, adds)
    start, block = local_in(self, plan.tensor, mesh), local_in(index, plan.numbers, mesh)
    values = local_in(source, plan.numbers, mesh) if isinstance(source, torch.Tensor) else source
    result = ShardTensorSpec.of(mesh, plan.result, spec.shape, spec.dtype)
    if plan.axis is None:
        return wrap(op(start, dim, block, values, **options), result)
    places, mine = _own(block, spec, plan, dim)
    length = start.shape[dim]
    spill = start.new_zeros([*start.shape[:dim], 1, *start.shape[dim + 1 :]])
    out = op(torch.cat([start, spill], dim), dim, torch.where(mine, places, length), values, **options)
    return wrap(out.narrow(dim, 0, length), result)


@lru_cache(maxsize=4096)
def _cut_like_source(index: ShardTensorSpec, source: ShardTensorSpec) -> ShardTensorSpec:
    """The index, cut as the values are where it is whole."""
    layout = tuple(
        theirs if isinstance(own, Replicate) and isinstance(theirs, Cut) else own
        for own, theirs in zip(index.resolved_layout, source.resolved_layout, strict=True)
    )
    dims = [entry.dim for entry in layout if isinstance(entry, Cut)]
    return index.with_layout(layout if len(dims) == len(set(dims)) else index.resolved_layout)


@rule(aten.scatter.src)
def scatter_src(self: torch.Tensor, dim: int, index: torch.Tensor, src: torch.Tensor) -> ShardTensor:
    return _scatter(aten.scatter.src, self, dim, index, src, False)


@rule(aten.scatter.value)
def scatter_value(self: torch.Tensor, dim: int, index: torch.Tensor, value: float) -> ShardTensor:
    return _scatter(aten.scatter.value, self, dim, index, value, False)


@rule(aten.scatter.reduce)
def scatter_reduce_src(
    self: torch.Tensor, dim: int, index: torch.Tensor, src: torch.Tensor, *, reduce: str
) -> ShardTensor:
    return _scatter(aten.scatter.reduce, self, dim, index, src, reduce == "add", reduce=reduce)


@rule(aten.scatter.value_reduce)
def scatter_reduce_value(
    self: torch.Tensor, dim: int, index: torch.Tensor, value: float, *, reduce: str
) -> ShardTensor:
    return _scatter(aten.scatter.value_reduce, self, dim, index, value, reduce == "add", reduce=reduce)


@rule(aten.scatter_add.default)
def scatter_add(self: torch.Tensor, dim: int, index: torch.Tensor, src: torch.Tensor) -> ShardTensor:
    return _scatter(aten.scatter_add.default, self, dim, index, src, True)


@rule(aten.scatter_reduce.two)
def scatter_reduce(
    self: torch.Tensor, dim: int, index: torch.Tensor, src: torch.Tensor, reduce: str, *, include_self: bool = True
) -> ShardTensor:
    def op(*args: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = aten.scatter_reduce.two(*args, reduce, include_self=include_self)
        return found

    return _scatter(op, self, dim, index, src, reduce == "sum" and include_self)


def _in_place(outside: Callable[..., ShardTensor]) -> Callable[..., torch.Tensor]:
    """The in-place form of a rule."""

    def inside(self: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        return write_back(self, outside(self, *args, **options))

    inside.__module__ = __name__
    return inside


rule(aten.scatter_.src)(_in_place(scatter_src))
rule(aten.scatter_.value)(_in_place(scatter_value))
rule(aten.scatter_.reduce)(_in_place(scatter_reduce_src))
rule(aten.scatter_.value_reduce)(_in_place(scatter_reduce_value))
rule(aten.scatter_add_.default)(_in_place(scatter_add))
rule(aten.scatter_reduce_.two)(_in_place(scatter_reduce))

"""Rows by number along one dim: index_select, index_add, embedding.

Along a cut dim every rank asks the owners for the rows that it will hold; neither the tensor nor its gradient is ever
whole on a rank.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch

from shardtensor import comm
from shardtensor.registry import rule
from shardtensor.rules.layouts import local_in, mesh_of, spec_of
from shardtensor.rules.memory import remember
from shardtensor.rules.slices import one_cut_layout
from shardtensor.rules.writing import write_back
from shardtensor.spec import (
    PENDING_SUM,
    REPLICATE,
    AxisLayout,
    Cut,
    Layout,
    Replicate,
    ShardTensorSpec,
    even_sizes,
    mesh_sizes,
)
from shardtensor.tensor import ShardTensor, wrap

__all__ = ["Rows", "add_to_rows", "rows_of", "take"]

aten = torch.ops.aten


class Rows(NamedTuple):
    """How rows of ``dim`` are taken by an index [K].

    Attributes:
        source: layout of the tensor.
        numbers: layout of the index.
        taken: layout of the rows taken.
        axis: the mesh axis that cuts ``dim``, if any: rows travel along it.
        parts: how many rows each of its ranks takes.
        shared: whether every rank knows the whole index.
    """

    source: Layout
    numbers: Layout
    taken: Layout
    axis: int | None
    parts: tuple[int, ...]
    shared: bool


@lru_cache(maxsize=4096)
def rows_of(spec: ShardTensorSpec, dim: int, index: ShardTensorSpec) -> Rows:
    """The layouts in which rows of ``dim`` are taken or added; ``index`` has one dim."""
    source = one_cut_layout(spec.with_layout(spec.resolved_layout), dim)
    axis = next((at for at, entry in enumerate(source) if isinstance(entry, Cut) and entry.dim == dim), None)
    numbers: list[AxisLayout] = [REPLICATE] * len(source)
    taken = list(source)
    parts: tuple[int, ...] = ()
    for at, entry in enumerate(index.resolved_layout):
        if not isinstance(entry, Cut):
            continue
        if axis is None and isinstance(source[at], Replicate):
            numbers[at], taken[at] = entry, entry.moved(dim)
        elif at == axis and entry.outer == 1 and len(index.axes_of(0)) == 1:
            numbers[at], parts = entry, entry.sizes
    if axis is not None:
        shared = not parts
        parts = parts or even_sizes(index.shape[0], mesh_sizes(spec.mesh)[axis])
        taken[axis] = Cut(dim, parts)
        return Rows(source, tuple(numbers), tuple(taken), axis, parts, shared)
    return Rows(source, tuple(numbers), tuple(taken), None, (), True)


def take(local: torch.Tensor, dim: int, index: torch.Tensor, spec: ShardTensorSpec, plan: Rows) -> torch.Tensor:
    """This rank's rows: ``local`` lies as ``plan.source``, ``index`` as ``plan.numbers``; numbers are >= 0."""
    if plan.axis is None:
        return local.index_select(dim, index)
    cut = plan.source[plan.axis]
    assert isinstance(cut, Cut)
    group = comm.group_of(spec.mesh, plan.axis)
    index = index.to(local.device, torch.int64)
    return comm.take_rows(local, dim, cut.sizes, index, plan.parts, group, shared=plan.shared)


def add_to_rows(
    rows: torch.Tensor, dim: int, index: torch.Tensor, spec: ShardTensorSpec, plan: Rows
) -> tuple[torch.Tensor, Layout]:
    """A block of zeros with ``rows`` (laid out as ``plan.taken``) added at their numbers, and its layout."""
    if plan.axis is None:
        layout = tuple(
            PENDING_SUM if isinstance(taken, Cut) and isinstance(source, Replicate) else source
            for taken, source in zip(plan.taken, plan.source, strict=True)
        )
        total = rows.new_zeros(spec.with_layout(plan.source).local_shape)
        return total.index_add_(dim, index, rows), layout
    cut = plan.source[plan.axis]
    assert isinstance(cut, Cut)
    group = comm.group_of(spec.mesh, plan.axis)
    index = index.to(rows.device, torch.int64)
    return comm.add_rows(rows, dim, cut.sizes, index, plan.parts, group, shared=plan.shared), plan.source


def _index_spec(index: torch.Tensor, mesh: Any) -> ShardTensorSpec:
    spec = spec_of(index, mesh)
    return spec if spec.ndim else ShardTensorSpec.of(mesh, spec.resolved_layout, (1,), spec.dtype)


@rule(aten.index_select.default)
def index_select(self: torch.Tensor, dim: int, index: torch.Tensor) -> ShardTensor:
    """``x.index_select(dim, index)``; the rows taken of a cut dim are cut as the index is, else evenly."""
    if isinstance(self, ShardTensor) and self.requires_grad:
        remember(self)
    if type(self) is ShardTensor and not isinstance(index, ShardTensor):
        result = _of_whole_rows(self._spec, dim, index.shape)
        if result is not None:  # the short way: every rank has the rows asked for
            return wrap(self._local_tensor.index_select(dim, index), result)
    mesh = mesh_of(self, index)
    spec, numbers = spec_of(self, mesh), _index_spec(index, mesh)
    dim = dim % max(spec.ndim, 1)
    plan = rows_of(spec, dim, numbers)
    rows = take(local_in(self, plan.source, mesh), dim, local_in(index, plan.numbers, mesh).reshape(-1), spec, plan)
    return wrap(rows, _taken(spec, dim, numbers.shape[0], plan.taken))


@lru_cache(maxsize=2048)
def _of_whole_rows(spec: ShardTensorSpec, dim: int, index: torch.Size) -> ShardTensorSpec | None:
    """The spec of rows taken of a dim that is not cut, by numbers of shape ``index``; None where it is not so."""
    if len(index) != 1 or not spec.ndim or spec.partial_axes or spec.axes_of(dim % spec.ndim):
        return None
    return _taken(spec, dim % spec.ndim, index[0], spec.layout)


@lru_cache(maxsize=2048)
def _taken(spec: ShardTensorSpec, dim: int, count: int, layout: Layout) -> ShardTensorSpec:
    return ShardTensorSpec.of(spec.mesh, layout, (*spec.shape[:dim], count, *spec.shape[dim + 1 :]), spec.dtype)


@rule(aten.index_add.default)
def index_add(
    self: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor, *, alpha: float = 1
) -> ShardTensor:
    """``self`` with rows of ``source`` added at the numbers of ``index``."""
    mesh = mesh_of(self, index, source)
    spec = _like_source(spec_of(self, mesh), spec_of(source, mesh), dim % max(self.dim(), 1))
    dim = dim % max(spec.ndim, 1)
    numbers = _index_spec(index, mesh)
    along = _numbers_like_rows(numbers, spec_of(source, mesh), dim)
    plan = rows_of(spec, dim, along)
    rows = local_in(source, plan.taken, mesh)
    added, layout = add_to_rows(rows, dim, local_in(index, plan.numbers, mesh).reshape(-1), spec, plan)
    start = local_in(self, layout, mesh)
    return wrap(torch.add(start, added, alpha=alpha), ShardTensorSpec.of(mesh, layout, spec.shape, spec.dtype))


@lru_cache(maxsize=4096)
def _like_source(spec: ShardTensorSpec, source: ShardTensorSpec, dim: int) -> ShardTensorSpec:
    """The target's spec, cut as the source is where the target is whole and it costs nothing to cut it."""
    layout = list(spec.resolved_layout)
    taken = {cut.dim for _, cut in spec.cuts}
    for axis, cut in source.cuts:
        fits = cut.dim != dim and source.shape[cut.dim] == spec.shape[cut.dim]
        if fits and isinstance(layout[axis], Replicate) and cut.dim not in taken:
            layout[axis] = cut
            taken.add(cut.dim)
    return spec.with_layout(tuple(layout))


@lru_cache(maxsize=4096)
def _numbers_like_rows(index: ShardTensorSpec, source: ShardTensorSpec, dim: int) -> ShardTensorSpec:
    """The index, cut as the rows of the source are where it is whole."""
    if index.cuts or not source.cuts or not source.ndim:
        return index
    layout = tuple(
        entry.moved(0) if isinstance(entry, Cut) and entry.dim == dim else REPLICATE for entry in source.layout
    )
    return index.with_layout(layout)


@rule(aten.index_add_.default)
def index_add_(
    self: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor, *, alpha: float = 1
) -> torch.Tensor:
    return write_back(self, index_add(self, dim, index, source, alpha=alpha))

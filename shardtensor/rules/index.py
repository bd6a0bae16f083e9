"""Advanced indexing, ``x[i, :, j]``, and its adjoint, index_put; `index_plan` says what is sent and where sums wait."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch

from shardtensor.registry import rule
from shardtensor.rules.index_plan import MASKS, IndexPlan, as_numbers, blocks_of, index_plan, only_mask, own_rows
from shardtensor.rules.layouts import local_in, mesh_of, operand_layout, spec_of, whole
from shardtensor.rules.mask import masked, put_masked
from shardtensor.rules.memory import remember
from shardtensor.rules.take import add_to_rows, take
from shardtensor.rules.writing import write_back
from shardtensor.spec import PENDING_SUM, Cut, DeviceMesh, Replicate, ShardTensorSpec, replicate
from shardtensor.tensor import ShardTensor, wrap

__all__ = ["index", "index_put"]

aten = torch.ops.aten
ALL = slice(None)

Specs = tuple[ShardTensorSpec | None, ...]


def _plain_shapes(indices: Sequence[torch.Tensor | None]) -> tuple[torch.Size | None, ...] | None:
    """The shapes of indices that are all plain lists of numbers, the usual case; else None."""
    shapes: list[torch.Size | None] = []
    for item in indices:
        if item is None:
            shapes.append(None)
        elif type(item) is torch.Tensor and item.dtype is torch.int64 and item.dim():
            shapes.append(item.shape)
        else:
            return None
    return tuple(shapes)


@lru_cache(maxsize=4096)
def _plain_plan(spec: ShardTensorSpec, shapes: tuple[torch.Size | None, ...]) -> IndexPlan:
    whole = replicate(len(spec.layout))
    specs = tuple(None if s is None else ShardTensorSpec.of(spec.mesh, whole, s, torch.int64) for s in shapes)
    return index_plan(spec, specs)


def _specs(indices: Sequence[torch.Tensor | None], mesh: DeviceMesh) -> Specs:
    return tuple(None if item is None else spec_of(item, mesh) for item in indices)


@rule(aten.index.Tensor, aten._unsafe_index.Tensor)
def index(self: torch.Tensor, indices: Sequence[torch.Tensor | None]) -> ShardTensor:
    """``x[i, :, j]`` with tensors as indices."""
    if isinstance(self, ShardTensor):
        if self.requires_grad:
            remember(self)
        shapes = _plain_shapes(indices)
        plan = None if shapes is None else _plain_plan(self._spec, shapes)
        if plan is not None and plan.local:
            key = tuple([ALL if item is None else item for item in indices])
            return wrap(self._local_tensor[key], plan.result)
    mesh = mesh_of(self, indices)
    numbers, spec = list(indices), spec_of(self, mesh)
    if any(item is not None and item.dtype in MASKS for item in indices):
        mask = only_mask(indices)
        if mask is not None:
            return masked(self, mask[1], mask[0], mesh)
        numbers = as_numbers(indices, mesh)
    plan = index_plan(spec, _specs(numbers, mesh))
    local = local_in(self, plan.source, mesh)
    blocks = blocks_of(numbers, plan, mesh, spec.shape)
    if plan.rows is not None:
        picked = next(block for block in blocks if block is not None)
        rows = take(local, plan.dims[0], picked.reshape(-1), spec, plan.rows)
        return wrap(rows.reshape(plan.block), plan.result)
    if plan.held:
        return wrap(_read_held(local, blocks, spec, plan), plan.result)
    return wrap(aten.index.Tensor(local, blocks), plan.result)


def _read_held(
    local: torch.Tensor, blocks: list[torch.Tensor | None], spec: ShardTensorSpec, plan: IndexPlan
) -> torch.Tensor:
    """What this rank holds of the result, zeros elsewhere."""
    inside: list[torch.Tensor] = []
    for axis, dim in plan.held:
        places, mine = own_rows(blocks[dim], spec, plan, axis, dim)
        blocks[dim] = places.clamp(0, max(local.shape[dim] - 1, 0))
        inside.append(mine)
    if not all(local.shape[dim] for _, dim in plan.held):
        return local.new_zeros(plan.block)
    found = aten.index.Tensor(local, blocks)
    mine = torch.broadcast_tensors(*inside, *(block for block in blocks if block is not None))[0]
    for other in inside[1:]:
        mine = mine & other
    mine = mine.reshape(*mine.shape, *[1] * (found.dim() - plan.at - mine.dim()))
    return torch.where(mine, found, torch.zeros((), dtype=found.dtype, device=found.device))


@rule(aten.index_put.default, aten._unsafe_index_put.default)
def index_put(
    self: torch.Tensor, indices: Sequence[torch.Tensor | None], values: torch.Tensor, accumulate: bool = False
) -> ShardTensor:
    """A copy of x with ``values`` put, or added, at ``x[i, :, j]``."""
    mesh = mesh_of(self, indices, values)
    mask = only_mask(indices)
    if mask is not None:
        return put_masked(self, mask[1], mask[0], values, accumulate, mesh)
    numbers = as_numbers(indices, mesh)
    if not accumulate:
        # Of several values for one place one stays: every rank must see all places.
        numbers = [None if item is None else whole(item, mesh) for item in numbers]
    specs, value_spec = _specs(numbers, mesh), spec_of(values, mesh)
    spec = _cut_like_values(spec_of(self, mesh), specs, value_spec)
    plan = index_plan(spec, specs, accumulate)
    own = local_in(values, operand_layout(plan.picked, value_spec, plan.result.shape), mesh)
    blocks = blocks_of(numbers, plan, mesh, spec.shape)
    if plan.rows is None:
        return _put_held(self, own, blocks, spec, plan, accumulate)
    dim = plan.dims[0]
    picked = next(block for block in blocks if block is not None)
    shape = list(spec.with_layout(plan.source).local_shape)
    rows = own.expand(plan.block)
    shape[dim] = rows.shape[plan.at : plan.at + len(plan.shape)].numel()
    added, layout = add_to_rows(rows.reshape(shape), dim, picked.reshape(-1), spec, plan.rows)
    return wrap(local_in(self, layout, mesh) + added, ShardTensorSpec.of(mesh, layout, spec.shape, spec.dtype))


@lru_cache(maxsize=4096)
def _cut_like_values(spec: ShardTensorSpec, indices: Specs, values: ShardTensorSpec) -> ShardTensorSpec:
    """The target's spec, cut as the values are where the target is whole: it costs nothing to cut it."""
    layout = list(spec.resolved_layout)
    plan = index_plan(spec.with_layout(tuple(layout)), indices, False)
    kept = [dim for dim in range(spec.ndim) if dim not in plan.dims]
    ahead = plan.result.ndim - values.ndim
    for axis, cut in values.cuts:
        place = cut.dim + ahead
        inside = plan.at <= place < plan.at + len(plan.shape)
        if inside or values.shape[cut.dim] != plan.result.shape[place] or not isinstance(layout[axis], Replicate):
            continue
        dim = kept[place - len(plan.shape) * (place >= plan.at)]
        if all(not isinstance(entry, Cut) or entry.dim != dim for entry in layout):
            layout[axis] = cut.moved(dim)
    return spec.with_layout(tuple(layout))


def _put_held(
    target: torch.Tensor,
    values: torch.Tensor,
    blocks: list[torch.Tensor | None],
    spec: ShardTensorSpec,
    plan: IndexPlan,
    accumulate: bool,
) -> ShardTensor:
    """Put what falls into the own block; the rest goes to a row that is cut off again."""
    mesh = spec.mesh
    layout = tuple(
        PENDING_SUM if isinstance(entry, Replicate) and isinstance(number, Cut) else entry
        for entry, number in zip(plan.source, plan.numbers, strict=True)
    )
    start = local_in(target, layout, mesh)
    shape = list(start.shape)
    for axis, dim in plan.held:
        places, mine = own_rows(blocks[dim], spec, plan, axis, dim)
        blocks[dim] = torch.where(mine, places, shape[dim])
        shape[dim] += 1
    out = start.new_zeros(shape)
    inner = out[tuple(slice(0, length) for length in start.shape)]
    inner.copy_(start)
    aten.index_put_.default(out, blocks, values.to(out.dtype), accumulate)
    result = inner.contiguous() if plan.held else out
    return wrap(result, ShardTensorSpec.of(mesh, layout, spec.shape, spec.dtype))


@rule(aten.index_put_.default, aten._index_put_impl_.default)
def index_put_(
    self: torch.Tensor,
    indices: Sequence[torch.Tensor | None],
    values: torch.Tensor,
    accumulate: bool = False,
    unsafe: bool = False,
) -> torch.Tensor:
    return write_back(self, index_put(self, indices, values, accumulate))

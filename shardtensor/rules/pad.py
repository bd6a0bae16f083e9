"""Padding with constants, reflections and replicas, along cut and uncut dims, and its adjoints.

Padding of a cut dim belongs to the first and the last rank. Constant padding needs no exchange; for the other modes
these two fetch the rows that they repeat, wherever they lie.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch

from shardtensor.errors import OpError
from shardtensor.registry import rule
from shardtensor.rules.layouts import local_in, resolved, uncut
from shardtensor.rules.pad_rows import added_rows, fold_rows, pad_rows
from shardtensor.rules.slices import one_cut, one_cut_layout, slice_
from shardtensor.spec import Cut, ShardTensorSpec
from shardtensor.tensor import ShardTensor, wrap

__all__ = ["by_dim", "constant_pad_nd"]

aten = torch.ops.aten


def by_dim(padding: Sequence[int], ndim: int) -> dict[int, tuple[int, int]]:
    """torch's padding list (last dim first) as {dim: (before, after)}, without dims that stay as they are."""
    found = {}
    for place in range(len(padding) // 2):
        before, after = padding[2 * place], padding[2 * place + 1]
        if before or after:
            found[ndim - 1 - place] = (before, after)
    return found


def as_list(pads: dict[int, tuple[int, int]], ndim: int, places: int) -> list[int]:
    """`by_dim` the other way round, for ``places`` last dims."""
    return [side for place in range(places) for side in pads.get(ndim - 1 - place, (0, 0))]


@rule(aten.constant_pad_nd.default)
def constant_pad_nd(self: ShardTensor, pad: Sequence[int], value: float = 0) -> ShardTensor:
    """Rows of ``value`` at both ends of the last dims; negative padding takes rows away."""
    plan = _constant(self._spec, tuple(pad))
    if plan is not None:
        return wrap(torch.constant_pad_nd(self._local_tensor, plan[0], value), plan[1])
    self = resolved(self)
    for dim, (before, after) in by_dim(pad, self._spec.ndim).items():
        self = one_cut(self, dim)
        if before < 0 or after < 0:
            self = slice_(self, dim, max(0, -before), self._spec.shape[dim] + min(0, after))
    return constant_pad_nd(self, [max(0, side) for side in pad], value)


@lru_cache(maxsize=2048)
def _constant(spec: ShardTensorSpec, padding: tuple[int, ...]) -> tuple[tuple[int, ...], ShardTensorSpec] | None:
    """What this rank pads, as torch's list, and the result's spec: ends of cut dims go to the first and last rank.

    None where rows are taken away, or the layout must change first.
    """
    mine = by_dim(padding, spec.ndim)
    if spec.partial_axes or min(padding, default=0) < 0:
        return None
    if any(one_cut_layout(spec, dim) != spec.layout for dim in mine):
        return None
    shape, layout = list(spec.shape), list(spec.layout)
    for dim, (before, after) in mine.items():
        shape[dim] += before + after
    for axis, cut in spec.cuts:
        if cut.dim not in mine:
            continue
        before, after = mine[cut.dim]
        layout[axis] = Cut(cut.dim, added_rows(cut.sizes, before, after))
        rank = spec.coordinate[axis]
        mine[cut.dim] = (before if rank == 0 else 0, after if rank == len(cut.sizes) - 1 else 0)
    result = ShardTensorSpec.of(spec.mesh, tuple(layout), shape, spec.dtype)
    return tuple(as_list(mine, spec.ndim, spec.ndim)), result


def _prepared(mode: str, tensor: ShardTensor, pads: dict[int, tuple[int, int]]) -> ShardTensor:
    """The tensor with its padded dims cut into consecutive rows; a dim that loses rows is made whole.

    Raises:
        OpError: reflection of more rows than there are.
    """
    tensor = resolved(tensor)
    for dim, sides in pads.items():
        length = tensor._spec.shape[dim]
        if mode == "reflect" and max(sides) >= length:
            raise OpError(f"reflection padding {sides} of dim {dim} needs more than its {length} rows: pad less")
        if mode == "replicate" and not length:
            raise OpError(f"replication padding of dim {dim} needs at least one row, got {tuple(tensor._spec.shape)}")
        tensor = uncut(tensor, [dim]) if min(sides) < 0 else one_cut(tensor, dim)
    return tensor


def _padded(mode: str, op: torch._ops.OpOverload, tensor: ShardTensor, padding: Sequence[int]) -> ShardTensor:
    """Reflection or replication padding: cut dims by fetched rows, the others by torch's own kernel."""
    pads = by_dim(padding, tensor._spec.ndim)
    tensor = _prepared(mode, tensor, pads)
    spec, local = tensor._spec, tensor._local_tensor
    layout, shape = list(spec.layout), list(spec.shape)
    own = dict(pads)
    for axis, cut in spec.cuts:
        if cut.dim in pads:
            local = pad_rows(local, spec, axis, own.pop(cut.dim), mode)
            layout[axis] = Cut(cut.dim, added_rows(cut.sizes, *pads[cut.dim]))
    for dim, (before, after) in pads.items():
        shape[dim] += before + after
    result = ShardTensorSpec.of(spec.mesh, tuple(layout), shape, spec.dtype)
    if own and local.numel():
        local = op(local, as_list(own, spec.ndim, len(padding) // 2))
    return wrap(local if local.numel() else local.new_empty(result.local_shape), result)


def _folded(
    mode: str, op: torch._ops.OpOverload, grad: ShardTensor, tensor: ShardTensor, padding: Sequence[int]
) -> ShardTensor:
    """The adjoint of `_padded`: every row's gradient goes back to the row that it repeats."""
    pads = by_dim(padding, tensor._spec.ndim)
    tensor = _prepared(mode, tensor, pads)
    spec = tensor._spec
    layout = list(spec.layout)
    along = [(axis, cut) for axis, cut in spec.cuts if cut.dim in pads]
    for axis, cut in along:
        layout[axis] = Cut(cut.dim, added_rows(cut.sizes, *pads[cut.dim]))
    local = local_in(grad, tuple(layout), spec.mesh)
    own = {dim: sides for dim, sides in pads.items() if all(cut.dim != dim for _, cut in along)}
    if own:
        shape = list(local.shape)
        for dim, sides in own.items():
            shape[dim] -= sum(sides)
        places = len(padding) // 2
        if local.numel():
            local = op(local, local.new_empty(shape), as_list(own, spec.ndim, places))
        else:
            local = local.new_zeros(shape)
    for axis, cut in along:
        local = fold_rows(local, spec, axis, pads[cut.dim], mode)
    return wrap(local, ShardTensorSpec.of(spec.mesh, spec.layout, spec.shape, spec.dtype))


def _enter(mode: str, name: str) -> None:
    for dims in (1, 2, 3):
        op = getattr(aten, f"{name}{dims}d").default
        back = getattr(aten, f"{name}{dims}d_backward").default

        def forward(self: ShardTensor, padding: Sequence[int], op: Any = op) -> ShardTensor:
            return _padded(mode, op, self, padding)

        def backward(grad: ShardTensor, self: ShardTensor, padding: Sequence[int], op: Any = back) -> ShardTensor:
            return _folded(mode, op, grad, self, padding)

        rule(op)(forward)
        rule(back)(backward)


_enter("reflect", "reflection_pad")
_enter("replicate", "replication_pad")

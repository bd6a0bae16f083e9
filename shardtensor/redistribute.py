"""Move a local block from one layout to another: the only place that knows which exchange each step needs."""

from __future__ import annotations

from itertools import accumulate, pairwise

import torch

from shardtensor import comm
from shardtensor.errors import LayoutError
from shardtensor.spec import REPLICATE, AxisLayout, Cut, Layout, Partial, Replicate, ShardTensorSpec, mesh_sizes

__all__ = ["redistribute_local"]

_REDUCE = {"sum": "sum", "avg": "sum", "max": "max", "min": "min", "product": "product"}


def redistribute_local(local: torch.Tensor, spec: ShardTensorSpec, layout: Layout) -> torch.Tensor:
    """Bring this rank's block of ``spec`` into ``layout``.

    Args:
        local: this rank's block under ``spec``.
        spec: the layout that ``local`` has.
        layout: the layout wanted, one entry per mesh axis.

    Returns:
        This rank's block under ``layout``; ``local`` itself where nothing changes.

    Raises:
        LayoutError: the layout does not fit the tensor.
    """
    if spec.layout == layout:
        return local
    spec.with_layout(layout)  # checks that the layout fits
    # First everything that must become whole, so that no dim is cut twice on the way; then the new cuts.
    for axis, (have, want) in enumerate(zip(spec.layout, layout, strict=True)):
        changes = have != want and not isinstance(have, Replicate)
        if changes and (isinstance(want, Replicate) or _must_pass_whole(spec, layout, axis)):
            local, spec = _step(local, spec, axis, REPLICATE)
    for axis in _cut_order(layout):
        if spec.layout[axis] != layout[axis]:
            local, spec = _step(local, spec, axis, layout[axis])
    return local


def _must_pass_whole(spec: ShardTensorSpec, layout: Layout, axis: int) -> bool:
    """Whether a dim touched by this axis is cut by another axis too, before or after: then go by way of whole."""
    dims = {entry.dim for entry in (spec.layout[axis], layout[axis]) if isinstance(entry, Cut)}
    others = [entry for group in (spec.layout, layout) for at, entry in enumerate(group) if at != axis]
    return any(isinstance(entry, Cut) and entry.dim in dims for entry in others)


def _cut_order(layout: Layout) -> list[int]:
    """Axes so that outer cuts of a dim come before inner ones."""
    return sorted(range(len(layout)), key=lambda axis: getattr(layout[axis], "outer", 0))


def _step(
    local: torch.Tensor, spec: ShardTensorSpec, axis: int, want: AxisLayout
) -> tuple[torch.Tensor, ShardTensorSpec]:
    """Change one mesh axis."""
    have = spec.layout[axis]
    target = spec.with_layout((*spec.layout[:axis], want, *spec.layout[axis + 1 :]))
    if mesh_sizes(spec.mesh)[axis] == 1:
        return local, target
    match have, want:
        case Partial(), Cut():
            local = _reduce_to_cut(local, spec, target, axis, have.reduce_op)
        case Partial(), _:
            local = _reduce(local, spec, axis, have.reduce_op)
            if isinstance(want, Partial):
                local = _as_contribution(local, target, axis, want.reduce_op)
        case Cut(), Replicate():
            local = _gather(local, spec, axis)
        case Replicate(), Cut():
            local = _slice(local, target, axis)
        case Replicate(), Partial():
            local = _as_contribution(local, target, axis, want.reduce_op)
        case Cut(), Cut() if have.dim == want.dim and have.outer == want.outer:
            local = _resize(local, spec, target, axis)
        case Cut(), Cut() if have.dim != want.dim:
            local = _move_cut(local, spec, target, axis)
        case _:
            local, spec = _step(local, spec, axis, REPLICATE)
            return _step(local, spec, axis, want)
    return local, target


def _folded(local: torch.Tensor, cut: Cut, rows: int) -> torch.Tensor:
    """The block with its cut dim seen as [outer, rows]: the rows then lie at ``cut.dim + 1``."""
    return local.reshape(*local.shape[: cut.dim], cut.outer, rows, *local.shape[cut.dim + 1 :])


def _group(spec: ShardTensorSpec, axis: int) -> str:
    return comm.group_of(spec.mesh, axis)


def _gather(local: torch.Tensor, spec: ShardTensorSpec, axis: int) -> torch.Tensor:
    cut = spec.local_cut(axis)
    if cut.outer == 1:
        return comm.all_gather(local, cut.dim, cut.sizes, _group(spec, axis))
    folded = _folded(local, cut, cut.sizes[spec.coordinate[axis]])
    return comm.all_gather(folded, cut.dim + 1, cut.sizes, _group(spec, axis)).flatten(cut.dim, cut.dim + 1)


def _slice(local: torch.Tensor, target: ShardTensorSpec, axis: int) -> torch.Tensor:
    cut, rank = target.local_cut(axis), target.coordinate[axis]
    start = sum(cut.sizes[:rank])
    if cut.outer == 1:
        return local.narrow(cut.dim, start, cut.sizes[rank])
    return _folded(local, cut, sum(cut.sizes)).narrow(cut.dim + 1, start, cut.sizes[rank]).flatten(cut.dim, cut.dim + 1)


def _reduce(local: torch.Tensor, spec: ShardTensorSpec, axis: int, op: str) -> torch.Tensor:
    total = comm.all_reduce(local, _REDUCE[op], _group(spec, axis))
    return total / mesh_sizes(spec.mesh)[axis] if op == "avg" else total


def _reduce_to_cut(
    local: torch.Tensor, spec: ShardTensorSpec, target: ShardTensorSpec, axis: int, op: str
) -> torch.Tensor:
    cut = target.local_cut(axis)
    if op != "sum" or cut.outer != 1:
        return _slice(_reduce(local, spec, axis, op), target, axis)
    return comm.reduce_scatter(local, cut.dim, cut.sizes, _group(spec, axis))


def _as_contribution(local: torch.Tensor, target: ShardTensorSpec, axis: int, op: str) -> torch.Tensor:
    """A whole value as pending reduction: the first rank brings it, the others bring the op's neutral element."""
    if op != "sum":
        if op in ("avg", "max", "min"):
            return local
        raise LayoutError(f"cannot turn a replicated tensor into Partial({op!r}); use Partial('sum')")
    return local if target.coordinate[axis] == 0 else torch.zeros_like(local)


def _resize(local: torch.Tensor, spec: ShardTensorSpec, target: ShardTensorSpec, axis: int) -> torch.Tensor:
    cut, want = spec.local_cut(axis), target.local_cut(axis)
    edges = (0, *accumulate(want.sizes))
    windows = list(pairwise(edges))
    if cut.outer == 1:
        return comm.halo_exchange(local, cut.dim, cut.sizes, windows, _group(spec, axis))
    folded = _folded(local, cut, cut.sizes[spec.coordinate[axis]])
    moved = comm.halo_exchange(folded, cut.dim + 1, cut.sizes, windows, _group(spec, axis))
    return moved.flatten(cut.dim, cut.dim + 1)


def _move_cut(local: torch.Tensor, spec: ShardTensorSpec, target: ShardTensorSpec, axis: int) -> torch.Tensor:
    cut, want = spec.local_cut(axis), target.local_cut(axis)
    group = _group(spec, axis)
    if cut.outer == 1 and want.outer == 1:
        return comm.all_to_all(local, want.dim, want.sizes, cut.dim, cut.sizes, group)
    # Fold the later dim first, so that the earlier dim keeps its place.
    first, last = sorted((cut, want), key=lambda item: item.dim)
    rows = {id(cut): cut.sizes[spec.coordinate[axis]], id(want): sum(want.sizes)}
    folded = _folded(_folded(local, last, rows[id(last)]), first, rows[id(first)])
    place = {id(first): first.dim + 1, id(last): last.dim + 2}
    moved = comm.all_to_all(folded, place[id(want)], want.sizes, place[id(cut)], cut.sizes, group)
    return moved.flatten(last.dim + 1, last.dim + 2).flatten(first.dim, first.dim + 1)

"""Joining and splitting: cat, stack, split, unbind. Along a cut dim, pieces move straight to their new owners.

The result of ``cat`` along a cut dim gives every rank as many rows as the pieces gave it, so that joining what was
split moves nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any

import torch

from shardtensor.errors import LayoutError
from shardtensor.registry import rule
from shardtensor.rules.aliasing import moved
from shardtensor.rules.dims import counted, moved_dims, unsqueeze
from shardtensor.rules.layouts import common_layout, local_in, mesh_of, spec_of, uncut
from shardtensor.rules.memory import in_backward, recall, remember
from shardtensor.rules.slices import one_cut, select, slice_
from shardtensor.spec import REPLICATE, AxisLayout, Cut, Layout, Replicate, ShardTensorSpec, even_sizes, mesh_sizes
from shardtensor.tensor import ShardTensor, wrap

__all__ = ["cat"]

aten = torch.ops.aten


def _is_legacy_empty(tensor: torch.Tensor) -> bool:
    """A tensor of shape (0,): torch lets it join with anything."""
    return tensor.dim() == 1 and tensor.shape[0] == 0


@lru_cache(maxsize=4096)
def _other_dims(specs: tuple[ShardTensorSpec, ...], dim: int) -> Layout:
    """The layout in which the pieces meet, ``dim`` left out: their lengths differ there."""
    first = specs[0]
    if first.partial_axes and all(spec.layout == first.layout for spec in specs) and first.cut_of(dim) is None:
        return first.layout
    others = [spec.with_layout(_without(spec.resolved_layout, dim)) for spec in specs]
    shape = [*first.shape[:dim], 0, *first.shape[dim + 1 :]]
    return common_layout(others, shape)


def _without(layout: Layout, dim: int) -> Layout:
    return tuple(REPLICATE if isinstance(entry, Cut) and entry.dim == dim else entry for entry in layout)


def _axis_along(specs: Sequence[ShardTensorSpec], dim: int, layout: Layout) -> int | None:
    """The mesh axis that cuts ``dim`` in the result: one that cuts a piece there, and no other dim of the pieces."""
    for spec in specs:
        for axis, cut in spec.cuts:
            if cut.dim == dim and isinstance(layout[axis], Replicate):
                return axis
    return None


@lru_cache(maxsize=4096)
def _sizes_along(specs: tuple[ShardTensorSpec, ...], dim: int, axis: int) -> tuple[tuple[int, ...], ...]:
    """Rows that every rank of the axis brings of every piece; a piece that is whole counts as cut evenly."""
    found = []
    for spec in specs:
        cut = spec.layout[axis]
        along = isinstance(cut, Cut) and cut.dim == dim and cut.outer == 1 and len(spec.axes_of(dim)) == 1
        found.append(cut.sizes if along else even_sizes(spec.shape[dim], mesh_sizes(spec.mesh)[axis]))  # type: ignore[union-attr]
    return tuple(found)


class _Joined:
    """A cat.

    Attributes:
        dim: the joined dim, counted from the front.
        spec: of the result.
        pieces: the layout of every piece that gives each rank what it owns of it.
        stays: whether the pieces lie so already.
    """

    def __init__(self, specs: tuple[ShardTensorSpec, ...], dim: int, wanted: tuple[int, ...] | None) -> None:
        first = specs[0]
        layout = _other_dims(specs, dim)
        length = sum(spec.shape[dim] for spec in specs)
        shape = [*first.shape[:dim], length, *first.shape[dim + 1 :]]
        axis = _axis_along(specs, dim, layout)
        self.pieces = [layout] * len(specs)
        if axis is not None:
            brought = _sizes_along(specs, dim, axis)
            sizes = wanted or tuple(sum(column) for column in zip(*brought, strict=True))
            self.pieces = [_with(layout, axis, Cut(dim, part)) for part in _shares(specs, dim, sizes)]
            layout = _with(layout, axis, Cut(dim, sizes))
        self.dim = dim
        self.spec = ShardTensorSpec.of(first.mesh, layout, shape, first.dtype)
        self.stays = all(spec.layout == piece for spec, piece in zip(specs, self.pieces, strict=True))


def _with(layout: Layout, axis: int, entry: AxisLayout) -> Layout:
    return (*layout[:axis], entry, *layout[axis + 1 :])


def _shares(specs: Sequence[ShardTensorSpec], dim: int, sizes: Sequence[int]) -> list[tuple[int, ...]]:
    """Rows of every piece that fall to each rank, where rank r owns ``sizes[r]`` rows of the joined dim."""
    ends = [sum(sizes[: rank + 1]) for rank in range(len(sizes))]
    found, start = [], 0
    for spec in specs:
        stop = start + spec.shape[dim]
        edges = [start, *(min(max(end, start), stop) for end in ends)]
        found.append(tuple(after - before for before, after in pairwise(edges)))
        start = stop
    return found


@lru_cache(maxsize=4096)
def _joined(specs: tuple[ShardTensorSpec, ...], dim: int, wanted: tuple[int, ...] | None) -> _Joined:
    return _Joined(specs, counted(dim, specs[0].ndim), wanted)


def _in_place(tensors: Sequence[Any], dim: int) -> ShardTensor | None:
    """The join of sharded pieces that lie so already, else None."""
    try:
        specs, blocks = tuple([tensor._spec for tensor in tensors]), [tensor._local_tensor for tensor in tensors]
    except AttributeError:  # a plain tensor among them
        return None
    plan = _joined(specs, dim, None)
    return wrap(torch.cat(blocks, plan.dim), plan.spec) if plan.stays else None


@rule(aten.cat.default)
def cat(tensors: Sequence[torch.Tensor], dim: int = 0) -> ShardTensor:
    """``torch.cat``: other cut dims stay cut; along a cut dim every rank receives the rows that it will own."""
    quick = _in_place(tensors, dim)
    if quick is not None:
        return quick
    mesh = mesh_of(tensors)
    kept = [tensor for tensor in tensors if not _is_legacy_empty(tensor)] or list(tensors[:1])
    specs = tuple(spec_of(tensor, mesh) for tensor in kept)
    plan = _joined(specs, dim, _wanted(kept, specs, dim % specs[0].ndim))
    blocks = [local_in(tensor, layout, mesh) for tensor, layout in zip(kept, plan.pieces, strict=True)]
    return wrap(torch.cat(blocks, plan.dim), plan.spec)


def _wanted(tensors: Sequence[torch.Tensor], specs: Sequence[ShardTensorSpec], dim: int) -> tuple[int, ...] | None:
    """In a backward pass with plain zeros among the pieces: the cut of the tensor that was split."""
    if all(isinstance(tensor, ShardTensor) for tensor in tensors):
        return None
    shape = [*specs[0].shape]
    shape[dim] = sum(spec.shape[dim] for spec in specs)
    known = recall(specs[0].mesh, torch.Size(shape))
    cuts = [entry for entry in known or () if isinstance(entry, Cut) and entry.dim == dim and entry.outer == 1]
    return cuts[0].sizes if len(cuts) == 1 else None


@rule(aten.stack.default)
def stack(tensors: Sequence[torch.Tensor], dim: int = 0) -> ShardTensor:
    """``torch.stack``: cuts stay, one dim further where the new dim comes before."""
    dim = dim % (tensors[0].dim() + 1)
    return cat([unsqueeze(t, dim) if isinstance(t, ShardTensor) else t.unsqueeze(dim) for t in tensors], dim)


@lru_cache(maxsize=4096)
def _split(spec: ShardTensorSpec, dim: int, sizes: tuple[int, ...]) -> tuple[ShardTensorSpec, ...] | None:
    """Specs of the parts; None where the dim is cut.

    Raises:
        LayoutError: the sizes do not sum to the dim's length.
    """
    dim = counted(dim, spec.ndim)
    if sum(sizes) != spec.shape[dim] or min(sizes, default=0) < 0:
        raise LayoutError(f"split: sizes {sizes} do not sum to the {spec.shape[dim]} rows of dim {dim}")
    if spec.axis_of(dim) is not None:
        return None
    return tuple(
        ShardTensorSpec.of(
            spec.mesh,
            spec.layout,
            (*spec.shape[:dim], size, *spec.shape[dim + 1 :]),
            spec.dtype,
            spec.tensor_meta.stride,
        )
        for size in sizes
    )


@rule(aten.split_with_sizes.default, aten.unsafe_split_with_sizes.default)
def split_with_sizes(self: ShardTensor, split_sizes: Sequence[int], dim: int = 0) -> list[ShardTensor]:
    """Parts of the given lengths; parts of a cut dim stay where they lie."""
    if self.requires_grad:
        remember(self)
    sizes = tuple(split_sizes)
    specs = _split(self._spec, dim, sizes)
    if specs is not None:
        parts = self._local_tensor.split_with_sizes(sizes, dim)
        return [wrap(part, own) for part, own in zip(parts, specs, strict=True)]
    dim = dim % self._spec.ndim
    self = one_cut(self, dim)
    edges = (0, *accumulate(sizes))
    return [slice_(self, dim, start, stop) for start, stop in pairwise(edges)]


@rule(aten.split.Tensor, aten.unsafe_split.Tensor)
def split(self: ShardTensor, split_size: int, dim: int = 0) -> list[ShardTensor]:
    """Parts of one length, the last one shorter; ``chunk`` ends here too."""
    length = self._spec.shape[dim]
    if split_size <= 0 and length:
        raise LayoutError(f"split: parts of {split_size} rows cannot make up {length} rows of dim {dim}")
    parts = max(1, -(-length // max(split_size, 1)))
    sizes = [split_size] * (parts - 1) + [length - split_size * (parts - 1)]
    return split_with_sizes(self, sizes, dim)


@rule(aten.unbind.int)
def unbind(self: ShardTensor, dim: int = 0) -> list[ShardTensor]:
    """The rows of a dim; those of a cut dim go to every rank of the axis, as in `select`."""
    dim = dim % self._spec.ndim
    remember(self)
    if self._spec.axis_of(dim) is None:
        spec = _row(self._spec, dim)
        return [wrap(row, spec) for row in self._local_tensor.unbind(dim)]
    if in_backward():
        return [select(self, dim, row) for row in range(self._spec.shape[dim])]
    return [moved(row, self) for row in unbind(uncut(self, [dim]), dim)]


@lru_cache(maxsize=4096)
def _row(spec: ShardTensorSpec, dim: int) -> ShardTensorSpec:
    shape, stride = spec.shape, spec.tensor_meta.stride
    return ShardTensorSpec.of(
        spec.mesh,
        moved_dims(spec.layout, lambda old: old - (old > dim)),
        (*shape[:dim], *shape[dim + 1 :]),
        spec.dtype,
        (*stride[:dim], *stride[dim + 1 :]),
    )

"""How a reshape carries cuts: old and new dims fall into groups of equal products, and a cut moves inside its group.

A cut of an old dim is a cut of its flattened group, seen as ``[outer, rows]``; it fits a new dim where the block's
edges fall between that dim's rows. Pure integers.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from math import prod
from typing import NamedTuple

import torch

from shardtensor.errors import LayoutError
from shardtensor.spec import (
    REPLICATE,
    AxisLayout,
    Cut,
    Layout,
    Replicate,
    ShardTensorSpec,
    contiguous_stride,
    even_sizes,
    mesh_sizes,
)

__all__ = ["Recut", "Regrouped", "regroup", "snapped"]


class Group(NamedTuple):
    """Old dims ``old[0] <= dim < old[1]`` hold the elements of new dims ``new[0] <= dim < new[1]``."""

    old: tuple[int, int]
    new: tuple[int, int]


class Recut(NamedTuple):
    """A change of layout that must come first: the block seen as ``flat``, its spec, brought to ``layout``."""

    flat: ShardTensorSpec
    layout: Layout


class Regrouped(NamedTuple):
    """A reshape: what must move first (None: nothing), the result's spec, and the shape of its block on this rank."""

    recut: Recut | None
    spec: ShardTensorSpec
    block: tuple[int, ...]


def groups(old: Sequence[int], new: Sequence[int]) -> list[Group]:
    """The smallest groups of neighbouring dims with equal products; no length may be 0.

    (4, 6, 5) -> (4, 2, 3, 5) has the groups 4 | 6 -> 2, 3 | 5.
    """
    found: list[Group] = []
    i = j = 0
    while i < len(old) and j < len(new):
        i0, j0, a, b = i, j, old[i], new[j]
        i, j = i + 1, j + 1
        while a != b:
            if a < b:
                a, i = a * old[i], i + 1
            else:
                b, j = b * new[j], j + 1
        found.append(Group((i0, i), (j0, j)))
    if not found:  # one side has no dims, the other only dims of length 1
        return [Group((0, len(old)), (0, len(new)))]
    # What is left on one side has length 1.
    last = found[-1]
    found[-1] = Group((last.old[0], len(old)), (last.new[0], len(new)))
    return found


def snapped(sizes: Sequence[int], step: int) -> tuple[int, ...]:
    """The nearest sizes whose edges are multiples of ``step``; the total must be one.

    (13, 15) by 4 is (12, 16).
    """
    edges = [0, *(round(edge / step) * step for edge in accumulate(sizes))]
    return tuple(stop - start for start, stop in pairwise(edges))


def _target(outer: int, lengths: Sequence[int]) -> tuple[int, int] | None:
    """The new dim that starts inside repeat ``outer`` of a flattened group, and how many repeats it has left."""
    before = 1
    for dim, length in enumerate(lengths):
        if before <= outer < before * length or dim == len(lengths) - 1:
            inside, rest = divmod(outer, before)
            return (dim, inside) if rest == 0 and inside and length % inside == 0 else None
        before *= length
    return None


def _flat(cut: Cut, lengths: Sequence[int], dim: int) -> Cut:
    """A cut of dim ``dim`` of the group as a cut of the flattened group."""
    inner = prod(lengths[dim + 1 :])
    return Cut(0, tuple(size * inner for size in cut.sizes), prod(lengths[:dim]) * cut.outer)


def _fitted(flat: Cut, lengths: Sequence[int], ranks: int) -> tuple[AxisLayout, Cut | Replicate]:
    """Where a cut of a flattened group goes: the cut of a new dim, and the flat cut that it needs (often the same)."""
    place = _target(flat.outer, lengths)
    if place is None:  # rows of one repeat straddle rows of the new dims: start over with a cut of the first long dim
        dim = next((dim for dim, length in enumerate(lengths) if length > 1), None)
        if dim is None:
            return REPLICATE, REPLICATE
        sizes, inner = even_sizes(lengths[dim], ranks), prod(lengths[dim + 1 :])
        return Cut(dim, sizes), Cut(0, tuple(size * inner for size in sizes))
    dim, outer = place
    inner = prod(lengths[dim + 1 :])
    sizes = snapped(flat.sizes, inner)
    return Cut(dim, tuple(size // inner for size in sizes), outer), Cut(0, sizes, flat.outer)


def _empty(spec: ShardTensorSpec, shape: torch.Size) -> Layout:
    """Layout of a reshaped tensor without elements: cuts of dims that stay in place from the front or from the back."""
    old = spec.shape
    layout: list[AxisLayout] = []
    for entry in spec.layout:
        if isinstance(entry, Cut):
            back = entry.dim - len(old)
            if shape[: entry.dim + 1] == old[: entry.dim + 1]:
                layout.append(entry)
                continue
            layout.append(entry.moved(back + len(shape)) if shape[back:] == old[back:] else REPLICATE)
            continue
        layout.append(entry)
    return tuple(layout)


def _nest(one: Cut, other: Cut) -> bool:
    """Whether two cuts of one dim fit together: each block of the outer one holds whole periods of the inner one."""
    outer, inner = sorted((one, other), key=lambda cut: cut.outer)
    period = max(sum(inner.sizes), 1)
    return outer.outer < inner.outer and all(size % period == 0 for size in outer.sizes)


def _mapped(spec: ShardTensorSpec, shape: torch.Size) -> tuple[Layout, Recut | None]:
    """The layout of the reshaped tensor, and the change of layout that must come first."""
    found = groups(spec.shape, shape)
    layout, have, need = list(spec.layout), list(spec.layout), list(spec.layout)
    placed: list[Cut] = []
    for axis, cut in sorted(spec.cuts, key=lambda item: (item[1].dim, item[1].outer)):
        at = next(place for place, group in enumerate(found) if group.old[0] <= cut.dim < group.old[1])
        group = found[at]
        flat = _flat(cut, spec.shape[slice(*group.old)], cut.dim - group.old[0])
        entry, needed = _fitted(flat, shape[slice(*group.new)], mesh_sizes(spec.mesh)[axis])
        if isinstance(entry, Cut):
            entry = entry.moved(entry.dim + group.new[0])
            if any(entry.dim == other.dim and not _nest(entry, other) for other in placed):
                entry, needed = REPLICATE, REPLICATE
            else:
                placed.append(entry)
        layout[axis], have[axis] = entry, flat.moved(at)
        need[axis] = needed.moved(at) if isinstance(needed, Cut) else needed
    if have == need:
        return tuple(layout), None
    lengths = [prod(spec.shape[slice(*group.old)]) for group in found]
    return tuple(layout), Recut(ShardTensorSpec.of(spec.mesh, tuple(have), lengths, spec.dtype), tuple(need))


def _stride(spec: ShardTensorSpec, shape: torch.Size) -> tuple[int, ...]:
    """Stride of the view that torch would give, row-major where it would have to copy."""
    meta = torch.empty_strided(spec.shape, spec.tensor_meta.stride, device="meta")
    try:
        return tuple(meta.view(shape).stride())
    except RuntimeError:
        return contiguous_stride(shape)


@lru_cache(maxsize=8192)
def regroup(spec: ShardTensorSpec, size: tuple[int, ...]) -> Regrouped:
    """How a tensor of ``spec`` is reshaped to ``size``; one entry may be -1.

    Raises:
        LayoutError: ``size`` holds another number of elements.
    """
    shape, numel = list(size), spec.shape.numel()
    known = prod(length for length in shape if length != -1)
    if shape.count(-1) == 1 and known and numel % known == 0:
        shape[shape.index(-1)] = numel // known
    if min(shape, default=0) < 0 or prod(shape) != numel:
        raise LayoutError(f"view: {tuple(size)} does not hold the {numel} elements of a tensor {tuple(spec.shape)}")
    new = torch.Size(shape)
    layout, recut = _mapped(spec, new) if numel else (_empty(spec, new), None)
    if not numel and layout != spec.layout:
        gone = tuple(e if isinstance(n, Cut) else n for e, n in zip(spec.layout, layout, strict=True))
        recut = Recut(spec, gone) if gone != spec.layout else None
    result = ShardTensorSpec.of(spec.mesh, layout, new, spec.dtype, _stride(spec, new))
    return Regrouped(recut, result, tuple(result.local_shape))

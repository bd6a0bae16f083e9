"""``x[key] = value``: written into the block that owns the rows, also where ``key`` names one row of a cut dim."""

from __future__ import annotations

from typing import Any

import torch

from shardtensor.promotion import promoted
from shardtensor.registry import function_rule
from shardtensor.rules.pointwise import own_up
from shardtensor.tensor import ShardTensor

__all__ = ["setitem"]

_off = torch._C.DisableTorchFunctionSubclass


@function_rule(torch.Tensor.__setitem__)
def setitem(self: torch.Tensor, key: Any, value: Any) -> None:
    """As ``Tensor.__setitem__``.

    A row ``x[3]`` of a cut dim goes to all ranks when it is read, so the copy could not be written through; the slice
    ``x[3:4]`` stays in place. Slices are taken of uncut dims too: the gradient may be cut where the tensor is not.
    """
    if isinstance(self, ShardTensor) and not self._spec.is_plain:
        own_up(self)
    if isinstance(self, ShardTensor):
        items = key if isinstance(key, tuple) else (key,)
        rows = _rows(items, self._spec.ndim)
        if rows and all(_is_basic(item) for item in items):
            key, value = _as_slices(items, list(rows), value, self._spec.ndim)
        elif any(self._spec.axis_of(dim) is not None for dim in rows.values()):
            for place, dim in reversed(rows.items()):
                self = self.narrow(dim, int(items[place]) % self.shape[dim], 1).squeeze(dim)
            key = tuple(item for place, item in enumerate(items) if place not in rows)
    (self, key, value), _ = promoted(torch.Tensor.__setitem__, (self, key, value), None)
    with _off():
        torch.Tensor.__setitem__(self, key, value)


def _is_row(item: Any) -> bool:
    """Whether an item of a key names one row."""
    if isinstance(item, torch.Tensor):
        return item.dim() == 0 and not item.dtype.is_floating_point and item.dtype != torch.bool
    return isinstance(item, int) and not isinstance(item, bool)


def _is_basic(item: Any) -> bool:
    return item is None or item is Ellipsis or isinstance(item, slice) or _is_row(item)


def _width(item: Any) -> int:
    """How many dims of the tensor an item of a key uses up."""
    if item is None or item is Ellipsis or isinstance(item, bool):
        return 0
    if isinstance(item, torch.Tensor) and item.dtype in (torch.bool, torch.uint8):
        return item.dim()
    return 1


def _rows(items: tuple[Any, ...], ndim: int) -> dict[int, int]:
    """The dims that are named by one row, by place in the key."""
    found, dim = {}, 0
    for place, item in enumerate(items):
        if item is Ellipsis:
            dim = ndim - sum(_width(later) for later in items[place + 1 :])
        if _is_row(item):
            found[place] = dim
        dim += _width(item)
    return found


def _as_slices(items: tuple[Any, ...], places: list[int], value: Any, ndim: int) -> tuple[tuple[Any, ...], Any]:
    """The key with rows as slices of length 1, and the value with dims of length 1 for them."""
    used = sum(_width(item) for item in items)
    key = list(items)
    ones: list[int] = []
    dim = 0  # of the target that the key names
    for place, item in enumerate(items):
        if place in places:
            row = int(item)
            key[place] = slice(row, row + 1 if row != -1 else None)
            ones.append(dim)
            dim += 1
        elif item is Ellipsis:
            dim += ndim - used
        elif item is None or isinstance(item, slice):
            dim += 1
    dims = dim + (0 if Ellipsis in items else ndim - used)
    if isinstance(value, torch.Tensor) and value.dim():
        value = value[(None,) * (dims - len(ones) - value.dim())]
        for one in ones:
            value = value.unsqueeze(one)
    return tuple(key), value

"""Sorting and its kin along one dim: sort, topk, kthvalue, mode. A cut dim is made whole first; other cuts stay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shardtensor.registry import rule
from shardtensor.rules.dims import moved_dims
from shardtensor.rules.layouts import uncut
from shardtensor.rules.memory import remember
from shardtensor.spec import ShardTensorSpec
from shardtensor.tensor import ShardTensor, wrap

__all__ = ["sort"]

aten = torch.ops.aten

Pair = tuple[ShardTensor, ShardTensor]


def _along(run: Callable[[torch.Tensor], Any], tensor: ShardTensor, dim: int, keepdim: bool = True) -> Pair:
    """Values and places that ``run`` finds along ``dim`` of the block."""
    remember(tensor)
    dim = dim % max(tensor._spec.ndim, 1)
    tensor = uncut(tensor, [dim])
    spec = tensor._spec
    values, places = run(tensor._local_tensor)
    shape, layout = list(spec.shape), spec.layout
    if spec.ndim and keepdim:
        shape[dim] = values.shape[dim]
    elif spec.ndim:
        del shape[dim]
        layout = moved_dims(layout, lambda old: old - (old > dim))
    return (
        wrap(values, ShardTensorSpec.of(spec.mesh, layout, shape, values.dtype)),
        wrap(places, ShardTensorSpec.of(spec.mesh, layout, shape, places.dtype)),
    )


@rule(aten.sort.default)
def sort(self: ShardTensor, dim: int = -1, descending: bool = False) -> Pair:
    """Sorted rows along ``dim`` and where they were."""
    return _along(lambda local: aten.sort.default(local, dim, descending), self, dim)


@rule(aten.sort.stable)
def sort_stable(self: ShardTensor, *, stable: bool | None, dim: int = -1, descending: bool = False) -> Pair:
    """Sorted rows along ``dim``, equal ones in their order, and where they were."""
    return _along(lambda local: aten.sort.stable(local, stable=stable, dim=dim, descending=descending), self, dim)


@rule(aten.topk.default)
def topk(self: ShardTensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Pair:
    """The ``k`` largest or smallest along ``dim`` and where they were."""
    return _along(lambda local: aten.topk.default(local, k, dim, largest, sorted), self, dim)


@rule(aten.kthvalue.default)
def kthvalue(self: ShardTensor, k: int, dim: int = -1, keepdim: bool = False) -> Pair:
    """The ``k``-th smallest along ``dim`` and where it was."""
    return _along(lambda local: aten.kthvalue.default(local, k, dim, keepdim), self, dim, keepdim)


@rule(aten.mode.default)
def mode(self: ShardTensor, dim: int = -1, keepdim: bool = False) -> Pair:
    """The most frequent value along ``dim`` and where it was."""
    return _along(lambda local: aten.mode.default(local, dim, keepdim), self, dim, keepdim)

"""Medians: one needs every value of its row in one place, so the rows become whole; other cuts stay."""

from __future__ import annotations

from typing import Any

import torch

from shardtensor.registry import rule
from shardtensor.rules.layouts import uncut
from shardtensor.rules.reduction import reduced
from shardtensor.tensor import ShardTensor, wrap

__all__ = ["median"]

aten = torch.ops.aten


@rule(aten.median.default)
def median(self: ShardTensor) -> ShardTensor:
    return _of_all(torch.median, self)


@rule(aten.nanmedian.default)
def nanmedian(self: ShardTensor) -> ShardTensor:
    return _of_all(torch.nanmedian, self)


def _of_all(function: Any, tensor: ShardTensor) -> ShardTensor:
    block = uncut(tensor, range(tensor._spec.ndim))
    return wrap(function(block._local_tensor), reduced(block._spec, None).spec)


@rule(aten.median.dim)
def median_dim(self: ShardTensor, dim: int, keepdim: bool = False) -> tuple[ShardTensor, ShardTensor]:
    return _along(torch.median, self, dim, keepdim)


@rule(aten.nanmedian.dim)
def nanmedian_dim(self: ShardTensor, dim: int, keepdim: bool = False) -> tuple[ShardTensor, ShardTensor]:
    return _along(torch.nanmedian, self, dim, keepdim)


def _along(function: Any, tensor: ShardTensor, dim: int, keepdim: bool) -> tuple[ShardTensor, ShardTensor]:
    """Values and their places, which count in the whole tensor because its rows are whole."""
    plan = reduced(tensor._spec, dim, keepdim)
    block = uncut(tensor, plan.dims)
    plan = reduced(block._spec, dim, keepdim)
    values, places = function(block._local_tensor, dim, keepdim)
    return wrap(values, plan.spec), wrap(places, plan.spec)

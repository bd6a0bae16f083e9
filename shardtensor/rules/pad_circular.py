"""Circular padding: caught as ``F.pad``, before it decomposes into slices and copies; rows come from the other end."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F

from shardtensor.errors import OpError
from shardtensor.registry import function_rule
from shardtensor.rules.layouts import local_in, resolved
from shardtensor.rules.pad import by_dim
from shardtensor.rules.pad_rows import added_rows, fold_rows, pad_rows
from shardtensor.rules.slices import one_cut
from shardtensor.spec import Cut, ShardTensorSpec
from shardtensor.tensor import ShardTensor, wrap

__all__ = ["pad"]

_off = torch._C.DisableTorchFunctionSubclass


@function_rule(F.pad)
def pad(input: torch.Tensor, pad: Sequence[int], mode: str = "constant", value: float | None = None) -> torch.Tensor:
    """``F.pad``: circular padding here, the other modes by their own ops.

    Raises:
        OpError: circular padding would wrap around more than once.
    """
    if mode != "circular":
        with _off():
            return torch._C._nn.pad(input, pad, mode, value)
    for dim, (before, after) in by_dim(pad, input.dim()).items():
        if before < 0 or after < 0:
            input = input.narrow(dim, max(0, -before), input.shape[dim] + min(0, before) + min(0, after))
        before, after = max(0, before), max(0, after)
        if max(before, after) > input.shape[dim]:
            raise OpError(
                f"circular padding ({before}, {after}) of dim {dim} with {input.shape[dim]} rows would wrap around "
                f"more than once: pad at most {input.shape[dim]} rows a side"
            )
        if before or after:
            input = _Circular.apply(input, dim, before, after)
    return input


class _Circular(torch.autograd.Function):
    """Circular padding of one dim."""

    @staticmethod
    def forward(ctx: Any, x: ShardTensor, dim: int, before: int, after: int) -> ShardTensor:
        x = one_cut(resolved(x), dim)
        ctx.spec, ctx.sides = x._spec, (dim, before, after)
        return _circular(x._local_tensor, x._spec, dim, before, after)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return _CircularAdjoint.apply(grad, ctx.spec, *ctx.sides), None, None, None


class _CircularAdjoint(torch.autograd.Function):
    """Gradients of the padding, added to the rows that it repeats."""

    @staticmethod
    def forward(ctx: Any, grad: ShardTensor, spec: ShardTensorSpec, dim: int, before: int, after: int) -> ShardTensor:
        ctx.sides = dim, before, after
        local = local_in(grad, _circular_spec(spec, dim, before, after).layout, spec.mesh)
        axis = spec.axis_of(dim)
        if axis is not None:
            return wrap(fold_rows(local, spec, axis, (before, after), "circular"), spec)
        length = spec.shape[dim]
        total = local.narrow(dim, before, length).clone()
        total.narrow(dim, length - before, before).add_(local.narrow(dim, 0, before))
        total.narrow(dim, 0, after).add_(local.narrow(dim, before + length, after))
        return wrap(total, ShardTensorSpec.of(spec.mesh, spec.layout, spec.shape, spec.dtype))

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return _Circular.apply(grad, *ctx.sides), None, None, None, None


@lru_cache(maxsize=2048)
def _circular_spec(spec: ShardTensorSpec, dim: int, before: int, after: int) -> ShardTensorSpec:
    shape = [*spec.shape]
    shape[dim] += before + after
    layout = tuple(
        Cut(dim, added_rows(entry.sizes, before, after)) if isinstance(entry, Cut) and entry.dim == dim else entry
        for entry in spec.layout
    )
    return ShardTensorSpec.of(spec.mesh, layout, shape, spec.dtype)


def _circular(local: torch.Tensor, spec: ShardTensorSpec, dim: int, before: int, after: int) -> ShardTensor:
    result = _circular_spec(spec, dim, before, after)
    axis = spec.axis_of(dim)
    if axis is not None:
        return wrap(pad_rows(local, spec, axis, (before, after), "circular"), result)
    length = spec.shape[dim]
    parts = [local.narrow(dim, length - before, before), local, local.narrow(dim, 0, after)]
    return wrap(torch.cat(parts, dim), result)

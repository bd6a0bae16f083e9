"""Copies side by side and look-ups in small tables: repeat, one_hot, bucketize, searchsorted, isin."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch

from shardtensor.errors import OpError
from shardtensor.registry import function_rule, rule
from shardtensor.rules.layouts import mesh_of, replicated_result, resolved, whole
from shardtensor.spec import Cut, ShardTensorSpec
from shardtensor.tensor import ShardTensor, wrap

__all__ = ["one_hot", "repeat"]

aten = torch.ops.aten


@lru_cache(maxsize=1024)
def _repeated(spec: ShardTensorSpec, repeats: tuple[int, ...]) -> ShardTensorSpec:
    """Repeats of a cut dim are an outer factor of its cut: [times, rows]."""
    ahead = len(repeats) - spec.ndim
    shape = [times * length for times, length in zip(repeats, (1,) * ahead + tuple(spec.shape), strict=True)]
    layout = tuple(
        Cut(entry.dim + ahead, entry.sizes, entry.outer * repeats[entry.dim + ahead])
        if isinstance(entry, Cut)
        else entry
        for entry in spec.layout
    )
    return ShardTensorSpec.of(spec.mesh, layout, shape, spec.dtype)


@rule(aten.repeat.default)
def repeat(self: ShardTensor, repeats: Sequence[int]) -> ShardTensor:
    """``x.repeat(...)`` and ``x.tile(...)``: each rank repeats its own rows."""
    if 0 in repeats:
        return replicated_result(whole(self, self._spec.mesh).repeat(tuple(repeats)), self._spec.mesh)
    return wrap(self._local_tensor.repeat(tuple(repeats)), _repeated(self._spec, tuple(repeats)))


@function_rule(torch.nn.functional.one_hot)
def one_hot(input: torch.Tensor, num_classes: int = -1) -> torch.Tensor:
    """``F.one_hot``: one more dim, 1 at the class; without ``num_classes`` the largest class of all ranks counts.

    Raises:
        OpError: a class is negative or not below ``num_classes``.
    """
    least, most = (int(input.min()), int(input.max())) if input.numel() else (0, -1)
    if num_classes == -1:
        num_classes = most + 1
    if least < 0 or most >= num_classes:
        raise OpError(f"one_hot: classes go from {least} to {most}, but must be >= 0 and < num_classes ({num_classes})")
    classes = torch.arange(num_classes, device=input.device)
    return (input.unsqueeze(-1) == classes).long()


def _looked_up(op: torch._ops.OpOverload, tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
    """An op that looks every element up in tables, which are made whole."""
    if not isinstance(tensor, ShardTensor):
        mesh = mesh_of(tensor, *args)
        tables = [whole(arg, mesh) if isinstance(arg, torch.Tensor) else arg for arg in args]
        return replicated_result(op(tensor, *tables, **options), mesh)
    tensor = resolved(tensor)
    spec = tensor._spec
    tables = [whole(arg, spec.mesh) if isinstance(arg, torch.Tensor) else arg for arg in args]
    local = op(tensor._local_tensor, *tables, **options)
    stride = spec.tensor_meta.stride if spec.is_dense else None
    return wrap(local, ShardTensorSpec.of(spec.mesh, spec.layout, spec.shape, local.dtype, stride))


@rule(aten.bucketize.Tensor)
def bucketize(self: torch.Tensor, boundaries: torch.Tensor, **options: Any) -> ShardTensor:
    """The bucket of every element."""
    return _looked_up(aten.bucketize.Tensor, self, boundaries, **options)  # type: ignore[no-any-return]


@rule(aten.isin.Tensor_Tensor)
def isin(elements: torch.Tensor, test_elements: torch.Tensor, **options: Any) -> ShardTensor:
    """Whether every element is among ``test_elements``."""
    return _looked_up(aten.isin.Tensor_Tensor, elements, test_elements, **options)  # type: ignore[no-any-return]

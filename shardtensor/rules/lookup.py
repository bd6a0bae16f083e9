"""Look-ups of every element in a small table, which is made whole: one_hot, bucketize, searchsorted, isin."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shardtensor.errors import OpError
from shardtensor.fallback import run_replicated
from shardtensor.registry import function_rule, rule
from shardtensor.rules.layouts import mesh_of, replicated_result, resolved, whole
from shardtensor.spec import ShardTensorSpec
from shardtensor.tensor import ShardTensor, wrap

__all__ = ["one_hot"]

aten = torch.ops.aten


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


def _looked_up(op: Callable[..., torch.Tensor], tensor: torch.Tensor, *args: Any, **options: Any) -> ShardTensor:
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
    return _looked_up(aten.bucketize.Tensor, self, boundaries, **options)


@rule(aten.searchsorted.Tensor)
def searchsorted(sorted_sequence: torch.Tensor, self: torch.Tensor, **options: Any) -> Any:
    """Where every element would be inserted into a sorted list; several lists at once are made whole with all else."""
    if sorted_sequence.dim() != 1 or options.get("sorter") is not None:
        return run_replicated(aten.searchsorted.Tensor, sorted_sequence, self, **options)

    def op(values: torch.Tensor, table: torch.Tensor, **others: Any) -> torch.Tensor:
        found: torch.Tensor = aten.searchsorted.Tensor(table, values, **others)
        return found

    return _looked_up(op, self, sorted_sequence, **options)


@rule(aten.isin.Tensor_Tensor)
def isin(elements: torch.Tensor, test_elements: torch.Tensor, **options: Any) -> ShardTensor:
    """Whether every element is among ``test_elements``."""
    return _looked_up(aten.isin.Tensor_Tensor, elements, test_elements, **options)

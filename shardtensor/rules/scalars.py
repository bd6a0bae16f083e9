"""Ops that turn a tensor into a Python value, or need nothing but the global shape."""

from __future__ import annotations

from typing import Any

import torch

from shardtensor.registry import rule
from shardtensor.rules.layouts import replicated_result, whole
from shardtensor.tensor import ShardTensor

aten = torch.ops.aten


@rule(aten._local_scalar_dense.default)
def local_scalar_dense(self: ShardTensor) -> Any:
    """``.item()``, ``float()``, ``bool()``: the value of the whole tensor, on every rank."""
    return aten._local_scalar_dense.default(whole(self, self._spec.mesh))


@rule(aten.equal.default)
def equal(self: torch.Tensor, other: torch.Tensor) -> bool:
    """``torch.equal``: one answer for all ranks."""
    sharded = self if isinstance(self, ShardTensor) else other
    assert isinstance(sharded, ShardTensor)
    mesh = sharded._spec.mesh
    return bool(aten.equal.default(whole(self, mesh), whole(other, mesh)))


@rule(aten.scalar_tensor.default)
def scalar_tensor(*args: Any, **kwargs: Any) -> torch.Tensor:
    """A fresh 0-dim tensor."""
    result: torch.Tensor = aten.scalar_tensor.default(*args, **kwargs)
    return result


__all__ = ["equal", "local_scalar_dense", "replicated_result"]

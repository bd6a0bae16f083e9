"""Where a tensor becomes Python values or memory that others read: the whole tensor, or a clear error."""

from __future__ import annotations

from typing import Any

import torch

from shardtensor.errors import OpError
from shardtensor.registry import function_rule, rule
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


@function_rule(torch.Tensor.tolist)
def tolist(self: ShardTensor) -> Any:
    """The values of the whole tensor, gathered on every rank."""
    return self.full_tensor().tolist()


@function_rule(torch.Tensor.numpy)
def numpy(self: ShardTensor, *, force: bool = False) -> Any:
    """The whole tensor, gathered on every rank, as an array."""
    return self.full_tensor().numpy(force=force)


@function_rule(torch.Tensor.__array__)
def array(self: ShardTensor, dtype: Any = None) -> Any:
    """What ``numpy.asarray`` asks for: the whole tensor, gathered on every rank."""
    return self.full_tensor().__array__(dtype)


@function_rule(torch.Tensor.__dlpack__)
def dlpack(self: ShardTensor, *args: Any, **kwargs: Any) -> Any:
    """Memory that somebody else would read as if it held the whole tensor."""
    raise OpError(
        f"a ShardTensor {tuple(self.shape)} has no memory of its own to hand out: use to_local() for this rank's "
        f"block, or full_tensor() for the whole"
    )


@function_rule(torch.Tensor.data.__set__)  # type: ignore[attr-defined]
def set_data(self: torch.Tensor, value: torch.Tensor) -> None:
    """``x.data = y``: both sharded, and of one shape and dtype."""
    both = isinstance(self, ShardTensor) and isinstance(value, ShardTensor)
    if not both or self.shape != value.shape or self.dtype != value.dtype:
        raise OpError(
            f"cannot set .data of a {type(self).__name__} {tuple(self.shape)} {self.dtype} to a "
            f"{type(value).__name__} {tuple(value.shape)} {value.dtype}: give a ShardTensor of the same shape and dtype"
        )
    assert isinstance(self, ShardTensor)
    assert isinstance(value, ShardTensor)
    self._local_tensor, self._spec = value._local_tensor.detach(), value._spec


__all__ = ["array", "dlpack", "equal", "local_scalar_dense", "numpy", "replicated_result", "set_data", "tolist"]

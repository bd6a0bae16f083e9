"""In-place ops by way of their out-of-place form: the result is written where the tensor lies."""

from __future__ import annotations

import torch

from shardtensor.rules.aliasing import refuse_lost_write
from shardtensor.rules.layouts import local_in, whole
from shardtensor.rules.pointwise import own_up
from shardtensor.tensor import ShardTensor

__all__ = ["write_back"]


def write_back(target: torch.Tensor, result: ShardTensor) -> torch.Tensor:
    """Overwrite ``target`` (sharded or plain) with ``result``, in the target's layout."""
    mesh = result._spec.mesh
    if not isinstance(target, ShardTensor):
        return target.copy_(whole(result, mesh))
    refuse_lost_write(target)
    own_up(target)
    target._local_tensor.copy_(local_in(result, target._spec.layout, mesh))
    return target

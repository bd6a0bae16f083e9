"""What layout tensors of a shape had: backward formulas are given shapes only, and must not make gradients whole.

A hint and nothing more: whatever it says, results are right; a wrong hint costs an exchange. Only tensors that wait for
a gradient are noted, so that all ranks, which run one backward together, hold the same notes.
"""

from __future__ import annotations

import torch

from shardtensor.spec import DeviceMesh, Layout, ShardTensorSpec
from shardtensor.tensor import ShardTensor

__all__ = ["in_backward", "recall", "remember"]

_MOST = 1024
_specs: dict[torch.Size, ShardTensorSpec] = {}


def remember(tensor: ShardTensor) -> None:
    """Note the layout of a tensor from which an op takes a part, if its gradient will be asked for."""
    if tensor.requires_grad and torch.is_grad_enabled():
        spec = tensor._spec
        if spec.cuts and not spec.partial_axes:
            _specs.pop(spec.tensor_meta.shape, None)
            _specs[spec.tensor_meta.shape] = spec
            if len(_specs) > _MOST:
                del _specs[next(iter(_specs))]


def recall(mesh: DeviceMesh, shape: torch.Size) -> Layout | None:
    """The layout that a tensor of this shape had when a part was last taken from one."""
    spec = _specs.get(shape)
    return spec.layout if spec is not None and (spec.mesh is mesh or spec.mesh == mesh) else None


def in_backward() -> bool:
    """Whether autograd is running a backward pass in this thread."""
    return torch._C._current_graph_task_id() != -1

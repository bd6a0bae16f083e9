"""What a weight becomes beside sharded tensors: a replicated tensor; and how gradients travel back together.

Inside the forward of a module given to `sync_module_over_mesh`, its parameters are promoted together, once: their
gradients then come back together, and one all-reduce carries them all.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import torch

from shardtensor import comm
from shardtensor import tensor as sharded  # used at call time only: the two modules need each other
from shardtensor.redistribute import redistribute_local
from shardtensor.spec import PENDING_SUM, DeviceMesh, Layout, ShardTensorSpec, mesh_sizes, replicate, whole_spec

__all__ = ["PLAIN", "Promote", "buckets_are_open", "close_bucket", "find_in_buckets", "open_bucket"]

PLAIN = (torch.Tensor, torch.nn.Parameter)
"""The classes of tensors that are promoted: exactly these, no subclass with a dispatch of its own."""


class Promote(torch.autograd.Function):
    """Plain tensors -> replicated tensors; their gradients are summed over the mesh together."""

    @staticmethod
    def forward(ctx: Any, mesh: DeviceMesh, *tensors: torch.Tensor) -> Any:
        ctx.mesh = mesh
        ctx.set_materialize_grads(False)
        return tuple(
            sharded.wrap(tensor.detach(), whole_spec(mesh, tensor.shape, tensor.dtype, tensor.stride()))
            for tensor in tensors
        )

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        whole = replicate(ctx.mesh.ndim)
        if torch.is_grad_enabled():  # a second derivative will be taken: keep every step differentiable
            return None, *(g._with_layout(whole).to_local() if isinstance(g, sharded.ShardTensor) else g for g in grads)
        return None, *_reduced(grads, ctx.mesh)


def _reduced(grads: Iterable[Any], mesh: DeviceMesh) -> list[torch.Tensor | None]:
    """The gradients as whole plain tensors; pending sums travel together, one all-reduce per kind and mesh axis."""
    found: list[Any] = []
    pending: dict[tuple[torch.dtype, torch.device, tuple[int, ...]], list[int]] = {}
    for place, grad in enumerate(grads):
        if not isinstance(grad, sharded.ShardTensor):
            found.append(grad)
            continue
        local, spec = grad._local_tensor, grad._spec
        sums, rest = _left_pending(spec)
        found.append(local if rest == spec.layout else redistribute_local(local, spec, rest))
        if sums:
            pending.setdefault((local.dtype, local.device, sums), []).append(place)
    for (_, _, axes), places in pending.items():
        blocks = [found[place] for place in places]
        flat = blocks[0] if len(blocks) == 1 else torch.cat([block.flatten() for block in blocks])
        for axis in axes:
            flat = comm.all_reduce(flat, "sum", comm.group_of(mesh, axis))
        parts = [flat] if len(blocks) == 1 else flat.split([block.numel() for block in blocks])
        for place, block, values in zip(places, blocks, parts, strict=True):
            found[place] = values.view(block.shape)
    return found


@lru_cache(maxsize=1024)
def _left_pending(spec: ShardTensorSpec) -> tuple[tuple[int, ...], Layout]:
    """The mesh axes whose sums wait for the bucket's all-reduce, and the layout in which they wait."""
    ranks, whole = mesh_sizes(spec.mesh), replicate(spec.mesh.ndim)
    pending = [axis for axis in spec.partial_axes if spec.layout[axis] == PENDING_SUM]
    rest = tuple(entry if axis in pending else whole[axis] for axis, entry in enumerate(spec.layout))
    return tuple(axis for axis in pending if ranks[axis] > 1), rest


class _Bucket:
    """The parameters of one module call, promoted together when the first of them is needed."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module
        self.members: dict[int, torch.Tensor] | None = None
        self.mesh: DeviceMesh | None = None
        self.promoted: dict[int, Any] = {}

    def find(self, tensor: torch.Tensor, mesh: DeviceMesh) -> Any:
        if self.members is None:
            weights = (p for p in self.module.parameters() if type(p) in PLAIN and p.requires_grad)
            self.members = {id(weight): weight for weight in weights}
        if id(tensor) not in self.members:
            return None
        if self.mesh is None:
            self.mesh = mesh
            together = Promote.apply(mesh, *self.members.values())
            self.promoted = dict(zip(self.members, together, strict=True))
        return self.promoted[id(tensor)] if mesh is self.mesh or mesh == self.mesh else None


class _Open(threading.local):
    def __init__(self) -> None:
        self.buckets: list[_Bucket] = []


_open = _Open()


def buckets_are_open() -> bool:
    """Whether the forward of a module runs whose weights are promoted together."""
    return bool(_open.buckets)


def find_in_buckets(tensor: torch.Tensor, mesh: DeviceMesh) -> Any:
    """What stands for the weight in the forward that runs; None for other tensors."""
    for bucket in reversed(_open.buckets):
        found = bucket.find(tensor, mesh)
        if found is not None:
            return found
    return None


def open_bucket(module: torch.nn.Module, args: Any) -> None:
    """Forward pre-hook: the module's parameters that this call promotes are promoted together."""
    _open.buckets.append(_Bucket(module))


def close_bucket(module: torch.nn.Module, args: Any, output: Any) -> None:
    """Forward hook, also called when the call failed: forget what was promoted for this call."""
    if _open.buckets and _open.buckets[-1].module is module:
        _open.buckets.pop()

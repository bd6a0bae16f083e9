"""Plain tensors that meet sharded ones: a weight becomes a replicated tensor whose gradient is summed over the ranks.

A parameter and its ``.grad`` stay plain tensors, so DDP and optimizers see nothing new. Inside the forward of a module
given to `sync_module_over_mesh`, its parameters are promoted together, once: their gradients then come back
together, and one all-reduce carries them all.
"""

from __future__ import annotations

import enum
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from shardtensor import comm
from shardtensor import tensor as sharded  # used at call time only: the two modules need each other
from shardtensor.boundary import FromDTensor
from shardtensor.errors import LayoutError, OpError
from shardtensor.redistribute import redistribute_local
from shardtensor.spec import DeviceMesh, Partial, replicate, whole_spec

__all__ = [
    "SETTLED",
    "TensorPromotionMode",
    "close_bucket",
    "get_mode",
    "open_bucket",
    "promoted",
    "set_mode",
    "with_promoted_arguments",
]


class TensorPromotionMode(enum.Enum):
    """What happens to a plain tensor that meets a sharded one in an op.

    Attributes:
        DISABLED: refused with an error, except tensors without dims; handlers of the caller's own get it as it is.
        WARN: promoted to a replicated tensor, with a warning.
        SILENT: promoted to a replicated tensor.
    """

    DISABLED = "disabled"
    WARN = "warn"
    SILENT = "silent"


_mode = TensorPromotionMode.SILENT
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_SUM = Partial("sum")

SETTLED: set[type] = {int, float, bool, type(None), torch.dtype, torch.device}
"""Types of arguments that need no look: ShardTensor enters itself."""


def get_mode() -> TensorPromotionMode:
    """The promotion mode in force."""
    return _mode


def set_mode(mode: TensorPromotionMode) -> None:
    """Set the promotion mode of this process."""
    global _mode
    _mode = mode


def promoted(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None
) -> tuple[tuple[Any, ...], dict[str, Any] | None]:
    """The arguments of a torch function, with plain tensors that require grad (and DTensors) promoted.

    Other plain tensors stay: rules take them as replicated.
    """
    for arg in args:
        if type(arg) not in SETTLED and _concerns(arg):
            break
    else:
        if not kwargs or not any(_concerns(value) for value in kwargs.values()):
            return args, kwargs
    mesh = _mesh_of(args, kwargs)
    if mesh is None:
        return args, kwargs
    if _mode is not TensorPromotionMode.SILENT:
        _report(func, args, kwargs)
    _refuse_lost_write(func, args)
    args, kwargs = _with_promoted((args, kwargs), mesh)
    return args, kwargs


def _concerns(arg: Any) -> bool:
    kind = type(arg)
    if kind in _PLAIN:
        # Outside SILENT mode every plain tensor is looked at, not only weights.
        return _is_weight(arg) or _mode is not TensorPromotionMode.SILENT
    if kind is tuple or kind is list:
        return any(_concerns(item) for item in arg)
    return isinstance(arg, DTensor)


def _flat(*values: Any) -> Iterator[Any]:
    for value in values:
        if isinstance(value, tuple | list):
            yield from _flat(*value)
        elif isinstance(value, dict):
            yield from _flat(*value.values())
        else:
            yield value


def _mesh_of(*values: Any) -> DeviceMesh | None:
    for value in _flat(*values):
        if isinstance(value, sharded.ShardTensor):
            return value._spec.mesh
    return None


def _report(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
    for value in _flat(args, kwargs or {}):
        if type(value) not in _PLAIN or value.dim() == 0:
            continue
        name = getattr(func, "__name__", func)
        what = f"{name}: a plain tensor {tuple(value.shape)} {value.dtype} meets a ShardTensor"
        if _mode is TensorPromotionMode.DISABLED:
            raise OpError(f"{what}, and promotion is disabled. Make it a ShardTensor, or set_promotion_mode('silent')")
        warnings.warn(f"{what}; it is taken as replicated", stacklevel=4)


def _refuse_lost_write(func: Any, args: tuple[Any, ...]) -> None:
    """In-place ops on a plain tensor that requires grad: what is written would reach its values, not its gradient."""
    name = getattr(func, "__name__", "")
    in_place = name in ("__setitem__", "__set__") or (name.endswith("_") and not name.endswith("__"))
    in_place = in_place or (name.startswith("__i") and len(args) > 1)
    if in_place and type(args[0]) in _PLAIN and _is_weight(args[0]):
        raise OpError(
            f"{name}: a ShardTensor is written in place into a plain tensor {tuple(args[0].shape)} that requires grad. "
            f"Write it out of place (h = h + x), or make the tensor a ShardTensor first"
        )


def _is_weight(tensor: torch.Tensor) -> bool:
    return tensor.requires_grad and torch.is_grad_enabled()


def _with_promoted(value: Any, mesh: DeviceMesh, everything: bool = False) -> Any:
    """Nested arguments with their weights (or all plain tensors) promoted; those not in a bucket go together."""
    found: dict[int, Any] = {}
    alone: dict[int, torch.Tensor] = {}
    for item in _flat(value):
        if isinstance(item, DTensor):
            if item.device_mesh != mesh:
                raise LayoutError(f"a DTensor on {item.device_mesh} meets a ShardTensor on {mesh}: use one mesh")
            found[id(item)] = FromDTensor.apply(item, sharded.ShardTensor)
        elif type(item) in _PLAIN and (everything or _is_weight(item)):
            promoted_before = _find_in_buckets(item, mesh)
            if promoted_before is None:
                alone[id(item)] = item
            else:
                found[id(item)] = promoted_before
    if alone:
        found.update(zip(alone, _Promote.apply(mesh, *alone.values()), strict=True))
    return _replaced(value, found)


def _replaced(value: Any, found: dict[int, Any]) -> Any:
    if type(value) is tuple or type(value) is list:
        return type(value)([_replaced(item, found) for item in value])
    if type(value) is dict:
        return {name: _replaced(item, found) for name, item in value.items()}
    return found.get(id(value), value)


def with_promoted_arguments(handler: Callable[..., Any]) -> Callable[..., Any]:
    """A user's handler that gets every plain tensor as a replicated ShardTensor."""

    def call(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        mesh = _mesh_of(args, kwargs)
        if mesh is not None and _mode is not TensorPromotionMode.DISABLED:
            if _mode is TensorPromotionMode.WARN:
                _report(func, args, kwargs)
            args, kwargs = _with_promoted((args, kwargs), mesh, everything=True)
        return handler(func, types, args, kwargs)

    return call


class _Promote(torch.autograd.Function):
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
    found: list[torch.Tensor | None] = []
    pending: dict[tuple[torch.dtype, torch.device, tuple[int, ...]], list[int]] = {}
    whole = replicate(mesh.ndim)
    for place, grad in enumerate(grads):
        if not isinstance(grad, sharded.ShardTensor):
            found.append(grad)
            continue
        spec = grad._spec
        sums = tuple(axis for axis in spec.partial_axes if spec.layout[axis] == _SUM)
        rest = tuple(entry if axis in sums else whole[axis] for axis, entry in enumerate(spec.layout))
        found.append(redistribute_local(grad._local_tensor, spec, rest))
        if sums:
            pending.setdefault((spec.dtype, grad.device, sums), []).append(place)
    for (_, _, axes), places in pending.items():
        blocks = [block for block in (found[place] for place in places) if block is not None]
        flat = torch.cat([block.flatten() for block in blocks])
        for axis in axes:
            flat = comm.all_reduce(flat, "sum", comm.group_of(mesh, axis))
        for place, block, values in zip(places, blocks, flat.split([b.numel() for b in blocks]), strict=True):
            found[place] = values.view(block.shape)
    return found


class _Bucket:
    """The parameters of one module call, promoted together when the first of them is needed."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module
        self.members: dict[int, torch.Tensor] | None = None
        self.mesh: DeviceMesh | None = None
        self.promoted: dict[int, Any] = {}

    def find(self, tensor: torch.Tensor, mesh: DeviceMesh) -> Any:
        if self.members is None:
            weights = (p for p in self.module.parameters() if type(p) in _PLAIN and p.requires_grad)
            self.members = {id(weight): weight for weight in weights}
        if id(tensor) not in self.members:
            return None
        if self.mesh is None:
            self.mesh = mesh
            together = _Promote.apply(mesh, *self.members.values())
            self.promoted = dict(zip(self.members, together, strict=True))
        return self.promoted[id(tensor)] if mesh == self.mesh else None


class _Open(threading.local):
    def __init__(self) -> None:
        self.buckets: list[_Bucket] = []


_open = _Open()


def _find_in_buckets(tensor: torch.Tensor, mesh: DeviceMesh) -> Any:
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

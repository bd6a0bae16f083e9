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
from shardtensor.spec import DeviceMesh, Partial, ShardTensorSpec, replicate

__all__ = ["SETTLED", "PromotionScope", "TensorPromotionMode", "get_mode", "promoted", "set_mode", "with_promoted_arguments"]


class TensorPromotionMode(enum.Enum):
    """What happens to a plain tensor that meets a sharded one in an op.

    Attributes:
        DISABLED: refused with an error (plain scalars and tensors of one element without dims are let through).
        WARN: promoted to a replicated tensor, with a warning.
        SILENT: promoted to a replicated tensor.
    """

    DISABLED = "disabled"
    WARN = "warn"
    SILENT = "silent"


_mode = TensorPromotionMode.SILENT
_PLAIN = (torch.Tensor, torch.nn.Parameter)

SETTLED: set[type] = {int, float, bool, type(None), torch.dtype, torch.device}
"""Types of arguments that need no look: ShardTensor enters itself."""


def get_mode() -> TensorPromotionMode:
    """The promotion mode in force."""
    return _mode


def set_mode(mode: TensorPromotionMode) -> None:
    """Set the promotion mode of this process."""
    global _mode
    _mode = mode


class _Scopes(threading.local):
    def __init__(self) -> None:
        self.stack: list[_Bucket] = []


_scopes = _Scopes()


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
    return (
        tuple(_promote(arg, mesh) for arg in args),
        {name: _promote(value, mesh) for name, value in kwargs.items()} if kwargs else kwargs,
    )


def _concerns(arg: Any) -> bool:
    kind = type(arg)
    if kind in _PLAIN:
        # Outside SILENT mode every plain tensor is looked at, not only weights.
        return (arg.requires_grad and torch.is_grad_enabled()) or _mode is not TensorPromotionMode.SILENT
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
        what = f"{getattr(func, '__name__', func)}: a plain tensor {tuple(value.shape)} {value.dtype} meets a ShardTensor"
        if _mode is TensorPromotionMode.DISABLED:
            raise OpError(f"{what}, and promotion is disabled. Make it a ShardTensor, or set_promotion_mode('silent')")
        warnings.warn(f"{what}; it is taken as replicated", stacklevel=4)


def _promote(arg: Any, mesh: DeviceMesh, everything: bool = False) -> Any:
    kind = type(arg)
    if kind is tuple or kind is list:
        return kind(_promote(item, mesh, everything) for item in arg)
    if isinstance(arg, DTensor):
        if arg.device_mesh != mesh:
            raise LayoutError(f"a DTensor on {arg.device_mesh} meets a ShardTensor on {mesh}: put both on one mesh")
        return FromDTensor.apply(arg, sharded.ShardTensor)
    if kind not in _PLAIN or not (everything or (arg.requires_grad and torch.is_grad_enabled())):
        return arg
    for bucket in reversed(_scopes.stack):
        found = bucket.find(arg, mesh)
        if found is not None:
            return found
    return _Promote.apply(mesh, arg)[0]


def with_promoted_arguments(handler: Callable[..., Any]) -> Callable[..., Any]:
    """A user's handler that gets every plain tensor as a replicated ShardTensor."""

    def call(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        mesh = _mesh_of(args, kwargs)
        if mesh is not None and _mode is not TensorPromotionMode.DISABLED:
            args = tuple(_promote(arg, mesh, True) for arg in args)
            kwargs = {name: _promote(value, mesh, True) for name, value in kwargs.items()}
        return handler(func, types, args, kwargs)

    return call


class _Promote(torch.autograd.Function):
    """Plain tensors -> replicated tensors; their gradients are summed over the mesh in one all-reduce per dtype."""

    @staticmethod
    def forward(ctx: Any, mesh: DeviceMesh, *tensors: torch.Tensor) -> Any:
        ctx.mesh = mesh
        ctx.set_materialize_grads(False)
        layout = replicate(mesh.ndim)
        return tuple(
            sharded.wrap(tensor.detach(), ShardTensorSpec.of(mesh, layout, tensor.shape, tensor.dtype, tensor.stride()))
            for tensor in tensors
        )

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        whole = replicate(ctx.mesh.ndim)
        if torch.is_grad_enabled():  # a second derivative will be taken: keep every step differentiable
            return None, *(g._with_layout(whole).to_local() if isinstance(g, sharded.ShardTensor) else g for g in grads)
        return None, *_reduced(grads, ctx.mesh)


def _reduced(grads: Iterable[Any], mesh: DeviceMesh) -> list[torch.Tensor | None]:
    """The gradients as whole plain tensors; pending sums travel together, one all-reduce per dtype and mesh axes."""
    found: list[torch.Tensor | None] = []
    pending: dict[tuple[torch.dtype, tuple[int, ...]], list[int]] = {}
    whole = replicate(mesh.ndim)
    for place, grad in enumerate(grads):
        if not isinstance(grad, sharded.ShardTensor):
            found.append(grad)
            continue
        spec = grad._spec
        sums = tuple(axis for axis in spec.partial_axes if spec.layout[axis] == Partial("sum"))
        rest = tuple(entry if axis in sums else whole[axis] for axis, entry in enumerate(spec.layout))
        found.append(redistribute_local(grad._local_tensor, spec, rest))
        if sums:
            pending.setdefault((spec.dtype, sums), []).append(place)
    for (_, axes), places in pending.items():
        blocks = [found[place] for place in places]
        flat = torch.cat([block.flatten() for block in blocks if block is not None])
        for axis in axes:
            flat = comm.all_reduce(flat, "sum", comm.group_of(mesh, axis))
        for place, values in zip(places, flat.split([b.numel() for b in blocks if b is not None]), strict=True):
            block = found[place]
            found[place] = values if block is None else values.view(block.shape)
    return found


class _Bucket:
    """The parameters of one module call, promoted together when the first of them is needed."""

    def __init__(self, mesh: DeviceMesh, parameters: list[torch.Tensor]) -> None:
        self.mesh = mesh
        self.waiting = {id(parameter): parameter for parameter in parameters}
        self.done: dict[int, Any] = {}

    def find(self, parameter: torch.Tensor, mesh: DeviceMesh) -> Any:
        if mesh != self.mesh:
            return None
        if not self.done and id(parameter) in self.waiting:
            self.done = dict(zip(self.waiting, _Promote.apply(mesh, *self.waiting.values()), strict=True))
        return self.done.get(id(parameter))


class PromotionScope:
    """Forward hooks of a module whose parameters are promoted together, once per forward.

    Holds no parameter and no tensor, so that the module can be copied and saved.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh

    def enter(self, module: torch.nn.Module, args: Any) -> None:
        """Forward pre-hook: open the bucket of this call."""
        parameters = [p for p in module.parameters() if p.requires_grad and type(p) in _PLAIN]
        _scopes.stack.append(_Bucket(self.mesh, parameters))

    def leave(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        """Forward hook, called after errors too: close it."""
        _scopes.stack.pop()

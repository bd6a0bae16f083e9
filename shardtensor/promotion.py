"""Plain tensors that meet sharded ones: a weight becomes a replicated tensor whose gradient is summed over the ranks.

A parameter and its ``.grad`` stay plain tensors, so DDP and optimizers see nothing new.
"""

from __future__ import annotations

import enum
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from shardtensor import tensor as sharded  # used at call time only: the two modules need each other
from shardtensor.boundary import FromDTensor
from shardtensor.buckets import PLAIN, Promote, buckets_are_open, find_in_buckets
from shardtensor.errors import LayoutError, OpError
from shardtensor.spec import DeviceMesh

__all__ = [
    "SETTLED",
    "TensorPromotionMode",
    "get_mode",
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

SETTLED: set[type] = {int, float, bool, str, slice, type(None), type(...), torch.dtype, torch.device, torch.Size}
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
    weights: list[torch.Tensor] = []
    for arg in (*args, *kwargs.values()) if kwargs else args:
        kind = type(arg)
        if kind in SETTLED:
            continue
        if kind in PLAIN and _mode is TensorPromotionMode.SILENT:
            if _is_weight(arg):
                weights.append(arg)
        elif _concerns(arg):
            return _generally_promoted(func, args, kwargs)
    if not weights:
        return args, kwargs
    if not args or type(args[0]) is not sharded.ShardTensor:
        return _generally_promoted(func, args, kwargs)
    # The usual case, in few steps: a sharded tensor, then weights.
    found = _stand_ins(weights, args[0]._spec.mesh)
    args = tuple([found.get(id(arg), arg) for arg in args])
    return args, {name: found.get(id(value), value) for name, value in kwargs.items()} if kwargs else kwargs


def _stand_ins(weights: list[torch.Tensor], mesh: DeviceMesh) -> dict[int, Any]:
    """What stands for plain tensors, by id: from the open buckets, or promoted now, together."""
    found: dict[int, Any] = {}
    if buckets_are_open():
        found = {id(weight): before for weight in weights if (before := find_in_buckets(weight, mesh)) is not None}
        weights = [weight for weight in weights if id(weight) not in found]
    if weights:
        found.update(zip(map(id, weights), Promote.apply(mesh, *weights), strict=True))
    return found


def _generally_promoted(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None
) -> tuple[tuple[Any, ...], dict[str, Any] | None]:
    """The same for weights in lists or among keywords, DTensors, open buckets, and other modes."""
    mesh = _mesh_of(args) or _mesh_of(kwargs)
    if mesh is None:
        return args, kwargs
    if _mode is not TensorPromotionMode.SILENT:
        _report(func, args, kwargs)
    if args and type(args[0]) in PLAIN:
        _refuse_lost_write(func, args)
    args, kwargs = _with_promoted((args, kwargs), mesh)
    return args, kwargs


def _concerns(arg: Any) -> bool:
    kind = type(arg)
    if kind in PLAIN:
        # Outside SILENT mode every plain tensor is looked at, not only weights.
        return _is_weight(arg) or _mode is not TensorPromotionMode.SILENT
    if kind is tuple or kind is list:
        for item in arg:
            if type(item) in SETTLED:
                continue
            if _concerns(item):
                return True
        return False
    return isinstance(arg, DTensor)


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, tuple | list):
        for item in value:
            yield from _flat(item)
    elif isinstance(value, dict):
        yield from _flat(list(value.values()))
    else:
        yield value


def _mesh_of(value: Any) -> DeviceMesh | None:
    """The mesh of the first sharded tensor in nested arguments."""
    if type(value) is sharded.ShardTensor:
        return value._spec.mesh
    if isinstance(value, tuple | list):
        for item in value:
            if (found := _mesh_of(item)) is not None:
                return found
        return None
    if isinstance(value, dict):
        return _mesh_of(list(value.values()))
    return value._spec.mesh if isinstance(value, sharded.ShardTensor) else None


def _report(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
    for value in _flat((args, kwargs)):
        if type(value) not in PLAIN or value.dim() == 0:
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
    if in_place and type(args[0]) in PLAIN and _is_weight(args[0]):
        raise OpError(
            f"{name}: a ShardTensor is written in place into a plain tensor {tuple(args[0].shape)} that requires grad. "
            f"Write it out of place (h = h + x), or make the tensor a ShardTensor first"
        )


def _is_weight(tensor: torch.Tensor) -> bool:
    return tensor.requires_grad and torch.is_grad_enabled()


def _with_promoted(value: Any, mesh: DeviceMesh, everything: bool = False) -> Any:
    """Nested arguments with their weights (or all plain tensors) and DTensors promoted."""
    leaves = [item for item in _flat(value) if type(item) not in SETTLED]
    found = _stand_ins([item for item in leaves if type(item) in PLAIN and (everything or _is_weight(item))], mesh)
    for item in leaves:
        if isinstance(item, DTensor):
            if item.device_mesh != mesh:
                raise LayoutError(f"a DTensor on {item.device_mesh} meets a ShardTensor on {mesh}: use one mesh")
            found[id(item)] = FromDTensor.apply(item)
    return _replaced(value, found)


def _replaced(value: Any, found: dict[int, Any]) -> Any:
    kind = type(value)
    if kind is tuple or kind is list:
        return kind([item if type(item) in SETTLED else _replaced(item, found) for item in value])
    if kind is dict:
        return {name: _replaced(item, found) for name, item in value.items()}
    return found.get(id(value), value)


def with_promoted_arguments(handler: Callable[..., Any]) -> Callable[..., Any]:
    """A user's handler that gets every plain tensor as a replicated ShardTensor."""

    def call(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        mesh = _mesh_of(args) or _mesh_of(kwargs)
        if mesh is not None and _mode is not TensorPromotionMode.DISABLED:
            if _mode is TensorPromotionMode.WARN:
                _report(func, args, kwargs)
            args, kwargs = _with_promoted((args, kwargs), mesh, everything=True)
        return handler(func, types, args, kwargs)

    return call

"""What happens to an op without a rule: gather its inputs, run it whole on every rank, and say so once."""

from __future__ import annotations

import warnings
from functools import lru_cache
from typing import Any

import torch

from shardtensor import tensor as sharded  # used at call time only: the two modules need each other
from shardtensor.errors import MissingRuleError
from shardtensor.redistribute import redistribute_local
from shardtensor.registry import is_strict
from shardtensor.spec import DeviceMesh, ShardTensorSpec, replicate

__all__ = ["run_replicated"]

_warned: set[Any] = set()


def run_replicated(func: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Run ``func`` on gathered inputs; results are replicated, arguments written to keep their layout.

    An op that torch composes of others is taken apart instead: under ``inference_mode`` it arrives here whole.

    Raises:
        MissingRuleError: inside `strict()`.
    """
    if _is_composite(func):
        return func.decompose(*args, **kwargs)
    found: list[Any] = []
    local_args, local_kwargs = _map((args, kwargs), lambda tensor: _gathered(tensor, found))
    if is_strict():
        raise MissingRuleError(
            f"{func} has no rule, and strict() forbids running it on gathered inputs "
            f"({', '.join(str(tuple(t.shape)) for t, _ in found)}). Register one with ShardTensor.register_dispatch_handler"
        )
    moved = sum(whole.numel() * whole.element_size() for tensor, whole in found if whole is not tensor._local_tensor)
    if func not in _warned:
        _warned.add(func)
        warnings.warn(
            f"{func} has no sharding rule: it runs replicated on every rank, which gathered {moved:,} bytes this time. "
            f"The result is right; register a rule to make it fast (said once per op)",
            stacklevel=2,
        )
    mesh = found[0][0]._spec.mesh
    result = func(*local_args, **local_kwargs)
    by_local = {id(whole): tensor for tensor, whole in found}
    if func._schema.is_mutable:
        for tensor, whole in found:
            _write_back(tensor, whole)
    return _map(result, lambda local: by_local.get(id(local)) or _replicated(local, mesh))


@lru_cache(maxsize=1024)
def _is_composite(func: torch._ops.OpOverload) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")


def _map(value: Any, function: Any) -> Any:
    """Apply ``function`` to the tensors in nested tuples, lists and dicts."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, tuple | list):
        return type(value)(_map(item, function) for item in value)
    if isinstance(value, dict):
        return {name: _map(item, function) for name, item in value.items()}
    return value


def _gathered(tensor: torch.Tensor, found: list[Any]) -> torch.Tensor:
    if not isinstance(tensor, sharded.ShardTensor):
        return tensor
    spec = tensor._spec
    whole = redistribute_local(tensor._local_tensor, spec, replicate(len(spec.layout)))
    found.append((tensor, whole))
    return whole


def _write_back(tensor: Any, whole: torch.Tensor) -> None:
    if whole is not tensor._local_tensor:
        spec = tensor._spec
        tensor._local_tensor.copy_(redistribute_local(whole, spec.replicated(), spec.resolved_layout))


def _replicated(local: torch.Tensor, mesh: DeviceMesh) -> Any:
    return sharded.wrap(
        local, ShardTensorSpec.of(mesh, replicate(mesh.ndim), local.shape, local.dtype, local.stride())
    )

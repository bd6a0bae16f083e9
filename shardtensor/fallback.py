"""What happens to an op without a rule: gather its inputs, run it whole on every rank, and say so once."""

from __future__ import annotations

import warnings
from functools import lru_cache
from typing import Any

import torch

from shardtensor import comm
from shardtensor import tensor as sharded  # used at call time only: the two modules need each other
from shardtensor.errors import MissingRuleError, OpError
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
    if is_strict():
        given = ", ".join(str(tuple(tensor.shape)) for tensor in _sharded((args, kwargs)))
        raise MissingRuleError(
            f"{func} has no rule, and strict() forbids running it on gathered inputs ({given}). Register one with "
            f"ShardTensor.register_dispatch_handler"
        )
    written = _written(func, args, kwargs)
    found: list[tuple[Any, torch.Tensor]] = []
    whole_args, whole_kwargs = _map((args, kwargs), lambda tensor: _gathered(tensor, found))
    moved = sum(whole.numel() * whole.element_size() for tensor, whole in found if whole is not tensor._local_tensor)
    if func not in _warned:
        _warned.add(func)
        warnings.warn(
            f"{func} has no sharding rule: it runs replicated on every rank, which gathered {moved:,} bytes this time. "
            f"The result is right; register a rule to make it fast (said once per op)",
            stacklevel=2,
        )
    mesh = found[0][0]._spec.mesh
    shapes = [whole.shape for _, whole in found]
    result = func(*whole_args, **whole_kwargs)
    if torch.Tag.nondeterministic_seeded in func.tags:
        _agree(result, mesh)
    if func._schema.is_mutable:
        for (tensor, whole), shape in zip(found, shapes, strict=True):
            if whole.shape != shape:
                raise OpError(f"{func} changes a shape in place, {tuple(shape)} to {tuple(whole.shape)}: use x = f(x)")
            if any(tensor is target for target in written):
                _write_back(tensor, whole)
    by_whole = {id(whole): tensor for tensor, whole in found}
    return _map(result, lambda whole: by_whole[id(whole)] if id(whole) in by_whole else _replicated(whole, mesh))


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


def _sharded(value: Any) -> list[Any]:
    found: list[Any] = []
    _map(value, lambda tensor: found.append(tensor) if isinstance(tensor, sharded.ShardTensor) else None)
    return found


def _written(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The sharded arguments that the op writes to in place; each must be one that a write reaches."""
    from shardtensor.rules.aliasing import refuse_lost_view, refuse_lost_write  # rules import what calls this

    arguments = func._schema.arguments
    given = dict(zip((argument.name for argument in arguments), args, strict=False)) | kwargs
    written = _sharded([given.get(a.name) for a in arguments if a.alias_info is not None and a.alias_info.is_write])
    for tensor in written:
        refuse_lost_write(tensor, func)
        if tensor._spec.partial_axes:
            refuse_lost_view(tensor)
    return written


def _agree(result: Any, mesh: DeviceMesh) -> None:
    """Give all ranks the random numbers of the first: what is replicated must be the same everywhere."""
    drawn: list[torch.Tensor] = []
    _map(result, drawn.append)
    for axis in range(mesh.ndim):
        comm.broadcast_values(drawn, 0, comm.group_of(mesh, axis))


def _gathered(tensor: torch.Tensor, found: list[tuple[Any, torch.Tensor]]) -> torch.Tensor:
    if not isinstance(tensor, sharded.ShardTensor):
        return tensor
    for known, whole in found:
        if known is tensor:  # passed twice: what is written to it is read from it
            return whole
    spec = tensor._spec
    whole = redistribute_local(tensor._local_tensor, spec, replicate(len(spec.layout)))
    if whole.is_contiguous() != tensor.is_contiguous():
        whole = _strided(whole, spec)
    found.append((tensor, whole))
    return whole


def _strided(whole: torch.Tensor, spec: ShardTensorSpec) -> torch.Tensor:
    """A copy with the strides of ``spec``: kernels, and formulas of their backward, choose by them (det, solve)."""
    copy = torch.empty_strided(spec.shape, spec.tensor_meta.stride, dtype=whole.dtype, device=whole.device)
    stored, rows = copy, whole
    for dim in spec.broadcast_dims:  # one stored row stands for all
        stored, rows = stored.narrow(dim, 0, 1), rows.narrow(dim, 0, 1)
    stored.copy_(rows)
    return copy


def _write_back(tensor: Any, whole: torch.Tensor) -> None:
    """Put a written whole back into the blocks; a pending reduction is done with it."""
    spec = tensor._spec
    if whole is not tensor._local_tensor:
        tensor._local_tensor.copy_(redistribute_local(whole, spec.replicated(), spec.resolved_layout))
        tensor._spec = spec.with_layout(spec.resolved_layout)


def _replicated(local: torch.Tensor, mesh: DeviceMesh) -> Any:
    return sharded.wrap(local, ShardTensorSpec.of(mesh, replicate(mesh.ndim), local.shape, local.dtype, local.stride()))

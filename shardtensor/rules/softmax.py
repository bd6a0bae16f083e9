"""Softmax: along a cut dim the ranks share the row's maximum and sum, along any other dim blocks stay as they are."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch

from shardtensor import comm
from shardtensor.registry import rule
from shardtensor.rules.layouts import local_in, resolved
from shardtensor.spec import ShardTensorSpec
from shardtensor.tensor import ShardTensor, wrap

__all__ = ["log_softmax", "safe_softmax", "softmax"]

aten = torch.ops.aten  # for the table; blocks go to the bindings of the same names, 1 to 2 us faster to call


class _Way(NamedTuple):
    """Names of the process groups that share a row, and the result's spec: row-major whatever the input's strides."""

    groups: tuple[str, ...]
    result: ShardTensorSpec


@lru_cache(maxsize=4096)
def _way(spec: ShardTensorSpec, dim: int) -> _Way:
    axes = spec.axes_of(dim % max(spec.ndim, 1))
    groups = tuple(comm.group_of(spec.mesh, axis) for axis in axes)
    return _Way(groups, ShardTensorSpec.of(spec.mesh, spec.layout, spec.shape, spec.dtype))


def _reduced(local: torch.Tensor, op: str, groups: tuple[str, ...]) -> torch.Tensor:
    for group in groups:
        local = comm.all_reduce(local, op, group)
    return local


def _shifted(local: torch.Tensor, dim: int, groups: tuple[str, ...], half_to_float: bool) -> torch.Tensor:
    """The block minus its rows' global maximum, in the dtype to compute in: at least float32."""
    wide = torch.float32 if half_to_float or local.dtype in (torch.float16, torch.bfloat16) else local.dtype
    local = local.to(wide)
    shape = list(local.shape)
    shape[dim] = 1
    top = local.amax(dim, keepdim=True) if local.shape[dim] else local.new_full(shape, float("-inf"))
    return local - _reduced(top, "max", groups)


def _row_sum(local: torch.Tensor, dim: int, groups: tuple[str, ...]) -> torch.Tensor:
    return _reduced(local.sum(dim, keepdim=True), "sum", groups)


def _out_dtype(spec: ShardTensorSpec, half_to_float: bool) -> torch.dtype:
    return torch.float32 if half_to_float else spec.dtype


@rule(aten._softmax.default)
def softmax(self: ShardTensor, dim: int, half_to_float: bool) -> ShardTensor:
    """Softmax along ``dim``; a row of -inf gives nan, as everywhere in torch."""
    self = resolved(self)
    spec = self._spec
    groups, result = _way(spec, dim)
    if not groups:
        return wrap(torch._softmax(self._local_tensor, dim, half_to_float), result)
    raised = _shifted(self._local_tensor, dim, groups, half_to_float).exp()
    shares = raised / _row_sum(raised, dim, groups)
    return wrap(shares.to(_out_dtype(spec, half_to_float)).contiguous(), result)


@rule(aten._safe_softmax.default)
def safe_softmax(self: ShardTensor, dim: int, dtype: torch.dtype | None = None) -> ShardTensor:
    """Softmax along ``dim`` in which a row of -inf gives 0: that of attention's masked rows."""
    self = resolved(self)
    spec = self._spec
    groups, result = _way(spec, dim)
    if not groups:
        return wrap(aten._safe_softmax.default(self._local_tensor, dim, dtype), result)
    local = self._local_tensor if dtype is None else self._local_tensor.to(dtype)
    raised = _shifted(local, dim, groups, False).exp()
    total = _row_sum(raised, dim, groups)
    # A row of -inf has no maximum: -inf - -inf is nan. Its probabilities are 0.
    hidden = _reduced((local != float("-inf")).any(dim, keepdim=True), "max", groups).logical_not()
    return wrap((raised / total).masked_fill(hidden, 0.0).to(local.dtype).contiguous(), result)


@rule(aten._log_softmax.default)
def log_softmax(self: ShardTensor, dim: int, half_to_float: bool) -> ShardTensor:
    """Logarithm of `softmax`."""
    self = resolved(self)
    spec = self._spec
    groups, result = _way(spec, dim)
    if not groups:
        return wrap(torch._log_softmax(self._local_tensor, dim, half_to_float), result)
    shifted = _shifted(self._local_tensor, dim, groups, half_to_float)
    logs = shifted - _row_sum(shifted.exp(), dim, groups).log()
    return wrap(logs.to(_out_dtype(spec, half_to_float)).contiguous(), result)


@rule(aten._softmax_backward_data.default)
def softmax_backward(grad_output: Any, output: ShardTensor, dim: int, input_dtype: torch.dtype) -> ShardTensor:
    """Gradient of `softmax` and `safe_softmax` from their result."""
    spec, grad, out = _backward_blocks(grad_output, output)
    groups, result = _way(spec, dim)
    if not groups:
        local = torch._softmax_backward_data(grad, out, dim, input_dtype)
    else:
        weighted = grad.to(_at_least_float(grad)) * out
        local = (weighted - out * _row_sum(weighted, dim, groups)).to(input_dtype)
    return wrap(local.contiguous(), result)


@rule(aten._log_softmax_backward_data.default)
def log_softmax_backward(grad_output: Any, output: ShardTensor, dim: int, input_dtype: torch.dtype) -> ShardTensor:
    """Gradient of `log_softmax` from its result."""
    spec, grad, out = _backward_blocks(grad_output, output)
    groups, result = _way(spec, dim)
    if not groups:
        local = torch._log_softmax_backward_data(grad, out, dim, input_dtype)
    else:
        wide = _at_least_float(grad)
        local = (grad - out.to(wide).exp() * _row_sum(grad.to(wide), dim, groups)).to(input_dtype)
    return wrap(local.contiguous(), result)


def _at_least_float(x: torch.Tensor) -> torch.dtype:
    return torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype


def _backward_blocks(grad: Any, output: Any) -> tuple[ShardTensorSpec, torch.Tensor, torch.Tensor]:
    """The blocks of gradient and result, both in the result's layout (the gradient's, where the result is plain)."""
    if not isinstance(output, ShardTensor):
        grad = resolved(grad)
        spec = grad._spec
        return spec, grad._local_tensor, local_in(output, spec.layout, spec.mesh)
    output = resolved(output)
    spec = output._spec
    return spec, local_in(grad, spec.layout, spec.mesh), output._local_tensor

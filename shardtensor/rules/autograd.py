"""Functions that ask autograd for gradients: they act on the tensor itself, and gradients come in its layout.

Autograd names a tensor's gradient by the tensor object, so none of these may act on a promoted or converted copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from shardtensor.boundary import in_layout
from shardtensor.redistribute import redistribute_local
from shardtensor.registry import function_rule
from shardtensor.spec import ShardTensorSpec
from shardtensor.tensor import ShardTensor

__all__ = ["like_primal"]

_off = torch._C.DisableTorchFunctionSubclass


def like_primal(grad: Any, spec: ShardTensorSpec) -> Any:
    """A gradient in the layout of its tensor, pending reductions done; a plain one is the same on every rank."""
    return grad if grad is None else in_layout(grad, spec, spec.resolved_layout)


def _guard_leaf(tensor: Any) -> None:
    """Have the gradient that arrives at a leaf brought to the leaf's layout, once per leaf."""
    if isinstance(tensor, ShardTensor) and tensor.requires_grad and tensor.is_leaf and not tensor._backward_hooks:
        spec = tensor._spec
        torch.Tensor.register_hook(tensor, lambda grad: like_primal(grad, spec))


@function_rule(torch.Tensor.requires_grad_)
def requires_grad_(self: torch.Tensor, requires_grad: bool = True) -> torch.Tensor:
    with _off():
        self.requires_grad_(requires_grad)
        _guard_leaf(self)
    return self


@function_rule(torch.Tensor.requires_grad.__set__)  # type: ignore[attr-defined]
def set_requires_grad(self: torch.Tensor, value: bool) -> None:
    with _off():
        self.requires_grad = value
        _guard_leaf(self)


@function_rule(torch.Tensor.backward)
def backward(self: torch.Tensor, *args: Any, **kwargs: Any) -> None:
    if isinstance(self, ShardTensor) and self._spec.partial_axes:
        # All ranks are here, which they may not be when one of them prints the loss: finish its sum now.
        layout = self._spec.resolved_layout
        self._local_tensor = redistribute_local(self._local_tensor, self._spec, layout)
        self._spec = self._spec.with_layout(layout)
    with _off():
        torch.Tensor.backward(self, *args, **kwargs)


@function_rule(torch.Tensor.retain_grad)
def retain_grad(self: ShardTensor) -> None:
    spec = self._spec
    with _off():
        if not self.is_leaf:
            torch.Tensor.register_hook(self, lambda grad: like_primal(grad, spec))
        torch.Tensor.retain_grad(self)


@function_rule(torch.Tensor.register_hook)
def register_hook(self: ShardTensor, hook: Callable[[Any], Any]) -> RemovableHandle:
    spec = self._spec
    with _off():
        handle: RemovableHandle = torch.Tensor.register_hook(self, lambda grad: hook(like_primal(grad, spec)))
    return handle


@function_rule(torch.autograd.grad)
def grad(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
    asked: Sequence[Any] = [inputs] if isinstance(inputs, torch.Tensor) else list(inputs)
    with _off():
        found = torch.autograd.grad(outputs, asked, *args, **kwargs)
        return tuple(
            like_primal(item, tensor._spec) if isinstance(tensor, ShardTensor) else item
            for item, tensor in zip(found, asked, strict=True)
        )

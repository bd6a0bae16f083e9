"""Functions that ask autograd for gradients: they act on the tensor itself, and gradients come in its layout.

Autograd names a tensor's gradient by the tensor object, so none of these may act on a promoted or converted copy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, _engine_run_backward, get_gradient_edge
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
        layout = spec.resolved_layout

        def lay(grad: Any) -> Any:
            lies = type(grad) is ShardTensor and grad._spec.layout == layout
            return None if lies else like_primal(grad, spec)

        torch.Tensor.register_hook(tensor, lay)


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
def backward(
    self: torch.Tensor,
    gradient: torch.Tensor | None = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Any = None,
) -> None:
    backward_of(self, gradient, retain_graph, create_graph, inputs=inputs)


@function_rule(torch.autograd.backward)
def backward_of(
    tensors: Any,
    grad_tensors: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    grad_variables: Any = None,
    inputs: Any = None,
) -> None:
    roots = _listed(tensors)
    given = grad_tensors if grad_variables is None else grad_variables
    with _off():
        for root in roots:
            _finish(root)
        asked = None if inputs is None else _listed(list(inputs.values()) if isinstance(inputs, dict) else inputs)
        sharded = [item for item in (*roots, *(asked or [])) if isinstance(item, ShardTensor)]
        if not all(tensor.requires_grad for tensor in sharded):  # torch says what is wrong
            return torch.autograd.backward(tensors, given, retain_graph, create_graph, inputs=inputs)
        grads = _listed(given) if given is not None else [None] * len(roots)
        grads = [_implied(root) if item is None else item for root, item in zip(roots, grads, strict=True)]
        edges = [_edge(root) for root in roots]
        wanted = None if asked is None else [_edge(item) for item in asked]
        fit = wanted != [] and all(map(_fits, roots, grads))
    # Not with torch functions off: what backward runs again (checkpoints) must find its weights promoted.
    if not fit:  # torch says what is wrong
        return torch.autograd.backward(edges, grads, retain_graph, create_graph, inputs=wanted)
    keep = create_graph if retain_graph is None else retain_graph
    ends = (tuple(edges), tuple(grads))
    _engine_run_backward(*ends, keep, create_graph, tuple(wanted or ()), allow_unreachable=True, accumulate_grad=True)


def _fits(root: Any, grad: Any) -> bool:
    """Whether a gradient is surely one for that root."""
    return (
        isinstance(root, ShardTensor)
        and isinstance(grad, torch.Tensor)
        and grad.shape == root.shape
        and grad.dtype == root.dtype
    )


def _finish(root: Any) -> None:
    """Do the pending sum of a root now: all ranks are here, which they may not be when one of them prints the loss."""
    if isinstance(root, ShardTensor) and root._spec.partial_axes:
        layout = root._spec.resolved_layout
        root._local_tensor = redistribute_local(root._local_tensor, root._spec, layout)
        root._spec = root._spec.with_layout(layout)


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
def grad(
    outputs: Any,
    inputs: Any,
    grad_outputs: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    only_inputs: bool = True,
    allow_unused: bool | None = None,
    is_grads_batched: bool = False,
    materialize_grads: bool = False,
) -> Any:
    if isinstance(inputs, dict):
        options = (grad_outputs, retain_graph, create_graph, only_inputs, allow_unused)
        values = torch.autograd.grad(outputs, list(inputs.values()), *options, is_grads_batched, materialize_grads)
        return dict(zip(inputs, values, strict=True))
    sources, asked = _listed(outputs), _listed(inputs)
    tensors = [item for item in (*sources, *asked) if isinstance(item, ShardTensor)]
    if is_grads_batched or not all(tensor.requires_grad for tensor in tensors):
        with _off():  # torch says what is wrong
            return torch.autograd.grad(
                outputs, inputs, grad_outputs, retain_graph, create_graph, only_inputs, allow_unused, is_grads_batched
            )
    given = _listed(grad_outputs) if grad_outputs is not None else [None] * len(sources)
    found = torch.autograd.grad(
        [_edge(source) for source in sources],
        [_edge(tensor) for tensor in asked],
        [_implied(source) if item is None else item for source, item in zip(sources, given, strict=True)],
        retain_graph,
        create_graph,
        only_inputs,
        True if materialize_grads else allow_unused,
    )
    pairs = zip(found, asked, strict=True)
    laid = [like_primal(item, tensor._spec) if isinstance(tensor, ShardTensor) else item for item, tensor in pairs]
    if materialize_grads:
        laid = [torch.zeros_like(tensor) if item is None else item for item, tensor in zip(laid, asked, strict=True)]
    return tuple(laid)


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) and not isinstance(value, GradientEdge) else [value]


def _edge(tensor: Any) -> Any:
    """A sharded tensor by its place in the graph: torch then looks for no torch function, and turns none off."""
    return get_gradient_edge(tensor) if isinstance(tensor, ShardTensor) else tensor


def _implied(output: Any) -> Any:
    """The gradient of a scalar output with respect to itself."""
    if not isinstance(output, ShardTensor):
        return None
    if output.numel() != 1:
        raise RuntimeError(f"grad can be implicitly created only for scalar outputs, not for {tuple(output.shape)}")
    return torch.ones_like(output)

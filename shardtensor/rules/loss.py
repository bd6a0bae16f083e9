"""Losses of two tensors, element by element: the mean is the mean of the whole, however uneven the blocks are.

A reduced loss is a pending sum over the ranks: nothing is sent until its value is asked for.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from shardtensor.registry import rule
from shardtensor.rules.layouts import common_layout, local_in, mesh_of, operand_layout, spec_of
from shardtensor.spec import PENDING_SUM, Cut, Layout, ShardTensorSpec, replicate
from shardtensor.tensor import ShardTensor, wrap

__all__ = [
    "MEAN",
    "NONE",
    "SUM",
    "binary_cross_entropy",
    "binary_cross_entropy_backward",
    "binary_cross_entropy_with_logits",
    "huber_loss",
    "huber_loss_backward",
    "mse_loss",
    "mse_loss_backward",
    "smooth_l1_loss",
    "smooth_l1_loss_backward",
    "soft_margin_loss",
    "soft_margin_loss_backward",
]

aten = torch.ops.aten

# torch's codes of reductions.
NONE, MEAN, SUM = 0, 1, 2

_HALVES = (torch.float16, torch.bfloat16)

Operand = torch.Tensor | None


@lru_cache(maxsize=1024)
def _met(specs: tuple[ShardTensorSpec, ...]) -> tuple[ShardTensorSpec, ShardTensorSpec]:
    """Where broadcast operands meet: the spec of the element-wise loss, and that of its sum."""
    shape = torch.broadcast_shapes(*(spec.shape for spec in specs))
    layout = common_layout(specs, shape)
    mesh, dtype = specs[0].mesh, specs[0].dtype
    pending = tuple(PENDING_SUM if isinstance(entry, Cut) else entry for entry in layout)
    return ShardTensorSpec.of(mesh, layout, shape, dtype), ShardTensorSpec.of(mesh, pending, (), dtype)


def _blocks(operands: tuple[Operand, ...]) -> tuple[list[Operand], ShardTensorSpec, ShardTensorSpec]:
    """The operands' blocks where they meet, and the two specs of `_met`."""
    mesh = mesh_of(operands)
    specs = tuple(spec_of(operand, mesh) for operand in operands if operand is not None)
    each, total = _met(specs)
    blocks = [
        None if operand is None else local_in(operand, _operand_layout(each, spec_of(operand, mesh)), mesh)
        for operand in operands
    ]
    return blocks, each, total


@lru_cache(maxsize=4096)
def _operand_layout(each: ShardTensorSpec, spec: ShardTensorSpec) -> Layout:
    return operand_layout(each.layout, spec, each.shape)


@lru_cache(maxsize=1024)
def _share(spec: ShardTensorSpec) -> float:
    """This rank's part of all elements."""
    everything = spec.shape.numel()
    return spec.local_shape.numel() / everything if everything else 1.0


def _loss(op: Any, operands: tuple[Operand, ...], reduction: int, *rest: float) -> ShardTensor:
    """``op(*operands, reduction, *rest)``."""
    blocks, each, total = _blocks(operands)
    if reduction == NONE:
        return wrap(op(*blocks, NONE, *rest).contiguous(), each)
    if reduction == SUM:
        return wrap(op(*blocks, SUM, *rest), total)
    # The local mean, weighted: a local sum could leave the range of a half-precision number.
    share = _share(each)
    local = op(*blocks, MEAN, *rest)
    if share != 1.0:
        local = local.mul_(share) if share else local.zero_()  # the mean of an empty block is nan
    return wrap(local, total)


def _gradient(op: Any, grad: torch.Tensor, operands: tuple[Operand, ...], reduction: int, *rest: float) -> ShardTensor:
    """``op(grad, *operands, reduction, *rest)``: the gradient of the first operand."""
    blocks, each, _ = _blocks(operands)
    mesh = each.mesh
    if reduction == NONE:
        return wrap(op(local_in(grad, each.layout, mesh), *blocks, NONE, *rest).contiguous(), each)
    scalar = local_in(grad, replicate(mesh.ndim), mesh)
    if reduction == SUM:
        local = op(scalar, *blocks, SUM, *rest)
    elif each.dtype in _HALVES:  # grad / count could vanish
        local = op(scalar, *blocks, MEAN, *rest) * _share(each)
    else:
        local = op(scalar / max(each.shape.numel(), 1), *blocks, SUM, *rest)
    return wrap(local.contiguous(), each)


@rule(aten.mse_loss.default)
def mse_loss(self: torch.Tensor, target: torch.Tensor, reduction: int = MEAN) -> ShardTensor:
    return _loss(aten.mse_loss.default, (self, target), reduction)


@rule(aten.mse_loss_backward.default)
def mse_loss_backward(
    grad_output: torch.Tensor, self: torch.Tensor, target: torch.Tensor, reduction: int
) -> ShardTensor:
    return _gradient(aten.mse_loss_backward.default, grad_output, (self, target), reduction)


@rule(aten.smooth_l1_loss.default)
def smooth_l1_loss(self: torch.Tensor, target: torch.Tensor, reduction: int = MEAN, beta: float = 1.0) -> ShardTensor:
    return _loss(aten.smooth_l1_loss.default, (self, target), reduction, beta)


@rule(aten.smooth_l1_loss_backward.default)
def smooth_l1_loss_backward(
    grad_output: torch.Tensor, self: torch.Tensor, target: torch.Tensor, reduction: int, beta: float
) -> ShardTensor:
    return _gradient(aten.smooth_l1_loss_backward.default, grad_output, (self, target), reduction, beta)


@rule(aten.huber_loss.default)
def huber_loss(self: torch.Tensor, target: torch.Tensor, reduction: int = MEAN, delta: float = 1.0) -> ShardTensor:
    return _loss(aten.huber_loss.default, (self, target), reduction, delta)


@rule(aten.huber_loss_backward.default)
def huber_loss_backward(
    grad_output: torch.Tensor, self: torch.Tensor, target: torch.Tensor, reduction: int, delta: float
) -> ShardTensor:
    return _gradient(aten.huber_loss_backward.default, grad_output, (self, target), reduction, delta)


@rule(aten.soft_margin_loss.default)
def soft_margin_loss(self: torch.Tensor, target: torch.Tensor, reduction: int = MEAN) -> ShardTensor:
    return _loss(aten.soft_margin_loss.default, (self, target), reduction)


@rule(aten.soft_margin_loss_backward.default)
def soft_margin_loss_backward(
    grad_output: torch.Tensor, self: torch.Tensor, target: torch.Tensor, reduction: int
) -> ShardTensor:
    return _gradient(aten.soft_margin_loss_backward.default, grad_output, (self, target), reduction)


@rule(aten.binary_cross_entropy.default)
def binary_cross_entropy(
    self: torch.Tensor, target: torch.Tensor, weight: Operand = None, reduction: int = MEAN
) -> ShardTensor:
    return _loss(aten.binary_cross_entropy.default, (self, target, weight), reduction)


@rule(aten.binary_cross_entropy_backward.default)
def binary_cross_entropy_backward(
    grad_output: torch.Tensor,
    self: torch.Tensor,
    target: torch.Tensor,
    weight: Operand = None,
    reduction: int = MEAN,
) -> ShardTensor:
    return _gradient(aten.binary_cross_entropy_backward.default, grad_output, (self, target, weight), reduction)


@rule(aten.binary_cross_entropy_with_logits.default)
def binary_cross_entropy_with_logits(
    self: torch.Tensor,
    target: torch.Tensor,
    weight: Operand = None,
    pos_weight: Operand = None,
    reduction: int = MEAN,
) -> ShardTensor:
    return _loss(aten.binary_cross_entropy_with_logits.default, (self, target, weight, pos_weight), reduction)

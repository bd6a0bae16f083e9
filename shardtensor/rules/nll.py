"""Negative log likelihood of classes, the second half of cross entropy; samples, points and classes may all be cut.

Where classes are cut, each rank looks up the targets that fall into its own classes and ignores the others: the sum
over the ranks is the loss, and no log-probability travels.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from shardtensor import comm
from shardtensor.registry import rule
from shardtensor.rules.layouts import local_in, mesh_of, spec_of, uncut
from shardtensor.rules.loss import MEAN, NONE, SUM
from shardtensor.spec import (
    PENDING_SUM,
    REPLICATE,
    AxisLayout,
    Cut,
    Layout,
    Replicate,
    ShardTensorSpec,
    mesh_sizes,
    replicate,
)
from shardtensor.tensor import ShardTensor, wrap

__all__ = ["nll_loss2d_backward", "nll_loss2d_forward", "nll_loss_backward", "nll_loss_forward"]

aten = torch.ops.aten

_IGNORED = -100


class _Blocks(NamedTuple):
    """This rank's blocks, targets counted in its own classes.

    Attributes:
        x: log-probabilities.
        target: classes, ``ignore`` where none of this rank's.
        weight: of the classes, or None.
        ignore: the class to ignore.
        spec: of the log-probabilities.
        classes: mesh axes that cut the classes.
        each: layout of one loss per target.
    """

    x: torch.Tensor
    target: torch.Tensor
    weight: torch.Tensor | None
    ignore: int
    spec: ShardTensorSpec
    classes: tuple[int, ...]
    each: Layout


def _class_dim(spec: ShardTensorSpec) -> int:
    return 0 if spec.ndim == 1 else 1


def _without_classes(entry: AxisLayout, dim: int) -> AxisLayout:
    """What an axis does to the targets, given what it does to the log-probabilities."""
    if not isinstance(entry, Cut) or entry.dim == dim:
        return REPLICATE
    return entry.moved(entry.dim - (entry.dim > dim))


def _led(self: torch.Tensor, target: torch.Tensor) -> ShardTensor:
    """The log-probabilities, cut as the targets along axes where only the targets are cut."""
    mesh = mesh_of((self, target))
    spec, target_spec = spec_of(self, mesh), spec_of(target, mesh)
    dim = _class_dim(spec)
    taken = {cut.dim for _, cut in spec.cuts}
    layout: list[AxisLayout] = []
    for have, other in zip(spec.resolved_layout, target_spec.resolved_layout, strict=True):
        if isinstance(have, Replicate) and isinstance(other, Cut) and other.dim + (other.dim >= dim) not in taken:
            have = other.moved(other.dim + (other.dim >= dim))
        layout.append(have)
    led = wrap(local_in(self, tuple(layout), mesh), spec.with_layout(tuple(layout)))
    axes = led._spec.axes_of(dim)
    odd = len(axes) > 1 or any(led._spec.local_cut(axis).outer != 1 for axis in axes)
    return uncut(led, [dim]) if odd else led


def _blocks(self: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None, ignore_index: int) -> _Blocks:
    led = _led(self, target)
    spec, mesh = led._spec, led._spec.mesh
    dim = _class_dim(spec)
    each = tuple(_without_classes(entry, dim) for entry in spec.layout)
    wanted = local_in(target, each, mesh)
    classes = spec.axes_of(dim)
    lies = tuple(
        entry.moved(0) if axis in classes and isinstance(entry, Cut) else REPLICATE
        for axis, entry in enumerate(spec.layout)
    )
    weight = None if weight is None else local_in(weight, lies, mesh)
    x = led._local_tensor
    if not classes:
        return _Blocks(x, wanted, weight, ignore_index, spec, classes, each)
    cut = spec.layout[classes[0]]
    assert isinstance(cut, Cut)
    rank, count = spec.coordinate[classes[0]], spec.shape[dim]
    counted = wanted != ignore_index
    torch._assert_async(
        (~counted | ((wanted >= 0) & (wanted < count))).all(), f"a target is not a class: classes are 0 to {count - 1}"
    )
    first = sum(cut.sizes[:rank])
    here = counted & (wanted >= first) & (wanted < first + cut.sizes[rank])
    return _Blocks(x, (wanted - first).masked_fill(~here, _IGNORED), weight, _IGNORED, spec, classes, each)


def _forward(
    op: Any,
    self: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    reduction: int,
    ignore_index: int,
) -> tuple[ShardTensor, ShardTensor]:
    blocks = _blocks(self, target, weight, ignore_index)
    spec, mesh = blocks.spec, blocks.spec.mesh
    cut = [axis for axis, _ in spec.cuts]
    if reduction == NONE:
        local = _looked_up(op, blocks, NONE)[0]
        pending = tuple(PENDING_SUM if axis in blocks.classes else e for axis, e in enumerate(blocks.each))
        each_spec = ShardTensorSpec.of(mesh, pending, spec_of(target, mesh).shape, spec.dtype)
        none = local.new_zeros(())
        return wrap(local.contiguous(), each_spec), wrap(none, _scalar(spec, ()))
    loss, total = _looked_up(op, blocks, SUM)
    if reduction == SUM:
        pending_spec = _scalar(spec, tuple(cut))
        return wrap(loss.to(spec.dtype), pending_spec), wrap(total.to(spec.dtype), pending_spec)
    both = torch.stack((loss, total))
    for axis in cut:
        if mesh_sizes(mesh)[axis] > 1:
            both = comm.all_reduce(both, "sum", comm.group_of(mesh, axis))
    loss, total = both.unbind()
    return wrap((loss / total).to(spec.dtype), _scalar(spec, ())), wrap(total, _scalar(spec, ()))


def _scalar(spec: ShardTensorSpec, pending: tuple[int, ...]) -> ShardTensorSpec:
    layout = tuple(PENDING_SUM if axis in pending else REPLICATE for axis in range(len(spec.layout)))
    return ShardTensorSpec.of(spec.mesh, layout, (), spec.dtype)


def _looked_up(op: Any, blocks: _Blocks, reduction: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss and weight of this rank's targets; sums in at least float32."""
    x, weight = blocks.x, blocks.weight
    if reduction == SUM and x.dtype in (torch.float16, torch.bfloat16):
        x, weight = x.float(), None if weight is None else weight.float()
    if not x.numel():
        none = x.new_zeros(())
        return (x.new_zeros(blocks.target.shape) if reduction == NONE else none), none
    loss, total = op(x, blocks.target, weight, reduction, blocks.ignore)
    return loss, total


def _backward(
    op: Any,
    grad_output: torch.Tensor,
    self: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    reduction: int,
    ignore_index: int,
    total_weight: torch.Tensor,
) -> ShardTensor:
    blocks = _blocks(self, target, weight, ignore_index)
    spec, mesh = blocks.spec, blocks.spec.mesh
    whole = replicate(mesh.ndim)
    result = ShardTensorSpec.of(mesh, spec.layout, spec.shape, spec.dtype)
    if not blocks.x.numel():
        return wrap(torch.zeros_like(blocks.x, memory_format=torch.contiguous_format), result)
    grad = local_in(grad_output, blocks.each if reduction == NONE else whole, mesh)
    total = local_in(total_weight, whole, mesh) if reduction == MEAN else grad.new_ones(())
    if reduction == MEAN:
        grad = (grad / total).to(spec.dtype)
    code = NONE if reduction == NONE else SUM
    x = blocks.x.contiguous()
    local = op(grad.contiguous(), x, blocks.target, blocks.weight, code, blocks.ignore, total.to(spec.dtype))
    return wrap(local.contiguous(), result)


@rule(aten.nll_loss_forward.default)
def nll_loss_forward(
    self: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None, reduction: int, ignore_index: int
) -> tuple[ShardTensor, ShardTensor]:
    return _forward(aten.nll_loss_forward.default, self, target, weight, reduction, ignore_index)


@rule(aten.nll_loss2d_forward.default)
def nll_loss2d_forward(
    self: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None, reduction: int, ignore_index: int
) -> tuple[ShardTensor, ShardTensor]:
    return _forward(aten.nll_loss2d_forward.default, self, target, weight, reduction, ignore_index)


@rule(aten.nll_loss_backward.default)
def nll_loss_backward(
    grad_output: torch.Tensor,
    self: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    reduction: int,
    ignore_index: int,
    total_weight: torch.Tensor,
) -> ShardTensor:
    op = aten.nll_loss_backward.default
    return _backward(op, grad_output, self, target, weight, reduction, ignore_index, total_weight)


@rule(aten.nll_loss2d_backward.default)
def nll_loss2d_backward(
    grad_output: torch.Tensor,
    self: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    reduction: int,
    ignore_index: int,
    total_weight: torch.Tensor,
) -> ShardTensor:
    op = aten.nll_loss2d_backward.default
    return _backward(op, grad_output, self, target, weight, reduction, ignore_index, total_weight)

"""Embedding: rows of a weight by cut indices; the weight is whole on every rank, its gradient a pending sum."""

from __future__ import annotations

from functools import lru_cache

import torch

from shardtensor.registry import rule
from shardtensor.rules.layouts import aligned, local_in, mesh_of, spec_of
from shardtensor.rules.take import index_select
from shardtensor.rules.view import reshaped
from shardtensor.spec import PENDING_SUM, REPLICATE, AxisLayout, Cut, Layout, ShardTensorSpec
from shardtensor.tensor import ShardTensor, wrap

__all__ = ["embedding"]

aten = torch.ops.aten


@lru_cache(maxsize=1024)
def _forward(weight: ShardTensorSpec, indices: ShardTensorSpec) -> tuple[Layout, Layout, ShardTensorSpec]:
    """Layouts of weight and indices, spec of the result; the weight's rows are whole."""
    ours: list[AxisLayout] = []
    numbers: list[AxisLayout] = []
    result: list[AxisLayout] = []
    for own, entry in zip(weight.resolved_layout, indices.resolved_layout, strict=True):
        columns = isinstance(own, Cut)
        ours.append(own)
        numbers.append(REPLICATE if columns else entry)
        result.append(own.moved(indices.ndim) if isinstance(own, Cut) else entry)
    shape = (*indices.shape, weight.shape[1])
    return tuple(ours), tuple(numbers), ShardTensorSpec.of(weight.mesh, tuple(result), shape, weight.dtype)


@rule(aten.embedding.default)
def embedding(
    weight: torch.Tensor,
    indices: torch.Tensor,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> ShardTensor:
    """Rows of ``weight`` [V, E]; a weight cut along V sends each rank the rows it asks for."""
    mesh = mesh_of(weight, indices)
    spec = spec_of(weight, mesh)
    if spec.axis_of(0) is not None:
        flat = aligned(indices, spec_of(indices, mesh).resolved_layout, mesh)
        rows = index_select(weight, 0, reshaped(flat, (-1,)))
        return reshaped(rows, (*indices.shape, spec.shape[1]))
    ours, numbers, result = _forward(spec, spec_of(indices, mesh))
    return wrap(aten.embedding.default(local_in(weight, ours, mesh), local_in(indices, numbers, mesh)), result)


@lru_cache(maxsize=1024)
def _backward(grad: ShardTensorSpec, indices: ShardTensorSpec) -> tuple[Layout, Layout, Layout]:
    """Layouts of grad, indices and result: cut indices bring a pending sum, cut columns stay cut."""
    last = grad.ndim - 1
    theirs: list[AxisLayout] = []
    numbers: list[AxisLayout] = []
    result: list[AxisLayout] = []
    for own, entry in zip(grad.resolved_layout, indices.resolved_layout, strict=True):
        if isinstance(own, Cut) and own.dim == last and not isinstance(entry, Cut):
            theirs.append(own)
            numbers.append(REPLICATE)
            result.append(own.moved(1))
            continue
        shared = entry if isinstance(entry, Cut) else own
        if isinstance(shared, Cut) and shared.dim == last:
            shared = REPLICATE
        theirs.append(shared)
        numbers.append(shared)
        result.append(PENDING_SUM if isinstance(shared, Cut) else REPLICATE)
    return tuple(theirs), tuple(numbers), tuple(result)


@rule(aten.embedding_dense_backward.default)
def embedding_dense_backward(
    grad_output: torch.Tensor, indices: torch.Tensor, num_weights: int, padding_idx: int, scale_grad_by_freq: bool
) -> ShardTensor:
    """The weight's gradient [V, E]: every rank's part of it, to be summed."""
    mesh = mesh_of(grad_output, indices)
    theirs, numbers, layout = _backward(spec_of(grad_output, mesh), spec_of(indices, mesh))
    if scale_grad_by_freq:  # needs how often each index occurs on all ranks
        theirs = numbers = layout = (REPLICATE,) * mesh.ndim
    local, index = local_in(grad_output, theirs, mesh), local_in(indices, numbers, mesh)
    columns = local.shape[-1]
    if local.numel():
        result = aten.embedding_dense_backward.default(local, index, num_weights, padding_idx, scale_grad_by_freq)
    else:
        result = local.new_zeros(num_weights, columns)
    shape = (num_weights, spec_of(grad_output, mesh).shape[-1])
    return wrap(result, ShardTensorSpec.of(mesh, layout, shape, local.dtype))

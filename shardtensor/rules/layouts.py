"""What rules share: the spec and block of any argument, common layouts of broadcast operands, results of ops."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from shardtensor.redistribute import redistribute_local
from shardtensor.spec import (
    REPLICATE,
    AxisLayout,
    Cut,
    DeviceMesh,
    Layout,
    Partial,
    ShardTensorSpec,
    replicate,
    whole_spec,
)
from shardtensor.tensor import ShardTensor, wrap

__all__ = [
    "aligned",
    "common_layout",
    "local_in",
    "mesh_of",
    "operand_layout",
    "replicated_result",
    "resolved",
    "spec_of",
    "uncut",
    "whole",
]


def mesh_of(*args: Any) -> DeviceMesh:
    """The mesh of the first sharded tensor among the arguments (lists are looked into)."""
    for arg in args:
        if isinstance(arg, ShardTensor):
            return arg._spec.mesh
        if isinstance(arg, list | tuple):
            for item in arg:
                if isinstance(item, ShardTensor):
                    return item._spec.mesh
    raise AssertionError("a rule was called without a sharded tensor")


def spec_of(tensor: torch.Tensor, mesh: DeviceMesh) -> ShardTensorSpec:
    """The layout of an argument; a plain tensor is the same on every rank."""
    if isinstance(tensor, ShardTensor):
        return tensor._spec
    return whole_spec(mesh, tensor.shape, tensor.dtype, tensor.stride())


def local_in(tensor: torch.Tensor, layout: Layout, mesh: DeviceMesh) -> torch.Tensor:
    """This rank's block of an argument (sharded or plain), brought to ``layout``."""
    if isinstance(tensor, ShardTensor):
        spec = tensor._spec
        return tensor._local_tensor if spec.layout == layout else redistribute_local(tensor._local_tensor, spec, layout)
    return tensor if layout == replicate(len(layout)) else redistribute_local(tensor, spec_of(tensor, mesh), layout)


def aligned(tensor: torch.Tensor, layout: Layout, mesh: DeviceMesh) -> ShardTensor:
    """An argument (sharded or plain) as a sharded tensor in ``layout``."""
    if isinstance(tensor, ShardTensor) and tensor._spec.layout == layout:
        return tensor
    return wrap(local_in(tensor, layout, mesh), spec_of(tensor, mesh).with_layout(layout))


def resolved(tensor: ShardTensor) -> ShardTensor:
    """The tensor with pending reductions done."""
    return aligned(tensor, tensor._spec.resolved_layout, tensor._spec.mesh) if tensor._spec.partial_axes else tensor


def uncut(tensor: ShardTensor, dims: Iterable[int]) -> ShardTensor:
    """The tensor with pending reductions done and ``dims`` (>= 0) whole on every rank; other cuts stay."""
    wanted = set(dims)
    layout = tuple(
        REPLICATE if isinstance(entry, Cut) and entry.dim in wanted else entry for entry in tensor._spec.resolved_layout
    )
    return aligned(tensor, layout, tensor._spec.mesh)


def whole(tensor: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """The whole of an argument as a plain tensor, on every rank."""
    return local_in(tensor, replicate(mesh.ndim), mesh)


def replicated_result(local: torch.Tensor, mesh: DeviceMesh) -> ShardTensor:
    """A result that every rank computed whole."""
    return wrap(local, whole_spec(mesh, local.shape, local.dtype, local.stride()))


def common_layout(specs: Sequence[ShardTensorSpec], shape: Sequence[int]) -> Layout:
    """The layout in which broadcast operands meet, over the dims of the broadcast ``shape``; no pending reductions.

    The operand with the most cuts, then the largest, leads; axes that it leaves whole follow the others.
    """
    layout: list[AxisLayout] = [REPLICATE] * len(specs[0].layout)
    for spec in sorted(specs, key=lambda spec: (-len(spec.cuts), -spec.shape.numel())):
        offset = len(shape) - spec.ndim
        taken = {entry.dim for entry in layout if isinstance(entry, Cut)}
        for axis, cut in spec.cuts:
            dim = cut.dim + offset
            broadcast = spec.shape[cut.dim] != shape[dim]
            if not broadcast and dim not in taken and not isinstance(layout[axis], Cut):
                layout[axis] = cut.moved(dim) if offset else cut
    return tuple(layout)


def operand_layout(layout: Layout, spec: ShardTensorSpec, shape: Sequence[int]) -> Layout:
    """How one operand must lie so that its blocks fit a result of ``shape`` in ``layout``."""
    offset = len(shape) - spec.ndim
    entries: list[AxisLayout] = []
    for entry in layout:
        if isinstance(entry, Cut):
            dim = entry.dim - offset
            if dim < 0 or spec.shape[dim] != shape[entry.dim]:
                entries.append(REPLICATE)
                continue
            entry = entry.moved(dim) if offset else entry
        entries.append(entry)
    return tuple(entries)


def has_sum(layout: Layout) -> bool:
    """Whether every pending reduction of the layout is a sum (and there is one)."""
    pending = [entry for entry in layout if isinstance(entry, Partial)]
    return bool(pending) and all(entry.reduce_op == "sum" for entry in pending)

"""Rules that slide over cut dims: how their input must lie, the windows fetched and given back, the formats kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch

from shardtensor import comm
from shardtensor.rules.stencil import Reach
from shardtensor.spec import (
    AxisLayout,
    Cut,
    DeviceMesh,
    Layout,
    Replicate,
    ShardTensorSpec,
    contiguous_stride,
    mesh_sizes,
)

__all__ = ["WindowPlan", "fetch_windows", "format_of", "meta_like", "return_windows", "slidable_layout"]

_REPLICATE = Replicate()


@dataclass(frozen=True)
class WindowPlan:
    """What a windowed op does with its input, derived from specs alone.

    Attributes:
        input: the input's spec, cut only where the op can slide or run along.
        out: the output's spec.
        reaches: the cut dims that the op slides over, in the order in which they are fetched.
    """

    input: ShardTensorSpec
    out: ShardTensorSpec
    reaches: tuple[Reach, ...]

    @cached_property
    def window_shape(self) -> torch.Size:
        """Shape of this rank's window."""
        shape = list(self.input.local_shape)
        for reach in self.reaches:
            start, stop = reach.windows[self.input.coordinate[reach.axis]]
            shape[reach.dim] = stop - start
        return torch.Size(shape)

    @cached_property
    def makes_nothing(self) -> bool:
        """Whether this rank has no output: kernels are not called then, exchanges are still joined."""
        return 0 in self.out.local_shape or 0 in self.window_shape

    @cached_property
    def input_format(self) -> torch.memory_format:
        """Memory format of the input."""
        return format_of(self.input)

    @cached_property
    def out_format(self) -> torch.memory_format:
        """Memory format that the plain op would give its output."""
        return format_of(self.out)

    @cached_property
    def dense_input(self) -> ShardTensorSpec:
        """The input's spec for a tensor of its own, such as its gradient: no broadcast dims."""
        shape, memory_format = self.input.shape, self.input_format
        stride = _channels_last_stride(shape) if memory_format != torch.contiguous_format else None
        return ShardTensorSpec.of(self.input.mesh, self.input.layout, shape, self.input.dtype, stride)

    def starts(self, first_dim: int) -> list[int]:
        """Global row at which this rank's window starts, for every dim from ``first_dim`` on."""
        starts = [0] * (self.input.ndim - first_dim)
        for reach in self.reaches:
            starts[reach.dim - first_dim] = reach.windows[self.input.coordinate[reach.axis]][0]
        return starts


@lru_cache(maxsize=4096)
def slidable_layout(spec: ShardTensorSpec, first_dim: int, whole_dims: tuple[int, ...] = ()) -> Layout:
    """The input's layout for an op that slides over the dims from ``first_dim`` on.

    Pending reductions are done, ``whole_dims`` are whole, and a dim slid over is cut by one mesh axis at most and in
    one piece a rank. Cuts of the dims before ``first_dim`` stay as they are.
    """
    layout: list[AxisLayout] = []
    taken = set(whole_dims)
    for entry in spec.resolved_layout:
        if isinstance(entry, Cut) and (entry.dim in taken or (entry.dim >= first_dim and entry.outer > 1)):
            entry = _REPLICATE
        if isinstance(entry, Cut) and entry.dim >= first_dim:
            taken.add(entry.dim)
        layout.append(entry)
    return tuple(layout)


def cut_dims(spec: ShardTensorSpec, first_dim: int) -> list[tuple[int, Cut]]:
    """The (mesh axis, cut) pairs whose dims an op slides over, where more than one rank shares the dim."""
    ranks = mesh_sizes(spec.mesh)
    return [(axis, cut) for axis, cut in spec.cuts if cut.dim >= first_dim and ranks[axis] > 1]


def out_layout(layout: Layout, reaches: Sequence[Reach], shape: Sequence[int]) -> Layout:
    """The layout of an output of ``shape``: dims slid over take the output's sizes, other cuts stay."""
    entries = list(layout)
    for axis, entry in enumerate(entries):
        if isinstance(entry, Cut) and len(entry.sizes) == 1:
            entries[axis] = Cut(entry.dim, (shape[entry.dim],)) if entry.outer == 1 else entry
    for reach in reaches:
        entries[reach.axis] = Cut(reach.dim, reach.out_sizes)
    return tuple(entries)


def meta_like(spec: ShardTensorSpec) -> torch.Tensor:
    """A tensor without data like the whole one: the plain op on it gives the output's shape and format, or its error."""
    meta = spec.tensor_meta
    return torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device="meta")


def _channels_last_stride(shape: Sequence[int]) -> tuple[int, ...]:
    moved = contiguous_stride([shape[0], *shape[2:], shape[1]])
    return (moved[0], moved[-1], *moved[1:-1])


def format_of(spec: ShardTensorSpec) -> torch.memory_format:
    """``channels_last`` (of 4 or 5 dims) where the global stride says so unmistakably, else ``contiguous_format``."""
    shape, stride = spec.shape, spec.tensor_meta.stride
    if spec.ndim not in (4, 5) or stride == contiguous_stride(shape) or stride != _channels_last_stride(shape):
        return torch.contiguous_format
    return torch.channels_last if spec.ndim == 4 else torch.channels_last_3d


def fetch_windows(local: torch.Tensor, plan: WindowPlan, fill: float = 0.0) -> torch.Tensor:
    """This rank's window: its block with the rows it reads of others; rows outside the tensor are ``fill``.

    One dim after the other, so that corners come along.
    """
    for reach in plan.reaches:
        if not reach.is_local:
            local = _exchange(comm.halo_exchange, local, reach, plan, fill=fill)
    return local


def return_windows(window: torch.Tensor, plan: WindowPlan) -> torch.Tensor:
    """The adjoint of `fetch_windows`: rows of the windows are added where they came from."""
    for reach in reversed(plan.reaches):
        if not reach.is_local:
            window = _exchange(comm.halo_reduce, window, reach, plan)
    return window


def _exchange(step: Any, block: torch.Tensor, reach: Reach, plan: WindowPlan, **options: Any) -> torch.Tensor:
    group = comm.group_of(plan.input.mesh, reach.axis)
    result: torch.Tensor
    if plan.input_format == torch.contiguous_format:
        result = step(block, reach.dim, reach.sizes, reach.windows, group, **options)
        return result
    # Exchanges make contiguous tensors: show them the channels last.
    moved = step(block.movedim(1, -1), reach.dim - 1, reach.sizes, reach.windows, group, **options)
    result = moved.movedim(-1, 1)
    return result


def replicated_spec(mesh: DeviceMesh, shape: Sequence[int], dtype: torch.dtype) -> ShardTensorSpec:
    """A row-major tensor that every rank holds whole."""
    return ShardTensorSpec.of(mesh, (_REPLICATE,) * mesh.ndim, shape, dtype)

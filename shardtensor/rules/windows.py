"""Rules that slide over cut dims: how their input must lie, the windows fetched and given back, the formats kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from typing import Any

import torch

from shardtensor import comm
from shardtensor.registry import rule
from shardtensor.rules.stencil import Reach
from shardtensor.spec import REPLICATE, AxisLayout, Cut, Layout, ShardTensorSpec, contiguous_stride, mesh_sizes

__all__ = [
    "WindowPlan",
    "cut_dims",
    "enter_by_dims",
    "fetch_windows",
    "format_of",
    "meta_like",
    "out_spec",
    "per_dim",
    "return_windows",
    "slidable_layout",
]


@dataclass(frozen=True)
class WindowPlan:
    """What a windowed op does with its input, derived from specs alone.

    Attributes:
        input: the input's spec, cut only where the op can slide or run along.
        out: the output's spec.
        reaches: the cut dims that the op slides over, in the order in which they are fetched.
        later: cut dims that the kernel leaves alone; another step brings them to the output's rows afterwards.
    """

    input: ShardTensorSpec
    out: ShardTensorSpec
    reaches: tuple[Reach, ...]
    later: tuple[Reach, ...] = ()

    @cached_property
    def window_shape(self) -> torch.Size:
        """Shape of what this rank's kernel runs on."""
        shape = list(self.input.local_shape)
        for reach in self.reaches:
            start, stop = reach.windows[self.coordinate[reach.axis]]
            shape[reach.dim] = stop - start
        return torch.Size(shape)

    @cached_property
    def made_shape(self) -> torch.Size:
        """Shape of what this rank's kernel makes."""
        shape = list(self.out.local_shape)
        for reach in self.later:
            shape[reach.dim] = self.window_shape[reach.dim]
        return torch.Size(shape)

    @cached_property
    def makes_nothing(self) -> bool:
        """Whether this rank's kernel has nothing to make: it is not called then, exchanges are still joined."""
        return 0 in self.made_shape or 0 in self.window_shape

    @property
    def coordinate(self) -> tuple[int, ...]:
        """This rank's place on every mesh axis."""
        return self.input.coordinate

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
            starts[reach.dim - first_dim] = reach.windows[self.coordinate[reach.axis]][0]
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
            entry = REPLICATE
        if isinstance(entry, Cut) and entry.dim >= first_dim:
            taken.add(entry.dim)
        layout.append(entry)
    return tuple(layout)


def cut_dims(spec: ShardTensorSpec, first_dim: int) -> list[tuple[int, Cut]]:
    """The (mesh axis, cut) pairs whose dims an op slides over, where more than one rank shares the dim."""
    ranks = mesh_sizes(spec.mesh)
    return [(axis, cut) for axis, cut in spec.cuts if cut.dim >= first_dim and ranks[axis] > 1]


def out_spec(input: ShardTensorSpec, reaches: Sequence[Reach], out: torch.Tensor) -> ShardTensorSpec:
    """The spec of an output shaped as ``out``: dims slid over take the output's sizes, other cuts stay.

    A cut by a mesh axis of one rank has no reach; it follows the shape.
    """
    layout = list(input.layout)
    for axis, entry in enumerate(layout):
        if isinstance(entry, Cut) and len(entry.sizes) == 1 and entry.outer == 1:
            layout[axis] = Cut(entry.dim, (out.shape[entry.dim],))
    for reach in reaches:
        layout[reach.axis] = Cut(reach.dim, reach.out_sizes)
    return ShardTensorSpec.of(input.mesh, tuple(layout), out.shape, input.dtype, out.stride())


def meta_like(spec: ShardTensorSpec) -> torch.Tensor:
    """A tensor without data like the whole one: the plain op on it gives the output's shape and format, or raises."""
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


def per_dim(dims: int, *arguments: Sequence[int]) -> list[tuple[int, ...]]:
    """Arguments of an op over ``dims`` dims, one number a dim: a single one stands for all."""
    return [tuple(value) * dims if len(value) == 1 else tuple(value) for value in arguments]


def enter_by_dims(ops: dict[int, torch._ops.OpOverload], function: Callable[..., Any]) -> None:
    """Enter one function, its first argument the number of spatial dims, as the rule of an op in 1, 2 and 3 dims."""
    for dims, op in ops.items():
        entry = partial(function, dims)
        entry.__module__ = function.__module__
        rule(op)(entry)

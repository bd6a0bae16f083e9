"""What a convolution does on cut dims, from its arguments alone: windows, the kernel's arguments, gradient specs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from shardtensor.errors import OpError
from shardtensor.rules.conv_overlap import Borders, borders_of
from shardtensor.rules.stencil import Reach, slide, spread
from shardtensor.rules.windows import WindowPlan, cut_dims, format_of, meta_like, out_spec, per_dim, slidable_layout
from shardtensor.spec import PENDING_SUM, REPLICATE, Cut, ShardTensorSpec

__all__ = ["ConvPlan", "Geometry", "plan_of"]

aten = torch.ops.aten


class Geometry(NamedTuple):
    """The whole-number arguments of a convolution; sequences have one entry per spatial dim."""

    weight: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    transposed: bool
    output_padding: tuple[int, ...]
    groups: int

    @property
    def arguments(self) -> tuple[Any, ...]:
        """What the op takes after input, weight and bias."""
        return self[1:]

    def along(self, dim: int) -> tuple[int, int, int, int]:
        """Kernel, stride, padding and dilation along a tensor dim."""
        return self.weight[dim], self.stride[dim - 2], self.padding[dim - 2], self.dilation[dim - 2]

    def local(self, reaches: Sequence[Reach]) -> Geometry:
        """The geometry of the kernel that runs on the window: what is padded there has been fetched."""
        slid = {reach.dim - 2 for reach in reaches}
        padding = tuple(0 if dim in slid else pad for dim, pad in enumerate(self.padding))
        output_padding = tuple(0 if dim in slid else pad for dim, pad in enumerate(self.output_padding))
        return self._replace(padding=padding, output_padding=output_padding)


def _check(spec: ShardTensorSpec, geometry: Geometry, dtype: torch.dtype) -> None:
    """Raise what the plain op would raise, on every rank, also on those that call no kernel.

    Raises:
        OpError: input and weight do not go together, or a number is out of range.
    """
    weight, groups = geometry.weight, geometry.groups
    what = f"convolution: input {tuple(spec.shape)} {spec.dtype}, weight {weight} {dtype}"
    if spec.ndim != len(weight):
        raise OpError(f"{what}: the input needs {len(weight)} dims")
    if spec.dtype != dtype:
        raise OpError(f"{what}: bring both to one dtype")
    channels = weight[0] if geometry.transposed else weight[1] * groups
    if groups < 1 or weight[0] % groups or spec.shape[1] != channels:
        raise OpError(f"{what}, groups={groups}: the weight takes {channels} channels, the input has {spec.shape[1]}")
    if min(geometry.stride + geometry.dilation) < 1 or min(geometry.padding + geometry.output_padding) < 0:
        raise OpError(f"{what}: stride and dilation must be >= 1, paddings >= 0, got {geometry.arguments}")
    steps = zip(geometry.output_padding, geometry.stride, geometry.dilation, strict=True)
    if geometry.transposed and any(extra >= max(stride, dilation) for extra, stride, dilation in steps):
        raise OpError(f"{what}: output_padding {geometry.output_padding} must be smaller than stride or dilation")


class ConvPlan(NamedTuple):
    windows: WindowPlan
    local: Geometry
    trims: tuple[tuple[int, int, int], ...]
    """(dim, start, length) of this rank's outputs in what the kernel makes of its window."""
    weight_grad: ShardTensorSpec
    """Every rank that holds a part of the input brings a part of the sum."""
    bias_grad: ShardTensorSpec
    """Likewise."""
    borders: Borders | None
    """How to convolve a large block while its halo is on its way."""

    def full_length(self, dim: int) -> int:
        """Length along ``dim`` of what a transposed convolution makes of this rank's window."""
        rows, geometry = self.windows.window_shape[dim], self.local
        return (rows - 1) * geometry.stride[dim - 2] + geometry.dilation[dim - 2] * (geometry.weight[dim] - 1) + 1


def _reaches(
    input: ShardTensorSpec, geometry: Geometry, out: torch.Tensor
) -> tuple[list[Reach], list[tuple[int, int, int]]]:
    """What is slid over, and for transposed ones this rank's trims."""
    reaches, trims = [], []
    for axis, cut in cut_dims(input, 2):
        if geometry.transposed:
            out_sizes, windows, starts = spread(cut.sizes, out.shape[cut.dim], *geometry.along(cut.dim))
            rank = input.coordinate[axis]
            trims.append((cut.dim, starts[rank], out_sizes[rank]))
        else:
            out_sizes, windows = slide(cut.sizes, out.shape[cut.dim], *geometry.along(cut.dim))
        reaches.append(Reach(axis, cut.dim, cut.sizes, windows, out_sizes))
    return reaches, trims


def _borders(input: ShardTensorSpec, geometry: Geometry, reaches: list[Reach]) -> Borders | None:
    if geometry.transposed or len(reaches) != 1 or reaches[0].is_local or format_of(input) != torch.contiguous_format:
        return None
    kernel, stride, padding, dilation = geometry.along(reaches[0].dim)
    return borders_of(reaches[0], input, stride, padding, dilation * (kernel - 1))


@lru_cache(maxsize=1024)
def plan_of(
    spec: ShardTensorSpec,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    dtype: torch.dtype,
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
    transposed: bool,
    output_padding: tuple[int, ...],
    groups: int,
) -> ConvPlan:
    """The plan of a convolution of an input of ``spec`` with a weight of ``shape``, ``strides`` and ``dtype``.

    Raises:
        OpError: the arguments do not fit the input.
    """
    dims = len(shape) - 2
    stride, padding, dilation, output_padding = per_dim(dims, stride, padding, dilation, output_padding)
    geometry = Geometry(tuple(shape), stride, padding, dilation, transposed, output_padding, groups)
    _check(spec, geometry, dtype)
    weight_is_channels_last = dims > 1 and strides[1] == 1 and strides[-1] != 1
    input = spec.with_layout(slidable_layout(spec, 2, (1,)))
    weight = torch.empty(geometry.weight, dtype=dtype, device="meta")
    out = aten.convolution.default(meta_like(spec), weight, None, *geometry.arguments)
    if weight_is_channels_last or format_of(spec) != torch.contiguous_format:
        out = out.contiguous(memory_format=torch.channels_last if spec.ndim == 4 else torch.channels_last_3d)
    reaches, trims = _reaches(input, geometry, out)
    windows_plan = WindowPlan(input, out_spec(input, reaches, out), tuple(reaches))
    summed = tuple(PENDING_SUM if isinstance(entry, Cut) else REPLICATE for entry in input.layout)
    weight_grad = ShardTensorSpec.of(spec.mesh, summed, shape, dtype)
    bias_grad = ShardTensorSpec.of(spec.mesh, summed, (out.shape[1],), dtype)
    borders = _borders(input, geometry, reaches)
    return ConvPlan(windows_plan, geometry.local(reaches), tuple(trims), weight_grad, bias_grad, borders)

"""Convolutions in 1, 2 and 3 dims, transposed ones too: halo of the input, then the plain kernel on the window."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from shardtensor.errors import OpError
from shardtensor.registry import rule
from shardtensor.rules.layouts import local_in, mesh_of, spec_of, whole
from shardtensor.rules.stencil import Reach, slide, spread
from shardtensor.rules.windows import (
    WindowPlan,
    cut_dims,
    fetch_windows,
    format_of,
    meta_like,
    out_spec,
    return_windows,
    slidable_layout,
)
from shardtensor.spec import Cut, Layout, Partial, Replicate, ShardTensorSpec
from shardtensor.tensor import ShardTensor, wrap

__all__ = ["convolution", "convolution_backward"]

aten = torch.ops.aten


class _Geometry(NamedTuple):
    """The whole-number arguments of a convolution; sequences have one entry per spatial dim."""

    weight: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    transposed: bool
    output_padding: tuple[int, ...]
    groups: int
    weight_is_channels_last: bool
    weight_dtype: torch.dtype

    @property
    def arguments(self) -> tuple[Any, ...]:
        """What the op takes after input, weight and bias."""
        return self[1:7]

    def local(self, reaches: Sequence[Reach]) -> _Geometry:
        """The geometry of the kernel that runs on the window: what is padded there has been fetched."""
        slid = {reach.dim - 2 for reach in reaches}
        padding = tuple(0 if dim in slid else pad for dim, pad in enumerate(self.padding))
        output_padding = tuple(0 if dim in slid else pad for dim, pad in enumerate(self.output_padding))
        return self._replace(padding=padding, output_padding=output_padding)


def _geometry(
    weight: torch.Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> _Geometry:
    shape = tuple(weight.shape)
    dims = len(shape) - 2
    if len(stride) == len(padding) == len(dilation) == len(output_padding) == dims:
        every = tuple(stride), tuple(padding), tuple(dilation), tuple(output_padding)
    else:  # one number stands for all dims
        lists = (stride, padding, dilation, output_padding)
        every = tuple(tuple(v) * dims if len(v) == 1 else tuple(v) for v in lists)  # type: ignore[assignment]
    last = dims > 1 and weight.stride(1) == 1 and weight.stride(-1) != 1
    return _Geometry(shape, *every[:3], transposed, every[3], groups, last, weight.dtype)


def _check(spec: ShardTensorSpec, geometry: _Geometry) -> None:
    """Raise what the plain op would raise, on every rank, also on those that call no kernel.

    Raises:
        OpError: input and weight do not go together, or a number is out of range.
    """
    weight, groups = geometry.weight, geometry.groups
    what = f"convolution: input {tuple(spec.shape)} {spec.dtype}, weight {weight} {geometry.weight_dtype}"
    if spec.ndim != len(weight):
        raise OpError(f"{what}: the input needs {len(weight)} dims")
    if spec.dtype != geometry.weight_dtype:
        raise OpError(f"{what}: bring both to one dtype")
    channels = weight[0] if geometry.transposed else weight[1] * groups
    if groups < 1 or weight[0] % groups or spec.shape[1] != channels:
        raise OpError(f"{what}, groups={groups}: the weight takes {channels} channels, the input has {spec.shape[1]}")
    if min(geometry.stride + geometry.dilation) < 1 or min(geometry.padding + geometry.output_padding) < 0:
        raise OpError(f"{what}: stride and dilation must be >= 1, paddings >= 0, got {geometry.arguments}")
    steps = zip(geometry.output_padding, geometry.stride, geometry.dilation, strict=True)
    if geometry.transposed and any(extra >= max(stride, dilation) for extra, stride, dilation in steps):
        raise OpError(f"{what}: output_padding {geometry.output_padding} must be smaller than stride or dilation")


class _Plan(NamedTuple):
    windows: WindowPlan
    local: _Geometry
    trims: tuple[tuple[int, int, int], ...]
    """(dim, start, length) of this rank's outputs in what the kernel makes of its window."""
    weight_layout: Layout
    """Of weight and bias gradients: every rank that holds a part of the input brings a part of the sum."""


@lru_cache(maxsize=1024)
def _plan(spec: ShardTensorSpec, geometry: _Geometry) -> _Plan:
    _check(spec, geometry)
    input = spec.with_layout(slidable_layout(spec, 2, (1,)))
    weight = torch.empty(geometry.weight, dtype=spec.dtype, device="meta")
    out = aten.convolution.default(meta_like(spec), weight, None, *geometry.arguments)
    if geometry.weight_is_channels_last or format_of(spec) != torch.contiguous_format:
        out = out.contiguous(memory_format=torch.channels_last if spec.ndim == 4 else torch.channels_last_3d)
    reaches, trims = [], []
    for axis, cut in cut_dims(input, 2):
        place = cut.dim - 2
        length = out.shape[cut.dim]
        row = (geometry.weight[cut.dim], geometry.stride[place], geometry.padding[place], geometry.dilation[place])
        if geometry.transposed:
            out_sizes, windows, starts = spread(cut.sizes, length, *row)
            rank = input.coordinate[axis]
            trims.append((cut.dim, starts[rank], out_sizes[rank]))
            reaches.append(Reach(axis, cut.dim, cut.sizes, windows, out_sizes))
        else:
            out_sizes, windows = slide(cut.sizes, length, *row)
            reaches.append(Reach(axis, cut.dim, cut.sizes, windows, out_sizes))
    windows_plan = WindowPlan(input, out_spec(input, reaches, out), tuple(reaches))
    summed = tuple(Partial("sum") if isinstance(entry, Cut) else Replicate() for entry in input.layout)
    return _Plan(windows_plan, geometry.local(reaches), tuple(trims), summed)


@rule(aten.convolution.default)
def convolution(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> ShardTensor:
    mesh = mesh_of(input, weight, bias)
    geometry = _geometry(weight, stride, padding, dilation, transposed, output_padding, groups)
    windows, local, trims, _ = _plan(spec_of(input, mesh), geometry)
    weight = whole(weight, mesh)
    bias = None if bias is None else whole(bias, mesh)
    window = fetch_windows(local_in(input, windows.input.layout, mesh), windows)
    if windows.makes_nothing:
        return wrap(window.new_empty(windows.out.local_shape), windows.out)
    result = aten.convolution.default(window, weight, bias, *local.arguments)
    for dim, start, length in trims:
        result = result.narrow(dim, start, length)
    return wrap(result.contiguous(memory_format=windows.out_format), windows.out)


@rule(aten.convolution_backward.default)
def convolution_backward(
    grad_output: torch.Tensor,
    input: torch.Tensor,
    weight: torch.Tensor,
    bias_sizes: Sequence[int] | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    output_mask: Sequence[bool],
) -> tuple[ShardTensor | None, ShardTensor | None, ShardTensor | None]:
    mesh = mesh_of(grad_output, input, weight)
    geometry = _geometry(weight, stride, padding, dilation, transposed, output_padding, groups)
    plan = _plan(spec_of(input, mesh), geometry)
    windows = plan.windows
    grad = local_in(grad_output, windows.out.layout, mesh)
    weight = whole(weight, mesh)
    if output_mask[1]:
        window = fetch_windows(local_in(input, windows.input.layout, mesh), windows)
    else:  # the input's gradient needs no value of the input
        window = grad.new_empty(windows.window_shape).contiguous(memory_format=windows.input_format)
    found = _local_backward(plan, grad, window, weight, bias_sizes, output_mask)
    if found[0] is not None:
        found[0] = return_windows(found[0], windows).contiguous(memory_format=windows.input_format)
    if found[1] is not None:
        found[1] = found[1].contiguous()
    specs = (
        windows.dense_input,
        ShardTensorSpec.of(mesh, plan.weight_layout, weight.shape, weight.dtype),
        ShardTensorSpec.of(mesh, plan.weight_layout, bias_sizes or (), weight.dtype),
    )
    gi, gw, gb = (None if g is None else wrap(g, spec) for g, spec in zip(found, specs, strict=True))
    return gi, gw, gb


def _local_backward(
    plan: _Plan,
    grad: torch.Tensor,
    window: torch.Tensor,
    weight: torch.Tensor,
    bias_sizes: Sequence[int] | None,
    mask: Sequence[bool],
) -> list[Any]:
    """Gradients of window, weight and bias from this rank's outputs; None where not asked for."""
    if plan.windows.makes_nothing:
        shapes = (plan.windows.window_shape, weight.shape, tuple(bias_sizes or ()))
        return [weight.new_zeros(shape) if asked else None for shape, asked in zip(shapes, mask, strict=True)]
    for dim, start, length in plan.trims:  # outputs of the window that other ranks own count nothing here
        end = _full_length(plan, dim) - start - length
        grad = torch.nn.functional.pad(grad, [0, 0] * (grad.dim() - 1 - dim) + [start, end])
    found = aten.convolution_backward.default(grad, window, weight, bias_sizes, *plan.local.arguments, list(mask))
    return [g if asked else None for g, asked in zip(found, mask, strict=True)]


def _full_length(plan: _Plan, dim: int) -> int:
    """Length along ``dim`` of what a transposed convolution makes of this rank's window."""
    rows = plan.windows.window_shape[dim]
    return (rows - 1) * plan.local.stride[dim - 2] + plan.local.dilation[dim - 2] * (plan.local.weight[dim] - 1) + 1

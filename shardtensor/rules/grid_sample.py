"""Sampling at points that the data names: the image is gathered, the points and the samples stay cut."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from shardtensor.errors import OpError
from shardtensor.registry import rule
from shardtensor.rules.layouts import local_in, mesh_of, spec_of
from shardtensor.rules.stencil import resized_sizes
from shardtensor.rules.windows import enter_by_dims
from shardtensor.spec import PENDING_SUM, REPLICATE, AxisLayout, Cut, Layout, ShardTensorSpec
from shardtensor.tensor import ShardTensor, wrap

__all__ = ["grid_sample", "grid_sample_backward"]

aten = torch.ops.aten

FORWARD = {2: aten.grid_sampler_2d.default, 3: aten.grid_sampler_3d.default}
BACKWARD = {2: aten.grid_sampler_2d_backward.default, 3: aten.grid_sampler_3d_backward.default}


class _Plan(NamedTuple):
    """Layouts of image [N, C, *in], points [N, *out, dims] and samples [N, C, *out], and of the gradients."""

    input: Layout
    grid: Layout
    out: ShardTensorSpec
    input_grad: ShardTensorSpec
    grid_grad: ShardTensorSpec


@lru_cache(maxsize=256)
def _plan(input: ShardTensorSpec, grid: ShardTensorSpec) -> _Plan:
    dims = input.ndim - 2
    if grid.ndim != input.ndim or grid.shape[-1] != dims or grid.shape[0] != input.shape[0] or 0 in input.shape[2:]:
        raise OpError(
            f"grid_sample: an image {tuple(input.shape)} needs points [{input.shape[0]}, *output, {dims}] with {dims} "
            f"output dims, got {tuple(grid.shape)}"
        )
    if input.dtype != grid.dtype:
        raise OpError(f"grid_sample: the image is {input.dtype}, the points are {grid.dtype}: bring both to one dtype")
    rows: list[tuple[AxisLayout, ...]] = []
    taken: set[int] = set()
    for image, points in zip(input.resolved_layout, grid.resolved_layout, strict=True):
        entries = _axis(image, points, grid)
        made = entries[2]
        if isinstance(made, Cut) and made.dim in taken:
            entries = (REPLICATE,) * 5
        elif isinstance(made, Cut):
            taken.add(made.dim)
        rows.append(entries)
    image_layout, grid_layout, made_layout, image_grad, grid_grad = zip(*rows, strict=True)
    shape = (*input.shape[:2], *grid.shape[1:-1])
    return _Plan(
        image_layout,
        grid_layout,
        ShardTensorSpec.of(input.mesh, made_layout, shape, input.dtype),
        ShardTensorSpec.of(input.mesh, image_grad, input.shape, input.dtype),
        ShardTensorSpec.of(input.mesh, grid_grad, grid.shape, grid.dtype),
    )


def _axis(image: AxisLayout, points: AxisLayout, grid: ShardTensorSpec) -> tuple[AxisLayout, ...]:
    """What one mesh axis does to image, points, samples and the gradients of image and points."""
    whole, pending = REPLICATE, PENDING_SUM
    if isinstance(image, Cut) and image.dim == 0:
        return (image,) * 5
    if isinstance(image, Cut) and image.dim == 1:
        return image, whole, image, image, pending
    if isinstance(points, Cut) and points.dim == 0:
        return (points,) * 5
    if isinstance(points, Cut) and points.dim < grid.ndim - 1 and points.outer == 1:
        return whole, points, points.moved(points.dim + 1), pending, points
    if isinstance(image, Cut) and image.outer == 1:
        sizes = resized_sizes(image.sizes, grid.shape[image.dim - 1])
        return whole, Cut(image.dim - 1, sizes), Cut(image.dim, sizes), pending, Cut(image.dim - 1, sizes)
    return (whole,) * 5


def grid_sample(dims: int, input: torch.Tensor, grid: torch.Tensor, *settings: Any) -> ShardTensor:
    mesh = mesh_of(input, grid)
    plan = _plan(spec_of(input, mesh), spec_of(grid, mesh))
    image, points = local_in(input, plan.input, mesh), local_in(grid, plan.grid, mesh)
    if 0 in plan.out.local_shape:
        return wrap(image.new_empty(plan.out.local_shape), plan.out)
    return wrap(FORWARD[dims](image, points, *settings).contiguous(), plan.out)


def grid_sample_backward(
    dims: int,
    grad_output: torch.Tensor,
    input: torch.Tensor,
    grid: torch.Tensor,
    interpolation_mode: int,
    padding_mode: int,
    align_corners: bool,
    output_mask: Sequence[bool],
) -> tuple[ShardTensor | None, ShardTensor | None]:
    mesh = mesh_of(grad_output, input, grid)
    plan = _plan(spec_of(input, mesh), spec_of(grid, mesh))
    grad = local_in(grad_output, plan.out.layout, mesh)
    image, points = local_in(input, plan.input, mesh), local_in(grid, plan.grid, mesh)
    found: list[Any] = [image.new_zeros(image.shape), points.new_zeros(points.shape)]
    if grad.numel():
        settings = (interpolation_mode, padding_mode, align_corners, output_mask)
        found = list(BACKWARD[dims](grad, image, points, *settings))
    specs = (plan.input_grad, plan.grid_grad)
    first, second = (wrap(g, s) if asked else None for g, s, asked in zip(found, specs, output_mask, strict=True))
    return first, second


@rule(aten.cudnn_grid_sampler.default)
def cudnn_grid_sampler(self: torch.Tensor, grid: torch.Tensor) -> ShardTensor:
    return grid_sample(2, self, grid, 0, 0, True)


@rule(aten.cudnn_grid_sampler_backward.default)
def cudnn_grid_sampler_backward(
    self: torch.Tensor, grid: torch.Tensor, grad_output: torch.Tensor
) -> tuple[ShardTensor | None, ShardTensor | None]:
    return grid_sample_backward(2, grad_output, self, grid, 0, 0, True, (True, True))


enter_by_dims(FORWARD, grid_sample)
enter_by_dims(BACKWARD, grid_sample_backward)

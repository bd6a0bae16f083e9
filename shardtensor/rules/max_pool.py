"""Max pooling with torch's global indices, its unpooling, and adaptive max pooling."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod

import torch

from shardtensor.errors import OpError
from shardtensor.rules.layouts import local_in, mesh_of, spec_of, uncut
from shardtensor.rules.stencil import Reach, resized_sizes, slide
from shardtensor.rules.windows import (
    WindowPlan,
    cut_dims,
    enter_by_dims,
    fetch_windows,
    format_of,
    meta_like,
    out_spec,
    per_dim,
    return_windows,
    slidable_layout,
)
from shardtensor.spec import ShardTensorSpec
from shardtensor.tensor import ShardTensor, wrap

__all__ = ["adaptive_max_pool", "max_pool", "max_unpool"]

aten = torch.ops.aten

FORWARD = {2: aten.max_pool2d_with_indices.default, 3: aten.max_pool3d_with_indices.default}
BACKWARD = {2: aten.max_pool2d_with_indices_backward.default, 3: aten.max_pool3d_with_indices_backward.default}
UNPOOL = {2: aten.max_unpool2d.default, 3: aten.max_unpool3d.default}
ADAPTIVE = {2: aten.adaptive_max_pool2d.default, 3: aten.adaptive_max_pool3d.default}
ADAPTIVE_BACKWARD = {2: aten.adaptive_max_pool2d_backward.default, 3: aten.adaptive_max_pool3d_backward.default}

_Numbers = tuple[int, ...]


@lru_cache(maxsize=1024)
def _plan(
    dims: int,
    spec: ShardTensorSpec,
    kernel: _Numbers,
    stride: _Numbers,
    padding: _Numbers,
    dilation: _Numbers,
    ceil_mode: bool,
) -> tuple[WindowPlan, _Numbers]:
    """The windows, and the padding that is left to the kernel."""
    first = spec.ndim - dims
    out, _ = FORWARD[dims](meta_like(spec), kernel, stride, padding, dilation, ceil_mode)
    input = spec.with_layout(slidable_layout(spec, first))
    reaches, left = [], list(padding)
    for axis, cut in cut_dims(input, first):
        place = cut.dim - first
        row = (kernel[place], stride[place], padding[place], dilation[place])
        out_sizes, windows = slide(cut.sizes, out.shape[cut.dim], *row)
        reaches.append(Reach(axis, cut.dim, cut.sizes, windows, out_sizes))
        left[place] = 0
    return WindowPlan(input, out_spec(input, reaches, out), tuple(reaches)), tuple(left)


def max_pool(
    dims: int,
    self: torch.Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    ceil_mode: bool = False,
) -> tuple[ShardTensor, ShardTensor]:
    mesh = mesh_of(self)
    args = per_dim(dims, kernel_size, stride or kernel_size, padding, dilation)
    plan, local_padding = _plan(dims, spec_of(self, mesh), *args, ceil_mode)
    local = local_in(self, plan.input.layout, mesh)
    window = fetch_windows(local, plan, _lowest(local.dtype))
    if plan.makes_nothing:
        shape = plan.out.local_shape
        return wrap(window.new_empty(shape), plan.out), wrap(window.new_empty(shape, dtype=torch.long), plan.out)
    values, indices = FORWARD[dims](window, args[0], args[1], local_padding, args[3], ceil_mode)
    indices = _to_global(indices, plan, dims, args[3])
    values, indices = (part.contiguous(memory_format=plan.out_format) for part in (values, indices))
    return wrap(values, plan.out), wrap(indices, plan.out)


def _lowest(dtype: torch.dtype) -> float:
    return float("-inf") if dtype.is_floating_point else float(torch.iinfo(dtype).min)


def _to_global(indices: torch.Tensor, plan: WindowPlan, dims: int, dilation: Sequence[int]) -> torch.Tensor:
    """Flat positions in this rank's window -> flat positions in the whole plane."""
    first = plan.input.ndim - dims
    return _moved(indices, plan.window_shape[first:], plan.input.shape[first:], plan.starts(first), dilation)


def _moved(
    indices: torch.Tensor,
    shape: Sequence[int],
    new_shape: Sequence[int],
    starts: Sequence[int],
    dilation: Sequence[int] | None = None,
) -> torch.Tensor:
    """Flat positions in ``shape`` -> flat positions in ``new_shape``, where the origin lies at ``starts``.

    A window of nothing but -inf names its first row, which may be one that was filled in front of the dim: torch names
    the first row inside, ``dilation`` steps on.
    """
    if not any(starts) and tuple(shape[1:]) == tuple(new_shape[1:]):
        return indices
    if tuple(shape[1:]) == tuple(new_shape[1:]) and not any(starts[1:]):
        inner = prod(shape[1:])
        indices = indices + starts[0] * inner
        if starts[0] < 0 and dilation is not None:
            indices = torch.where(indices < 0, indices.remainder(dilation[0] * inner), indices)
        return indices
    total, scale = torch.zeros_like(indices), 1
    for dim in reversed(range(len(shape))):
        row = indices % shape[dim] + starts[dim]
        if starts[dim] < 0 and dilation is not None:
            row = torch.where(row < 0, row.remainder(dilation[dim]), row)
        total += row * scale
        scale *= new_shape[dim]
        indices = indices // shape[dim]
    return total


def max_pool_backward(
    dims: int,
    grad_output: torch.Tensor,
    self: torch.Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
    indices: torch.Tensor,
) -> ShardTensor:
    mesh = mesh_of(grad_output, self, indices)
    args = per_dim(dims, kernel_size, stride or kernel_size, padding, dilation)
    plan, local_padding = _plan(dims, spec_of(self, mesh), *args, ceil_mode)
    grad = local_in(grad_output, plan.out.layout, mesh)
    places = local_in(indices, plan.out.layout, mesh)
    if plan.makes_nothing:
        window = grad.new_zeros(plan.window_shape)
    else:
        first = self.dim() - dims
        back = [-start for start in plan.starts(first)]
        places = _moved(places, plan.input.shape[first:], plan.window_shape[first:], back)
        shaped = grad.new_empty(plan.window_shape).contiguous(memory_format=plan.input_format)
        window = BACKWARD[dims](grad, shaped, args[0], args[1], local_padding, args[3], ceil_mode, places)
    return wrap(return_windows(window, plan).contiguous(memory_format=plan.input_format), plan.dense_input)


def max_unpool(
    dims: int,
    self: torch.Tensor,
    indices: torch.Tensor,
    output_size: Sequence[int],
    *_: Sequence[int],
) -> ShardTensor:
    """The values travel, not the larger result: every rank places those that belong into its own rows.

    What `max_unpool3d` takes beside, stride and padding, has no effect once the output's size is known.
    """
    mesh = mesh_of(self, indices)
    if self.shape != indices.shape:
        raise OpError(f"max_unpool: values {tuple(self.shape)} and indices {tuple(indices.shape)} must have one shape")
    plan, reaches = _unpool_plan(dims, spec_of(self, mesh), tuple(output_size))
    layout = slidable_layout(plan.input, 0, tuple(reach.dim for reach in reaches))
    values, places = local_in(self, layout, mesh), local_in(indices, layout, mesh)
    block, first = plan.out.local_shape, self.dim() - dims
    starts = [0] * dims
    for reach in reaches:
        starts[reach.dim - first] = reach.outputs(plan.coordinate[reach.axis])[0]
    _check_places(places, plan.out.shape[first:])
    target = _inside(places, plan.out.shape[first:], block[first:], starts)
    cells = prod(block[first:])
    filled = values.new_zeros((*block[:first], cells + 1))  # the last cell takes what belongs to other ranks
    filled.scatter_(-1, target.flatten(first), values.flatten(first))
    return wrap(filled[..., :cells].reshape(block).contiguous(memory_format=plan.out_format), plan.out)


@lru_cache(maxsize=1024)
def _unpool_plan(dims: int, spec: ShardTensorSpec, size: _Numbers) -> tuple[WindowPlan, tuple[Reach, ...]]:
    first = spec.ndim - dims
    if first < 1 or len(size) != dims:
        raise OpError(f"max_unpool: {tuple(spec.shape)} has no {dims} dims behind its channels to bring to {size}")
    # A shape to read off; torch's own shape inference takes seconds here.
    out = torch.empty((*spec.shape[:first], *size), dtype=spec.dtype, device="meta", memory_format=format_of(spec))
    input = spec.with_layout(slidable_layout(spec, first))
    cuts = cut_dims(input, first)
    reaches = [Reach(a, cut.dim, cut.sizes, (), resized_sizes(cut.sizes, out.shape[cut.dim])) for a, cut in cuts]
    return WindowPlan(input, out_spec(input, reaches, out), ()), tuple(reaches)


def _check_places(places: torch.Tensor, shape: Sequence[int]) -> None:
    if places.numel() and (places.min() < 0 or places.max() >= prod(shape)):
        found = int(places.min()), int(places.max())
        raise OpError(f"max_unpool: indices {found} lie outside an output plane of {tuple(shape)}; give output_size")


def _inside(places: torch.Tensor, shape: Sequence[int], block: Sequence[int], starts: Sequence[int]) -> torch.Tensor:
    """Flat positions in ``shape`` -> flat positions in the block at ``starts``; ``prod(block)`` for those outside."""
    target, scale = torch.zeros_like(places), 1
    fits = torch.ones_like(places, dtype=torch.bool)
    for dim in reversed(range(len(shape))):
        row = places % shape[dim] - starts[dim]
        fits &= (row >= 0) & (row < block[dim])
        target += row * scale
        scale *= block[dim]
        places = places // shape[dim]
    return torch.where(fits, target, prod(block))


def adaptive_max_pool(dims: int, self: ShardTensor, output_size: Sequence[int]) -> tuple[ShardTensor, ShardTensor]:
    """Windows may reach over all shards: the pooled dims are gathered, cuts of other dims stay."""
    first = self.dim() - dims
    meta = ADAPTIVE[dims](meta_like(self._spec), output_size)[0]
    gathered = uncut(self, range(first, self.dim()))
    spec, local = gathered._spec, gathered._local_tensor
    out = ShardTensorSpec.of(spec.mesh, spec.layout, meta.shape, spec.dtype, meta.stride())
    if 0 in local.shape:
        values, indices = local.new_empty(out.local_shape), local.new_empty(out.local_shape, dtype=torch.long)
    else:
        values, indices = ADAPTIVE[dims](local, output_size)
    return wrap(values, out), wrap(indices, out)


def adaptive_max_pool_backward(
    dims: int, grad_output: torch.Tensor, self: torch.Tensor, indices: torch.Tensor
) -> ShardTensor:
    mesh = mesh_of(grad_output, self, indices)
    layout = slidable_layout(spec_of(self, mesh), 0, tuple(range(self.dim() - dims, self.dim())))
    spec = ShardTensorSpec.of(mesh, layout, self.shape, self.dtype)
    grad, places = local_in(grad_output, layout, mesh), local_in(indices, layout, mesh)
    if 0 in spec.local_shape:
        return wrap(grad.new_zeros(spec.local_shape), spec)
    return wrap(ADAPTIVE_BACKWARD[dims](grad, grad.new_empty(spec.local_shape), places), spec)


enter_by_dims(FORWARD, max_pool)
enter_by_dims(BACKWARD, max_pool_backward)
enter_by_dims(UNPOOL, max_unpool)
enter_by_dims(ADAPTIVE, adaptive_max_pool)
enter_by_dims(ADAPTIVE_BACKWARD, adaptive_max_pool_backward)

"""Average pooling with windows of one size, and adaptive average pooling."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch

from shardtensor.rules.layouts import local_in, mesh_of, spec_of
from shardtensor.rules.spans import Spans, averaged, averaged_adjoint, make_spans
from shardtensor.rules.stencil import Reach, Rows, adaptive_spans, slide
from shardtensor.rules.windows import (
    WindowPlan,
    cut_dims,
    enter_by_dims,
    fetch_windows,
    meta_like,
    out_spec,
    per_dim,
    return_windows,
    slidable_layout,
)
from shardtensor.spec import ShardTensorSpec
from shardtensor.tensor import ShardTensor, wrap

__all__ = ["adaptive_avg_pool", "avg_pool"]

aten = torch.ops.aten

AVG = {2: aten.avg_pool2d.default, 3: aten.avg_pool3d.default}
AVG_BACKWARD = {2: aten.avg_pool2d_backward.default, 3: aten.avg_pool3d_backward.default}
ADAPTIVE = {2: aten._adaptive_avg_pool2d.default, 3: aten._adaptive_avg_pool3d.default}
ADAPTIVE_BACKWARD = {2: aten._adaptive_avg_pool2d_backward.default, 3: aten._adaptive_avg_pool3d_backward.default}


class _Geometry(NamedTuple):
    """Arguments of average pooling after the input; sequences have one entry per spatial dim."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    ceil_mode: bool
    count_include_pad: bool
    divisor_override: int | None

    def with_dims(self, changed: dict[int, tuple[int, int, int]]) -> _Geometry:
        """The geometry with (kernel, stride, padding) of some spatial dims changed."""
        rows = list(zip(self.kernel, self.stride, self.padding, strict=True))
        for place, row in changed.items():
            rows[place] = row
        kernel, stride, padding = zip(*rows, strict=True)
        return self._replace(kernel=kernel, stride=stride, padding=padding)

    def span(self, place: int, output: int, length: int) -> tuple[Rows, int]:
        """Input rows of an output along one dim, and what their sum is divided by."""
        start = output * self.stride[place] - self.padding[place]
        stop = min(start + self.kernel[place], length + self.padding[place])
        rows = max(start, 0), min(stop, length)
        if self.divisor_override is not None:
            return rows, 1
        return rows, stop - start if self.count_include_pad else rows[1] - rows[0]


class _Plan(NamedTuple):
    windows: WindowPlan
    spans: tuple[Spans, ...]
    local: _Geometry
    scales: tuple[tuple[int, int, float], ...]
    """(dim, row of this rank's output, factor) where the op counts other rows than the kernel on the window does."""


@lru_cache(maxsize=1024)
def _plan(dims: int, spec: ShardTensorSpec, geometry: _Geometry) -> _Plan:
    first = spec.ndim - dims
    out = AVG[dims](meta_like(spec), *geometry)
    whole_dims = () if spec.dtype.is_floating_point else tuple(range(first, spec.ndim))  # integers divide but once
    input = spec.with_layout(slidable_layout(spec, first, whole_dims))
    reaches, spans, local, scales = [], [], {}, []
    for axis, cut in cut_dims(input, first):
        place, length, count = cut.dim - first, spec.shape[cut.dim], out.shape[cut.dim]
        kernel, stride, padding = geometry.kernel[place], geometry.stride[place], geometry.padding[place]
        outputs = [geometry.span(place, output, length) for output in range(count)]
        if kernel > max(cut.sizes):
            rows, divisors = zip(*outputs, strict=True)
            spans.append(make_spans(axis, cut.dim, cut.sizes, rows, divisors))
            local[place] = (1, 1, 0)
            continue
        out_sizes, windows = slide(cut.sizes, count, kernel, stride, padding, 1)
        reaches.append(Reach(axis, cut.dim, cut.sizes, windows, out_sizes))
        local[place] = (kernel, stride, 0)
        begin, end = reaches[-1].outputs(input.coordinate[axis])
        for output in range(begin, end):
            if outputs[output][1] != kernel and geometry.divisor_override is None:
                scales.append((cut.dim, output - begin, kernel / outputs[output][1]))
    slid = [*reaches, *(item.reach for item in spans)]
    windows_plan = WindowPlan(input, out_spec(input, slid, out), tuple(reaches), tuple(item.reach for item in spans))
    return _Plan(windows_plan, tuple(spans), geometry.with_dims(local), tuple(scales))


def _geometry(
    dims: int, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int], *rest: bool | int | None
) -> _Geometry:
    return _Geometry(*per_dim(dims, kernel, stride or kernel, padding), *rest)  # type: ignore[arg-type]


def _scaled(block: torch.Tensor, scales: tuple[tuple[int, int, float], ...]) -> torch.Tensor:
    for dim, row, factor in scales:
        block.select(dim, row).mul_(factor)
    return block


def avg_pool(
    dims: int,
    self: torch.Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> ShardTensor:
    mesh = mesh_of(self)
    geometry = _geometry(dims, kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override)
    plan, spans, local, scales = _plan(dims, spec_of(self, mesh), geometry)
    window = fetch_windows(local_in(self, plan.input.layout, mesh), plan)
    result = window.new_empty(plan.made_shape) if plan.makes_nothing else _scaled(AVG[dims](window, *local), scales)
    for item in spans:
        result = averaged(result, item, mesh, plan.coordinate[item.reach.axis])
    return wrap(result.contiguous(memory_format=plan.out_format), plan.out)


def avg_pool_backward(
    dims: int,
    grad_output: torch.Tensor,
    self: torch.Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None,
) -> ShardTensor:
    mesh = mesh_of(grad_output, self)
    geometry = _geometry(dims, kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override)
    plan, spans, local, scales = _plan(dims, spec_of(self, mesh), geometry)
    grad = local_in(grad_output, plan.out.layout, mesh)
    for item in reversed(spans):
        grad = averaged_adjoint(grad, item, mesh, plan.coordinate[item.reach.axis])
    if plan.makes_nothing:
        found = grad.new_zeros(plan.window_shape)
    else:
        grad = _scaled(grad.clone(memory_format=torch.contiguous_format), scales) if scales else grad
        shaped = grad.new_empty(plan.window_shape).contiguous(memory_format=plan.input_format)
        found = AVG_BACKWARD[dims](grad, shaped, *local)
    return wrap(return_windows(found, plan).contiguous(memory_format=plan.input_format), plan.dense_input)


@lru_cache(maxsize=1024)
def _adaptive_plan(dims: int, spec: ShardTensorSpec, size: tuple[int, ...]) -> tuple[WindowPlan, tuple[Spans, ...]]:
    first = spec.ndim - dims
    out = ADAPTIVE[dims](meta_like(spec), size)
    input = spec.with_layout(slidable_layout(spec, first))
    spans = []
    for axis, cut in cut_dims(input, first):
        rows = adaptive_spans(spec.shape[cut.dim], out.shape[cut.dim])
        spans.append(make_spans(axis, cut.dim, cut.sizes, rows, [stop - start for start, stop in rows]))
    reaches = tuple(item.reach for item in spans)
    return WindowPlan(input, out_spec(input, reaches, out), (), reaches), tuple(spans)


def adaptive_avg_pool(dims: int, self: torch.Tensor, output_size: Sequence[int]) -> ShardTensor:
    mesh = mesh_of(self)
    plan, spans = _adaptive_plan(dims, spec_of(self, mesh), tuple(output_size))
    block = local_in(self, plan.input.layout, mesh)
    # Dims averaged afterwards keep their rows here: adaptive pooling to a dim's own length does nothing.
    shape = plan.made_shape
    result = block.new_empty(shape) if plan.makes_nothing else ADAPTIVE[dims](block, shape[-dims:])
    for item in spans:
        result = averaged(result, item, mesh, plan.coordinate[item.reach.axis])
    return wrap(result.contiguous(memory_format=plan.out_format), plan.out)


def adaptive_avg_pool_backward(dims: int, grad_output: torch.Tensor, self: torch.Tensor) -> ShardTensor:
    mesh = mesh_of(grad_output, self)
    plan, spans = _adaptive_plan(dims, spec_of(self, mesh), tuple(grad_output.shape[-dims:]))
    grad = local_in(grad_output, plan.out.layout, mesh)
    for item in reversed(spans):
        grad = averaged_adjoint(grad, item, mesh, plan.coordinate[item.reach.axis])
    if plan.makes_nothing:
        found = grad.new_zeros(plan.window_shape)
    else:
        found = ADAPTIVE_BACKWARD[dims](grad, grad.new_empty(plan.window_shape))
    return wrap(found.contiguous(memory_format=plan.input_format), plan.dense_input)


enter_by_dims(AVG, avg_pool)
enter_by_dims(AVG_BACKWARD, avg_pool_backward)
enter_by_dims(ADAPTIVE, adaptive_avg_pool)
enter_by_dims(ADAPTIVE_BACKWARD, adaptive_avg_pool_backward)

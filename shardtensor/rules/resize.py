"""Resizing: nearest, linear and cubic interpolation in 1, 2 and 3 dims, in the coordinates of the whole tensor."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch

from shardtensor.errors import OpError
from shardtensor.registry import rule
from shardtensor.rules.layouts import local_in, mesh_of, spec_of
from shardtensor.rules.stencil import Reach, resized_sizes
from shardtensor.rules.taps import TAPS, Sampling, Taps, source_rows
from shardtensor.rules.windows import (
    WindowPlan,
    cut_dims,
    fetch_windows,
    format_of,
    out_spec,
    return_windows,
    slidable_layout,
)
from shardtensor.spec import Cut, ShardTensorSpec
from shardtensor.tensor import ShardTensor, wrap

__all__ = ["resize", "resize_backward"]

aten = torch.ops.aten

# (mode, forward, backward) by number of spatial dims.
OPS = {
    1: (
        ("nearest", aten.upsample_nearest1d, aten.upsample_nearest1d_backward),
        ("nearest-exact", aten._upsample_nearest_exact1d, aten._upsample_nearest_exact1d_backward),
        ("linear", aten.upsample_linear1d, aten.upsample_linear1d_backward),
    ),
    2: (
        ("nearest", aten.upsample_nearest2d, aten.upsample_nearest2d_backward),
        ("nearest-exact", aten._upsample_nearest_exact2d, aten._upsample_nearest_exact2d_backward),
        ("linear", aten.upsample_bilinear2d, aten.upsample_bilinear2d_backward),
        ("cubic", aten.upsample_bicubic2d, aten.upsample_bicubic2d_backward),
    ),
    3: (
        ("nearest", aten.upsample_nearest3d, aten.upsample_nearest3d_backward),
        ("nearest-exact", aten._upsample_nearest_exact3d, aten._upsample_nearest_exact3d_backward),
        ("linear", aten.upsample_trilinear3d, aten.upsample_trilinear3d_backward),
    ),
}


class _Op(NamedTuple):
    """One aten op of the table, forward and backward."""

    mode: str
    dims: int
    forward: Any
    backward: Any

    def settings(self, rest: Sequence[Any]) -> tuple[bool, tuple[float | None, ...]]:
        """align_corners and one scale a dim, from the arguments after the sizes."""
        if self.mode.startswith("nearest"):
            return False, (*rest, *(None,) * (self.dims - len(rest)))
        return bool(rest[0]), (*rest[1:], *(None,) * (self.dims + 1 - len(rest)))

    def arguments(self, align_corners: bool, scales: Sequence[float | None]) -> tuple[Any, ...]:
        """What `settings` took apart."""
        return tuple(scales) if self.mode.startswith("nearest") else (align_corners, *scales)


class _Plan(NamedTuple):
    windows: WindowPlan
    taps: tuple[Taps, ...]
    """Dims resized by weighted sums; the kernel leaves them alone."""
    kernel_shape: tuple[int, ...]
    """Spatial shape that the kernel makes, or none where taps do all."""
    scales: tuple[float | None, ...]
    trims: tuple[tuple[int, int, int], ...]
    """(dim, start, length) of this rank's outputs in what the kernel makes."""

    @property
    def tapped_shape(self) -> torch.Size:
        """Shape of the block after the taps."""
        shape = list(self.windows.window_shape)
        for item in self.taps:
            shape[item.dim] = item.outputs[1] - item.outputs[0]
        return torch.Size(shape)


@lru_cache(maxsize=1024)
def _plan(
    op: _Op, spec: ShardTensorSpec, size: tuple[int, ...], align: bool, scales: tuple[float | None, ...]
) -> _Plan:
    out = _made(op, spec, size)
    # Integers are rounded once, after all dims: only nearest neighbours can be taken dim by dim.
    exact = spec.dtype.is_floating_point or op.mode.startswith("nearest")
    input = spec.with_layout(slidable_layout(spec, 2, () if exact else tuple(range(2, spec.ndim))))
    kernel_shape, left, reaches, taps, trims = list(size), list(scales), [], [], []
    for axis, cut in cut_dims(input, 2):
        place, rank = cut.dim - 2, input.coordinate[axis]
        sampling = Sampling(op.mode, spec.shape[cut.dim], size[place], align, scales[place])
        reach = Reach(axis, cut.dim, cut.sizes, (), resized_sizes(cut.sizes, size[place]))
        halo = _shift_halo(sampling)
        if halo is not None:
            reach = _shifted(reach, sampling, halo)
            factor, window, outputs = sampling.whole_factor, reach.windows[rank], reach.outputs(rank)
            kernel_shape[place] = factor * (window[1] - window[0])
            trims.append((cut.dim, outputs[0] - factor * window[0], outputs[1] - outputs[0]))
        else:
            ranks = range(len(cut.sizes))
            reach = Reach(
                axis, cut.dim, cut.sizes, tuple(source_rows(sampling, reach.outputs(r)) for r in ranks), reach.out_sizes
            )
            taps.append(Taps(sampling, cut.dim, reach.outputs(rank), reach.windows[rank]))
        reaches.append(reach)
    if taps and op.mode == "cubic":  # the kernel would spread NaN along dims that it leaves alone
        taps += [
            Taps(Sampling(op.mode, n, m, align, s), dim, (0, m), (0, n))
            for dim, (n, m, s) in enumerate(zip(spec.shape[2:], size, scales, strict=True), 2)
            if dim not in {reach.dim for reach in reaches}
        ]
    for item in taps:
        kernel_shape[item.dim - 2], left[item.dim - 2] = item.outputs[1] - item.outputs[0], None
    windows = WindowPlan(input, out_spec(input, reaches, out), tuple(reaches))
    done = len(taps) == op.dims
    return _Plan(windows, tuple(taps), () if done else tuple(kernel_shape), tuple(left), tuple(trims))


def _made(op: _Op, spec: ShardTensorSpec, size: tuple[int, ...]) -> torch.Tensor:
    """A tensor without data like the whole output. (The plain ops themselves take up to 0.7 s for this.)"""
    if spec.ndim != op.dims + 2 or len(size) != op.dims or min(size) < 1 or 0 in spec.shape[1:]:
        raise OpError(
            f"{op.forward}: cannot resize {tuple(spec.shape)} to {size}: it takes {op.dims} dims behind batch and "
            f"channels, with rows to read and to make"
        )
    return torch.empty((*spec.shape[:2], *size), dtype=spec.dtype, device="meta", memory_format=format_of(spec))


def _shift_halo(sampling: Sampling) -> int | None:
    """Rows beyond its own that the plain kernel needs on a rank's rows, or None where it has other coordinates there.

    With a whole factor, a run of rows is resized as it would be inside the whole, but for the rows next to its ends;
    factors that are powers of two make every coordinate exact, so that it does not matter from where rows are counted.
    """
    factor = sampling.whole_factor
    if not factor:
        return None
    if TAPS[sampling.mode] == 1:
        return 0 if _rounds_up(factor) else None
    return TAPS[sampling.mode] // 2 if factor & (factor - 1) == 0 else None


def _rounds_up(factor: int) -> bool:
    """Whether 1 / factor is not rounded down: ``row * (1 / factor)`` then never falls below a whole number."""
    single = struct.unpack("f", struct.pack("f", 1 / factor))[0]
    return single * factor >= 1 and (1 / factor) * factor >= 1


def _shifted(reach: Reach, sampling: Sampling, halo: int) -> Reach:
    windows = []
    for start, stop in (reach.outputs(rank) for rank in range(len(reach.sizes))):
        first, last = start // sampling.whole_factor, stop // sampling.whole_factor
        windows.append((max(first - halo, 0), min(last + halo, sampling.length)) if stop > start else (first, first))
    return Reach(reach.axis, reach.dim, reach.sizes, tuple(windows), reach.out_sizes)


def resize(op: _Op, self: torch.Tensor, output_size: Sequence[int], *rest: Any) -> ShardTensor:
    mesh = mesh_of(self)
    align, scales = op.settings(rest)
    plan = _plan(op, spec_of(self, mesh), tuple(output_size), align, scales)
    windows = plan.windows
    block = fetch_windows(local_in(self, windows.input.layout, mesh), windows)
    if windows.makes_nothing:
        return wrap(block.new_empty(windows.out.local_shape), windows.out)
    half = bool(plan.taps) and block.dtype in (torch.bfloat16, torch.float16)
    found = block.float() if half else block
    for item in plan.taps:
        found = item.apply(found)
    if plan.kernel_shape:
        found = op.forward.default(found, plan.kernel_shape, *op.arguments(align, plan.scales))
    for dim, start, length in plan.trims:
        found = found.narrow(dim, start, length)
    found = found.to(block.dtype) if half else found
    return wrap(found.contiguous(memory_format=windows.out_format), windows.out)


def resize_backward(
    op: _Op, grad_output: torch.Tensor, output_size: Sequence[int], input_size: Sequence[int], *rest: Any
) -> ShardTensor:
    mesh = mesh_of(grad_output)
    align, scales = op.settings(rest)
    input = _input_spec(spec_of(grad_output, mesh), tuple(input_size))
    plan = _plan(op, input, tuple(output_size), align, scales)
    windows = plan.windows
    grad = local_in(grad_output, windows.out.layout, mesh)
    found = grad.new_zeros(windows.window_shape) if windows.makes_nothing else _local_backward(op, plan, grad, align)
    return wrap(return_windows(found, windows).contiguous(memory_format=windows.input_format), windows.dense_input)


def _local_backward(op: _Op, plan: _Plan, grad: torch.Tensor, align: bool) -> torch.Tensor:
    dtype = grad.dtype
    if plan.taps and dtype in (torch.bfloat16, torch.float16):
        grad = grad.float()
    for dim, start, length in plan.trims:
        end = plan.kernel_shape[dim - 2] - start - length
        grad = torch.nn.functional.pad(grad, [0, 0] * (grad.dim() - 1 - dim) + [start, end])
    if plan.kernel_shape:
        arguments = op.arguments(align, plan.scales)
        grad = op.backward.default(grad, plan.kernel_shape, plan.tapped_shape, *arguments)
    for item in reversed(plan.taps):
        grad = item.adjoint(grad)
    return grad.to(dtype)


@lru_cache(maxsize=1024)
def _input_spec(grad: ShardTensorSpec, shape: tuple[int, ...]) -> ShardTensorSpec:
    """The input's spec, which a backward op is not given: cut where the gradient is, its edges in proportion."""
    layout = list(slidable_layout(grad, 2))
    for axis, entry in enumerate(layout):
        if isinstance(entry, Cut) and entry.dim >= 2:
            layout[axis] = Cut(entry.dim, resized_sizes(entry.sizes, shape[entry.dim]))
    return ShardTensorSpec.of(grad.mesh, tuple(layout), shape, grad.dtype)


def _enter_table() -> None:
    for dims, rows in OPS.items():
        for mode, forward, backward in rows:
            op = _Op(mode, dims, forward, backward)
            for aten_op, function in ((forward.default, resize), (backward.default, resize_backward)):
                entry = partial(function, op)
                entry.__module__ = __name__
                rule(aten_op)(entry)


_enter_table()

"""Shuffles: pixels between channels and rows, and channels among themselves."""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any

import torch

from shardtensor.registry import rule
from shardtensor.rules.layouts import local_in, mesh_of, spec_of
from shardtensor.rules.stencil import Reach
from shardtensor.rules.windows import WindowPlan, cut_dims, meta_like, out_spec, slidable_layout
from shardtensor.spec import Cut, Layout, ShardTensorSpec
from shardtensor.tensor import ShardTensor, wrap

__all__ = ["channel_shuffle", "pixel_shuffle", "pixel_unshuffle"]

aten = torch.ops.aten


def _with_sizes(layout: Layout, sizes: dict[int, tuple[int, ...]]) -> Layout:
    """The layout with the cuts of some mesh axes resized."""
    return tuple(
        Cut(entry.dim, sizes[axis]) if axis in sizes and isinstance(entry, Cut) else entry
        for axis, entry in enumerate(layout)
    )


def _run(op: Any, self: torch.Tensor, plan: WindowPlan, *args: Any) -> ShardTensor:
    block = local_in(self, plan.input.layout, plan.input.mesh)
    if plan.makes_nothing:
        return wrap(block.new_empty(plan.out.local_shape), plan.out)
    return wrap(op(block, *args).contiguous(memory_format=plan.out_format), plan.out)


@lru_cache(maxsize=256)
def _shuffle_plan(spec: ShardTensorSpec, factor: int) -> WindowPlan:
    out = aten.pixel_shuffle.default(meta_like(spec), factor)
    input = spec.with_layout(slidable_layout(spec, spec.ndim - 2, (spec.ndim - 3,)))
    reaches = [
        Reach(axis, cut.dim, cut.sizes, (), tuple(size * factor for size in cut.sizes))
        for axis, cut in cut_dims(input, spec.ndim - 2)
    ]
    return WindowPlan(input, out_spec(input, reaches, out), ())


@rule(aten.pixel_shuffle.default)
def pixel_shuffle(self: torch.Tensor, upscale_factor: int) -> ShardTensor:
    plan = _shuffle_plan(spec_of(self, mesh_of(self)), upscale_factor)
    return _run(aten.pixel_shuffle.default, self, plan, upscale_factor)


@lru_cache(maxsize=256)
def _unshuffle_plan(spec: ShardTensorSpec, factor: int) -> WindowPlan:
    out = aten.pixel_unshuffle.default(meta_like(spec), factor)
    input = spec.with_layout(slidable_layout(spec, spec.ndim - 2, (spec.ndim - 3,)))
    cuts = cut_dims(input, spec.ndim - 2)
    # Shards start at multiples of the factor: edges move to the next one.
    sizes = {
        axis: tuple(
            stop - start
            for start, stop in pairwise(-(-edge // factor) * factor for edge in (0, *accumulate(cut.sizes)))
        )
        for axis, cut in cuts
    }
    input = input.with_layout(_with_sizes(input.layout, sizes))
    reaches = [Reach(axis, cut.dim, sizes[axis], (), tuple(n // factor for n in sizes[axis])) for axis, cut in cuts]
    return WindowPlan(input, out_spec(input, reaches, out), ())


@rule(aten.pixel_unshuffle.default)
def pixel_unshuffle(self: torch.Tensor, downscale_factor: int) -> ShardTensor:
    plan = _unshuffle_plan(spec_of(self, mesh_of(self)), downscale_factor)
    return _run(aten.pixel_unshuffle.default, self, plan, downscale_factor)


@lru_cache(maxsize=256)
def _channel_plan(spec: ShardTensorSpec, groups: int) -> WindowPlan:
    out = aten.channel_shuffle.default(meta_like(spec), groups)
    input = spec.with_layout(slidable_layout(spec, spec.ndim, (1,)))
    return WindowPlan(input, out_spec(input, (), out), ())


@rule(aten.channel_shuffle.default, aten.native_channel_shuffle.default)
def channel_shuffle(self: torch.Tensor, groups: int) -> ShardTensor:
    return _run(aten.channel_shuffle.default, self, _channel_plan(spec_of(self, mesh_of(self)), groups), groups)

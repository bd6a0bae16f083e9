"""Antialiased resizing: its kernel reads rows from afar, so they are gathered, and the result is cut again."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any

import torch

from shardtensor.redistribute import redistribute_local
from shardtensor.registry import rule
from shardtensor.rules.layouts import local_in, mesh_of, spec_of
from shardtensor.rules.stencil import resized_sizes
from shardtensor.rules.windows import meta_like, slidable_layout
from shardtensor.spec import Cut, Layout, ShardTensorSpec, contiguous_stride
from shardtensor.tensor import ShardTensor, wrap

__all__ = ["antialiased", "antialiased_backward"]

aten = torch.ops.aten

OPS = (
    (aten._upsample_bilinear2d_aa.default, aten._upsample_bilinear2d_aa_backward.default),
    (aten._upsample_bicubic2d_aa.default, aten._upsample_bicubic2d_aa_backward.default),
)


@lru_cache(maxsize=256)
def _layouts(spec: ShardTensorSpec, shape: tuple[int, ...]) -> tuple[Layout, Layout]:
    """How the kernel's input must lie, and how its result of ``shape`` is handed on."""
    cut = list(slidable_layout(spec, 2))
    for axis, entry in enumerate(cut):
        if isinstance(entry, Cut) and entry.dim >= 2:
            cut[axis] = Cut(entry.dim, resized_sizes(entry.sizes, shape[entry.dim]))
    return slidable_layout(spec, 2, (2, 3)), tuple(cut)


def _on_gathered(
    op: Any, tensor: torch.Tensor, shape: Sequence[int], stride: tuple[int, ...], *args: Any
) -> ShardTensor:
    mesh = mesh_of(tensor)
    spec = spec_of(tensor, mesh)
    gathered, cut = _layouts(spec, tuple(shape))
    block = local_in(tensor, gathered, mesh)
    made = ShardTensorSpec.of(mesh, gathered, shape, spec.dtype, stride)
    result = op(block, *args) if block.numel() else block.new_empty(made.local_shape)
    part = redistribute_local(result, made, cut)
    return wrap(part.clone() if part is not result else part, made.with_layout(cut))


def antialiased(op: Any, self: torch.Tensor, output_size: Sequence[int], *rest: Any) -> ShardTensor:
    out = op(meta_like(spec_of(self, mesh_of(self))), output_size, *rest)
    return _on_gathered(op, self, out.shape, out.stride(), output_size, *rest)


def antialiased_backward(
    op: Any, grad_output: torch.Tensor, output_size: Sequence[int], input_size: Sequence[int], *rest: Any
) -> ShardTensor:
    def on_block(grad: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = op(grad, output_size, [*grad.shape[:2], *input_size[2:]], *rest)
        return result

    return _on_gathered(on_block, grad_output, input_size, contiguous_stride(input_size))


def _enter_table() -> None:
    for forward, backward in OPS:
        for op, function in ((forward, antialiased), (backward, antialiased_backward)):
            entry = partial(function, op)
            entry.__module__ = __name__
            rule(op)(entry)


_enter_table()

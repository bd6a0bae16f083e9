"""Copies side by side: repeat, and tile, which ends here too."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch

from shardtensor.registry import rule
from shardtensor.rules.layouts import replicated_result, whole
from shardtensor.spec import Cut, ShardTensorSpec
from shardtensor.tensor import ShardTensor, wrap

__all__ = ["repeat"]

aten = torch.ops.aten


@lru_cache(maxsize=1024)
def _repeated(spec: ShardTensorSpec, repeats: tuple[int, ...]) -> ShardTensorSpec:
    """Repeats of a cut dim are an outer factor of its cut: [times, rows]."""
    ahead = len(repeats) - spec.ndim
    shape = [times * length for times, length in zip(repeats, (1,) * ahead + tuple(spec.shape), strict=True)]
    layout = tuple(
        Cut(entry.dim + ahead, entry.sizes, entry.outer * repeats[entry.dim + ahead])
        if isinstance(entry, Cut)
        else entry
        for entry in spec.layout
    )
    return ShardTensorSpec.of(spec.mesh, layout, shape, spec.dtype)


@rule(aten.repeat.default)
def repeat(self: ShardTensor, repeats: Sequence[int]) -> ShardTensor:
    """``x.repeat(...)`` and ``x.tile(...)``: each rank repeats its own rows."""
    if 0 in repeats:
        return replicated_result(whole(self, self._spec.mesh).repeat(tuple(repeats)), self._spec.mesh)
    return wrap(self._local_tensor.repeat(tuple(repeats)), _repeated(self._spec, tuple(repeats)))

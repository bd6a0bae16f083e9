"""Triangles of matrices: each block knows how far it lies from the whole matrix's diagonal."""

from __future__ import annotations

import torch

from shardtensor.registry import rule
from shardtensor.rules.layouts import resolved
from shardtensor.rules.slices import one_cut
from shardtensor.rules.writing import write_back
from shardtensor.spec import ShardTensorSpec
from shardtensor.tensor import ShardTensor, wrap

__all__ = ["tril", "triu"]

aten = torch.ops.aten


def _triangle(op: torch._ops.OpOverload, tensor: ShardTensor, diagonal: int) -> ShardTensor:
    rows, columns = tensor._spec.ndim - 2, tensor._spec.ndim - 1
    tensor = one_cut(one_cut(resolved(tensor), rows), columns)
    spec = tensor._spec
    starts = {rows: 0, columns: 0}
    for axis, cut in spec.cuts:
        if cut.dim in starts:
            starts[cut.dim] = sum(cut.sizes[: spec.coordinate[axis]])
    local = op(tensor._local_tensor, diagonal + starts[rows] - starts[columns])
    return wrap(local, ShardTensorSpec.of(spec.mesh, spec.layout, spec.shape, spec.dtype))


@rule(aten.tril.default)
def tril(self: ShardTensor, diagonal: int = 0) -> ShardTensor:
    """The lower triangle of [..., rows, columns], zeros elsewhere."""
    return _triangle(aten.tril.default, self, diagonal)


@rule(aten.triu.default)
def triu(self: ShardTensor, diagonal: int = 0) -> ShardTensor:
    """The upper triangle of [..., rows, columns], zeros elsewhere."""
    return _triangle(aten.triu.default, self, diagonal)


@rule(aten.tril_.default)
def tril_(self: ShardTensor, diagonal: int = 0) -> torch.Tensor:
    return write_back(self, tril(self, diagonal))


@rule(aten.triu_.default)
def triu_(self: ShardTensor, diagonal: int = 0) -> torch.Tensor:
    return write_back(self, triu(self, diagonal))

"""Ops that are indexing by another name: index_fill, index_copy, take, put."""

from __future__ import annotations

import torch

from shardtensor.registry import rule
from shardtensor.rules.index import index as indexed
from shardtensor.rules.index import index_put
from shardtensor.rules.view import reshaped
from shardtensor.rules.writing import write_back
from shardtensor.tensor import ShardTensor

__all__ = ["index_copy", "index_fill", "put", "take"]

aten = torch.ops.aten


def _along(tensor: torch.Tensor, dim: int, index: torch.Tensor) -> list[torch.Tensor | None]:
    """The key ``[:, ..., index]`` for one dim."""
    return [None] * (dim % max(tensor.dim(), 1)) + [aten.view.default(index, (-1,))]


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return reshaped(tensor, (-1,)) if isinstance(tensor, ShardTensor) else tensor.reshape(-1)


@rule(aten.index_copy.default)
def index_copy(self: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor) -> ShardTensor:
    """A copy with the rows of ``source`` in the numbered rows of ``dim``."""
    return index_put(self, _along(self, dim, index), source)


@rule(aten.index_fill.int_Tensor)
def index_fill(self: torch.Tensor, dim: int, index: torch.Tensor, value: torch.Tensor) -> ShardTensor:
    """A copy with one value in the numbered rows of ``dim``."""
    return index_put(self, _along(self, dim, index), value)


@rule(aten.index_fill.int_Scalar)
def index_fill_number(self: torch.Tensor, dim: int, index: torch.Tensor, value: float) -> ShardTensor:
    return index_fill(self, dim, index, torch.tensor(value, dtype=self.dtype, device=self.device))


@rule(aten.take.default)
def take(self: torch.Tensor, index: torch.Tensor) -> ShardTensor:
    """Elements by their number in the flattened tensor."""
    return indexed(_flat(self), [index])


@rule(aten.put.default)
def put(self: torch.Tensor, index: torch.Tensor, source: torch.Tensor, accumulate: bool = False) -> ShardTensor:
    """A copy with the elements of ``source`` at their numbers in the flattened tensor, or added there."""
    values = aten.view.default(source.contiguous(), index.shape)
    return reshaped(index_put(_flat(self), [index], values, accumulate), self.shape)


@rule(aten.index_copy_.default)
def index_copy_(self: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    return write_back(self, index_copy(self, dim, index, source))


@rule(aten.index_fill_.int_Tensor)
def index_fill_(self: torch.Tensor, dim: int, index: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return write_back(self, index_fill(self, dim, index, value))


@rule(aten.index_fill_.int_Scalar)
def index_fill_number_(self: torch.Tensor, dim: int, index: torch.Tensor, value: float) -> torch.Tensor:
    return write_back(self, index_fill_number(self, dim, index, value))


@rule(aten.put_.default)
def put_(self: torch.Tensor, index: torch.Tensor, source: torch.Tensor, accumulate: bool = False) -> torch.Tensor:
    return write_back(self, put(self, index, source, accumulate))

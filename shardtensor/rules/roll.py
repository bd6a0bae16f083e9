"""Ops that move rows elsewhere: roll, flip, rot90. Along a cut dim each rank fetches the rows of its new block."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch

from shardtensor import comm
from shardtensor.registry import rule
from shardtensor.rules.dims import transpose
from shardtensor.rules.layouts import resolved
from shardtensor.rules.slices import one_cut
from shardtensor.rules.view import reshaped
from shardtensor.spec import Cut, ShardTensorSpec
from shardtensor.tensor import ShardTensor, wrap

__all__ = ["fetched"]

aten = torch.ops.aten


def fetched(
    local: torch.Tensor, spec: ShardTensorSpec, axis: int, windows: Sequence[tuple[int, int]], periodic: bool = False
) -> torch.Tensor:
    """This rank's window of the dim that mesh axis ``axis`` cuts into consecutive rows."""
    cut = spec.layout[axis]
    assert isinstance(cut, Cut)
    return comm.halo_exchange(local, cut.dim, cut.sizes, windows, comm.group_of(spec.mesh, axis), periodic=periodic)


def _dense(tensor: ShardTensor) -> ShardTensorSpec:
    spec = tensor._spec
    return ShardTensorSpec.of(spec.mesh, spec.layout, spec.shape, spec.dtype)


@rule(aten.flip.default)
def flip(self: ShardTensor, dims: Sequence[int]) -> ShardTensor:
    """Rows in opposite order; the sizes of the shards stay."""
    turned = [dim % max(self._spec.ndim, 1) for dim in dims]
    self = resolved(self)
    for dim in turned:
        self = one_cut(self, dim) if self._spec.ndim else self
    spec, local = self._spec, self._local_tensor
    for axis, cut in spec.cuts:
        if cut.dim in turned:
            length = spec.shape[cut.dim]
            edges = [0, *accumulate(cut.sizes)]
            local = fetched(local, spec, axis, [(length - stop, length - start) for start, stop in pairwise(edges)])
    return wrap(local.flip(tuple(dims)), _dense(self))


@rule(aten.roll.default)
def roll(self: ShardTensor, shifts: Sequence[int], dims: Sequence[int] = ()) -> ShardTensor:
    """Rows moved by ``shifts``, those that leave at the end coming in at the start."""
    if not dims:
        return reshaped(roll(reshaped(self, (-1,)), shifts, (0,)), self.shape)
    self = resolved(self)
    moves: dict[int, int] = {}
    for shift, dim in zip(shifts, dims, strict=True):
        dim = dim % self._spec.ndim
        moves[dim] = moves.get(dim, 0) + shift
        self = one_cut(self, dim)
    spec, local = self._spec, self._local_tensor
    for axis, cut in spec.cuts:
        length = spec.shape[cut.dim]
        shift = moves.pop(cut.dim, 0) % max(length, 1)
        if shift:
            edges = [0, *accumulate(cut.sizes)]
            windows = [(start - shift, stop - shift) for start, stop in pairwise(edges)]
            local = fetched(local, spec, axis, windows, periodic=True)
    if moves:
        local = local.roll(tuple(moves.values()), tuple(moves))
    elif local is self._local_tensor:
        local = local.clone(memory_format=torch.contiguous_format)
    return wrap(local, _dense(self))


@rule(aten.rot90.default)
def rot90(self: ShardTensor, k: int = 1, dims: Sequence[int] = (0, 1)) -> ShardTensor:
    """A plane turned ``k`` times by 90 degrees."""
    one, other = (dim % self._spec.ndim for dim in dims)
    turns = k % 4
    if turns == 2:
        return flip(self, (one, other))
    if not turns:
        return wrap(self._local_tensor.clone(), self._spec)
    turned = transpose(self, one, other)
    return flip(turned, (one,) if turns == 1 else (other,))

"""Largest and smallest values, and where they are: each block's own candidate, then the best of the ranks'."""

from __future__ import annotations

from functools import lru_cache

import torch

from shardtensor import comm
from shardtensor.redistribute import redistribute_local
from shardtensor.registry import rule
from shardtensor.rules.layouts import resolved
from shardtensor.rules.reduction import Dims, Reduced, reduce_over, reduced
from shardtensor.spec import REPLICATE, Cut, Layout, ShardTensorSpec, mesh_sizes, replicate
from shardtensor.tensor import ShardTensor, wrap

__all__ = ["highest", "lowest"]

aten = torch.ops.aten

_NOWHERE = torch.iinfo(torch.int64).max


def worst(dtype: torch.dtype, op: str) -> float | int | bool:
    """The value that every other beats under ``op`` ("max" or "min")."""
    if dtype == torch.bool:
        return op == "min"
    if dtype.is_floating_point:
        return float("-inf") if op == "max" else float("inf")
    info = torch.iinfo(dtype)
    return info.min if op == "max" else info.max


# Values ------------------------------------------------------------------------------------------------------------


def _extreme(tensor: ShardTensor, dims: Dims, keepdim: bool, op: str) -> ShardTensor:
    block = resolved(tensor)
    local = block._local_tensor
    plan = reduced(block._spec, dims, keepdim)
    function = torch.amax if op == "max" else torch.amin
    if not plan.axes or not plan.elements:
        return wrap(function(local, plan.dims, keepdim), plan.spec)
    if local.numel():
        part = function(local, plan.dims, keepdim)
    else:
        part = local.new_full(plan.spec.local_shape, worst(local.dtype, op))
    if not local.dtype.is_floating_point:
        return wrap(reduce_over(part, plan.spec, plan.axes, op), plan.spec)
    # Backends may lose a nan in max and min: send a mark beside the values.
    missing = part.isnan()
    mark = missing.to(part.dtype) if op == "max" else -missing.to(part.dtype)
    packed = torch.stack((part.masked_fill(missing, worst(part.dtype, op)), mark))
    values, marks = reduce_over(packed, plan.spec, plan.axes, op)
    return wrap(values.masked_fill(marks != 0, torch.nan), plan.spec)


def highest(tensor: ShardTensor, dims: Dims = None, keepdim: bool = False) -> ShardTensor:
    """The largest values over ``dims`` (None: all), on every rank."""
    return _extreme(tensor, dims, keepdim, "max")


def lowest(tensor: ShardTensor, dims: Dims = None, keepdim: bool = False) -> ShardTensor:
    """The smallest values over ``dims`` (None: all), on every rank."""
    return _extreme(tensor, dims, keepdim, "min")


rule(aten.amax.default, aten.max.default)(highest)
rule(aten.amin.default, aten.min.default)(lowest)


@rule(aten.aminmax.default)
def aminmax(self: ShardTensor, *, dim: int | None = None, keepdim: bool = False) -> tuple[ShardTensor, ShardTensor]:
    block = resolved(self)
    return lowest(block, dim, keepdim), highest(block, dim, keepdim)


# Places ------------------------------------------------------------------------------------------------------------


def _best(values: torch.Tensor, places: torch.Tensor, plan: Reduced, op: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Of every rank's candidates, the best ones; of equals the first; a nan beats all, as in torch."""
    function = torch.amax if op == "max" else torch.amin
    for axis in plan.axes:
        ranks, group = mesh_sizes(plan.spec.mesh)[axis], comm.group_of(plan.spec.mesh, axis)
        packed = torch.stack((_as_bits(values), places)).unsqueeze(0)
        parts = comm.all_gather(packed, 0, (1,) * ranks, group)
        candidates = _from_bits(parts[:, 0], values.dtype)
        values = function(candidates, 0)
        same = (candidates == values) | (candidates.isnan() & values.isnan())
        places = parts[:, 1].masked_fill(~same, _NOWHERE).amin(0)
    return values, places


def _as_bits(values: torch.Tensor) -> torch.Tensor:
    return values.double().view(torch.int64) if values.is_floating_point() else values.long()


def _from_bits(bits: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return bits.view(torch.float64).to(dtype) if dtype.is_floating_point else bits.to(dtype)


def _candidate(
    local: torch.Tensor, plan: Reduced, op: str, dim: int, keepdim: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The best value of the block along ``dim`` and its place there; one that loses where the block is empty."""
    if local.numel() or not plan.axes or not plan.elements:
        found = torch.max(local, dim, keepdim) if op == "max" else torch.min(local, dim, keepdim)
        return found[0], found[1]
    shape = plan.spec.local_shape
    return local.new_full(shape, worst(local.dtype, op)), local.new_full(shape, _NOWHERE, dtype=torch.int64)


def _extreme_along(tensor: ShardTensor, dim: int, keepdim: bool, op: str) -> tuple[ShardTensor, ShardTensor]:
    """Values and places of the extremes along one dim; places count in the whole tensor."""
    block = resolved(tensor)
    spec = block._spec
    plan = reduced(spec, dim, keepdim)
    values, places = _candidate(block._local_tensor, plan, op, dim, keepdim)
    if plan.axes and plan.elements:
        rows = _rows(spec, plan.dims[0]).to(places.device)
        known = places != _NOWHERE
        if rows.numel():
            places = torch.where(known, rows[places.masked_fill(~known, 0)], places)
        values, places = _best(values, places, plan, op)
    return wrap(values, plan.spec), wrap(places, plan.spec)


@lru_cache(maxsize=256)
def _rows(spec: ShardTensorSpec, dim: int) -> torch.Tensor:
    """The places in the whole tensor of this rank's rows along ``dim``."""
    layout: Layout = tuple(
        entry.moved(0) if isinstance(entry, Cut) and entry.dim == dim else REPLICATE for entry in spec.layout
    )
    rows = ShardTensorSpec.of(spec.mesh, replicate(len(layout)), spec.shape[dim : dim + 1], torch.int64)
    return redistribute_local(torch.arange(spec.shape[dim]), rows, layout)


@rule(aten.max.dim)
def max_dim(self: ShardTensor, dim: int, keepdim: bool = False) -> tuple[ShardTensor, ShardTensor]:
    return _extreme_along(self, dim, keepdim, "max")


@rule(aten.min.dim)
def min_dim(self: ShardTensor, dim: int, keepdim: bool = False) -> tuple[ShardTensor, ShardTensor]:
    return _extreme_along(self, dim, keepdim, "min")


def _place(tensor: ShardTensor, dim: int | None, keepdim: bool, op: str) -> ShardTensor:
    if dim is not None or not tensor._spec.ndim:
        return _extreme_along(tensor, dim or 0, keepdim, op)[1]
    block = resolved(tensor)
    spec = block._spec
    plan = reduced(spec, None, keepdim)
    flat = block._local_tensor.reshape(-1)
    value, place = _candidate(flat, plan._replace(spec=reduced(spec, None).spec), op, 0, False)
    if plan.axes and plan.elements:
        if flat.numel():
            place = _flat_place(place, spec)
        place = _best(value, place, plan, op)[1]
    return wrap(place.view(plan.spec.local_shape), plan.spec)


def _flat_place(place: torch.Tensor, spec: ShardTensorSpec) -> torch.Tensor:
    """A place in this rank's flattened block as a place in the flattened whole."""
    here = torch.unravel_index(place, spec.local_shape)
    total = torch.zeros_like(place)
    for dim, index in enumerate(here):
        total = total * spec.shape[dim] + _rows(spec, dim).to(place.device)[index]
    return total


@rule(aten.argmax.default)
def argmax(self: ShardTensor, dim: int | None = None, keepdim: bool = False) -> ShardTensor:
    return _place(self, dim, keepdim, "max")


@rule(aten.argmin.default)
def argmin(self: ShardTensor, dim: int | None = None, keepdim: bool = False) -> ShardTensor:
    return _place(self, dim, keepdim, "min")

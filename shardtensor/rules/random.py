"""Random values: blocks draw independent numbers, replicas the same ones, and a seed gives the same numbers again.

`generators` says from where each block draws; a tensor that every rank holds whole has the numbers of one process.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from shardtensor.registry import function_rule, rule
from shardtensor.rules.aliasing import refuse_lost_write
from shardtensor.rules.factory import like
from shardtensor.rules.generators import block_generator
from shardtensor.rules.layouts import common_layout, local_in, mesh_of, operand_layout, spec_of, uncut
from shardtensor.rules.pointwise import own_up, pointwise
from shardtensor.spec import ShardTensorSpec
from shardtensor.tensor import ShardTensor, wrap

__all__ = ["dropout", "fill_", "multinomial", "native_dropout", "rand_like", "randint_like", "randn_like", "sampled"]

aten = torch.ops.aten

Generator = torch.Generator | None

_off = torch._C.DisableTorchFunctionSubclass


# Dropout -------------------------------------------------------------------------------------------------------------


@function_rule(F.dropout)
def dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    """torch's function as one op with one backward op, instead of the four and one into which it decomposes on CPU."""
    with _off():
        if not training or inplace or not 0.0 < p < 1.0:
            return F.dropout(input, p, training, inplace)
        out: torch.Tensor = aten.native_dropout.default(input, p, True)[0]
        return out


@rule(aten.native_dropout.default)
def native_dropout(input: ShardTensor, p: float, train: bool | None) -> tuple[ShardTensor, ShardTensor]:
    """The tensor with elements dropped, and the mask of those kept."""
    mask = like(aten.empty_like.default, input, dtype=torch.bool)
    local, spec = mask._local_tensor, mask._spec
    kept = local_in(input, spec.layout, spec.mesh)
    if train is False:
        return wrap(kept.clone(), spec.with_dtype(kept.dtype)), wrap(local.fill_(True), spec)
    local.bernoulli_(1.0 - p, generator=block_generator(spec, local.device))
    out = kept.mul(local).mul_(1.0 / (1.0 - p) if p < 1.0 else 0.0)
    return wrap(out, spec.with_dtype(out.dtype)), mask


# In place ------------------------------------------------------------------------------------------------------------


def fill_(op: Any, self: ShardTensor, *args: Any, generator: Generator = None) -> ShardTensor:
    """``normal_`` and its kin: write random values into the tensor, which keeps its layout."""
    refuse_lost_write(self)
    own_up(self)
    spec, local = self._spec, self._local_tensor
    blocks = [
        local_in(arg, operand_layout(spec.layout, spec_of(arg, spec.mesh), spec.shape), spec.mesh)
        if isinstance(arg, torch.Tensor)
        else arg
        for arg in args
    ]
    op(local, *blocks, generator=block_generator(spec, local.device, generator))
    return self


FILLS = [
    aten.bernoulli_.Tensor,
    aten.bernoulli_.float,
    aten.cauchy_.default,
    aten.exponential_.default,
    aten.geometric_.default,
    aten.log_normal_.default,
    aten.normal_.default,
    aten.random_.default,
    aten.random_.to,
    getattr(aten.random_, "from"),
    aten.uniform_.default,
]


# Made like another tensor --------------------------------------------------------------------------------------------


@rule(aten.rand_like.default, aten.rand_like.generator)
def rand_like(self: ShardTensor, *, generator: Generator = None, **options: Any) -> ShardTensor:
    return fill_(aten.uniform_.default, like(aten.empty_like.default, self, **options), generator=generator)


@rule(aten.randn_like.default, aten.randn_like.generator)
def randn_like(self: ShardTensor, *, generator: Generator = None, **options: Any) -> ShardTensor:
    return fill_(aten.normal_.default, like(aten.empty_like.default, self, **options), generator=generator)


@rule(aten.randint_like.default, aten.randint_like.generator)
def randint_like(self: ShardTensor, high: int, *, generator: Generator = None, **options: Any) -> ShardTensor:
    return randint_like_from(self, 0, high, generator=generator, **options)


@rule(aten.randint_like.low_dtype, aten.randint_like.low_generator_dtype)
def randint_like_from(
    self: ShardTensor, low: int, high: int, *, generator: Generator = None, **options: Any
) -> ShardTensor:
    made = like(aten.empty_like.default, self, **options)
    return fill_(getattr(aten.random_, "from"), made, low, high, generator=generator)


# Sampled from other tensors ------------------------------------------------------------------------------------------


def sampled(op: Any, *args: Any, generator: Generator = None) -> ShardTensor:
    """An op that draws each element from a distribution given by the same element of its operands."""
    mesh = mesh_of(args)
    specs = [spec_of(arg, mesh) for arg in args if isinstance(arg, torch.Tensor)]
    shape = torch.broadcast_shapes(*(spec.shape for spec in specs))
    layout = common_layout(specs, shape)
    blocks = [
        local_in(arg, operand_layout(layout, spec_of(arg, mesh), shape), mesh) if isinstance(arg, torch.Tensor) else arg
        for arg in args
    ]
    spec = ShardTensorSpec.of(mesh, layout, shape, specs[0].dtype)
    device = next(block.device for block in blocks if isinstance(block, torch.Tensor))
    return wrap(op(*blocks, generator=block_generator(spec, device, generator)).contiguous(), spec)


def sampled_by_position(op: Any, *args: Any) -> ShardTensor:
    """`sampled` for ops that take the generator as their last argument."""
    count = sum(isinstance(arg, torch.Tensor) for arg in args)
    return sampled(op, *args[:count], generator=args[count] if len(args) > count else None)


SAMPLES = [
    aten.bernoulli.default,
    aten.bernoulli.p,
    aten.bernoulli.Tensor,
    aten.normal.Tensor_float,
    aten.normal.float_Tensor,
    aten.normal.Tensor_Tensor,
]
SAMPLES_BY_POSITION = [aten.poisson.default, aten.binomial.default, aten._standard_gamma.default]


@rule(aten.multinomial.default)
def multinomial(
    self: ShardTensor, num_samples: int, replacement: bool = False, *, generator: Generator = None
) -> ShardTensor:
    """Indices drawn for every row of weights; each rank needs its rows whole."""
    self = uncut(self, [self._spec.ndim - 1])
    spec, local = self._spec, self._local_tensor
    result = ShardTensorSpec.of(spec.mesh, spec.layout, (*spec.shape[:-1], num_samples), torch.int64)
    generator = block_generator(spec, local.device, generator)
    if not local.numel():
        return wrap(local.new_empty(result.local_shape, dtype=torch.int64), result)
    return wrap(aten.multinomial.default(local, num_samples, replacement, generator=generator), result)


# rrelu ---------------------------------------------------------------------------------------------------------------


@rule(aten.rrelu_with_noise.default)
def rrelu_with_noise(
    self: ShardTensor,
    noise: ShardTensor,
    lower: float = 0.125,
    upper: float = 1.0 / 3.0,
    training: bool = False,
    generator: Generator = None,
) -> ShardTensor:
    """Leaky ReLU with slopes drawn between ``lower`` and ``upper``, which are left in ``noise``."""
    own_up(noise)
    spec = noise._spec
    local = local_in(self, spec.layout, spec.mesh)
    source = block_generator(spec, local.device, generator) if training else None
    out = aten.rrelu_with_noise.default(local, noise._local_tensor, lower, upper, training, source)
    return wrap(out, spec.with_dtype(out.dtype))


def _enter_table() -> None:
    for function, ops in ((fill_, FILLS), (sampled, SAMPLES), (sampled_by_position, SAMPLES_BY_POSITION)):
        for op in ops:
            entry = partial(function, op)
            entry.__module__ = __name__
            rule(op)(entry)
    slope = aten.rrelu_with_noise_backward.default
    backward = partial(pointwise, slope, slope)
    backward.__module__ = __name__
    rule(slope)(backward)


_enter_table()

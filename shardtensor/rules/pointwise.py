"""Point-wise ops: every output element needs the same element of the inputs, so blocks are computed where they lie.

The table is torch's own: every op that torch tags as point-wise, and the rows below that it does not tag.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial
from types import BuiltinFunctionType
from typing import Any, NamedTuple

import torch

from shardtensor.registry import rule
from shardtensor.rules.aliasing import refuse_lost_view, refuse_lost_write
from shardtensor.rules.layouts import common_layout, has_sum, local_in, mesh_of, operand_layout, spec_of
from shardtensor.rules.memory import in_backward
from shardtensor.spec import REPLICATE, Layout, Partial, ShardTensorSpec, contiguous_stride
from shardtensor.tensor import ShardTensor, wrap

__all__ = ["dense_stride", "formatted", "own_up", "pointwise", "pointwise_"]

aten = torch.ops.aten

# Names (all overloads) that are point-wise though torch does not tag them.
# fmt: off
UNTAGGED = [
    "_to_copy", "_conj_physical", "fill", "masked_fill", "where", "rsub", "complex", "polar", "_prelu_kernel",
    "_prelu_kernel_backward",
    "hardswish", "hardtanh_backward", "leaky_relu_backward", "elu_backward", "softplus_backward", "mish_backward",
    "hardswish_backward", "hardsigmoid_backward", "log_sigmoid_forward", "log_sigmoid_backward",
    "softshrink_backward", "hardshrink_backward", "clamp_min", "clamp_max", "floor_divide", "bitwise_not",
    "special_i0", "copy_", "fill_", "zero_", "masked_fill_", "eq_", "ne_", "lt_", "le_", "gt_", "ge_", "relu6_",
    "hardswish_", "mish_", "celu_", "selu_", "elu_", "threshold_", "sigmoid_", "silu_", "gelu_", "softplus_",
    "floor_divide_", "clip_", "fmod_", "remainder_", "float_power_", "copysign_", "digamma_", "lgamma_", "polygamma_",
    "square_", "conj_physical_", "gcd_", "lcm_", "heaviside_", "logical_and_", "logical_or_", "logical_xor_",
    "logical_not_", "abs_", "__iand__", "__ior__", "__and__", "__or__", "sign_", "xlogy_", "ldexp_", "hardsigmoid_",
    "hardtanh_", "leaky_relu_",
]
# fmt: on

OTHER_RULES = {"equal", "rrelu"}  # tagged as point-wise, but not to be run on blocks: one answer, random numbers
SCRIPT_ONLY = {"int", "float", "bool", "str", "complex", "any", "default_dtype"}

# f(a + b) == f(a) + f(b): a pending sum may stay pending.
LINEAR = {
    aten.neg.default,
    aten.neg_.default,
    aten.clone.default,
    aten.positive.default,
    aten.zero_.default,
}
SCALING = {
    aten.mul.Tensor,
    aten.mul.Scalar,
    aten.mul_.Tensor,
    aten.mul_.Scalar,
    aten.div.Tensor,
    aten.div.Scalar,
    aten.div_.Tensor,
    aten.div_.Scalar,
}
ADDING = {aten.add.Tensor, aten.add_.Tensor, aten.sub.Tensor, aten.sub_.Tensor}


def pointwise(op: Any, kernel: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a point-wise op on the local blocks; operands laid out otherwise are brought to one layout first.

    ``kernel`` is what runs ``op`` on blocks that lie right, see `_kernel`.
    """
    spec: ShardTensorSpec | None = None
    blocks = []
    for arg in args:
        if type(arg) is ShardTensor:
            found = arg._spec
            if spec is None:
                if not found.is_plain:
                    return _general(op, args, kwargs)
                spec = found
            elif found is not spec and not _same_place(found, spec):
                return _general(op, args, kwargs)
            blocks.append(arg._local_tensor)
        elif isinstance(arg, torch.Tensor) and arg.dim():
            return _general(op, args, kwargs)
        else:
            blocks.append(arg)
    if spec is None:
        return _general(op, args, kwargs)
    result = kernel(*blocks, **kwargs)
    if kwargs and "memory_format" in kwargs:
        spec = formatted(spec, kwargs["memory_format"])
    return wrap(result, spec) if isinstance(result, torch.Tensor) else _wrapped(result, spec)


def _same_place(one: ShardTensorSpec, other: ShardTensorSpec) -> bool:
    return one.layout == other.layout and one.tensor_meta.shape == other.tensor_meta.shape and one.is_dense


def _wrapped(result: Any, spec: ShardTensorSpec) -> Any:
    if isinstance(result, torch.Tensor):
        return wrap(result, spec)
    return tuple(wrap(part, spec) for part in result)


class Meeting(NamedTuple):
    """How operands in different layouts meet.

    Attributes:
        spec: the result.
        wanted: the layout of every tensor among the operands.
        lazy: dims along which the result is expanded: one row is computed.
    """

    spec: ShardTensorSpec
    wanted: tuple[Layout, ...]
    lazy: tuple[int, ...]


def _general(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Operands in different layouts, broadcast, expanded or waiting for a reduction."""
    mesh = mesh_of(args, tuple(kwargs.values()))
    tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
    specs = tuple(spec_of(tensor, mesh) for tensor in tensors)
    expands = in_backward() and op is not aten.clone.default  # elsewhere somebody may write to a part of the result
    pends = isinstance(args[0], torch.Tensor) and _stays_pending(op, specs, kwargs)
    spec, wanted, lazy = _meet(specs, pends, expands)
    ndim = len(spec.tensor_meta.shape)
    laid = zip(tensors, wanted, strict=True)
    blocks = iter([_first_rows(local_in(tensor, layout, mesh), lazy, ndim) for tensor, layout in laid])
    result = op(*(next(blocks) if isinstance(arg, torch.Tensor) else arg for arg in args), **kwargs)
    spec = formatted(spec, kwargs.get("memory_format"))
    if lazy:
        return _wrapped(_expanded(result, spec.local_shape), spec)
    return _wrapped(result, spec)


@lru_cache(maxsize=4096)
def _meet(specs: tuple[ShardTensorSpec, ...], pends: bool, expands: bool) -> Meeting:
    """The meeting of operands; sums stay pending if the op ``pends``, rows stay expanded if it ``expands``."""
    shape = torch.broadcast_shapes(*(spec.shape for spec in specs))
    layout = specs[0].layout if pends else common_layout(specs, shape)
    long = [dim for dim in range(len(shape)) if shape[dim] > 1] if expands else []
    lazy = tuple(dim for dim in long if all(_stands_still(spec, dim, shape) for spec in specs))
    spec = ShardTensorSpec.of(specs[0].mesh, layout, shape, specs[0].dtype, _stride(specs, shape, lazy))
    return Meeting(spec, tuple(_lies(layout, spec, shape) for spec in specs), lazy)


def _stays_pending(op: Any, specs: Sequence[ShardTensorSpec], kwargs: dict[str, Any]) -> bool:
    """Whether pending sums of the first operand may stay pending in the result, else they are resolved first."""
    first = specs[0]
    if not has_sum(first.layout):
        return False
    if op in LINEAR or (op is aten._to_copy.default and _widens(kwargs, first.dtype)):
        return True
    if op in SCALING and all(spec.ndim == 0 and not spec.partial_axes for spec in specs[1:]):
        return True
    # A scalar added to a pending sum would be added once per rank.
    return op in ADDING and len(specs) == 2 and specs[1].layout == first.layout and specs[1].shape == first.shape


@lru_cache(maxsize=4096)
def _lies(layout: Layout, spec: ShardTensorSpec, shape: torch.Size) -> Layout:
    """How an operand must lie beside a result in ``layout``: a factor of a pending sum is whole on every rank."""
    wanted = operand_layout(layout, spec, shape)
    if spec.partial_axes or not has_sum(layout):
        return wanted
    return tuple(REPLICATE if isinstance(entry, Partial) else entry for entry in wanted)


def _widens(kwargs: dict[str, Any], dtype: torch.dtype) -> bool:
    """Whether a conversion keeps every digit of what the ranks contribute."""
    wanted = kwargs.get("dtype") or dtype
    both = dtype.is_floating_point and wanted.is_floating_point
    return both and torch.finfo(wanted).eps <= torch.finfo(dtype).eps


def _stands_still(spec: ShardTensorSpec, dim: int, shape: torch.Size) -> bool:
    """Whether the operand has one value along the result's ``dim``."""
    own = dim - (len(shape) - spec.ndim)
    return own < 0 or spec.shape[own] == 1 or own in spec.broadcast_dims


def _first_rows(block: torch.Tensor, dims: tuple[int, ...], ndim: int) -> torch.Tensor:
    """One row of every expanded dim: what is stored once is computed once."""
    for dim in dims:
        own = dim - (ndim - block.dim())
        if own >= 0 and block.shape[own] > 1:
            block = block.narrow(own, 0, 1)
    return block


def _expanded(result: Any, shape: torch.Size) -> Any:
    if isinstance(result, torch.Tensor):
        return result.expand(shape)
    return tuple(part.expand(shape) for part in result)


def _stride(specs: Sequence[ShardTensorSpec], shape: torch.Size, lazy: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of the result: in the order of the first operand that has its full shape, row-major otherwise."""
    for spec in specs:
        if spec.shape == shape and not lazy and (spec.is_dense or not spec.broadcast_dims):
            return spec.tensor_meta.stride if spec.is_dense else dense_stride(shape, spec.tensor_meta.stride)
    stored = contiguous_stride([1 if dim in lazy else length for dim, length in enumerate(shape)])
    return tuple(0 if dim in lazy else step for dim, step in enumerate(stored))


@lru_cache(maxsize=1024)
def dense_stride(shape: torch.Size, stride: tuple[int, ...]) -> tuple[int, ...]:
    """Strides in the same order of dims, without gaps."""
    return tuple(torch.empty_like(torch.empty_strided(shape, stride, device="meta")).stride())


@lru_cache(maxsize=1024)
def formatted(spec: ShardTensorSpec, memory_format: torch.memory_format | None) -> ShardTensorSpec:
    """The spec of a copy in a memory format."""
    if memory_format in (None, torch.preserve_format):
        return spec
    stride = torch.empty(spec.shape, device="meta", memory_format=memory_format).stride()
    return ShardTensorSpec.of(spec.mesh, spec.layout, spec.shape, spec.dtype, tuple(stride))


def pointwise_(op: Any, target: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Run an in-place point-wise op: operands are brought to the layout of the tensor that is written."""
    mesh = mesh_of(target, args, tuple(kwargs.values()))
    if isinstance(target, ShardTensor):
        refuse_lost_write(target, op)
        own_up(target, op, args)
    specs = [spec_of(target, mesh), *(spec_of(arg, mesh) for arg in args if isinstance(arg, torch.Tensor))]
    layout, shape = specs[0].layout, specs[0].shape
    blocks = [
        local_in(arg, _lies(layout, spec_of(arg, mesh), shape), mesh) if isinstance(arg, torch.Tensor) else arg
        for arg in args
    ]
    op(target._local_tensor if isinstance(target, ShardTensor) else target, *blocks, **kwargs)
    return target


def own_up(target: ShardTensor, op: Any = None, args: tuple[Any, ...] = ()) -> None:
    """Make the block of ``target`` a block that can be written: no pending reduction, no expanded rows.

    A tensor that is stored expanded (a fresh ``new_zeros``, say) takes the layout of the first other operand of its
    shape, so that it never becomes whole on any rank.
    """
    spec = target._spec
    local = target._local_tensor
    expanded = any(n > 1 and step == 0 for n, step in zip(local.shape, local.stride(), strict=True))
    layout = spec.resolved_layout
    if spec.partial_axes and _stays_pending(op, [spec, *_specs(args)], {}):
        layout = spec.layout
    elif expanded:
        layout = next((s.resolved_layout for s in _specs(args) if s.shape == spec.shape), layout)
    if layout != spec.layout or expanded:
        refuse_lost_view(target)
        block = local_in(target, layout, spec.mesh)
        target._local_tensor = block.clone(memory_format=torch.contiguous_format) if expanded else block
        target._spec = ShardTensorSpec.of(spec.mesh, layout, spec.shape, spec.dtype)


def _specs(args: tuple[Any, ...]) -> list[ShardTensorSpec]:
    return [arg._spec for arg in args if isinstance(arg, ShardTensor)]


def _kernel(name: str, op: Any) -> Any:
    """The binding of that name, whose call is 1 us shorter than the op's; else the op past its Python part."""
    for home in (torch, torch._C._nn):
        binding = getattr(home, name, None)
        if isinstance(binding, BuiltinFunctionType):
            return binding
    return op._op


def _enter_table() -> None:
    # dir(torch.ops.aten) only knows the ops that somebody has used already.
    every = {name.removeprefix("aten::").partition(".")[0] for name in torch._C._dispatch_get_all_op_names()}
    for name in sorted(every):
        listed = name in UNTAGGED
        if ":" in name or (name[0] == "_" and name[:2] != "__" and not listed):
            continue
        packet = getattr(aten, name)
        for overload in packet.overloads():
            if overload in SCRIPT_ONLY or name in OTHER_RULES:
                continue
            op = getattr(packet, overload)
            arguments = op._schema.arguments
            takes_out = any(argument.is_out for argument in arguments)
            tensors = all(any("Tensor" in str(item.type) for item in side) for side in (arguments, op._schema.returns))
            if takes_out or not tensors or not (listed or torch.Tag.pointwise in op.tags):
                continue
            entry = partial(pointwise_, op) if op._schema.is_mutable else partial(pointwise, op, _kernel(name, op))
            entry.__module__ = __name__
            rule(op)(entry)


_enter_table()

"""The ops under scaled dot-product attention: one forward, one backward; keys go round a ring where they are cut."""

from __future__ import annotations

import torch

from shardtensor.comm.library import LIBRARY
from shardtensor.errors import OpError
from shardtensor.registry import rule
from shardtensor.rules.attention_block import Dropout, wide
from shardtensor.rules.attention_plan import Plan, plan
from shardtensor.rules.layouts import local_in, mesh_of, operand_layout, spec_of
from shardtensor.rules.ring import Operands, Result, Scoring, ring_backward, ring_forward
from shardtensor.spec import PENDING_SUM, Cut, Layout, ShardTensorSpec
from shardtensor.tensor import ShardTensor, wrap

__all__ = ["attention", "attention_backward"]

# Two ops of this package's own, for sharded tensors only: no kernel, just the rules below.
torch.library.define(
    "shardtensor::attention",
    "(Tensor query, Tensor key, Tensor value, Tensor? mask, bool causal, float scale, float dropout_p, int seed)"
    " -> (Tensor out, Tensor logsumexp)",
    lib=LIBRARY,
)
torch.library.define(
    "shardtensor::attention_backward",
    "(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor? mask, Tensor out, Tensor logsumexp, bool causal, "
    "float scale, float dropout_p, int seed, bool mask_grad) -> (Tensor, Tensor, Tensor, Tensor)",
    lib=LIBRARY,
)


@rule(torch.ops.shardtensor.attention.default)
def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    scale: float,
    dropout_p: float,
    seed: int,
) -> tuple[ShardTensor, ShardTensor]:
    """Result [..., Sq, Ev] and logsumexp [..., Sq], cut as the queries.

    Args:
        query, key, value: [..., H, Sq, E], [..., Hk, Sk, E], [..., Hk, Sk, Ev], equal dims in front of H.
        mask: broadcastable to [..., H, Sq, Sk]: bool, False hides, or added to the scores.
        causal: key j is hidden from query i where j > i.
        scale: of the scores.
        dropout_p: probability with which a weight is dropped.
        seed: of the dropped weights, the same on all ranks.
    """
    mesh = mesh_of((query, key, value, mask))
    chosen = plan(spec_of(query, mesh), spec_of(key, mesh), spec_of(value, mesh))
    own = _operands(query, key, value, chosen)
    scoring = _scoring(mask, causal, scale, dropout_p, seed, chosen)
    out, lse = ring_forward(own, scoring, chosen)
    return _wrapped(out, chosen.out_spec), _wrapped(lse, chosen.lse_spec)


@rule(torch.ops.shardtensor.attention_backward.default)
def attention_backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    causal: bool,
    scale: float,
    dropout_p: float,
    seed: int,
    mask_grad: bool,
) -> tuple[ShardTensor, ShardTensor, ShardTensor, ShardTensor | None]:
    """Gradients of queries, keys, values and (if asked) mask; other arguments as in `attention`."""
    mesh = mesh_of((grad, query, key, value, out))
    chosen = plan(spec_of(query, mesh), spec_of(key, mesh), spec_of(value, mesh))
    own = _operands(query, key, value, chosen)
    scoring = _scoring(mask, causal, scale, dropout_p, seed, chosen)
    layout = chosen.query.layout
    result = Result(
        _four(local_in(out, layout, mesh)),
        local_in(logsumexp, layout, mesh).reshape(own.q.shape[:3]),
        _four(local_in(grad, layout, mesh)),
    )
    total = None
    if mask_grad and scoring.mask is not None:
        total = torch.zeros(scoring.mask.shape, dtype=wide(scoring.mask.dtype), device=scoring.mask.device)
    dq, dk, dv = ring_backward(result, own, scoring, chosen, total)
    specs = chosen.grad_specs
    return (
        _wrapped(dq, specs[0]),
        _wrapped(dk, specs[1]),
        _wrapped(dv, specs[2]),
        None if total is None or mask is None else _mask_gradient(total, mask, chosen),
    )


def _wrapped(local: torch.Tensor, spec: ShardTensorSpec) -> ShardTensor:
    return wrap((local if local.shape == spec.local_shape else local.reshape(spec.local_shape)).contiguous(), spec)


def _four(block: torch.Tensor) -> torch.Tensor:
    """The block with four dims: ones in front, or the first dims merged."""
    if block.dim() == 4:
        return block
    return block.flatten(0, -4) if block.dim() > 4 else block.reshape((1,) * (4 - block.dim()) + tuple(block.shape))


def _operands(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, chosen: Plan) -> Operands:
    pairs = ((query, chosen.query), (key, chosen.key), (value, chosen.value))
    return Operands(*(_four(local_in(tensor, spec.layout, spec.mesh)) for tensor, spec in pairs))


def _scoring(
    mask: torch.Tensor | None,
    causal: bool,
    scale: float,
    dropout_p: float,
    seed: int,
    chosen: Plan,
) -> Scoring:
    dropout = Dropout(dropout_p, seed) if dropout_p > 0.0 else None
    if mask is None:
        return Scoring(None, causal, scale, dropout)
    block = local_in(mask, _mask_layout(mask, chosen), chosen.query.mesh)
    if chosen.query.ndim > 4:  # the first dims are merged: a mask that is broadcast over some of them is spelt out
        lead = chosen.query.local_shape[:-3]
        block = block.reshape((1,) * (chosen.query.ndim - block.dim()) + tuple(block.shape))
        block = block.expand(*lead, *block.shape[-3:])
    return Scoring(_four(block), causal, scale, dropout)


def _scores_shape(chosen: Plan) -> tuple[int, ...]:
    return (*chosen.query.shape[:-1], chosen.key.shape[-2])


def _mask_layout(mask: torch.Tensor, chosen: Plan) -> Layout:
    """The mask's rows lie as the queries; every rank needs all its columns, for all the keys that pass by.

    Raises:
        OpError: the mask cannot be broadcast to the scores.
    """
    shape, spec = _scores_shape(chosen), spec_of(mask, chosen.query.mesh)
    short = shape[len(shape) - spec.ndim :]
    if spec.ndim > len(shape) or any(have not in (1, want) for have, want in zip(spec.shape, short, strict=True)):
        raise OpError(
            f"scaled_dot_product_attention: attn_mask {tuple(spec.shape)} cannot be broadcast to the scores {shape}"
        )
    return operand_layout(chosen.query.layout, spec, shape)


def _mask_gradient(total: torch.Tensor, mask: torch.Tensor, chosen: Plan) -> ShardTensor:
    """The mask's gradient: pending where several ranks computed scores to which one element was added."""
    spec = spec_of(mask, chosen.query.mesh)
    lies = _mask_layout(mask, chosen)
    computed = tuple(
        PENDING_SUM if not isinstance(entry, Cut) and (isinstance(query, Cut) or axis in chosen.joined) else entry
        for axis, (entry, query) in enumerate(zip(lies, chosen.query.layout, strict=True))
    )
    shape = spec.with_layout(lies).local_shape
    if chosen.query.ndim > 4:  # undo what was spelt out
        padded = (1,) * (chosen.query.ndim - len(shape)) + tuple(shape)
        total = total.reshape(*chosen.query.local_shape[:-3], *total.shape[-3:]).sum_to_size(padded)
    result = ShardTensorSpec.of(spec.mesh, computed, spec.shape, spec.dtype)
    return wrap(total.reshape(shape).to(spec.dtype), result)

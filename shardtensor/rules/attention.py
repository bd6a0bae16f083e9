"""`F.scaled_dot_product_attention` on sharded tensors, caught before torch chooses a backend, and its derivatives.

Where torch chooses inside another function, the backends' own ops come here by way of `attention_backends`.
"""

from __future__ import annotations

from functools import lru_cache
from math import sqrt
from typing import Any

import torch
import torch.nn.functional as F

from shardtensor.comm.library import LIBRARY
from shardtensor.errors import OpError
from shardtensor.registry import function_rule
from shardtensor.rules import attention_ops as attention_ops  # defines the two ops
from shardtensor.rules.attention_plan import plan
from shardtensor.rules.generators import replicas_seed
from shardtensor.rules.layouts import mesh_of, spec_of
from shardtensor.spec import ShardTensorSpec
from shardtensor.tensor import ShardTensor

__all__ = ["scaled_dot_product_attention"]

_attention = torch.ops.shardtensor.attention.default
_attention_backward = torch.ops.shardtensor.attention_backward.default

_off = torch._C.DisableTorchFunctionSubclass


@function_rule(F.scaled_dot_product_attention)
def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """torch's function of this name: [..., H, Sq, E], [..., Hk, Sk, E], [..., Hk, Sk, Ev] -> [..., H, Sq, Ev].

    Raises:
        OpError: the shapes do not go together.
    """
    with _off():  # plain tensors that require grad are promoted already
        if torch.is_autocast_enabled(query.device.type):
            query, key, value, attn_mask = (_autocast(tensor) for tensor in (query, key, value, attn_mask))
        query, key, value = _matched(query, key, value, enable_gqa)
        mesh = mesh_of((query, key, value, attn_mask))
        chosen = plan(spec_of(query, mesh), spec_of(key, mesh), spec_of(value, mesh))
        # Brought into place here, differentiably, the tensors are saved for the backward as it needs them.
        query, key, value = _placed(query, chosen.query), _placed(key, chosen.key), _placed(value, chosen.value)
        if scale is None:
            scale = 1.0 / sqrt(max(query.shape[-1], 1))
        held = {axis for axis, _ in chosen.query.cuts} | set(chosen.joined)
        seed = replicas_seed(mesh, held) if dropout_p > 0.0 else 0
        out: torch.Tensor = _attention(query, key, value, attn_mask, is_causal, scale, dropout_p, seed)[0]
        return out


def _placed(tensor: torch.Tensor, spec: ShardTensorSpec) -> torch.Tensor:
    return tensor._with_layout(spec.layout) if isinstance(tensor, ShardTensor) else tensor


def _autocast(tensor: Any) -> Any:
    """What autocast would do to an argument of the function, had it seen it."""
    eligible = tensor is not None and tensor.is_floating_point() and tensor.dtype != torch.float64
    return tensor.to(torch.get_autocast_dtype(tensor.device.type)) if eligible else tensor


def _matched(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, enable_gqa: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The operands with equal leading dims; with ``enable_gqa``, keys may have fewer heads than queries."""
    if key.dtype != query.dtype or value.dtype != query.dtype:
        dtypes = f"{query.dtype}, {key.dtype}, {value.dtype}"
        raise OpError(f"scaled_dot_product_attention needs operands of one dtype, got {dtypes}")
    wanted = _common_shapes(query.shape, key.shape, value.shape, enable_gqa)
    if wanted is None:
        return query, key, value
    heads, tail, lead = wanted
    if enable_gqa and key.shape[-3] != value.shape[-3]:
        key, value = _repeated(key, heads), _repeated(value, heads)
    return tuple(x.expand(*lead, *x.shape[-tail:]) for x in (query, key, value))  # type: ignore[return-value]


@lru_cache(maxsize=1024)
def _common_shapes(
    query: torch.Size, key: torch.Size, value: torch.Size, enable_gqa: bool
) -> tuple[int, int, torch.Size] | None:
    """What is to be done to operands of these shapes: None if nothing, else heads, own dims, and the common lead.

    Raises:
        OpError: the shapes do not go together.
    """
    shapes = f"query {tuple(query)}, key {tuple(key)}, value {tuple(value)}"
    if min(len(query), len(key), len(value)) < 2:
        raise OpError(f"scaled_dot_product_attention needs two dims or more, got {shapes}")
    if query[-1] != key[-1] or key[-2] != value[-2]:
        raise OpError(
            f"scaled_dot_product_attention: queries and keys need the same number of features, keys and values the "
            f"same length; got {shapes}"
        )
    grouped = enable_gqa and min(len(query), len(key), len(value)) > 2
    if grouped and any(not x[-3] or query[-3] % x[-3] for x in (key, value)):
        raise OpError(f"scaled_dot_product_attention: heads of keys must divide those of queries; got {shapes}")
    tail = 3 if grouped else 2
    lead = [x[: len(x) - tail] for x in (query, key, value)]
    if lead[0] == lead[1] == lead[2] and (not grouped or key[-3] == value[-3]):
        return None
    try:
        common: torch.Size = torch.broadcast_shapes(*lead)
    except RuntimeError as error:
        raise OpError(f"scaled_dot_product_attention: leading dims do not go together: {shapes}") from error
    return query[-3] if grouped else 1, tail, common


def _repeated(x: torch.Tensor, heads: int) -> torch.Tensor:
    """Keys or values with each head repeated until there are ``heads``."""
    times = heads // x.shape[-3]
    return x.unsqueeze(-3).expand(*x.shape[:-2], times, *x.shape[-2:]).flatten(-4, -3)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    ctx.save_for_backward(*inputs[:4], *output)
    ctx.settings = inputs[4:]
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad: torch.Tensor | None, _: None) -> tuple[Any, ...]:
    if grad is None:
        return (None,) * 8
    query, key, value, mask, out, logsumexp = ctx.saved_tensors
    wants_mask = mask is not None and ctx.needs_input_grad[3]
    if torch.is_grad_enabled():
        grads = _differentiable_backward(grad, query, key, value, mask, ctx.settings, wants_mask)
        return (*grads, *(None,) * 4)
    grads = _attention_backward(grad, query, key, value, mask, out, logsumexp, *ctx.settings, wants_mask)
    return (*grads, *(None,) * 4)


def _differentiable_backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    settings: tuple[bool, float, float, int],
    wants_mask: bool,
) -> tuple[torch.Tensor | None, ...]:
    """The gradients by ops that can be differentiated again; all scores of a rank's queries exist at once.

    Raises:
        OpError: there is dropout.
    """
    causal, scale, dropout_p, _ = settings
    if dropout_p > 0.0:
        raise OpError("scaled_dot_product_attention with dropout has no second derivative: use dropout_p=0")
    heads = query.shape[-3] if query.dim() > 2 else 1
    own = key.shape[-3] if key.dim() > 2 else 1
    keys, values = (_repeated(x, heads) if own != heads else x for x in (key, value))
    scores = query @ keys.mT * scale
    if mask is not None:
        hidden = torch.zeros((), dtype=query.dtype, device=query.device)
        scores = scores + (torch.where(mask, hidden, float("-inf")) if mask.dtype == torch.bool else mask)
    if causal:
        rows, columns = (torch.arange(n, device=query.device) for n in scores.shape[-2:])
        scores = scores.masked_fill(columns > rows.unsqueeze(1), float("-inf"))
    weights = torch.ops.aten._safe_softmax.default(scores, -1)
    dweights = grad @ values.mT
    dscores = weights * (dweights - (dweights * weights).sum(-1, keepdim=True))
    dkeys, dvalues = dscores.mT @ query * scale, weights.mT @ grad
    if own != heads:
        dkeys, dvalues = (x.unflatten(-3, (own, heads // own)).sum(-3) for x in (dkeys, dvalues))
    return (
        dscores @ keys * scale,
        dkeys,
        dvalues,
        dscores.sum_to_size(mask.shape) if wants_mask and mask is not None else None,
    )


torch.library.register_autograd(_attention, _backward, setup_context=_save, lib=LIBRARY)

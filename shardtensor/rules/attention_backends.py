"""The ops of torch's attention backends, where torch chose one itself: all are the one attention of `attention_ops`.

Each backend returns its own extras (lengths, states of a random generator); the seed of dropped weights travels as one
of these states, on the CPU, so that reading it back waits for no device.
"""

from __future__ import annotations

from math import sqrt
from typing import Any

import torch

from shardtensor.registry import rule
from shardtensor.rules.attention_ops import attention, attention_backward
from shardtensor.rules.generators import replicas_seed
from shardtensor.rules.layouts import mesh_of, spec_of

__all__: list[str] = []

aten = torch.ops.aten


def _scale(query: torch.Tensor, scale: float | None) -> float:
    return 1.0 / sqrt(max(query.shape[-1], 1)) if scale is None else scale


def _forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout_p: float,
    causal: bool,
    scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Result, logsumexp, and the seed of the dropped weights as a tensor."""
    seed = 0
    if dropout_p > 0.0:
        mesh = mesh_of(query, key, value)
        seed = replicas_seed(mesh, {axis for axis, _ in spec_of(query, mesh).cuts})
    out, lse = attention(query, key, value, mask, causal, _scale(query, scale), dropout_p, seed)
    return out, lse, torch.tensor(seed)


def _backward(
    grad: torch.Tensor,
    operands: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    mask: torch.Tensor | None,
    result: tuple[torch.Tensor, torch.Tensor],
    state: torch.Tensor | None,
    dropout_p: float,
    causal: bool,
    scale: float | None,
    mask_grad: bool = False,
) -> tuple[Any, ...]:
    seed = int(state) if state is not None and dropout_p > 0.0 else 0
    scale = _scale(operands[0], scale)
    return attention_backward(grad, *operands, mask, *result, causal, scale, dropout_p, seed, mask_grad)


@rule(aten._scaled_dot_product_flash_attention_for_cpu.default)
def cpu_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: torch.Tensor | None = None,
    scale: float | None = None,
) -> tuple[Any, ...]:
    return _forward(query, key, value, attn_mask, dropout_p, is_causal, scale)[:2]


@rule(aten._scaled_dot_product_flash_attention_for_cpu_backward.default)
def cpu_attention_backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: torch.Tensor | None = None,
    scale: float | None = None,
) -> tuple[Any, ...]:
    operands = (query, key, value)
    return _backward(grad_out, operands, attn_mask, (out, logsumexp), None, dropout_p, is_causal, scale)[:3]


@rule(aten._scaled_dot_product_flash_attention.default)
def flash_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    out, lse, state = _forward(query, key, value, None, dropout_p, is_causal, scale)
    return out, lse, None, None, query.shape[-2], key.shape[-2], state, torch.empty(0), torch.empty(0)


@rule(aten._scaled_dot_product_flash_attention_backward.default)
def flash_attention_backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    cum_seq_q: Any,
    cum_seq_k: Any,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: torch.Tensor,
    philox_offset: torch.Tensor,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    operands, result = (query, key, value), (out, logsumexp)
    return _backward(grad_out, operands, None, result, philox_seed, dropout_p, is_causal, scale)[:3]


@rule(aten._scaled_dot_product_efficient_attention.default)
def efficient_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_bias: torch.Tensor | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    out, lse, state = _forward(query, key, value, attn_bias, dropout_p, is_causal, scale)
    return out, lse, state, torch.tensor(0)


@rule(aten._scaled_dot_product_efficient_attention_backward.default)
def efficient_attention_backward(
    grad_out_: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_bias: torch.Tensor | None,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    philox_seed: torch.Tensor,
    philox_offset: torch.Tensor,
    dropout_p: float,
    grad_input_mask: list[bool],
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    operands, result = (query, key, value), (out, logsumexp)
    wants_bias = grad_input_mask[3] and attn_bias is not None
    return _backward(grad_out_, operands, attn_bias, result, philox_seed, dropout_p, is_causal, scale, wants_bias)


@rule(aten._scaled_dot_product_cudnn_attention.default)
def cudnn_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_bias: torch.Tensor | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    out, lse, state = _forward(query, key, value, attn_bias, dropout_p, is_causal, scale)
    return out, lse, None, None, query.shape[-2], key.shape[-2], state, torch.tensor(0), torch.empty(0)


@rule(aten._scaled_dot_product_cudnn_attention_backward.default)
def cudnn_attention_backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    philox_seed: torch.Tensor,
    philox_offset: torch.Tensor,
    attn_bias: torch.Tensor | None,
    cum_seq_q: Any,
    cum_seq_k: Any,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    operands, result = (query, key, value), (out, logsumexp)
    return _backward(grad_out, operands, attn_bias, result, philox_seed, dropout_p, is_causal, scale)[:3]

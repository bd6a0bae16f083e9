"""Attention of one block of queries to one block of keys, on plain tensors: torch's fused kernels, or the formula.

Shapes: [B, H, Sq, E] queries, [B, Hk, Sk, E] keys, [B, Hk, Sk, Ev] values, H a multiple of Hk. No length is 0. What
comes back with the result is the logsumexp [B, H, Sq] of every row's scores, by which blocks are joined; the backward
takes result and logsumexp of the whole row, not of the block.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

__all__ = ["Dropout", "attend", "attend_backward", "wide"]

aten = torch.ops.aten

_NEVER = float("-inf")
_HALVES = (torch.float16, torch.bfloat16)
_FUSED_ON_CPU = (torch.float64, torch.float32, *_HALVES)


class Dropout(NamedTuple):
    """Drop attention weights with ``probability``; the same ``seed`` gives the same mask again."""

    probability: float
    seed: int


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype to accumulate in: at least float32."""
    return torch.float32 if dtype in _HALVES else dtype


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None,
    causal: bool,
    scale: float,
    dropout: Dropout | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Result [B, H, Sq, Ev] and logsumexp [B, H, Sq] of one block.

    Args:
        bias: added to the scores, of the queries' dtype, broadcastable to [B, H, Sq, Sk]; -inf hides.
        causal: hide keys after the query; Sq == Sk, and no bias.
        scale: of the scores.
        dropout: None for none.

    Returns:
        A row in which everything is hidden is 0, its logsumexp -inf.
    """
    kernel = None if dropout else _kernel(q, k, v, bias, causal)
    if kernel == "cpu":
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu.default(
            _rows(q), _rows(k), _rows(v), 0.0, causal, attn_mask=bias, scale=scale
        )
        if bias is not None:  # the kernel says 0 for a row in which all is hidden
            lse = lse.masked_fill((bias == _NEVER).all(-1), _NEVER)
        return out, lse
    if kernel == "flash":
        k, v = _every_head(q, k), _every_head(q, v)
        out, lse, *_ = aten._scaled_dot_product_flash_attention.default(
            _rows(q), _rows(k), _rows(v), 0.0, causal, scale=scale
        )
        return out, lse
    if kernel == "efficient":
        k, v = _every_head(q, k), _every_head(q, v)
        out, lse, *_ = aten._scaled_dot_product_efficient_attention.default(
            _rows(q), _rows(k), _rows(v), None, True, 0.0, causal, scale=scale
        )
        return out, lse[..., : q.shape[2]]
    return _formula(q, k, v, bias, causal, scale, dropout)


def attend_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    causal: bool,
    scale: float,
    dropout: Dropout | None,
    bias_grad: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Gradients of queries, keys, values and (if asked) of the scores' bias, [B, H, Sq, Sk], from one block.

    Args:
        grad: of the result, [B, H, Sq, Ev].
        out, lse: result and logsumexp of the whole rows, over all blocks.
        q, k, v, bias, causal, scale, dropout: as in `attend`.
    """
    lse = lse.masked_fill(lse == _NEVER, 0.0)  # all scores of such a row are -inf: exp(-inf - 0) is 0
    kernel = None if dropout or bias_grad else _kernel(q, k, v, bias, causal)
    grad, q, k, v, out = _rows(grad), _rows(q), _rows(k), _rows(v), _rows(out)
    if kernel == "cpu":
        dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward.default(
            grad, q, k, v, out, lse, 0.0, causal, attn_mask=bias, scale=scale
        )
        return dq, dk, dv, None
    if kernel is not None:
        backward = _flash_backward if kernel == "flash" else _efficient_backward
        dq, dk, dv = backward(grad, q, _every_head(q, k), _every_head(q, v), out, lse, causal, scale)
        return dq, _own_heads(dk, k), _own_heads(dv, v), None
    return _formula_backward(grad, q, k, v, bias, out, lse, causal, scale, dropout)


def _kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None, causal: bool) -> str | None:
    """Which of torch's fused kernels takes this block; None: the formula."""
    if q.shape[-1] != v.shape[-1] or not q.numel() or not k.numel():
        return None
    if q.device.type == "cpu":
        return "cpu" if q.dtype in _FUSED_ON_CPU else None
    if q.device.type != "cuda" or bias is not None or q.shape[-1] % 8:
        return None
    params = torch.backends.cuda.SDPAParams(q, _every_head(q, k), _every_head(q, v), None, 0.0, causal, False)
    if q.dtype in _HALVES and torch.backends.cuda.can_use_flash_attention(params):
        return "flash"
    return "efficient" if torch.backends.cuda.can_use_efficient_attention(params) else None


def _rows(x: torch.Tensor) -> torch.Tensor:
    """The tensor with features that lie side by side, as the kernels want them."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _every_head(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Keys or values repeated for the queries' heads."""
    return k if k.shape[1] == q.shape[1] else k.repeat_interleave(q.shape[1] // k.shape[1], 1)


def _own_heads(grad: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """The adjoint of `_every_head`."""
    return grad if grad.shape[1] == k.shape[1] else grad.view(grad.shape[0], k.shape[1], -1, *grad.shape[2:]).sum(2)


def _flash_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    none = torch.zeros(2, dtype=torch.int64, device=q.device)  # state of a random generator that is not used
    lengths = (None, None, q.shape[2], k.shape[2])
    dq, dk, dv = aten._scaled_dot_product_flash_attention_backward.default(
        grad, q, k, v, out, lse.contiguous(), *lengths, 0.0, causal, none, none, scale=scale
    )
    return dq, dk, dv


def _efficient_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    none = torch.zeros((), dtype=torch.int64, device=q.device)
    # The kernel reads rows in groups of 32; the rows past the end must give exp(score - inf) = 0.
    lse = torch.nn.functional.pad(lse, (0, -lse.shape[-1] % 32), value=float("inf"))
    dq, dk, dv, _ = aten._scaled_dot_product_efficient_attention_backward.default(
        grad, q, k, v, None, out, lse, none, none, 0.0, [True, True, True, False], causal, scale=scale
    )
    return dq, dk, dv


def _scores(q: torch.Tensor, k: torch.Tensor, bias: torch.Tensor | None, causal: bool, scale: float) -> torch.Tensor:
    scores = (q @ k.mT) * scale
    if bias is not None:
        scores = scores + bias
    if causal:
        scores = scores.masked_fill(scores.new_ones(scores.shape[-2:], dtype=torch.bool).triu(1), _NEVER)
    return scores


def _kept(scores: torch.Tensor, dropout: Dropout) -> torch.Tensor:
    """The factor of every weight: 0 where dropped, 1 / (1 - p) elsewhere."""
    generator = torch.Generator(scores.device).manual_seed(dropout.seed)
    keep = 1.0 - dropout.probability
    factor = torch.empty_like(scores).bernoulli_(keep, generator=generator)
    return factor / keep if keep else factor


def _formula(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None,
    causal: bool,
    scale: float,
    dropout: Dropout | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    dtype = wide(q.dtype)
    scores = _scores(q.to(dtype), _every_head(q, k).to(dtype), bias, causal, scale)
    lse = scores.logsumexp(-1)
    weights = (scores - lse.masked_fill(lse == _NEVER, 0.0).unsqueeze(-1)).exp()
    if dropout:
        weights = weights * _kept(scores, dropout)
    return (weights @ _every_head(q, v).to(dtype)).to(q.dtype), lse


def _formula_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    causal: bool,
    scale: float,
    dropout: Dropout | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    dtype = wide(q.dtype)
    own = (k, v)
    grad, q, out = grad.to(dtype), q.to(dtype), out.to(dtype)
    k, v = _every_head(q, k).to(dtype), _every_head(q, v).to(dtype)
    scores = _scores(q, k, bias, causal, scale)
    weights = (scores - lse.unsqueeze(-1)).exp()
    dweights = grad @ v.mT
    used = weights
    if dropout:
        factor = _kept(scores, dropout)
        used, dweights = weights * factor, dweights * factor
    dscores = weights * (dweights - (grad * out).sum(-1, keepdim=True))
    dk, dv = (dscores.mT @ q) * scale, used.mT @ grad
    return (dscores @ k) * scale, _own_heads(dk, own[0]), _own_heads(dv, own[1]), dscores

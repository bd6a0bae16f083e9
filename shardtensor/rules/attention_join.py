"""Join what attention to several blocks of keys gave: results by their logsumexp, gradients by addition."""

from __future__ import annotations

import torch

from shardtensor import comm
from shardtensor.rules.attention_block import wide

__all__ = ["GradSum", "Joint"]

_NEVER = float("-inf")


class Joint:
    """Result and logsumexp of queries over the keys seen so far."""

    def __init__(self, queries: torch.Tensor, features: int) -> None:
        self.shape = (*queries.shape[:3], features)
        self.like = queries
        self.parts: tuple[torch.Tensor, torch.Tensor] | None = None

    def _held(self) -> tuple[torch.Tensor, torch.Tensor]:
        if self.parts is None:
            empty = torch.zeros(self.shape, dtype=wide(self.like.dtype), device=self.like.device)
            self.parts = empty, empty.new_full(self.shape[:3], _NEVER)
        return self.parts

    def add(self, rows: slice, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Join the result of further keys for the queries ``rows``."""
        if self.parts is None and len(range(*rows.indices(self.shape[2]))) == self.shape[2]:
            self.parts = out.to(wide(out.dtype)), lse
            return
        held_out, held_lse = (part[:, :, rows] for part in self._held())
        total = torch.logaddexp(held_lse, lse)
        base = total.masked_fill(total == _NEVER, 0.0)
        held_out.mul_((held_lse - base).exp().unsqueeze(-1)).add_(out * (lse - base).exp().unsqueeze(-1))
        held_lse.copy_(total)

    def join_over(self, group: str) -> None:
        """Join what the ranks of the group have, each for its own keys."""
        out, lse = self._held()
        top = comm.all_reduce(lse, "max", group)
        top = top.masked_fill(top == _NEVER, 0.0)
        weight = (lse - top).exp().unsqueeze(-1)
        both = comm.all_reduce(torch.cat((out * weight, weight), -1), "sum", group)
        total, weight = both[..., :-1], both[..., -1]
        hidden = weight == 0
        out = total / weight.masked_fill(hidden, 1.0).unsqueeze(-1)
        self.parts = out, (weight.log() + top)

    def result(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The result in the queries' dtype, and the logsumexp."""
        out, lse = self._held()
        return out.to(self.like.dtype), lse


class GradSum:
    """A sum of gradients for rows of a block, in the dtype to accumulate in."""

    def __init__(self, like: torch.Tensor) -> None:
        self.like = like
        self.held: torch.Tensor | None = None

    def add(self, rows: slice, part: torch.Tensor) -> None:
        """Add the gradient of some rows; ``part`` is given away."""
        if self.held is None and part.shape == self.like.shape:
            self.held = part.to(wide(part.dtype))
        else:
            self.sum()[:, :, rows].add_(part)

    def sum(self) -> torch.Tensor:
        """The sum so far."""
        if self.held is None:
            self.held = torch.zeros(self.like.shape, dtype=wide(self.like.dtype), device=self.like.device)
        return self.held

    def total(self) -> torch.Tensor:
        """The sum in the block's own dtype."""
        return self.sum().to(self.like.dtype)

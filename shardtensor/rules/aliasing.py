"""Views that had to move rows between ranks are copies: writing into one would not reach its base."""

from __future__ import annotations

from typing import Any

import torch

from shardtensor.errors import OpError
from shardtensor.rules.memory import in_backward
from shardtensor.tensor import ShardTensor

__all__ = ["moved", "refuse_lost_view", "refuse_lost_write"]


def moved(view: ShardTensor) -> ShardTensor:
    """Mark a view whose block is a copy."""
    view._moved_view = "in backward" if in_backward() else "in forward"
    return view


def refuse_lost_write(target: ShardTensor, op: Any = None) -> None:
    """Check a tensor before ``op`` writes to it in place.

    A backward pass writes through views only when it repeats, by ``copy_``, what the forward wrote; its other in-place
    ops add up gradients, which nobody reads through a base.

    Raises:
        OpError: the tensor is a view that is a copy.
    """
    repeats = in_backward() and op is torch.ops.aten.copy_.default
    if (
        target._moved_view == "in forward"
        or (target._moved_view and repeats)
        or ((repeats or not in_backward()) and _lies_apart(target))
    ):
        raise OpError(
            f"in-place write to a view {tuple(target._spec.shape)} whose rows had to move between ranks: it would not "
            f"reach the tensor it shows. Assign through that tensor (x[:, 3] = value), or clone() the view first"
        )


def _lies_apart(view: ShardTensor) -> bool:
    """Whether this rank's block is not in its base's memory: a rule copied it, or the base was given another block."""
    if not view._is_view() or not view._local_tensor.numel():
        return False
    base = view._base
    return isinstance(base, ShardTensor) and (
        view._local_tensor.untyped_storage()._cdata != base._local_tensor.untyped_storage()._cdata
    )


def refuse_lost_view(target: ShardTensor) -> None:
    """Check a tensor whose block must be replaced before it is written in place: it waits for a sum, or is expanded.

    Raises:
        OpError: the tensor is a view, whose base would keep the old block.
    """
    if target._is_view() and not in_backward():
        raise OpError(
            f"in-place write to a view {tuple(target._spec.shape)} of a tensor that is expanded or waits for a sum "
            f"(placements {target._spec.placements}): it would not reach it. Write out of place (y = y + 1), or "
            f"clone() the view first"
        )

"""Views that had to move rows between ranks are copies: writing into one would not reach its base."""

from __future__ import annotations

from shardtensor.errors import OpError
from shardtensor.rules.memory import in_backward
from shardtensor.tensor import ShardTensor

__all__ = ["moved", "refuse_lost_write"]


def moved(view: ShardTensor) -> ShardTensor:
    """Mark a view whose block is a copy. Not in a backward pass, whose gradients nobody reads through a base."""
    if not in_backward():
        view._is_moved_view = True
    return view


def refuse_lost_write(target: ShardTensor) -> None:
    """Check a tensor before it is written in place.

    Raises:
        OpError: the tensor is a view that is a copy.
    """
    if target._is_moved_view:
        raise OpError(
            f"in-place write to a view {tuple(target._spec.shape)} whose rows had to move between ranks: it would not "
            f"reach the tensor it shows. Assign through that tensor (x[:, 3] = value), or clone() the view first"
        )

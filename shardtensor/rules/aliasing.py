"""Views that had to move rows between ranks are copies: no write travels between one and its base, so neither is lost
in silence. Writing into the view is refused; writing into the base makes the view unreadable."""

from __future__ import annotations

from typing import Any
from weakref import ref

import torch

from shardtensor.errors import OpError
from shardtensor.rules.memory import in_backward
from shardtensor.tensor import ShardTensor

__all__ = ["moved", "refuse_lost_view", "refuse_lost_write"]


def moved(view: ShardTensor, source: ShardTensor) -> ShardTensor:
    """Mark a view of ``source`` whose block is a copy."""
    if in_backward():
        view._moved_view = "in backward"
        return view
    view._moved_view = "in forward"
    root = _root(source)
    root._moved_views = (*(known for known in root._moved_views if known() is not None), ref(view))
    return view


def _root(tensor: ShardTensor) -> ShardTensor:
    """The tensor that a view shows, or the tensor itself. Under ``inference_mode`` torch keeps no account of views."""
    base = tensor._base if tensor._is_view() else None
    return base if isinstance(base, ShardTensor) else tensor


class _Stale(torch.Tensor):
    """The block of a view that no longer shows its base: any use is an error."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise OpError(
            f"{func} reads a view whose rows had to move between ranks, but the tensor that it shows was written in "
            f"place after the view was made, so it holds old values. Take the view again after the write"
        )


def refuse_lost_write(target: ShardTensor, op: Any = None) -> None:
    """Check a tensor before ``op`` writes to it in place; views of it that are copies can then no longer be read.

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
    root = _root(target)
    if root._moved_views and not in_backward():
        for view in (view for known in root._moved_views if (view := known()) is not None and view is not target):
            local = view._local_tensor
            view._local_tensor = torch.Tensor._make_wrapper_subclass(
                _Stale, local.shape, local.stride(), dtype=local.dtype, device=local.device
            )
        root._moved_views = ()


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

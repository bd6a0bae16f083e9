"""All-reduce: every rank contributes, every rank gets the result. Its own adjoint (for sums)."""

from __future__ import annotations

import torch
import torch.distributed as dist

from shardtensor.comm.library import defined_op, exchange, resolve

__all__ = ["all_reduce"]

_OPS = {
    "sum": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "product": dist.ReduceOp.PRODUCT,
}

# Backends reduce neither bools nor short integers: 0 and 1 keep their meaning under max, min and product.
_CARRIED = {torch.bool: torch.uint8, torch.int16: torch.int32}


def _fake(x: torch.Tensor, op: str, group: str) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@defined_op("all_reduce(Tensor x, str op, str group) -> Tensor", _fake)
def _all_reduce(x: torch.Tensor, op: str, group: str) -> torch.Tensor:
    process_group, _, size = resolve(group)
    carried = _CARRIED.get(x.dtype, x.dtype)
    out = x.to(carried, copy=True, memory_format=torch.contiguous_format)
    if size > 1 and out.numel():
        with exchange("all_reduce", process_group, out.numel() * out.element_size()):
            dist.all_reduce(torch.view_as_real(out) if out.is_complex() else out, _OPS[op], group=process_group)
    return out.to(x.dtype)


def all_reduce(x: torch.Tensor, op: str, group: str) -> torch.Tensor:
    """Reduce ``x`` (any shape, the same on every rank) over the group.

    Args:
        x: this rank's contribution.
        op: "sum", "max", "min" or "product".
        group: name of the process group.

    Returns:
        A new contiguous tensor, the same on every rank.
    """
    return torch.ops.shardtensor.all_reduce(x, op, group)  # type: ignore[no-any-return]

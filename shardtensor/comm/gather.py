"""Uneven all-gather along one dim, and its adjoint, the uneven reduce-scatter."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from shardtensor.comm.all_to_all import swap_blocks
from shardtensor.comm.library import as_bytes, defined_op, exchange, resolve, with_length

__all__ = ["all_gather", "reduce_scatter"]

# torch 2.13 renamed it and warns about the old name.
_gather_blocks = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


def _fake_gather(x: torch.Tensor, dim: int, sizes: list[int], group: str) -> torch.Tensor:
    return x.new_empty(with_length(x, dim, sum(sizes)))


@defined_op("all_gather(Tensor x, int dim, int[] sizes, str group) -> Tensor", _fake_gather)
def _all_gather(x: torch.Tensor, dim: int, sizes: list[int], group: str) -> torch.Tensor:
    process_group, _, world = resolve(group)
    if world == 1:
        return x.clone(memory_format=torch.contiguous_format)
    widest, block = max(sizes), x.movedim(dim, 0)
    if len(block) < widest:
        # Backends gather equal blocks only: pad every block to the widest one, cut the padding off afterwards.
        block = torch.cat([block, block.new_zeros([widest - len(block), *block.shape[1:]])])
    gathered = x.new_empty([world, *block.shape])
    if block.numel():
        with exchange("all_gather", process_group, x.numel() * x.element_size()):
            _gather_blocks(as_bytes(gathered), as_bytes(block), group=process_group)
    if dim == 0 and min(sizes) == widest:
        return gathered.flatten(0, 1)
    out = _fake_gather(x, dim, sizes, group)
    torch.cat([gathered[rank, :size].movedim(0, dim) for rank, size in enumerate(sizes)], dim, out=out)
    return out


def all_gather(x: torch.Tensor, dim: int, sizes: Sequence[int], group: str) -> torch.Tensor:
    """Concatenate the ranks' blocks along ``dim``.

    Args:
        x: this rank's block, ``sizes[rank]`` long along ``dim``.
        sizes: length of every rank's block; zeros allowed.
        group: name of the process group.

    Returns:
        A contiguous tensor, ``sum(sizes)`` long along ``dim``, the same on every rank.
    """
    return torch.ops.shardtensor.all_gather(x, dim, list(sizes), group)  # type: ignore[no-any-return]


def _fake_scatter(x: torch.Tensor, dim: int, sizes: list[int], group: str) -> torch.Tensor:
    _, rank, _ = resolve(group)
    return x.new_empty(with_length(x, dim, sizes[rank]))


@defined_op("reduce_scatter(Tensor x, int dim, int[] sizes, str group) -> Tensor", _fake_scatter)
def _reduce_scatter(x: torch.Tensor, dim: int, sizes: list[int], group: str) -> torch.Tensor:
    process_group, rank, world = resolve(group)
    parts = swap_blocks(
        list(x.split(sizes, dim)), [with_length(x, dim, sizes[rank])] * world, process_group, "reduce_scatter"
    )
    total = parts[0].clone(memory_format=torch.contiguous_format)
    for part in parts[1:]:
        total += part
    return total


def reduce_scatter(x: torch.Tensor, dim: int, sizes: Sequence[int], group: str) -> torch.Tensor:
    """Sum the ranks' tensors and keep this rank's block along ``dim``: the adjoint of `all_gather`.

    Args:
        x: this rank's contribution, ``sum(sizes)`` long along ``dim``.
        sizes: length of the block that each rank keeps; zeros allowed.
        group: name of the process group.
    """
    return torch.ops.shardtensor.reduce_scatter(x, dim, list(sizes), group)  # type: ignore[no-any-return]

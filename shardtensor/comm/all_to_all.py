"""Uneven all-to-all: move the cut of a tensor from one dim to another. Swapping the two dims is its adjoint."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
import torch.distributed as dist

from shardtensor.comm.library import as_bytes, defined_op, exchange, resolve

__all__ = ["all_to_all", "swap_blocks"]


def swap_blocks(
    blocks: list[torch.Tensor], shapes: Sequence[Sequence[int]], group: dist.ProcessGroup, name: str
) -> list[torch.Tensor]:
    """Send ``blocks[r]`` to rank r and return what every rank sent here, of ``shapes[r]``; one message per pair."""
    if group.size() == 1:
        return [blocks[0]]
    dtype, item = blocks[0].dtype, blocks[0].element_size()
    outgoing = as_bytes(torch.cat([block.flatten() for block in blocks]))
    lengths = [prod(shape) for shape in shapes]
    incoming = outgoing.new_empty(sum(lengths) * item)
    kept = blocks[group.rank()].numel() * item
    with exchange(name, group, outgoing.numel() - kept):
        dist.all_to_all_single(
            incoming,
            outgoing,
            [length * item for length in lengths],
            [block.numel() * item for block in blocks],
            group=group,
        )
    pieces = incoming.view(dtype).split(lengths)
    return [piece.view(tuple(shape)) for piece, shape in zip(pieces, shapes, strict=True)]


def _fake(
    x: torch.Tensor, split_dim: int, split_sizes: list[int], cat_dim: int, cat_sizes: list[int], group: str
) -> torch.Tensor:
    _, rank, _ = resolve(group)
    shape = list(x.shape)
    shape[split_dim], shape[cat_dim] = split_sizes[rank], sum(cat_sizes)
    return x.new_empty(shape)


@defined_op(
    "all_to_all(Tensor x, int split_dim, int[] split_sizes, int cat_dim, int[] cat_sizes, str group) -> Tensor", _fake
)
def _all_to_all(
    x: torch.Tensor, split_dim: int, split_sizes: list[int], cat_dim: int, cat_sizes: list[int], group: str
) -> torch.Tensor:
    process_group, rank, _ = resolve(group)
    shapes = []
    for size in cat_sizes:
        shape = list(x.shape)
        shape[split_dim], shape[cat_dim] = split_sizes[rank], size
        shapes.append(shape)
    return torch.cat(swap_blocks(list(x.split(split_sizes, split_dim)), shapes, process_group, "all_to_all"), cat_dim)


def all_to_all(
    x: torch.Tensor, split_dim: int, split_sizes: Sequence[int], cat_dim: int, cat_sizes: Sequence[int], group: str
) -> torch.Tensor:
    """Cut ``split_dim`` and join ``cat_dim``.

    Args:
        x: this rank's block: ``sum(split_sizes)`` long along ``split_dim``, ``cat_sizes[rank]`` along ``cat_dim``.
        split_sizes: what each rank holds of ``split_dim`` afterwards; zeros allowed.
        cat_sizes: what each rank holds of ``cat_dim`` before; zeros allowed.
        group: name of the process group.

    Returns:
        ``split_sizes[rank]`` long along ``split_dim``, ``sum(cat_sizes)`` along ``cat_dim``.
    """
    return torch.ops.shardtensor.all_to_all(  # type: ignore[no-any-return]
        x, split_dim, list(split_sizes), cat_dim, list(cat_sizes), group
    )

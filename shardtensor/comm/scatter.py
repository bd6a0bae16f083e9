"""One rank to all: send each rank its own block, or the same values to every rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from shardtensor.comm.library import as_bytes, exchange, resolve
from shardtensor.comm.pairs import begin_pairs

__all__ = ["broadcast_value", "broadcast_values", "scatter_blocks"]


def scatter_blocks(
    blocks: dict[int, torch.Tensor] | None,
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    src: int,
    group: str | None = None,
) -> torch.Tensor:
    """Send each rank its block; nothing else travels.

    Args:
        blocks: by global rank on the source, None elsewhere.
        shape, dtype, device: of this rank's block.
        src: global rank of the source.
        group: name of a process group that holds all these ranks; default: the one of all ranks.
    """
    process_group = resolve(group)[0] if group else dist.distributed_c10d._get_default_group()
    rank = dist.get_rank()
    outgoing: dict[int, torch.Tensor] = {}
    incoming: dict[int, torch.Tensor] = {}
    if blocks is not None:
        mine = blocks[rank].to(device, copy=True, memory_format=torch.contiguous_format)
        others = {peer: block for peer, block in blocks.items() if peer != rank}
        outgoing = {dist.get_group_rank(process_group, peer): block.to(device) for peer, block in others.items()}
    else:
        mine = torch.empty(tuple(shape), dtype=dtype, device=device)
        incoming = {dist.get_group_rank(process_group, src): mine}
    begin_pairs("scatter", outgoing, incoming, process_group, device)()
    return mine


def broadcast_value(value: Any, src: int, group: str) -> Any:
    """A picklable value of rank ``src`` of the group, on every rank."""
    process_group, _, world = resolve(group)
    if world == 1:
        return value
    box = [value]
    with exchange("broadcast", process_group, 0):
        dist.broadcast_object_list(box, group=process_group, group_src=src)
    return box[0]


def broadcast_values(tensors: Sequence[torch.Tensor], src: int, group: str) -> None:
    """Overwrite ``tensors`` with those of rank ``src`` of the group, one message per dtype."""
    process_group, rank, world = resolve(group)
    if world == 1:
        return
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        by_dtype.setdefault(tensor.dtype, []).append(tensor)
    for members in by_dtype.values():
        flat = torch.cat([member.detach().flatten() for member in members])
        if flat.numel():
            with exchange("broadcast", process_group, flat.numel() * flat.element_size() if rank == src else 0):
                dist.broadcast(as_bytes(flat), group=process_group, group_src=src)
        for member, values in zip(members, flat.split([member.numel() for member in members]), strict=True):
            member.detach().copy_(values.view_as(member))

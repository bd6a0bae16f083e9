"""Ring shift: hand a tensor to the next rank and take the previous rank's. The opposite shift is its adjoint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

import torch
import torch.distributed as dist

from shardtensor.comm.library import as_bytes, defined_op, exchange, resolve

__all__ = ["ring_shift", "ring_shift_begin"]


def ring_shift_begin(
    x: torch.Tensor, recv_shape: Sequence[int], group: str, shift: int = 1
) -> Callable[[], torch.Tensor]:
    """Start a ring shift; the returned function waits for it and gives the tensor received.

    Compute on ``x`` while it flies, but do not write to it.
    """
    process_group, rank, world = resolve(group)
    if shift % world == 0:
        return lambda: x
    received = x.new_empty(tuple(recv_shape))
    sent = x.contiguous()
    ops = []
    if sent.numel():
        ops.append(dist.P2POp(dist.isend, as_bytes(sent), group=process_group, group_peer=(rank + shift) % world))
    if prod(recv_shape):
        ops.append(dist.P2POp(dist.irecv, as_bytes(received), group=process_group, group_peer=(rank - shift) % world))
    with exchange("ring_shift", process_group, sent.numel() * sent.element_size()):
        works = dist.batch_isend_irecv(ops) if ops else []

    def end() -> torch.Tensor:
        with exchange("ring_shift", process_group):
            for work in works:
                work.wait()
        del sent_alive[:]
        return received

    sent_alive = [sent]
    return end


def _fake(x: torch.Tensor, recv_shape: list[int], shift: int, group: str) -> torch.Tensor:
    return x.new_empty(recv_shape)


@defined_op("ring_shift(Tensor x, int[] recv_shape, int shift, str group) -> Tensor", _fake)
def _ring_shift(x: torch.Tensor, recv_shape: list[int], shift: int, group: str) -> torch.Tensor:
    received = ring_shift_begin(x, recv_shape, group, shift)()
    return received.clone() if received is x else received


def ring_shift(x: torch.Tensor, recv_shape: Sequence[int], group: str, shift: int = 1) -> torch.Tensor:
    """Send ``x`` to rank ``+shift`` and return what rank ``-shift`` sent, of ``recv_shape``; shapes may differ."""
    return torch.ops.shardtensor.ring_shift(x, list(recv_shape), shift, group)  # type: ignore[no-any-return]

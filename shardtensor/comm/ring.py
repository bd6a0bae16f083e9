"""Ring shift: hand a tensor to the next rank and take the previous rank's. The opposite shift is its adjoint."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from shardtensor.comm.library import defined_op, resolve
from shardtensor.comm.pairs import begin_pairs

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
    outgoing, incoming = {(rank + shift) % world: x.contiguous()}, {(rank - shift) % world: received}
    wait = begin_pairs("ring_shift", outgoing, incoming, process_group, x.device)

    def end() -> torch.Tensor:
        wait()
        return received

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

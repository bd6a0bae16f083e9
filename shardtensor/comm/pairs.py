"""Messages between pairs of ranks: start all sends and receives of one exchange together, wait for them later."""

from __future__ import annotations

from collections.abc import Callable
from weakref import WeakSet

import torch
import torch.distributed as dist

from shardtensor.comm.library import as_bytes, exchange

__all__ = ["begin_pairs"]

_set_up: WeakSet[dist.ProcessGroup] = WeakSet()


def begin_pairs(
    name: str,
    outgoing: dict[int, torch.Tensor],
    incoming: dict[int, torch.Tensor],
    group: dist.ProcessGroup,
    device: torch.device,
) -> Callable[[], None]:
    """Start sending and receiving; call it on every rank of the group, also where nothing is sent or received.

    Args:
        name: of the exchange, for errors and traces.
        outgoing: by rank of the group: what to send; not to be written to before the wait. Empty tensors do not travel.
        incoming: by rank of the group: contiguous tensors to receive into.
        group: the process group.
        device: where the tensors are.

    Returns:
        A function that waits until everything has been sent and received.
    """
    if device.type != "cpu":
        _set_up_group(group, device)
    sends = {peer: as_bytes(block) for peer, block in outgoing.items() if block.numel()}
    receives = {peer: as_bytes(block) for peer, block in incoming.items() if block.numel()}
    ops = [dist.P2POp(dist.isend, block, group=group, group_peer=peer) for peer, block in sends.items()]
    ops += [dist.P2POp(dist.irecv, block, group=group, group_peer=peer) for peer, block in receives.items()]
    if not ops:
        return lambda: None
    with exchange(name, group, sum(block.numel() for block in sends.values())):
        works = dist.batch_isend_irecv(ops)

    def wait() -> None:
        with exchange(name, group):
            for work in works:
                work.wait()
        sends.clear()  # kept alive until here

    return wait


def _set_up_group(group: dist.ProcessGroup, device: torch.device) -> None:
    """Make the connections of a device's group, once, by an exchange in which all ranks take part.

    NCCL makes them at a group's first call and waits for all its ranks then; messages between pairs may leave some out.
    """
    if group not in _set_up:
        with exchange("set up", group):
            dist.all_reduce(torch.zeros(1, device=device), group=group)
        _set_up.add(group)

"""Facts that all ranks must share: gather small Python values so that every rank judges the same list."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardtensor.comm.library import exchange

__all__ = ["any_rank", "gather_facts"]


def gather_facts(value: Any, mesh: DeviceMesh) -> dict[tuple[int, ...], Any]:
    """The picklable ``value`` of every rank of the mesh, by mesh coordinate; the same dict on every rank."""
    found: dict[tuple[int, ...], Any] = {(): value}
    for axis in reversed(range(mesh.ndim)):
        group = mesh.get_group(axis)
        gathered: list[Any] = [found]
        if group.size() > 1:
            gathered = [None] * group.size()
            with exchange("gather_facts", group, 0):
                dist.all_gather_object(gathered, found, group=group)
        found = {(rank, *rest): item for rank, part in enumerate(gathered) for rest, item in part.items()}
    return found


def any_rank(flag: bool, mesh: DeviceMesh) -> bool:
    """Whether the flag is set on any rank of the mesh; the same answer on all of them."""
    for axis in range(mesh.ndim):
        group = mesh.get_group(axis)
        if group.size() == 1:
            continue
        device = "cpu" if "gloo" in dist.get_backend_config(group) else mesh.device_type
        found = torch.tensor([flag], dtype=torch.uint8, device=device)
        with exchange("any_rank", group, 1):
            dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
        flag = bool(found.item())
    return flag

"""Facts that all ranks must share: gather small Python values so that every rank judges the same list."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardtensor.comm.library import exchange

__all__ = ["gather_facts"]


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

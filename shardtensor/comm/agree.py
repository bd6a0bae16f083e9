"""Facts that all ranks must share: gather small Python values so that every rank judges the same list."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardtensor.comm.library import exchange

__all__ = ["SideGroup", "gather_facts"]


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


class SideGroup:
    """All ranks of a mesh on a gloo group of their own, so that agreeing never mixes with the model's exchanges.

    Make it on every rank of the mesh at the same point; it works from any one thread per rank.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self._ranks = mesh.mesh.flatten().tolist()
        self._group = None
        if len(self._ranks) > 1:
            self._group = dist.new_group(self._ranks, backend="gloo", use_local_synchronization=True)

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any rank."""
        if self._group is None:
            return flag
        found = torch.tensor([flag], dtype=torch.uint8)
        with exchange("agree", self._group, 1):
            dist.all_reduce(found, dist.ReduceOp.MAX, group=self._group)
        return bool(found.item())

    def gather(self, value: Any) -> dict[int, Any]:
        """The picklable value of every rank, by global rank."""
        if self._group is None:
            return {self._ranks[0]: value}
        gathered: list[Any] = [None] * len(self._ranks)
        with exchange("agree", self._group, 0):
            dist.all_gather_object(gathered, value, group=self._group)
        return dict(zip(self._ranks, gathered, strict=True))

    def close(self) -> None:
        """Give the group up; on every rank."""
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)
        self._group = None

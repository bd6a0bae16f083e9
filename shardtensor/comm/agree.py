"""Facts that all ranks must share: gather small Python values so that every rank judges the same list."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardtensor.comm.library import exchange

__all__ = ["gather_facts", "largest", "totals"]


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


def largest(value: int, mesh: DeviceMesh) -> int:
    """The largest ``value`` of any rank of the mesh; the same on all of them."""
    return _reduced([value], mesh, dist.ReduceOp.MAX, "largest")[0]


def totals(values: Sequence[int], mesh: DeviceMesh) -> list[int]:
    """Sums over all ranks of the mesh, place by place, of as many values on each; the same on all of them."""
    return _reduced(values, mesh, dist.ReduceOp.SUM, "totals")


def _reduced(values: Sequence[int], mesh: DeviceMesh, how: dist.ReduceOp.RedOpType, name: str) -> list[int]:
    found = torch.tensor(values, dtype=torch.int64)
    for axis in range(mesh.ndim):
        group = mesh.get_group(axis)
        if group.size() == 1:
            continue
        found = found.to("cpu" if "gloo" in dist.get_backend_config(group) else mesh.device_type)
        with exchange(name, group, found.numel() * found.element_size()):
            dist.all_reduce(found, how, group=group)
    numbers: list[int] = found.tolist()
    return numbers

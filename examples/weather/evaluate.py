"""How good a forecaster is on held-out times, beside the forecast that nothing changes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from shardtensor import ShardTensor


@dataclass(frozen=True)
class Score:
    """Root mean square errors per channel, in units of the channel's standard deviation.

    Attributes:
        model, persistence: errors [C] of the forecast, and of the last input taken as the forecast.
        samples: how many this data group forecast.
    """

    model: Tensor
    persistence: Tensor
    samples: int

    @property
    def overall(self) -> tuple[float, float]:
        """Both errors over all channels."""
        model, persistence = (errors.square().mean().sqrt().item() for errors in (self.model, self.persistence))
        return model, persistence

    def loss(self, scale: Tensor) -> float:
        """Mean square error over all channels, each in units of `scale` [C, 1, 1]: what training minimises."""
        return (self.model / scale.flatten().cpu()).square().mean().item()


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor on every rank, whether it is sharded or not. A collective."""
    return tensor.full_tensor() if isinstance(tensor, ShardTensor) else tensor


def group_sum(value: Tensor, mesh: DeviceMesh | None) -> Tensor:
    """The sum of a plain tensor over the data groups. A collective."""
    if mesh is not None and mesh["data"].size() > 1:
        dist.all_reduce(value, group=mesh["data"].get_group())
    return value


def group_mean(value: Tensor, mesh: DeviceMesh | None) -> Tensor:
    """The mean of a plain tensor over the data groups. A collective."""
    return group_sum(value, mesh) / (1 if mesh is None else mesh["data"].size())


@torch.no_grad()
def evaluate(model: nn.Module, batches: Iterable[dict[str, Any]], mesh: DeviceMesh | None) -> Score:
    """Forecast all batches; the same score comes out on every rank."""
    model.eval()
    sums: Tensor | None = None
    samples = 0
    for batch in batches:
        target = batch["target"]
        samples += len(target)
        channels = target.shape[1]
        guesses = (model(batch["input"]), batch["input"][:, -channels:])
        errors = torch.stack([whole((guess - target).square().mean(dim=(0, 2, 3))) for guess in guesses])
        counted = torch.cat([errors * len(target), torch.full_like(errors[:1], len(target))]).double()
        sums = counted if sums is None else sums + counted
    model.train()
    if sums is None:
        raise ValueError("there is no batch to evaluate on")
    sums = group_sum(sums, mesh)
    model_errors, persistence = (sums[:2] / sums[2]).sqrt().cpu()
    return Score(model_errors, persistence, samples)


@torch.no_grad()
def change_scale(batches: Iterable[dict[str, Any]], mesh: DeviceMesh | None) -> Tensor:
    """How much each channel changes over the lead [C, 1, 1]: the root mean square of some batches' changes."""
    sums: Tensor | None = None
    for batch in batches:
        channels = batch["target"].shape[1]
        change = (batch["target"] - batch["input"][:, -channels:]).square().mean(dim=(0, 2, 3))
        counted = torch.cat([whole(change), torch.ones_like(whole(change)[:1])]).double()
        sums = counted if sums is None else sums + counted
    if sums is None:
        raise ValueError("there is no batch to measure changes on")
    sums = group_sum(sums, mesh)
    return (sums[:-1] / sums[-1]).sqrt().clamp(min=1e-6).float()[:, None, None]

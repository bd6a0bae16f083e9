"""What a training prints at its end: losses, skill, agreement with one process, bytes and memory per rank, pictures."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from evaluate import Score
from rich.console import Console
from rich.table import Table
from torch import nn


@dataclass(frozen=True)
class Agreement:
    """The largest relative differences between this training and the same one in one process.

    Attributes:
        steps: training steps compared.
        loss: of the losses of these steps.
        weights: of any weight after them, relative to the largest entry of its tensor.
    """

    steps: int
    loss: float
    weights: float

    @classmethod
    def of(cls, model: nn.Module, losses: Sequence[float], reference: dict[str, Any]) -> Agreement:
        """Compare the state right after the reference's last step with its checkpoint."""
        pairs = list(zip(losses, reference["losses"], strict=True))
        theirs = reference["model"]
        apart = [
            (
                (weight.detach().cpu() - theirs[name].cpu()).abs().max()
                / theirs[name].abs().max().cpu().clamp(min=1e-12)
            ).item()
            for name, weight in model.state_dict().items()
        ]
        return cls(len(pairs), max(abs(one - two) / abs(two) for one, two in pairs), max(apart))


@dataclass(frozen=True)
class Usage:
    """What one rank used.

    Attributes:
        samples: samples read.
        needed, fetched: bytes of its slabs, and bytes it decoded to get them.
        memory: peak bytes, of the process, or on the GPU where there is one; None where the system does not tell.
    """

    samples: int
    needed: int
    fetched: int
    memory: int | None


def peak_memory(device: torch.device) -> int | None:
    """Peak memory of this process in bytes: on the GPU, or resident."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if sys.platform == "win32":
        return None
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def from_all_ranks(mine: Any) -> list[Any]:
    """What every rank has, on every rank. A collective."""
    if not dist.is_initialized():
        return [mine]
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    return every


@dataclass(frozen=True)
class Report:
    """All that is known at the end of a training.

    Attributes:
        losses: of every step.
        held_out: loss on the held-out times before and after.
        score: errors on the held-out times after.
        channels, std: names and standard deviations of the channels.
        lead: how far ahead the forecast is, in words.
        agreement: with one process, where it was compared.
        usage: by rank.
        sample_bytes: stored bytes of one sample.
        pictures: where they are.
    """

    losses: Sequence[float]
    held_out: tuple[float, float]
    score: Score
    channels: Sequence[str]
    std: Sequence[float]
    lead: str
    agreement: Agreement | None
    usage: Sequence[Usage]
    sample_bytes: int
    pictures: Sequence[Path]

    def write(self, path: Path) -> None:
        """As JSON, with errors in the channels' units."""
        units = torch.tensor([unit or 1.0 for unit in self.std], dtype=torch.float64)
        facts = {
            "losses": list(self.losses),
            "held_out_loss": {"before": self.held_out[0], "after": self.held_out[1]},
            "lead": self.lead,
            "rmse": dict(zip(self.channels, (self.score.model * units).tolist(), strict=True)),
            "rmse_persistence": dict(zip(self.channels, (self.score.persistence * units).tolist(), strict=True)),
            "rmse_overall": dict(zip(("model", "persistence"), self.score.overall, strict=True)),
            "difference_to_one_process": None if self.agreement is None else asdict(self.agreement),
            "sample_bytes": self.sample_bytes,
            "ranks": [asdict(used) for used in self.usage],
        }
        path.write_text(json.dumps(facts, indent=1))

    def show(self) -> None:
        """Print it."""
        console = Console(width=110, highlight=False)
        last = self.losses[-20:]
        before, after = self.held_out
        mean = sum(last) / len(last)
        console.print(f"\nloss, training:  {self.losses[0]:.4f} at step 1, {mean:.4f} over the last {len(last)} steps")
        console.print(f"loss, held out:  {before:.4f} before, {after:.4f} after training")
        console.print(self._errors())
        model, persistence = self.score.overall
        better = 100 * (1 - _ratio(model, persistence))
        verdict, how = ("beats", "smaller") if better > 0 else ("does not beat", "larger")
        console.print(f"The model {verdict} persistence: its error is {abs(better):.1f} % {how}.")
        if self.agreement is not None:
            found = self.agreement
            console.print(
                f"Largest difference to one process over the first {found.steps} steps: loss {found.loss:.1e}, "
                f"weights {found.weights:.1e} (relative)"
            )
        console.print(self._usage())
        for path in self.pictures:
            console.print(f"picture: {path}")

    def _errors(self) -> Table:
        table = _table(f"Error on held-out times, {self.lead} ahead (root mean square)", "channel")
        for heading in ("model", "persistence", "model / persistence"):
            table.add_column(heading, justify="right")
        rows = zip(self.channels, self.std, self.score.model.tolist(), self.score.persistence.tolist(), strict=True)
        everything = ("all, in standard deviations", 1.0, *self.score.overall)
        for name, std, model, persistence in (*rows, everything):
            unit = std or 1.0
            table.add_row(name, f"{model * unit:.4g}", f"{persistence * unit:.4g}", f"{_ratio(model, persistence):.3f}")
        return table

    def _usage(self) -> Table:
        table = _table(f"By rank; one sample is {_size(self.sample_bytes)}", "rank")
        for heading in ("its part of a sample", "decoded for it", "samples read", "peak memory"):
            table.add_column(heading, justify="right")
        for rank, used in enumerate(self.usage):
            part, decoded = (_size(count / max(used.samples, 1)) for count in (used.needed, used.fetched))
            memory = "unknown" if used.memory is None else _size(used.memory)
            table.add_row(str(rank), part, decoded, str(used.samples), memory)
        return table


def _table(title: str, first: str) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column(first)
    return table


def _ratio(model: float, persistence: float) -> float:
    return model / persistence if persistence > 0 else math.nan


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.1f} {unit}" if unit != "B" else f"{count:.0f} B"
        count /= 1024
    raise AssertionError

"""Pictures of a forecast beside the truth, and of the loss. Needs matplotlib: the extra `plot`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np
from torch import Tensor

matplotlib.use("Agg")
from matplotlib import pyplot


def draw_forecast(
    path: Path, channels: Sequence[str], last: Tensor, forecast: Tensor, truth: Tensor, title: str
) -> None:
    """A row per channel: where the forecast started, the forecast, the truth, the difference; all fields [C, H, W]."""
    count = min(len(channels), 6)
    height, width = truth.shape[1:]
    wide = 3.4 * min(2.2, max(0.8, width / height))
    figure, axes = pyplot.subplots(count, 4, figsize=(4 * wide, 3.0 * count), squeeze=False, layout="constrained")
    for row, name in zip(axes, channels, strict=False):
        number = list(channels).index(name)
        fields = [field[number].cpu().numpy() for field in (last, forecast, truth)]
        low, high = np.percentile(fields[2], [0.5, 99.5])
        for axis, field, label in zip(row, fields, ("last input", "forecast", "truth"), strict=False):
            image = axis.imshow(field, vmin=low, vmax=high, aspect="auto")
            axis.set_title(f"{name}: {label}", fontsize=9)
        figure.colorbar(image, ax=row[:3].tolist(), shrink=0.8)
        difference = fields[1] - fields[2]
        most = max(float(np.abs(fields[0] - fields[2]).max()), 1e-30)
        image = row[3].imshow(difference, vmin=-most, vmax=most, cmap="RdBu_r", aspect="auto")
        row[3].set_title("forecast - truth (scale: change since last input)", fontsize=9)
        figure.colorbar(image, ax=row[3], shrink=0.8)
        for axis in row:
            axis.set_xticks([])
            axis.set_yticks([])
    figure.suptitle(title)
    figure.savefig(path, dpi=80)
    pyplot.close(figure)


def draw_losses(path: Path, losses: Sequence[float], held_out: tuple[float, float]) -> None:
    """The training loss by step, and the held-out loss before and after."""
    figure, axis = pyplot.subplots(figsize=(7, 4), layout="constrained")
    axis.semilogy(range(1, len(losses) + 1), losses, lw=0.8, label="training, each step")
    axis.semilogy([0, len(losses)], held_out, "o", label="held-out times, before and after")
    axis.set_xlabel("step")
    axis.set_ylabel("mean square error / mean square change")
    axis.grid(alpha=0.3)
    axis.legend()
    figure.savefig(path, dpi=80)
    pyplot.close(figure)

"""Interpolation along one dim as a weighted sum of rows, in global coordinates, with the plain op's own weights."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch.utils._python_dispatch import _disable_current_modes

from shardtensor.rules.stencil import Rows

__all__ = ["Sampling", "Taps", "source_rows"]

aten = torch.ops.aten

TAPS = {"nearest": 1, "nearest-exact": 1, "linear": 2, "cubic": 4}


@dataclass(frozen=True)
class Sampling:
    """How an op resizes one dim.

    Attributes:
        mode: "nearest", "nearest-exact", "linear" or "cubic".
        length: input rows.
        out_length: output rows.
        align_corners: whether first and last rows of input and output coincide.
        scale: output rows per input row where the caller gave it, else None.
    """

    mode: str
    length: int
    out_length: int
    align_corners: bool
    scale: float | None

    def base(self, output: int) -> int:
        """The input row at or before the place that an output samples, which may lie outside where rows are repeated.

        The op's own arithmetic may round to the next row on either side.
        """
        if self.align_corners:
            ratio = (self.length - 1) / (self.out_length - 1) if self.out_length > 1 else 0.0
        else:
            ratio = 1 / self.scale if self.scale else self.length / self.out_length
        middle = self.mode == "nearest-exact" or not (self.align_corners or self.mode == "nearest")
        place = (
            (output + 0.5) * ratio - (0.5 if self.mode in ("linear", "cubic") else 0.0) if middle else output * ratio
        )
        # Farther out, all rows are the one at the edge.
        low, high = (-2, self.length) if self.mode == "cubic" else (0, self.length - 1)
        return min(max(int(place // 1), low), high)

    @property
    def whole_factor(self) -> int:
        """Output rows per input row where that is a whole number in every respect, else 0."""
        factor = self.out_length // self.length
        whole = factor * self.length == self.out_length and self.scale in (None, float(factor))
        return factor if whole and not self.align_corners else 0

    def probe(self, rows: torch.Tensor) -> torch.Tensor:
        """The plain op on ``rows`` [channels, length] -> [channels, out_length]."""
        size, scale = [self.out_length], self.scale
        if self.mode == "nearest":
            return aten.upsample_nearest1d.default(rows[None], size, scale)[0]  # type: ignore[no-any-return]
        if self.mode == "nearest-exact":
            return aten._upsample_nearest_exact1d.default(rows[None], size, scale)[0]  # type: ignore[no-any-return]
        if self.mode == "linear":
            return aten.upsample_linear1d.default(rows[None], size, self.align_corners, scale)[0]  # type: ignore[no-any-return]
        column = rows[None, :, :, None]
        found = aten.upsample_bicubic2d.default(column, [*size, 1], self.align_corners, scale, None)
        return found[0, :, :, 0]  # type: ignore[no-any-return]


def source_rows(sampling: Sampling, outputs: Rows) -> Rows:
    """Input rows that a run of outputs may read, one row to spare on each side."""
    start, stop = outputs
    if start == stop:
        return 0, 0
    before, after = _reach(sampling.mode)
    return max(sampling.base(start) - before, 0), min(sampling.base(stop - 1) + after + 1, sampling.length)


def _reach(mode: str) -> Rows:
    taps = TAPS[mode]
    return 1 + (taps - 1) // 2, 1 + taps // 2


@lru_cache(maxsize=256)
def _table(sampling: Sampling, dtype: torch.dtype, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Input rows and weights [taps, out_length] of every output, in the arithmetic of the plain op itself.

    The op runs on combs: rows that are 1 where ``row % period == offset``. What comes out at an output is the weight
    of the only row of that offset near it.
    """
    with _disable_current_modes(), torch.inference_mode(False):  # the table outlives the call: real tensors, no traces
        return _probed(sampling, dtype, device)


def _probed(sampling: Sampling, dtype: torch.dtype, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    taps = TAPS[sampling.mode]
    before, _ = _reach(sampling.mode)
    period = taps + 2
    at = torch.arange(sampling.length, device=device)
    combs = (at % period == torch.arange(period, device=device)[:, None]).to(dtype)
    found = sampling.probe(combs)
    lowest = torch.tensor([sampling.base(output) for output in range(sampling.out_length)], device=device) - before
    near = lowest + torch.arange(period, device=device)[:, None]
    weights = found.gather(0, near % period)
    weights = torch.where((near >= 0) & (near < sampling.length), weights, 0.0)
    # The op's first tap is the second of these, unless a weight outside its taps says otherwise.
    first = torch.ones(sampling.out_length, dtype=torch.long, device=device)
    first = torch.where(weights[0] != 0, 0, torch.where(weights[-1] != 0, 2, first))
    chosen = first + torch.arange(taps, device=device)[:, None]
    return near.gather(0, chosen).clamp(0, sampling.length - 1), weights.gather(0, chosen)


@dataclass(frozen=True)
class Taps:
    """One dim of a block, resized by weighted sums of its rows.

    Attributes:
        sampling: how the whole dim is resized.
        dim: the tensor dim.
        outputs: the outputs that are made here.
        window: the input rows that are here.
    """

    sampling: Sampling
    dim: int
    outputs: Rows
    window: Rows

    def _rows(self, block: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        kind = block.dtype if block.dtype in (torch.float64, torch.float32) else torch.float32
        rows, weights = _table(self.sampling, kind, block.device.type)
        run = slice(*self.outputs)
        here = (rows[:, run] - self.window[0]).clamp(0, self.window[1] - self.window[0] - 1)
        return here, weights[:, run].view(len(rows), -1, *(1,) * (block.dim() - self.dim - 1))

    def apply(self, block: torch.Tensor) -> torch.Tensor:
        """The outputs along the dim, of the window along it."""
        rows, weights = self._rows(block)
        if len(rows) == 1:
            return block.index_select(self.dim, rows[0])
        total = block.index_select(self.dim, rows[0]).mul_(weights[0])
        for row, weight in zip(rows[1:], weights[1:], strict=True):
            total.addcmul_(block.index_select(self.dim, row), weight)
        return total

    def adjoint(self, grad: torch.Tensor) -> torch.Tensor:
        """The gradient of the window, from that of the outputs."""
        rows, weights = self._rows(grad)
        shape = list(grad.shape)
        shape[self.dim] = self.window[1] - self.window[0]
        total = grad.new_zeros(shape)
        for row, weight in zip(rows, weights, strict=True):
            total.index_add_(self.dim, row, grad if len(rows) == 1 else grad * weight)
        return total

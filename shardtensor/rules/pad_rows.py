"""Rows that padding repeats: which row each row of the padded dim shows, and the exchange that fetches them.

Every rank's rows of the padded dim show a window of rows of the dim; ranks at the ends show some of them several times.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch

from shardtensor import comm
from shardtensor.spec import Cut, ShardTensorSpec

__all__ = ["added_rows", "fold_rows", "pad_rows"]


def added_rows(sizes: Sequence[int], before: int, after: int) -> tuple[int, ...]:
    """Sizes of the padded dim: the first rank owns the rows before, the last one those after."""
    found = list(sizes)
    found[0] += before
    found[-1] += after
    return tuple(found)


class _Shown(NamedTuple):
    """What a rank's rows of the padded dim show: a window of rows, and each row's place in it (None: in order)."""

    window: tuple[int, int]
    places: tuple[int, ...] | None


def _reflected(row: int, length: int) -> int:
    """The row shown at ``row``, which may lie outside ``0 <= row < length``."""
    return -row if row < 0 else 2 * (length - 1) - row if row >= length else row


def _replicated(row: int, length: int) -> int:
    return min(max(row, 0), length - 1)


_ROWS = {"reflect": _reflected, "replicate": _replicated}


@lru_cache(maxsize=2048)
def _shown(sizes: tuple[int, ...], before: int, after: int, mode: str) -> tuple[_Shown, ...]:
    """By rank. Circular padding shows rows beyond the ends, which the exchange wraps around."""
    edges = [0, *accumulate(sizes)]
    length = edges[-1]
    edges[0], edges[-1] = -before, length + after
    if mode == "circular":
        return tuple(_Shown(window, None) for window in pairwise(edges))
    found = []
    for start, stop in pairwise(edges):
        rows = [_ROWS[mode](row, length) for row in range(start, stop)]
        if not rows:
            found.append(_Shown((0, 0), None))
            continue
        first, last = min(rows), max(rows)
        in_order = rows == list(range(first, last + 1))
        found.append(_Shown((first, last + 1), None if in_order else tuple(row - first for row in rows)))
    return tuple(found)


def _exchange(spec: ShardTensorSpec, axis: int, sides: tuple[int, int], mode: str) -> tuple[Cut, list[_Shown], str]:
    cut = spec.layout[axis]
    assert isinstance(cut, Cut)
    return cut, list(_shown(cut.sizes, *sides, mode)), comm.group_of(spec.mesh, axis)


def pad_rows(local: torch.Tensor, spec: ShardTensorSpec, axis: int, sides: tuple[int, int], mode: str) -> torch.Tensor:
    """Pad the dim that mesh axis ``axis`` cuts into consecutive rows.

    Args:
        local: this rank's block.
        spec: layout of the whole tensor; of other dims, ``local`` may be longer or shorter.
        sides: rows before and after.
        mode: "reflect", "replicate" or "circular".
    """
    cut, shown, group = _exchange(spec, axis, sides, mode)
    windows = [item.window for item in shown]
    rows = comm.halo_exchange(local, cut.dim, cut.sizes, windows, group, periodic=mode == "circular")
    places = shown[spec.coordinate[axis]].places
    return rows if places is None else rows.index_select(cut.dim, torch.tensor(places, device=rows.device))


def fold_rows(grad: torch.Tensor, spec: ShardTensorSpec, axis: int, sides: tuple[int, int], mode: str) -> torch.Tensor:
    """The adjoint of `pad_rows`: add every row of the padded dim to the row that it shows."""
    cut, shown, group = _exchange(spec, axis, sides, mode)
    window, places = shown[spec.coordinate[axis]]
    if places is not None:
        shape = [*grad.shape[: cut.dim], window[1] - window[0], *grad.shape[cut.dim + 1 :]]
        grad = grad.new_zeros(shape).index_add_(cut.dim, torch.tensor(places, device=grad.device), grad)
    windows = [item.window for item in shown]
    return comm.halo_reduce(grad.contiguous(), cut.dim, cut.sizes, windows, group, periodic=mode == "circular")

"""Rows of a cut dim by number: every rank asks the owners for the rows it names; the adjoint adds rows to their owners.

Only the rows asked for travel, never the whole tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
import torch.distributed as dist

from shardtensor.comm.all_to_all import swap_blocks
from shardtensor.comm.library import defined_op, resolve, with_length

__all__ = ["add_rows", "take_rows"]


class _Plan(NamedTuple):
    """Which local rows go to whom, and where the rows that come in belong.

    Attributes:
        give: for every rank, the rows of the own block that it asked for, in the order of its list.
        place: for every rank, the places in the own list whose rows it owns.
    """

    give: list[torch.Tensor]
    place: list[torch.Tensor]


def _plan(index: torch.Tensor, sizes: list[int], parts: list[int], shared: bool, group: dist.ProcessGroup) -> _Plan:
    """Work out who owes which rows to whom.

    Raises:
        IndexError: on all ranks, where any rank names a row outside the dim.
    """
    edges = [0, *accumulate(sizes)]
    owned = edges[group.rank()], edges[group.rank() + 1]
    bad = (index < 0) | (index >= edges[-1])
    if shared:
        _check(bad.any(), edges[-1])
        asked = index.split(parts)
        mine = asked[group.rank()]
        wanted = [part[(part >= owned[0]) & (part < owned[1])] for part in asked]
        place = [((mine >= start) & (mine < stop)).nonzero().squeeze(1) for start, stop in pairwise(edges)]
    else:
        place = [((index >= start) & (index < stop)).nonzero().squeeze(1) for start, stop in pairwise(edges)]
        facts = [torch.stack([index.new_tensor(len(part)), bad.sum()]) for part in place]
        heard = torch.stack(swap_blocks(facts, [(2,)] * len(facts), group, "take_rows"))
        _check(heard[:, 1].any(), edges[-1])
        lengths = [(length,) for length in heard[:, 0].tolist()]
        wanted = swap_blocks([index[part] for part in place], lengths, group, "take_rows")
    return _Plan([part - owned[0] for part in wanted], place)


def _check(bad: torch.Tensor, length: int) -> None:
    if bad:
        raise IndexError(f"index out of range: a row must be 0 <= row < {length}, the length of the dim")


def _fake_take(
    x: torch.Tensor, dim: int, sizes: list[int], index: torch.Tensor, parts: list[int], shared: bool, group: str
) -> torch.Tensor:
    _, rank, _ = resolve(group)
    return x.new_empty(with_length(x, dim, parts[rank]))


@defined_op(
    "take_rows(Tensor x, int dim, int[] sizes, Tensor index, int[] parts, bool shared, str group) -> Tensor", _fake_take
)
def _take_rows(
    x: torch.Tensor, dim: int, sizes: list[int], index: torch.Tensor, parts: list[int], shared: bool, group: str
) -> torch.Tensor:
    process_group, rank, _ = resolve(group)
    plan = _plan(index, sizes, parts, shared, process_group)
    blocks = [x.index_select(dim, rows) for rows in plan.give]
    shapes = [with_length(x, dim, len(place)) for place in plan.place]
    out = x.new_empty(with_length(x, dim, parts[rank]))
    for place, rows in zip(plan.place, swap_blocks(blocks, shapes, process_group, "take_rows"), strict=True):
        out.index_copy_(dim, place, rows)
    return out


def take_rows(
    x: torch.Tensor,
    dim: int,
    sizes: Sequence[int],
    index: torch.Tensor,
    parts: Sequence[int],
    group: str,
    *,
    shared: bool,
) -> torch.Tensor:
    """Give every rank the rows of a cut dim that it names.

    Args:
        x: this rank's block, ``sizes[rank]`` long along ``dim``.
        dim: the cut dim.
        sizes: rows that each rank holds; zeros allowed.
        index: [parts[rank]] global row numbers (int64) that this rank wants, repeats allowed; with ``shared``, the
            list of all ranks one after the other, [sum(parts)], the same on every rank: it then need not be sent.
        parts: how many rows each rank wants; zeros allowed.
        group: name of the process group.
        shared: whether ``index`` holds the numbers of all ranks.

    Returns:
        ``parts[rank]`` long along ``dim``, in the order asked for.

    Raises:
        IndexError: on all ranks, where a row is outside the dim.
    """
    return torch.ops.shardtensor.take_rows(  # type: ignore[no-any-return]
        x, dim, list(sizes), index, list(parts), shared, group
    )


def _fake_add(
    rows: torch.Tensor, dim: int, sizes: list[int], index: torch.Tensor, parts: list[int], shared: bool, group: str
) -> torch.Tensor:
    _, rank, _ = resolve(group)
    return rows.new_empty(with_length(rows, dim, sizes[rank]))


@defined_op(
    "add_rows(Tensor rows, int dim, int[] sizes, Tensor index, int[] parts, bool shared, str group) -> Tensor",
    _fake_add,
)
def _add_rows(
    rows: torch.Tensor, dim: int, sizes: list[int], index: torch.Tensor, parts: list[int], shared: bool, group: str
) -> torch.Tensor:
    process_group, rank, _ = resolve(group)
    plan = _plan(index, sizes, parts, shared, process_group)
    blocks = [rows.index_select(dim, place) for place in plan.place]
    shapes = [with_length(rows, dim, len(give)) for give in plan.give]
    total = rows.new_zeros(with_length(rows, dim, sizes[rank]))
    # Ranks in order, so that the sum does not depend on which message came first.
    for give, block in zip(plan.give, swap_blocks(blocks, shapes, process_group, "add_rows"), strict=True):
        total.index_add_(dim, give, block)
    return total


def add_rows(
    rows: torch.Tensor,
    dim: int,
    sizes: Sequence[int],
    index: torch.Tensor,
    parts: Sequence[int],
    group: str,
    *,
    shared: bool,
) -> torch.Tensor:
    """Add every rank's rows to the rows of a cut dim that it names: the adjoint of `take_rows`.

    Args:
        rows: ``parts[rank]`` long along ``dim``.
        dim, sizes, index, parts, group, shared: as in `take_rows`.

    Returns:
        ``sizes[rank]`` long along ``dim``, zero where nobody added.
    """
    return torch.ops.shardtensor.add_rows(  # type: ignore[no-any-return]
        rows, dim, list(sizes), index, list(parts), shared, group
    )

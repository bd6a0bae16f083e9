"""Plans of advanced indexing, ``x[i, :, j]``: which layouts the tensor, the indices and the result need. No exchange.

Indexed dims that are whole need no exchange, whether x is cut along other dims or the indices are cut. One index along
a cut dim sends rows to the ranks that take them. Several indices, one of them along a cut dim, read what lies in the
own block and leave a sum pending: every element is held by one rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch

from shardtensor.rules.layouts import common_layout, local_in, operand_layout, spec_of, whole
from shardtensor.rules.slices import one_cut_layout
from shardtensor.rules.take import Rows, rows_of
from shardtensor.spec import PENDING_SUM, REPLICATE, AxisLayout, Cut, DeviceMesh, Replicate, ShardTensorSpec

__all__ = ["MASKS", "IndexPlan", "as_numbers", "blocks_of", "index_plan", "only_mask", "own_rows"]
MASKS = (torch.bool, torch.uint8)


class IndexPlan:
    """Layouts for ``x[..., index, ...]``.

    Attributes:
        dims: the indexed dims of x.
        shape: the broadcast shape of the indices.
        at: where its dims stand in the result.
        source: layout of x.
        numbers: layout over the broadcast shape of the indices.
        result: spec of the result; axes in ``held`` are pending sums.
        held: (mesh axis, dim) of indexed dims that are cut: each rank reads what it holds.
        rows: how rows travel, where one index runs along a cut dim.
        picked: layout of the values that are put there: the result's, without pending sums.
        block: shape of the result's block.
        local: whether the blocks lie as needed, and hold all that is asked for.
    """

    def __init__(self, spec: ShardTensorSpec, indices: tuple[ShardTensorSpec | None, ...], send: bool) -> None:
        found = [(dim, own) for dim, own in enumerate(indices) if own is not None]
        self.dims = [dim for dim, _ in found]
        specs = [own for _, own in found]
        self.shape = torch.broadcast_shapes(*(own.shape for own in specs))
        kept = [dim for dim in range(spec.ndim) if dim not in self.dims]
        adjacent = self.dims == list(range(self.dims[0], self.dims[-1] + 1))
        self.at = self.dims[0] if adjacent else 0
        source = spec.resolved_layout
        for dim in self.dims:
            source = one_cut_layout(spec.with_layout(source), dim)
        self.source = source
        self.held = [(axis, e.dim) for axis, e in enumerate(source) if isinstance(e, Cut) and e.dim in self.dims]
        self.rows: Rows | None = None
        numbers = list(common_layout(specs, self.shape))
        result: list[AxisLayout] = list(source)
        for axis, entry in enumerate(source):
            if isinstance(entry, Cut):
                numbers[axis] = REPLICATE
                place = 0 if entry.dim in self.dims else kept.index(entry.dim)
                place += len(self.shape) * (place >= self.at)
                result[axis] = PENDING_SUM if entry.dim in self.dims else entry.moved(place)
            elif isinstance(moved := numbers[axis], Cut):
                result[axis] = moved.moved(moved.dim + self.at)
        if send and len(self.dims) == 1 and self.held and self.shape:
            self._send_rows(spec, specs[0], numbers, result)
        self.numbers = tuple(numbers)
        shape = [spec.shape[dim] for dim in kept]
        shape[self.at : self.at] = self.shape
        self.result = ShardTensorSpec.of(spec.mesh, tuple(result), shape, spec.dtype)
        self.picked = self.result.resolved_layout
        self.block = self.result.local_shape
        lies = [operand_layout(self.numbers, own, self.shape) == own.layout for own in specs]
        self.local = all(lies) and self.source == spec.layout and self.rows is None and not self.held

    def _send_rows(
        self, spec: ShardTensorSpec, index: ShardTensorSpec, numbers: list[AxisLayout], result: list[AxisLayout]
    ) -> None:
        """One index along a cut dim: its first dim is cut, or gets cut, and rows go where it lies."""
        axis, dim = self.held[0]
        rest = self.shape[1:].numel()
        first = index.layout[axis]
        along = isinstance(first, Cut) and first.dim == 0 and first.outer == 1 and len(index.axes_of(0)) == 1
        layout = tuple(first if at == axis and along else REPLICATE for at in range(len(numbers)))
        plan = rows_of(
            spec.with_layout(self.source), dim, ShardTensorSpec.of(spec.mesh, layout, self.shape[:1], index.dtype)
        )
        numbers[:] = layout
        for at, entry in enumerate(self.source):
            if isinstance(entry, Replicate):
                result[at] = REPLICATE
        result[axis] = Cut(self.at, plan.parts)
        parts = tuple(size * rest for size in plan.parts)
        taken = tuple(Cut(dim, parts) if at == axis else entry for at, entry in enumerate(plan.taken))
        self.rows = plan._replace(parts=parts, taken=taken)
        self.held = []


@lru_cache(maxsize=4096)
def index_plan(spec: ShardTensorSpec, indices: tuple[ShardTensorSpec | None, ...], send: bool = True) -> IndexPlan:
    """The plan for indices of these specs; with ``send``, rows of a cut dim may travel."""
    return IndexPlan(spec, indices, send)


def as_numbers(indices: Sequence[torch.Tensor | None], mesh: DeviceMesh) -> list[torch.Tensor | None]:
    """The indices with masks replaced by the places they mark."""
    found: list[torch.Tensor | None] = []
    for item in indices:
        if item is not None and item.dtype in MASKS:
            found += whole(item, mesh).nonzero().unbind(1)
        else:
            found.append(item)
    return found


def only_mask(indices: Sequence[torch.Tensor | None]) -> tuple[int, torch.Tensor] | None:
    """The one index and its dim, where the only index is a mask."""
    found = [(dim, item) for dim, item in enumerate(indices) if item is not None]
    return found[0] if len(found) == 1 and found[0][1].dtype == torch.bool and found[0][1].dim() else None


def blocks_of(
    numbers: Sequence[torch.Tensor | None], plan: IndexPlan, mesh: DeviceMesh, lengths: torch.Size
) -> list[torch.Tensor | None]:
    """This rank's blocks of the indices; numbers along a cut dim are made >= 0."""
    blocks: list[torch.Tensor | None] = []
    for dim, item in enumerate(numbers):
        if item is None:
            blocks.append(None)
            continue
        block = local_in(item, operand_layout(plan.numbers, spec_of(item, mesh), plan.shape), mesh)
        if plan.rows is not None or any(dim == cut for _, cut in plan.held):
            block = torch.where(block < 0, block + lengths[dim], block)
        blocks.append(block)
    return blocks


def own_rows(
    block: torch.Tensor | None, spec: ShardTensorSpec, plan: IndexPlan, axis: int, dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers of a cut dim inside the own block, and a mask of those that are.

    Raises:
        IndexError: a number is outside the dim.
    """
    assert block is not None
    cut = plan.source[axis]
    assert isinstance(cut, Cut)
    rank = spec.coordinate[axis]
    start, size = sum(cut.sizes[:rank]), cut.sizes[rank]
    if bool(((block < 0) | (block >= spec.shape[dim])).any()):
        raise IndexError(f"index out of range: dim {dim} has {spec.shape[dim]} rows")
    return block - start, (block >= start) & (block < start + size)

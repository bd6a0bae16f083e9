"""Averages over long spans of a cut dim: every rank adds up its own rows, the owner of an output sums what ranks found.

The windows may reach over many shards (global pooling reaches over all), yet only outputs travel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from shardtensor import comm
from shardtensor.rules.stencil import Reach, Rows, resized_sizes, span_touches
from shardtensor.spec import DeviceMesh

__all__ = ["Spans", "averaged", "averaged_adjoint", "make_spans"]


@dataclass(frozen=True)
class Spans:
    """One cut dim, averaged over spans of rows.

    Attributes:
        reach: of the outputs: ``reach.windows`` are the outputs that each rank adds to, by rows it holds.
        spans: input rows of every output, rising.
        divisors: what the sum over each span is divided by.
    """

    reach: Reach
    spans: tuple[Rows, ...]
    divisors: tuple[int, ...]

    def parts(self, rank: int) -> list[tuple[int, int, int, int]]:
        """(place among the outputs added to, first local row, number of rows, divisor) of what a rank holds."""
        first, stop = self.reach.windows[rank]
        begin = sum(self.reach.sizes[:rank])
        end = begin + self.reach.sizes[rank]
        found = []
        for output in range(first, stop):
            start, last = max(self.spans[output][0], begin), min(self.spans[output][1], end)
            found.append((output - first, start - begin, last - start, self.divisors[output]))
        return found


def make_spans(axis: int, dim: int, sizes: tuple[int, ...], spans: tuple[Rows, ...], divisors: Sequence[int]) -> Spans:
    """Spans over a dim cut into ``sizes`` along mesh axis ``axis``."""
    touches = span_touches(sizes, spans)
    return Spans(Reach(axis, dim, sizes, touches, resized_sizes(sizes, len(spans))), spans, tuple(divisors))


def averaged(local: torch.Tensor, spans: Spans, mesh: DeviceMesh, rank: int) -> torch.Tensor:
    """This rank's outputs of the averaged dim."""
    reach = spans.reach
    sums = [
        local.narrow(reach.dim, start, rows).sum(reach.dim, keepdim=True) / divisor
        for _, start, rows, divisor in spans.parts(rank)
    ]
    found = torch.cat(sums, reach.dim) if sums else local.narrow(reach.dim, 0, 0)
    return comm.halo_reduce(found, reach.dim, reach.out_sizes, reach.windows, comm.group_of(mesh, reach.axis))


def averaged_adjoint(grad: torch.Tensor, spans: Spans, mesh: DeviceMesh, rank: int) -> torch.Tensor:
    """The gradient of this rank's rows, from the gradient of its outputs."""
    reach = spans.reach
    grad = comm.halo_exchange(grad, reach.dim, reach.out_sizes, reach.windows, comm.group_of(mesh, reach.axis))
    shape = list(grad.shape)
    shape[reach.dim] = reach.sizes[rank]
    total = grad.new_zeros(shape)
    for place, start, rows, divisor in spans.parts(rank):
        total.narrow(reach.dim, start, rows).add_(grad.narrow(reach.dim, place, 1) / divisor)
    return total

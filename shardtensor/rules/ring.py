"""Ring attention on this rank's blocks: attend to the keys at hand while the next ones fly, join the results.

Results of blocks are joined in linear space: each is weighted by exp(its logsumexp - the joint one), so values of 0
are no special case. In the backward pass keys and values go round again, and their gradients travel with them, one
hop behind, and then home.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import prod
from typing import NamedTuple

import torch

from shardtensor import comm
from shardtensor.rules.attention_block import Dropout, attend, attend_backward
from shardtensor.rules.attention_join import GradSum, Joint
from shardtensor.rules.attention_plan import Hop, Plan, Tile, rows_of, tiles
from shardtensor.rules.generators import mixed_seed
from shardtensor.spec import Cut, mesh_sizes

__all__ = ["Operands", "Result", "Scoring", "ring_backward", "ring_forward"]

_NEVER = float("-inf")

Work = tuple[Tile, torch.Tensor | None, Dropout | None]


class Operands(NamedTuple):
    """This rank's blocks: queries [B, H, Sq, E], keys [B, Hk, Sk, E], values [B, Hk, Sk, Ev]."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


class Result(NamedTuple):
    """The result for this rank's queries, [B, H, Sq, Ev], its logsumexp [B, H, Sq], and the result's gradient."""

    out: torch.Tensor
    lse: torch.Tensor
    grad: torch.Tensor


class Scoring(NamedTuple):
    """How scores are made.

    Attributes:
        mask: this rank's rows of the mask, all keys, broadcastable to [B, H, Sq, Sk]; bool (False hides) or added.
        causal: key j is hidden from query i where j > i, counted over the whole sequence.
        scale: of the scores.
        dropout: of the weights, or None.
    """

    mask: torch.Tensor | None
    causal: bool
    scale: float
    dropout: Dropout | None


def ring_forward(own: Operands, scoring: Scoring, plan: Plan) -> tuple[torch.Tensor, torch.Tensor]:
    """Result and logsumexp of this rank's queries over all keys."""
    joint = Joint(own.q, own.v.shape[3])
    for hop, k, v in _passing(own, plan):
        for tile, bias, dropout in _work(Operands(own.q, k, v), scoring, plan, hop):
            q_tile, k_tile, v_tile = own.q[:, :, tile.queries], k[:, :, tile.keys], v[:, :, tile.keys]
            out, lse = attend(q_tile, k_tile, v_tile, bias, tile.causal, scoring.scale, dropout)
            joint.add(tile.queries, out, lse)
    for axis in plan.joined:
        joint.join_over(comm.group_of(plan.key.mesh, axis))
    return joint.result()


def ring_backward(
    result: Result, own: Operands, scoring: Scoring, plan: Plan, mask_grad: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of this rank's blocks; that of the mask is added to ``mask_grad``, of the mask's shape, if given."""
    dq = GradSum(own.q)
    arriving: Callable[[], torch.Tensor] | None = None
    for hop, k, v in _passing(own, plan):
        dk, dv = GradSum(k), GradSum(v)
        for work in _work(Operands(own.q, k, v), scoring, plan, hop):
            dbias = _add_tile(result, Operands(own.q, k, v), (dq, dk, dv), scoring.scale, work, mask_grad is not None)
            if mask_grad is not None and dbias is not None:
                _add_to_mask(mask_grad, dbias, rows_of(plan.key, plan.key.ndim - 2, hop.owner))
        if not plan.ring:
            return dq.total(), dk.total(), dv.total()
        grads = _packed(dk.sum(), dv.sum())
        if arriving is not None:
            grads += arriving()
        if hop.axis is not None:
            arriving = _shift(grads, own, plan, hop.axis, 1, hop.next_owner)
    home, owner = grads, hop.owner
    for axis in plan.ring:
        ahead = owner[axis] - plan.key.coordinate[axis]
        owner = (*owner[:axis], plan.key.coordinate[axis], *owner[axis + 1 :])
        home = _shift(home, own, plan, axis, ahead, owner)()
    key_grad, value_grad = _unpacked(home, own, plan, plan.key.coordinate)
    return dq.total(), key_grad.to(own.k.dtype), value_grad.to(own.v.dtype)


def _add_tile(
    result: Result, blocks: Operands, sums: tuple[GradSum, GradSum, GradSum], scale: float, work: Work, bias_grad: bool
) -> torch.Tensor | None:
    """Add one tile's gradients to the sums; returns that of the scores if asked."""
    tile, bias, dropout = work
    rows, columns = tile.queries, tile.keys
    dq, dk, dv, dbias = attend_backward(
        result.grad[:, :, rows],
        blocks.q[:, :, rows],
        blocks.k[:, :, columns],
        blocks.v[:, :, columns],
        bias,
        result.out[:, :, rows],
        result.lse[:, :, rows],
        tile.causal,
        scale,
        dropout,
        bias_grad,
    )
    for total, part, place in zip(sums, (dq, dk, dv), (rows, columns, columns), strict=True):
        total.add(place, part)
    return dbias


# The blocks that pass by ---------------------------------------------------------------------------------------------


def _passing(own: Operands, plan: Plan) -> Iterator[tuple[Hop, torch.Tensor, torch.Tensor]]:
    """The blocks of keys and values as they pass; the next one is under way while the caller works on this one."""
    hops = plan.hops
    if len(hops) == 1:
        yield hops[0], own.k, own.v
        return
    block = _packed(own.k, own.v)
    for hop in hops:
        end = None if hop.axis is None else _shift(block, own, plan, hop.axis, 1, hop.next_owner)
        yield hop, *_unpacked(block, own, plan, hop.owner)
        if end is not None:
            block = end()


def _packed(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.cat((k.reshape(-1), v.reshape(-1)))


def _shapes(own: Operands, plan: Plan, owner: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of the keys and values of the rank at ``owner``: like ours but for the number of rows."""
    rows = plan.key.shape_at(owner)[-2]
    k, v = own.k.shape, own.v.shape
    return (k[0], k[1], rows, k[3]), (v[0], v[1], rows, v[3])


def _unpacked(
    block: torch.Tensor, own: Operands, plan: Plan, owner: tuple[int, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    k, v = _shapes(own, plan, owner)
    return block[: prod(k)].view(k), block[prod(k) :].view(v)


def _shift(
    block: torch.Tensor, own: Operands, plan: Plan, axis: int, shift: int, arriving: tuple[int, ...]
) -> Callable[[], torch.Tensor]:
    """Send a packed block along the axis; what comes belongs to the rank at ``arriving``."""
    length = sum(prod(shape) for shape in _shapes(own, plan, arriving))
    group = comm.group_of(plan.key.mesh, axis)
    if type(block) is not torch.Tensor:  # being traced: one op that the trace can hold, instead of a begin and an end
        received = comm.ring_shift(block, (length,), group, shift)
        return lambda: received
    return comm.ring_shift_begin(block, (length,), group, shift % mesh_sizes(plan.key.mesh)[axis])


# What is computed on a block -----------------------------------------------------------------------------------------


def _work(blocks: Operands, scoring: Scoring, plan: Plan, hop: Hop) -> Iterator[Work]:
    """The tiles of this block that are not hidden, each with the bias and the dropout of its scores."""
    q, k, _ = blocks
    if not q.numel() or not k.numel():
        return
    everything = Tile(slice(0, q.shape[2]), slice(0, k.shape[2]), False)
    if scoring.mask is None and not scoring.causal:
        yield everything, None, _dropout(scoring, plan, hop, 0)
        return
    seq = plan.key.ndim - 2
    columns = rows_of(plan.key, seq, hop.owner)
    rows = rows_of(plan.query, seq, plan.query.coordinate)
    if scoring.causal and columns[0] > rows[-1]:
        return
    if scoring.mask is None and isinstance(rows, range) and isinstance(columns, range):
        for place, tile in enumerate(tiles(rows, columns, scoring.causal)):
            yield tile, None, _dropout(scoring, plan, hop, place)
        return
    yield everything, _bias(scoring, q, rows, columns), _dropout(scoring, plan, hop, 0)


def _dropout(scoring: Scoring, plan: Plan, hop: Hop, tile: int) -> Dropout | None:
    """The dropout of one tile: the same on all ranks that compute it, independent of every other tile's."""
    if scoring.dropout is None:
        return None
    place = [at if isinstance(e, Cut) else -1 for at, e in zip(plan.query.coordinate, plan.query.layout, strict=True)]
    owner = [at if isinstance(e, Cut) else -1 for at, e in zip(hop.owner, plan.key.layout, strict=True)]
    return Dropout(scoring.dropout.probability, mixed_seed(scoring.dropout.seed, tile, *place, *owner))


def _indices(rows: range | tuple[int, ...], device: torch.device) -> torch.Tensor:
    if isinstance(rows, range):
        return torch.arange(rows.start, rows.stop, device=device)
    return torch.tensor(rows, device=device)


def _bias(
    scoring: Scoring, q: torch.Tensor, rows: range | tuple[int, ...], columns: range | tuple[int, ...]
) -> torch.Tensor:
    """What is added to the scores of a block: its part of the mask, -inf where a key comes after the query."""
    bias = q.new_zeros(())
    if scoring.mask is not None:
        part = _columns(scoring.mask, columns)
        bias = bias.where(part, _NEVER) if part.dtype == torch.bool else part.to(q.dtype)
    if scoring.causal:
        later = _indices(columns, q.device) > _indices(rows, q.device).unsqueeze(1)
        bias = bias.masked_fill(later, _NEVER)
    return bias


def _columns(mask: torch.Tensor, columns: range | tuple[int, ...]) -> torch.Tensor:
    if mask.shape[-1] == 1:
        return mask
    if isinstance(columns, range):
        return mask[..., columns.start : columns.stop]
    return mask.index_select(-1, _indices(columns, mask.device))


def _add_to_mask(mask_grad: torch.Tensor, dscores: torch.Tensor, columns: range | tuple[int, ...]) -> None:
    """Add the gradient of a block's scores, [B, H, Sq, Sk], to that of the mask, summed where the mask is broadcast."""
    dims = [dim for dim in range(4) if mask_grad.shape[dim] == 1 and dscores.shape[dim] != 1]
    part = dscores.sum(dims, keepdim=True) if dims else dscores
    if mask_grad.shape[-1] == 1 or isinstance(columns, range):
        _columns(mask_grad, columns).add_(part)
    else:
        mask_grad.index_add_(-1, _indices(columns, mask_grad.device), part)

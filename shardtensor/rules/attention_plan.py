"""How attention's operands lie, axis by axis of the mesh, and which blocks of keys pass by: integers only."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import NamedTuple

from shardtensor.rules.attention_block import wide
from shardtensor.spec import (
    PENDING_SUM,
    REPLICATE,
    AxisLayout,
    Cut,
    Layout,
    Replicate,
    ShardTensorSpec,
    even_sizes,
    mesh_sizes,
)

__all__ = ["Hop", "Plan", "Tile", "plan", "rows_of", "tiles"]


class Hop(NamedTuple):
    """The block of keys at hand: the mesh coordinate of its owner, the axis along which it moves on (None at the last
    stop), and the owner of the block that then comes."""

    owner: tuple[int, ...]
    axis: int | None
    next_owner: tuple[int, ...]


@dataclass(frozen=True)
class Plan:
    """Layouts in which attention runs.

    Attributes:
        query, key, value: the operands' specs as they must be brought.
        ring: axes along which both queries and keys are cut: the ranks pass their keys around.
        joined: axes along which only keys are cut: each rank attends to its own, the results are joined.
    """

    query: ShardTensorSpec
    key: ShardTensorSpec
    value: ShardTensorSpec
    ring: tuple[int, ...]
    joined: tuple[int, ...]

    @cached_property
    def out_spec(self) -> ShardTensorSpec:
        """Of the result [..., Sq, Ev]: cut as the queries."""
        shape = (*self.query.shape[:-1], self.value.shape[-1])
        return ShardTensorSpec.of(self.query.mesh, self.query.layout, shape, self.query.dtype)

    @cached_property
    def lse_spec(self) -> ShardTensorSpec:
        """Of the logsumexp [..., Sq]."""
        return ShardTensorSpec.of(self.query.mesh, self.query.layout, self.query.shape[:-1], wide(self.query.dtype))

    @cached_property
    def grad_specs(self) -> tuple[ShardTensorSpec, ShardTensorSpec, ShardTensorSpec]:
        """Of the gradients of queries, keys and values.

        Where keys are cut and queries are not, each rank has a part of the queries' gradient, and the other way round.
        """
        pairs = list(zip(self.query.layout, self.key.layout, strict=True))
        queries = tuple(PENDING_SUM if axis in self.joined else entry for axis, (entry, _) in enumerate(pairs))
        keys = tuple(PENDING_SUM if isinstance(q, Cut) and isinstance(k, Replicate) else k for q, k in pairs)
        return _dense(self.query, queries), _dense(self.key, keys), _dense(self.value, keys)

    @cached_property
    def hops(self) -> tuple[Hop, ...]:
        """The blocks of keys in the order in which this rank meets them, its own first."""
        sizes = mesh_sizes(self.key.mesh)
        axes: list[int] = []
        for axis in reversed(self.ring):
            axes = axes + [axis, *axes] * (sizes[axis] - 1)
        owner = self.key.coordinate
        found = []
        for axis in axes:
            following = (*owner[:axis], (owner[axis] - 1) % sizes[axis], *owner[axis + 1 :])
            found.append(Hop(owner, axis, following))
            owner = following
        return (*found, Hop(owner, None, owner))


def _dense(spec: ShardTensorSpec, layout: Layout) -> ShardTensorSpec:
    return ShardTensorSpec.of(spec.mesh, layout, spec.shape, spec.dtype)


@lru_cache(maxsize=1024)
def plan(query: ShardTensorSpec, key: ShardTensorSpec, value: ShardTensorSpec) -> Plan:
    """Choose layouts: queries stay where they are; keys and values follow, or pass by.

    Args:
        query, key, value: [..., H, Sq, E], [..., Hk, Sk, E], [..., Hk, Sk, Ev]: equal dims in front, H a multiple of
            Hk (a tensor of two dims has no H).
    """
    heads = query.shape[-3] // max(key.shape[-3], 1) if query.ndim > 2 else 1
    wanted = [_query_entry(entry, query.ndim, heads) for entry in query.resolved_layout]
    layout: list[tuple[AxisLayout, AxisLayout]] = []
    for axis, entry in enumerate(wanted):
        others = {cut.dim for at, cut in enumerate(wanted) if at != axis and isinstance(cut, Cut)}
        key_cuts = {cut.dim for at, cut in key.cuts if at != axis}
        own = next((e for e in (key.layout[axis], value.layout[axis]) if _cuts_rows(e, key.ndim)), REPLICATE)
        layout.append(_axis(entry, own, others, key_cuts, key, mesh_sizes(key.mesh)[axis], heads))
    q_layout, k_layout = tuple(pair[0] for pair in layout), tuple(pair[1] for pair in layout)
    seq = key.ndim - 2
    held = [axis for axis, entry in enumerate(k_layout) if isinstance(entry, Cut) and entry.dim == seq]
    return Plan(
        query.with_layout(q_layout),
        key.with_layout(k_layout),
        value.with_layout(k_layout),
        tuple(axis for axis in held if isinstance(q_layout[axis], Cut)),
        tuple(axis for axis in held if not isinstance(q_layout[axis], Cut)),
    )


def _cuts_rows(entry: AxisLayout, ndim: int) -> bool:
    return isinstance(entry, Cut) and entry.dim < ndim - 1


def _query_entry(entry: AxisLayout, ndim: int, heads: int) -> AxisLayout:
    """The queries' own cut, unless it cuts features, or heads that share a head of the keys."""
    if not isinstance(entry, Cut) or entry.dim == ndim - 1:
        return REPLICATE
    if entry.dim == ndim - 3 and any(size % heads for size in entry.sizes):
        return REPLICATE
    return entry


def _axis(
    query: AxisLayout,
    key: AxisLayout,
    query_dims: set[int],
    key_dims: set[int],
    spec: ShardTensorSpec,
    ranks: int,
    heads: int,
) -> tuple[AxisLayout, AxisLayout]:
    """What one mesh axis does to queries and to keys; ``*_dims`` are the dims that other axes cut."""
    seq = spec.ndim - 2
    if isinstance(query, Cut):
        if query.dim < seq:
            return query, _scaled(query, 1, heads) if query.dim == seq - 1 else query
        if isinstance(key, Cut) and key.dim < seq:
            spread = seq not in key_dims
            return query, Cut(seq, even_sizes(spec.shape[seq], ranks)) if spread else REPLICATE
        return query, key
    if isinstance(key, Cut) and key.dim < seq:
        if key.dim in query_dims:
            return REPLICATE, REPLICATE
        return _scaled(key, heads, 1) if key.dim == seq - 1 else key, key
    return REPLICATE, key


def _scaled(cut: Cut, times: int, by: int) -> Cut:
    return Cut(cut.dim, tuple(size * times // by for size in cut.sizes), cut.outer)


@lru_cache(maxsize=1024)
def rows_of(spec: ShardTensorSpec, dim: int, owner: tuple[int, ...]) -> range | tuple[int, ...]:
    """The global rows along ``dim`` that the rank at ``owner`` holds; a range where they lie side by side."""
    cuts = [(owner[axis], cut) for axis, cut in spec.cuts if cut.dim == dim]
    if not cuts:
        return range(spec.shape[dim])
    if len(cuts) == 1 and cuts[0][1].outer == 1:
        return _interval(cuts[0][1], cuts[0][0])
    rows: list[int] = list(range(spec.shape[dim]))
    for rank, cut in cuts:
        held = _interval(cut, rank)
        rows = [row for row in rows if row % sum(cut.sizes) in held]
    if rows and rows[-1] - rows[0] + 1 == len(rows):
        return range(rows[0], rows[-1] + 1)
    return tuple(rows) if rows else range(0)


def _interval(cut: Cut, rank: int) -> range:
    """What a rank holds of one repeat of the cut dim."""
    edges = (0, *accumulate(cut.sizes))
    return range(edges[rank], edges[rank + 1])


class Tile(NamedTuple):
    """A rectangle of scores that is computed in one go; ``causal``: a square of which the lower triangle counts."""

    queries: slice
    keys: slice
    causal: bool


@lru_cache(maxsize=1024)
def tiles(queries: range, keys: range, causal: bool) -> tuple[Tile, ...]:
    """The parts of a block of scores that are not hidden: key j is seen by query i where j <= i, if ``causal``."""
    if not len(queries) or not len(keys):
        return ()
    whole = Tile(slice(0, len(queries)), slice(0, len(keys)), False)
    if not causal or keys[-1] <= queries[0]:
        return (whole,)
    # Row r of the block sees its columns up to r + ahead.
    ahead = queries[0] - keys[0]
    row, column = max(0, -ahead), max(0, ahead)
    side = min(len(queries) - row, len(keys) - column)
    if side <= 0:
        return ()
    found = [Tile(slice(row, row + side), slice(column, column + side), True)]
    if column:
        found.append(Tile(slice(0, len(queries)), slice(0, column), False))
    if row + side < len(queries):
        found.append(Tile(slice(row + side, len(queries)), slice(column, column + side), False))
    return tuple(found)

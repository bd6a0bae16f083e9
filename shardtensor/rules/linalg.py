"""Matrix products: what each operand's cut means for a product, written once for all of them.

Operands are named by letters as in ``einsum``: "mk,kn->mn". A cut along a kept letter passes to the result; a cut along
a contracted letter makes the result a pending sum; operands that disagree along a mesh axis are brought together there.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import torch

from shardtensor.redistribute import redistribute_local
from shardtensor.registry import rule
from shardtensor.rules.layouts import mesh_of, operand_layout, spec_of
from shardtensor.rules.memory import in_backward
from shardtensor.spec import (
    PENDING_SUM,
    REPLICATE,
    AxisLayout,
    Cut,
    Layout,
    Partial,
    ShardTensorSpec,
    contiguous_stride,
)
from shardtensor.tensor import ShardTensor, wrap

__all__ = ["product"]

aten = torch.ops.aten


class Product(NamedTuple):
    """How a product is computed: the operands' layouts, the result, and dims computed as one row only.

    Attributes:
        left, right: layouts that the operands are brought to.
        spec: the result.
        still_left, still_right: dims of the operands that are expanded and kept: their rows are all the same.
        moves: whether an operand lies otherwise.
    """

    left: Layout
    right: Layout
    spec: ShardTensorSpec
    still_left: tuple[int, ...]
    still_right: tuple[int, ...]
    moves: bool


@lru_cache(maxsize=4096)
def _plan(a: ShardTensorSpec, b: ShardTensorSpec, left: str, right: str, out: str) -> Product:
    shape = {**dict(zip(left, a.shape, strict=True)), **dict(zip(right, b.shape, strict=True))}
    taken: dict[str, str] = {}
    layouts_a: list[AxisLayout] = []
    layouts_b: list[AxisLayout] = []
    result: list[AxisLayout] = []
    for axis in range(len(a.layout)):
        want_a, want_b = _meet(a, b, left, right, out, axis)
        letter = _letter(want_a, left) or _letter(want_b, right)
        lead = _lead(a, b, left, right, letter, axis)
        if letter and taken.setdefault(letter, lead) != lead:
            # Both operands cut this letter along different axes, each in its own way: one of the two cuts goes.
            want_a, want_b, letter = REPLICATE, REPLICATE, ""
        layouts_a.append(want_a)
        layouts_b.append(want_b)
        cut = want_a if isinstance(want_a, Cut) else want_b
        if letter and letter in out and isinstance(cut, Cut):
            result.append(cut.moved(out.index(letter)))
        else:
            result.append(PENDING_SUM if letter or PENDING_SUM in (want_a, want_b) else REPLICATE)
    still_a = _still(a, left, right, out, layouts_a)
    still_b = _still(b, right, left, out, layouts_b)
    still = {left[dim] for dim in still_a} | {right[dim] for dim in still_b}
    stored = contiguous_stride([1 if letter in still else shape[letter] for letter in out])
    stride = tuple(0 if letter in still else step for letter, step in zip(out, stored, strict=True))
    spec = ShardTensorSpec.of(a.mesh, tuple(result), [shape[letter] for letter in out], a.dtype, stride)
    moves = (a.layout, b.layout) != (tuple(layouts_a), tuple(layouts_b))
    return Product(tuple(layouts_a), tuple(layouts_b), spec, still_a, still_b, moves)


def _letter(entry: AxisLayout, letters: str) -> str:
    return letters[entry.dim] if isinstance(entry, Cut) else ""


def _lead(a: ShardTensorSpec, b: ShardTensorSpec, left: str, right: str, letter: str, axis: int) -> str:
    """Whose cut of the letter is followed: the operand's that has one, the larger one's where both have."""
    mine, theirs = (_letter(spec.layout[axis], names) == letter for spec, names in ((a, left), (b, right)))
    return "ab"[_size(b) > _size(a)] if mine and theirs else "a" if mine else "b"


def _size(spec: ShardTensorSpec) -> int:
    return spec.shape.numel()


def _still(spec: ShardTensorSpec, letters: str, others: str, out: str, layout: list[AxisLayout]) -> tuple[int, ...]:
    """Dims kept in the result along which the operand is expanded and whole on every rank."""
    cut = {entry.dim for entry in layout if isinstance(entry, Cut)}
    return tuple(
        dim for dim in spec.broadcast_dims if dim not in cut and letters[dim] in out and letters[dim] not in others
    )


def _meet(
    a: ShardTensorSpec, b: ShardTensorSpec, left: str, right: str, out: str, axis: int
) -> tuple[AxisLayout, AxisLayout]:
    """The entries in which the two operands meet along one mesh axis."""
    mine, theirs = (_sums_only(spec.layout[axis]) for spec in (a, b))
    letter_a, letter_b = _letter(mine, left), _letter(theirs, right)
    shared = [letter for letter in left if letter in right]
    batch = [letter for letter in shared if letter in out]

    def along(letter: str, cut: AxisLayout) -> tuple[AxisLayout, AxisLayout]:
        assert isinstance(cut, Cut)
        return cut.moved(left.index(letter)), cut.moved(right.index(letter))

    if letter_a and letter_a == letter_b:
        return along(letter_a, mine if _lead(a, b, left, right, letter_a, axis) == "a" else theirs)
    for letter in (*batch, *shared):
        # The other operand lies otherwise: it is sliced, scattered or moved to this cut, unless that costs more.
        if letter == letter_a and (letter in batch or letter_b not in _kept(right, left) or _moving_pays(a, b, axis)):
            return along(letter, mine)
        if letter == letter_b and (letter in batch or letter_a not in _kept(left, right) or _moving_pays(b, a, axis)):
            return along(letter, theirs)
    if letter_a in shared or letter_b in shared:
        # Contracted here, kept there: the contracted one becomes whole, the result is cut like the other.
        return (REPLICATE, theirs) if letter_a in shared else (mine, REPLICATE)
    if letter_a and letter_b:
        return (REPLICATE, theirs) if _size(a) < _size(b) else (mine, REPLICATE)
    if isinstance(mine, Partial) and isinstance(theirs, Partial):
        return (REPLICATE, theirs) if _size(a) < _size(b) else (mine, REPLICATE)
    if letter_a or letter_b:
        return (mine, REPLICATE) if letter_a else (REPLICATE, theirs)
    return mine, theirs


def _kept(letters: str, others: str) -> list[str]:
    """Letters of one operand alone."""
    return [letter for letter in letters if letter not in others]


def _moving_pays(contracted: ShardTensorSpec, other: ShardTensorSpec, axis: int) -> bool:
    """Whether moving ``other`` to the contracted cut is cheaper than gathering the operand that has it.

    Moving costs ``other`` / ranks, and summing the pending result later about as much as ``other`` twice.
    """
    entry = contracted.layout[axis]
    ranks = len(entry.sizes) if isinstance(entry, Cut) else 1
    return _size(contracted) > _size(other) // ranks + 2 * _size(other)


def _sums_only(entry: AxisLayout) -> AxisLayout:
    return REPLICATE if isinstance(entry, Partial) and entry != PENDING_SUM else entry


def product(
    function: Callable[..., torch.Tensor],
    a: torch.Tensor,
    b: torch.Tensor,
    left: str,
    right: str,
    out: str,
    added: torch.Tensor | None = None,
) -> ShardTensor:
    """A product of two operands, sharded or plain, on the blocks.

    Args:
        function: computes a block of the result: ``function(a, b)``, or ``function(added, a, b)``.
        left, right, out: one letter per dim of the operands and the result.
        added: broadcast to the result and added to it; where the result is a pending sum, by one rank only.
    """
    mesh = mesh_of(a, b, added)
    spec_a, spec_b = spec_of(a, mesh), spec_of(b, mesh)
    plan = _plan(spec_a, spec_b, left, right, out)
    spec = plan.spec
    local_a = a._local_tensor if isinstance(a, ShardTensor) else a
    local_b = b._local_tensor if isinstance(b, ShardTensor) else b
    if plan.moves:
        local_a = redistribute_local(local_a, spec_a, plan.left)
        local_b = redistribute_local(local_b, spec_b, plan.right)
    if plan.still_left or plan.still_right:
        if added is None and in_backward():  # elsewhere somebody may write to a part of the result
            local_a, local_b = _one_row(local_a, plan.still_left), _one_row(local_b, plan.still_right)
            return wrap(function(local_a, local_b).expand(spec.local_shape), spec)
        spec = _dense(spec)
    if added is not None:
        return wrap(function(_bias(added, spec), local_a, local_b), spec)
    return wrap(function(local_a, local_b), spec)


def _bias(added: torch.Tensor, spec: ShardTensorSpec) -> torch.Tensor:
    """What is added to a block of the product."""
    own = spec_of(added, spec.mesh)
    local = added._local_tensor if isinstance(added, ShardTensor) else added
    return redistribute_local(local, own, _bias_layout(own, spec))


@lru_cache(maxsize=1024)
def _bias_layout(own: ShardTensorSpec, result: ShardTensorSpec) -> Layout:
    return operand_layout(result.layout, own, result.shape)


@lru_cache(maxsize=1024)
def _dense(spec: ShardTensorSpec) -> ShardTensorSpec:
    return ShardTensorSpec.of(spec.mesh, spec.layout, spec.shape, spec.dtype)


def _one_row(local: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
    for dim in dims:
        local = local.narrow(dim, 0, 1)
    return local


@rule(aten.mm.default)
def mm(self: torch.Tensor, mat2: torch.Tensor) -> ShardTensor:
    return product(torch.mm, self, mat2, "mk", "kn", "mn")


@rule(aten.bmm.default)
def bmm(self: torch.Tensor, mat2: torch.Tensor) -> ShardTensor:
    return product(torch.bmm, self, mat2, "bmk", "bkn", "bmn")


@rule(aten.mv.default)
def mv(self: torch.Tensor, vec: torch.Tensor) -> ShardTensor:
    return product(torch.mv, self, vec, "mk", "k", "m")


@rule(aten.dot.default)
def dot(self: torch.Tensor, tensor: torch.Tensor) -> ShardTensor:
    return product(torch.dot, self, tensor, "k", "k", "")


@rule(aten.vdot.default)
def vdot(self: torch.Tensor, other: torch.Tensor) -> ShardTensor:
    return product(torch.vdot, self, other, "k", "k", "")


@rule(aten.addmm.default)
def addmm(
    self: torch.Tensor, mat1: torch.Tensor, mat2: torch.Tensor, *, beta: float = 1, alpha: float = 1
) -> ShardTensor:
    if beta == 1 and alpha == 1:
        return product(torch.addmm, mat1, mat2, "mk", "kn", "mn", self)
    return product(_scaled(torch.addmm, beta, alpha), mat1, mat2, "mk", "kn", "mn", self)


@rule(aten.baddbmm.default)
def baddbmm(
    self: torch.Tensor, batch1: torch.Tensor, batch2: torch.Tensor, *, beta: float = 1, alpha: float = 1
) -> ShardTensor:
    return product(_scaled(torch.baddbmm, beta, alpha), batch1, batch2, "bmk", "bkn", "bmn", self)


@rule(aten.addbmm.default)
def addbmm(
    self: torch.Tensor, batch1: torch.Tensor, batch2: torch.Tensor, *, beta: float = 1, alpha: float = 1
) -> ShardTensor:
    return product(_scaled(torch.addbmm, beta, alpha), batch1, batch2, "bmk", "bkn", "mn", self)


@rule(aten.addmv.default)
def addmv(
    self: torch.Tensor, mat: torch.Tensor, vec: torch.Tensor, *, beta: float = 1, alpha: float = 1
) -> ShardTensor:
    return product(_scaled(torch.addmv, beta, alpha), mat, vec, "mk", "k", "m", self)


@rule(aten.addr.default)
def addr(
    self: torch.Tensor, vec1: torch.Tensor, vec2: torch.Tensor, *, beta: float = 1, alpha: float = 1
) -> ShardTensor:
    return product(_scaled(torch.addr, beta, alpha), vec1, vec2, "m", "n", "mn", self)


def _scaled(function: Callable[..., torch.Tensor], beta: float, alpha: float) -> Callable[..., torch.Tensor]:
    def scaled(added: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return function(added, a, b, beta=beta, alpha=alpha)

    return scaled


@rule(aten.linear.default)
def linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> ShardTensor:
    """Whole only under ``inference_mode``; otherwise it arrives as views and ``addmm``."""
    kept, out = "abcdefgh"[: input.dim() - 1], "n"[: weight.dim() - 1]

    def function(*blocks: torch.Tensor) -> torch.Tensor:
        *added, a, b = blocks
        return torch.nn.functional.linear(a, b, *added)

    return product(function, input, weight, kept + "k", out + "k", kept + out, bias)

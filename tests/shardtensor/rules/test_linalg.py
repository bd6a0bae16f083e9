"""Matrix products: cuts of rows, columns, batches and contracted dims, alone and against each other."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shardtensor.comm import comm_trace
from shardtensor.registry import strict
from shardtensor.spec import Cut, Partial
from shardtensor.testing import assert_close, assert_same_as_plain, shard


def values(*shape, dtype=torch.float64, seed=3):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def compare(ranks, table, inputs, mesh, cuts):
    """Every function on the same inputs; no op may fall back."""

    def check(mesh):
        for name, function in table.items():
            try:
                with strict():
                    assert_same_as_plain(function, inputs, mesh, cuts)
            except Exception as error:
                raise AssertionError(f"{name}, cuts {cuts}: {error}") from error

    ranks.run(check, mesh=mesh)


# Every layout of one operand against every layout of the other ------------------------------------------------------

ROWS, INNER, COLUMNS, BATCH = (5, 0, 2), (1, 4, 1), (2, 1, 2), (1, 0, 2)
LEFT = {"whole": {}, "rows": {0: (0, ROWS)}, "inner": {0: (1, INNER)}}
RIGHT = {
    "whole": {},
    "plain": None,
    "inner": {0: (0, INNER)},
    "inner elsewhere": {0: (0, (3, 3, 0))},
    "columns": {0: (1, COLUMNS)},
}
MATRIX = {
    "mm": lambda a, b: a @ b,
    "mm of transposed": lambda a, b: (b.t() @ a.t()).t(),
    "addmm": lambda a, b: torch.addmm(torch.arange(5.0, dtype=a.dtype), a, b),
    "scaled addmm": lambda a, b: torch.addmm(torch.ones(7, 1, dtype=a.dtype), a, b, beta=0.5, alpha=2),
    "added to a product": lambda a, b: torch.addmm(a @ b, a, b),
    "mv": lambda a, b: a @ b[:, 0],
    "addmv": lambda a, b: torch.addmv(a[:, 0], a, b[:, 1], beta=2),
    "dot": lambda a, b: torch.dot(a[0], b[:, 0]) + torch.vdot(b[:, 2], a[1]),
    "outer": lambda a, b: torch.outer(a[:, 0], b[0]),
    "addr": lambda a, b: torch.addr(b[1], a[:, 0], b[0]),
    "linear": lambda a, b: F.linear(a, b.t(), b[0]),
}


@pytest.mark.parametrize("right", RIGHT)
@pytest.mark.parametrize("left", LEFT)
def test_matrices(ranks, left, right):
    compare(ranks, MATRIX, [values(7, 6), values(6, 5, seed=4)], (3,), [LEFT[left], RIGHT[right]])


BATCHED_LEFT = {"whole": {}, "batch": {0: (0, BATCH)}, "rows": {0: (1, ROWS)}, "inner": {0: (2, INNER)}}
BATCHED_RIGHT = {
    "plain": None,
    "whole": {},
    "batch": {0: (0, BATCH)},
    "batch elsewhere": {0: (0, (3, 0, 0))},
    "inner": {0: (1, INNER)},
    "columns": {0: (2, COLUMNS)},
}
BATCHED = {
    "bmm": torch.bmm,
    "baddbmm": lambda a, b: torch.baddbmm(torch.arange(5.0, dtype=a.dtype), a, b, alpha=0.5),
    "addbmm": lambda a, b: torch.addbmm(torch.ones(7, 1, dtype=a.dtype), a, b),
    "einsum": lambda a, b: torch.einsum("bij,bjk->ikb", a, b),
    "einsum over the batch": lambda a, b: torch.einsum("bij,bjk->ik", a, b),
    "matmul with more dims": lambda a, b: a.unsqueeze(0) @ b,
}


@pytest.mark.parametrize("right", BATCHED_RIGHT)
@pytest.mark.parametrize("left", BATCHED_LEFT)
def test_batches(ranks, left, right):
    compare(
        ranks, BATCHED, [values(3, 7, 6), values(3, 6, 5, seed=4)], (3,), [BATCHED_LEFT[left], BATCHED_RIGHT[right]]
    )


TWO_AXES = {
    "rows and columns": ({0: (0, (5, 2))}, {1: (1, (1, 4))}),
    "rows and inner": ({0: (0, (5, 2)), 1: (1, (2, 4))}, {}),
    "rows and inner of the other": ({0: (0, (5, 2))}, {1: (0, (2, 4))}),
    "inner twice, each its own": ({0: (1, (5, 1))}, {1: (0, (2, 4))}),
    "inner on both sides, columns": ({1: (1, (5, 1))}, {0: (1, (3, 2)), 1: (0, (5, 1))}),
    "rows against columns": ({0: (0, (5, 2)), 1: (1, (2, 4))}, {0: (1, (5, 0)), 1: (0, (3, 3))}),
    "all against all": ({0: (1, (5, 1)), 1: (0, (3, 4))}, {0: (1, (3, 2)), 1: (0, (2, 4))}),
}


@pytest.mark.parametrize("cuts", TWO_AXES.values(), ids=TWO_AXES)
def test_matrices_on_a_mesh_of_two_axes(ranks, cuts):
    compare(ranks, MATRIX, [values(7, 6), values(6, 5, seed=4)], (2, 2), cuts)


# Pending sums -------------------------------------------------------------------------------------------------------


def test_products_of_pending_sums(ranks):
    table = {
        "times whole": lambda x, w: x.sum(1) @ w,
        "whole times": lambda x, w: w.t() @ x.sum(1).t(),
        "both pending": lambda x, w: x.sum(1) @ x.sum(1).t(),
        "pending product again": lambda x, w: x.transpose(1, 2).reshape(-1, 7) @ x[0] @ w,
        "times rows": lambda x, w: torch.bmm(x, x.sum(1, keepdim=True).transpose(1, 2)),
        "rows times": lambda x, w: torch.bmm(x.sum(1, keepdim=True), x.transpose(1, 2)),
        "bias on a pending product": lambda x, w: torch.addmm(w[0], x[0].t() @ x[1], w),
        "maximum times": lambda x, w: x.amax(1) @ w,
    }
    for sizes in ((4, 3), (5, 0, 2)):
        compare(ranks, table, [values(2, 7, 6), values(6, 5, seed=4)], (len(sizes),), [{0: (1, sizes)}, None])


def test_where_results_lie_and_what_is_sent(ranks):
    def check(mesh, x, w):
        x = shard(x, mesh, {0: (0, (5, 2))})
        with comm_trace() as trace:
            assert (x @ w)._spec.layout == (Cut(0, (5, 2)),)
            assert (x.t() @ x).placements == (Partial("sum"),)
            assert (x.t() @ x @ w).placements == (Partial("sum"),)
            assert (w.t() @ x.t())._spec.layout == (Cut(1, (5, 2)),)
            assert F.linear(x.view(1, 7, 6), w.t(), w[0])._spec.layout == (Cut(1, (5, 2)),)
        assert not trace.sent, str(trace)
        with comm_trace() as trace:
            scores = x @ x.t()
        assert trace.counts() == {"all_gather": 1}, str(trace)
        assert scores._spec.layout == (Cut(0, (5, 2)),)

    ranks.run(check, values(7, 6), values(6, 5))


def test_gradients_of_a_sum_stay_one_row(ranks):
    """The gradient of ``sum`` is expanded: what a product makes of it must not become whole on any rank."""

    def check(mesh, x, w):
        seen = []

        class Watch(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x * 1

            @staticmethod
            def backward(ctx, grad):
                seen.append(grad)
                return grad

        x = shard(x, mesh, {0: (0, (5, 2))}, requires_grad=True)
        torch.mm(Watch.apply(x), w).sum().backward()
        assert seen[0]._local_tensor.untyped_storage().nbytes() <= 6 * 8
        assert seen[0]._spec.tensor_meta.stride == (0, 1)
        assert_close(x.grad.full_tensor(), torch.ones(7, 5, dtype=w.dtype) @ w.t(), "gradient")

    ranks.run(check, values(7, 6), values(6, 5))


# Modules ------------------------------------------------------------------------------------------------------------


def attend(heads, x):
    return heads(x, x, x, need_weights=False)[0]


def attend_with_weights(heads, x, mask):
    return heads(x, x, x, attn_mask=mask, average_attn_weights=False)


class Attend(nn.Module):
    """Self attention with MultiheadAttention over [B, S, C]."""

    def __init__(self, function, *more):
        super().__init__()
        torch.manual_seed(0)
        self.heads = nn.MultiheadAttention(6, 2, batch_first=True).double()
        self.function, self.more = function, more

    def forward(self, x):
        return self.function(self.heads, x, *self.more)


MODULES = {
    "linear": lambda: nn.Linear(6, 5),
    "linear without bias": lambda: nn.Linear(6, 5, bias=False),
    "mlp": lambda: nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 6)),
    "bilinear products": lambda: nn.Sequential(
        nn.Linear(6, 6), nn.Unflatten(2, (2, 3)), nn.Flatten(2), nn.Linear(6, 2)
    ),
}


@pytest.mark.parametrize("sizes", [(4, 3), (3, 1, 3), (5, 0, 2)], ids=str)
@pytest.mark.parametrize("batch", [1, 2])
def test_modules(ranks, batch, sizes):
    torch.manual_seed(0)
    for build in MODULES.values():
        compare(ranks, {"": build().double()}, [values(batch, 7, 6)], (len(sizes),), [{0: (1, sizes)}])


@pytest.mark.parametrize("sizes", [(4, 3), (3, 1, 3), (5, 0, 2)], ids=str)
def test_multihead_attention(ranks, sizes):
    mask = torch.triu(torch.full((7, 7), -torch.inf, dtype=torch.float64), 1)
    for module in (Attend(attend), Attend(attend_with_weights, None), Attend(attend_with_weights, mask)):
        ranks.same_as_plain(module, values(2, 7, 6), dim=1, sizes=sizes)


@pytest.mark.parametrize("name", ["linear", "mlp"])
def test_modules_over_pixels_cut_along_two_axes(ranks, name):
    torch.manual_seed(0)
    cuts = {0: (1, (2, 1)), 1: (2, (1, 3))}
    compare(ranks, {name: MODULES[name]().double()}, [values(2, 3, 4, 6)], (2, 2), [cuts])


def test_cut_channels(ranks):
    torch.manual_seed(0)
    compare(ranks, {"mlp": MODULES["mlp"]().double()}, [values(2, 7, 6)], (3,), [{0: (2, (3, 1, 2))}])


def test_cut_weights(ranks):
    """A weight that is itself sharded, along its output or its input."""
    table = {"linear": F.linear, "twice": lambda x, w, b: F.linear(F.linear(x, w, b), w.t())}
    for cut in ({0: (0, (2, 3))}, {0: (1, (5, 1))}):
        compare(ranks, table, [values(2, 7, 6), values(5, 6), values(5)], (2,), [{0: (1, (4, 3))}, cut, None])
        compare(ranks, table, [values(2, 7, 6), values(5, 6), values(5)], (2,), [{}, cut, {}])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_dtypes(ranks, dtype):
    torch.manual_seed(0)
    compare(ranks, {"linear": nn.Linear(6, 5).to(dtype)}, [values(2, 7, 6, dtype=dtype)], (2,), [{0: (1, (4, 3))}])


def test_under_autocast_no_grad_and_inference_mode(ranks):
    torch.manual_seed(0)
    linear = nn.Linear(6, 5)

    def check(mesh, linear, x):
        mine = shard(x, mesh, {0: (1, (5, 0, 2))})
        functions = {
            "linear": linear,
            "matmul": lambda x: x @ linear.weight.t(),
            "einsum": lambda x: torch.einsum("bsc,dc->bsd", x, linear.weight),
            "bmm": lambda x: torch.bmm(x, x.transpose(1, 2)),
        }
        cast = torch.autocast("cpu", torch.bfloat16)
        for context in (torch.no_grad(), torch.inference_mode(), cast):
            for name, function in functions.items():
                with context, strict():
                    found, right = function(mine), function(x)
                assert_close(found.detach().full_tensor(), right.detach(), name)

    ranks.run(check, linear, values(2, 7, 6, dtype=torch.float32), mesh=(3,))


def test_second_derivatives(ranks):
    def penalty(x, w):
        (slope,) = torch.autograd.grad((F.linear(x, w).sigmoid() @ w).pow(2).sum(), x, create_graph=True)
        return slope.pow(2).sum()

    for sizes in ((4, 3), (5, 0, 2)):
        compare(ranks, {"penalty": penalty}, [values(2, 7, 6), values(5, 6)], (len(sizes),), [{0: (1, sizes)}, None])

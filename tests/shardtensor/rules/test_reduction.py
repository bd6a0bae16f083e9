"""Reductions over cut and whole dims: sums stay pending, the rest is one value on every rank, indices are global."""

from __future__ import annotations

import pytest
import torch

from shardtensor.comm import comm_trace
from shardtensor.errors import OpError
from shardtensor.registry import strict
from shardtensor.spec import Partial, Replicate
from shardtensor.testing import assert_close, assert_same_as_plain, shard

CUTS = {
    "2 ranks": ((2,), {0: (1, (4, 3))}),
    "3 ranks": ((3,), {0: (1, (3, 1, 3))}),
    "empty block": ((3,), {0: (1, (5, 0, 2))}),
    "last dim": ((3,), {0: (2, (1, 3, 2))}),
    "first dim": ((2,), {0: (0, (1, 1))}),
    "batch of one on one rank": ((3,), {0: (0, (0, 2, 0))}),
    "two axes": ((2, 2), {0: (1, (5, 2)), 1: (2, (2, 4))}),
    "two axes, whole along one": ((2, 2), {1: (1, (7, 0))}),
}
OVER = {
    "all": {},
    "all kept": {"dim": (0, 1, 2), "keepdim": True},
    "first": {"dim": 0},
    "first kept": {"dim": (0,), "keepdim": True},
    "middle": {"dim": 1},
    "middle kept": {"dim": -2, "keepdim": True},
    "last": {"dim": -1},
    "two": {"dim": (-1, 0)},
    "no dims": {"dim": []},
}
ONE_DIM = {name: OVER[name] for name in ("first", "middle", "middle kept", "last")}


def values(*shape, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64).to(dtype)


def vector_norm(order):
    return lambda x, **over: torch.linalg.vector_norm(x, order, **over)


SUMS = {
    "sum": torch.sum,
    "sum in another dtype": lambda x, **over: torch.sum(x, dtype=torch.float32, **over),
    "mean": torch.mean,
    "nansum": lambda x, **over: torch.nansum(torch.where(x > 1, torch.nan, x), **over),
}
OTHERS = {
    "var": torch.var,
    "var, no correction": lambda x, **over: torch.var(x, correction=0, **over),
    "std": torch.std,
    "var_mean": torch.var_mean,
    "std_mean": torch.std_mean,
    "amax": torch.amax,
    "amin": torch.amin,
    **{f"norm {order}": vector_norm(order) for order in (1, 2, 3, 0.5, -1, float("inf"), -float("inf"))},
    "norm 0": lambda x, **over: vector_norm(0)(x.detach(), **over),
    "old norm": lambda x, **over: torch.norm(x, p=3, **over),
}
BOOLEAN = {
    "any": lambda x, **over: torch.any(x > 1.5, **over),
    "all": lambda x, **over: torch.all(x > -1.5, **over),
    "all are": lambda x, **over: torch.all(x > -100, **over),
    "sum of bools": lambda x, **over: torch.sum(x > 0, **over),
}
ALONG = {
    "max": torch.max,
    "min": torch.min,
    "prod": torch.prod,
    "logsumexp": torch.logsumexp,
    "aminmax": torch.aminmax,
}
PLACES = {
    "argmax": torch.argmax,
    "argmin": torch.argmin,
    "argmax, ties": lambda x, **over: torch.argmax(x.round(), **over),
    "max, ties": lambda x, **over: torch.max(x.round(), **over),
    "min of integers": lambda x, **over: torch.min((3 * x).long(), **over),
    "median": lambda x, **over: torch.median(x, **over),
}
WHOLE = {
    "max": torch.max,
    "min": torch.min,
    "prod": lambda x: torch.prod(x[:1]),
    "argmax": torch.argmax,
    "argmin": lambda x: torch.argmin(x, keepdim=True),
    "argmax, ties": lambda x: torch.argmax((x * 0.4).round()),
    "count_nonzero": lambda x: torch.count_nonzero(x.detach() > 0),
    "count_nonzero of two dims": lambda x: torch.count_nonzero(x.detach() > 0, (0, 1)),
    "norm": lambda x: x.norm(),
    "fro": lambda x: torch.norm(x, "fro"),
    "dist": lambda x: torch.dist(x, torch.zeros_like(x), 3),
    "median": torch.median,
    "logsumexp": lambda x: torch.logsumexp(x, (0, 1, 2)),
    "logsumexp of large values": lambda x: torch.logsumexp(1000 * x, (1, 2)),
    "sum of a sum": lambda x: x.sum(0).sum(0, keepdim=True),
    "mean of a sum": lambda x: x.sum(1).mean(),
    "sum of an expanded": lambda x: x.mean((1, 2), keepdim=True).expand(2, 7, 6).sum((0, 1)),
    "mean of an expanded": lambda x: x.mean(1, keepdim=True).expand(2, 7, 6).mean((1, 2)),
    "mean that keeps an expanded": lambda x: x.mean(1, keepdim=True).expand(2, 7, 6).mean(0) * x,
    "square of a sum": lambda x: x.sum() ** 2 + x.sum(1).exp().sum(),
    "one value of a dim of one": lambda x: x.sum(1, keepdim=True).sum(1).amax(0),
    "over a 0-dim tensor": lambda x: x.sum().sum(0) + x.mean().amax(-1),
}


def compare(ranks, table, over, mesh, cuts, x=None, gradients=True):
    """Every function over every choice of dims on the same ranks; no op may gather."""
    x = values(2, 7, 6) if x is None else x

    def check(mesh):
        for name, function in table.items():
            for dims, arguments in over.items():
                try:
                    with strict():
                        assert_same_as_plain(function, [x], mesh, [cuts], kwargs=arguments, gradients=gradients)
                except Exception as error:
                    raise AssertionError(f"{name} over {dims}: {error}") from error

    ranks.run(check, mesh=mesh)


@pytest.mark.parametrize(("mesh", "cuts"), CUTS.values(), ids=CUTS)
@pytest.mark.parametrize("table", [SUMS, OTHERS], ids=["sums", "others"])
def test_over_any_dims(ranks, table, mesh, cuts):
    over = OVER if table is SUMS else {name: OVER[name] for name in ("all", "all kept", "middle", "last", "two")}
    compare(ranks, table, over, mesh, cuts)


@pytest.mark.parametrize(("mesh", "cuts"), CUTS.values(), ids=CUTS)
def test_along_one_dim(ranks, mesh, cuts):
    compare(ranks, ALONG, ONE_DIM, mesh, cuts)
    compare(ranks, {**BOOLEAN, **PLACES}, ONE_DIM, mesh, cuts, gradients=False)


@pytest.mark.parametrize(("mesh", "cuts"), CUTS.values(), ids=CUTS)
def test_of_the_whole(ranks, mesh, cuts):
    compare(ranks, WHOLE, {"": {}}, mesh, cuts)
    compare(ranks, BOOLEAN, {name: OVER[name] for name in ("all", "two", "no dims")}, mesh, cuts, gradients=False)


FLAT = {
    "sum of rows": lambda x: x.flatten(0, 1).sum(1),
    "sum of columns": lambda x: x.flatten(0, 1).sum(0),
    "mean": lambda x: x.flatten(0, 1).mean(0, keepdim=True),
    "var": lambda x: x.flatten(0, 1).var(0),
    "max": lambda x: x.flatten(0, 1).max(0),
    "argmax": lambda x: x.flatten(0, 1).argmax(0),
    "argmax of all": lambda x: x.flatten(0, 1).argmax(),
    "of rows and back": lambda x: x.flatten(0, 1).amax(1).view(2, 7),
}


@pytest.mark.parametrize("cuts", ["2 ranks", "empty block", "two axes"])
def test_of_flattened_rows(ranks, cuts):
    compare(ranks, FLAT, {"": {}}, *CUTS[cuts])


def test_rows_flattened_over_two_axes(ranks):
    table = {name: lambda x, f=f: f(x.flatten(1, 2)) for name, f in FLAT.items() if name != "of rows and back"}
    compare(ranks, table, {"": {}}, (2, 2), {0: (1, (2, 1)), 1: (2, (3, 1))}, values(2, 3, 4, 5))


def test_sums_wait_and_extremes_do_not(ranks):
    def check(mesh, x):
        x = shard(x, mesh, {0: (1, (4, 3))})
        with comm_trace() as trace:
            pending = [x.sum(), x.mean(1), x.sum((0, 1)), x.sum(1).sum(0), -x.mean() * 2]
        assert not trace.sent, str(trace)
        assert all(item.placements == (Partial("sum"),) for item in pending), [p.placements for p in pending]
        for function in (torch.amax, torch.var, torch.linalg.vector_norm, torch.any, torch.argmax):
            with comm_trace() as trace:
                assert function(x).placements == (Replicate(),)
            assert len(trace.sent) == 1, str(trace)
        with comm_trace() as trace:
            x.sum(2), x.mean(-1), x.var(0), x.amax(2), x.max(0), x.norm(dim=2)
        assert not trace.sent, str(trace)

    ranks.run(check, values(2, 7, 6))


@pytest.mark.parametrize("sizes", [(4, 3), (5, 0, 2)], ids=str)
def test_values_in_python_are_those_of_the_whole(ranks, sizes):
    def check(mesh, x):
        mine = shard(x, mesh, {0: (1, sizes)})
        assert mine.sum().item() == pytest.approx(x.sum().item(), rel=1e-12)
        assert float(mine.mean()) == pytest.approx(float(x.mean()), rel=1e-12)
        assert int(mine.argmax()) == int(x.argmax())
        for limit in (-100.0, x.max().item(), 100.0):
            assert bool((mine >= limit).any()) == bool((x >= limit).any())
            assert bool((mine >= limit).all()) == bool((x >= limit).all())

    ranks.run(check, values(2, 7, 6), mesh=(len(sizes),))


def test_dtypes(ranks):
    """Integers and bools are summed in int64, half precision in float32."""
    table = {"sum": torch.sum, "max": torch.amax, "prod": lambda x, dim: torch.prod(x, dim), "any": torch.any}
    for dtype in (torch.int32, torch.int64, torch.uint8, torch.int16):
        x = (3 * values(2, 7, 6)).abs().to(dtype)
        compare(ranks, table, {"middle": {"dim": 1}}, (3,), {0: (1, (3, 1, 3))}, x, gradients=False)
    half = {
        "sum": torch.sum,
        "mean": torch.mean,
        "var": torch.var,
        "norm": torch.linalg.vector_norm,
        "amax": torch.amax,
    }
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        x = values(2, 7, 6).to(dtype)
        compare(ranks, half, {name: OVER[name] for name in ("all", "middle")}, (2,), {0: (1, (4, 3))}, x)
    many = torch.full((2, 4096), 100.0, dtype=torch.float16)  # the sum is beyond float16, the mean is not
    compare(ranks, {"mean": torch.mean}, {"": {}}, (2,), {0: (1, (4000, 96))}, many)


@pytest.mark.parametrize("sizes", [(4, 3), (5, 0, 2)], ids=str)
def test_missing_values_are_found_wherever_they_are(ranks, sizes):
    x = values(2, 7, 6)
    x[0, 6, 0] = x[1, 0, 1] = x[0, 3, 2] = torch.nan
    x[:, 2, 3] = torch.inf
    x[:, :, 4] = -torch.inf
    table = {
        "amax": torch.amax,
        "amin": torch.amin,
        "max": torch.max,
        "argmin": torch.argmin,
        "logsumexp": torch.logsumexp,
        "sum": torch.sum,
        "nansum": torch.nansum,
    }
    compare(ranks, table, ONE_DIM, (len(sizes),), {0: (1, sizes)}, x, gradients=False)


def test_variance_beside_a_large_mean(ranks):
    x = 3000 + values(4, 501, dtype=torch.float32)
    right = x.double().var(1)

    def check(mesh):
        found = shard(x, mesh, {0: (1, (300, 1, 200))}).var(1)
        assert_close(found.full_tensor().double(), right, "variance", 1e-5)

    ranks.run(check, mesh=(3,))


def test_second_derivatives(ranks):
    def penalty(x):
        (slope,) = torch.autograd.grad(
            x.mean(1).pow(3).sum() + x.var((1, 2)).sum() + x.norm(dim=1).sum(), x, create_graph=True
        )
        return slope.pow(2).sum()

    compare(ranks, {"penalty": penalty}, {"": {}}, (2,), {0: (1, (4, 3))})
    compare(ranks, {"penalty": penalty}, {"": {}}, (3,), {0: (1, (5, 0, 2))})


def test_under_inference_mode(ranks):
    def check(mesh, x):
        mine = shard(x, mesh, {0: (1, (4, 3))})
        with torch.inference_mode(), strict():
            for function in (torch.sum, torch.mean, torch.std, torch.amax, torch.norm):
                assert_close(function(mine).full_tensor(), function(x), function.__name__)

    ranks.run(check, values(2, 7, 6))


def test_wrong_arguments(ranks):
    def check(mesh, x):
        x = shard(x, mesh, {0: (1, (4, 3))})
        for function in (torch.sum, torch.amax, torch.argmax, torch.var):
            with pytest.raises(IndexError, match="out of range"):
                function(x, 3)
        with pytest.raises(OpError, match="twice"):
            x.sum((1, -2))
        with pytest.raises(OpError, match="mean of torch"):
            x.long().mean()

    ranks.run(check, values(2, 7, 6))


def test_complex_numbers(ranks):
    table = {
        "sum": torch.sum,
        "mean": torch.mean,
        "var": torch.var,
        "norm": torch.linalg.vector_norm,
        "norm 3": vector_norm(3),
        "largest": vector_norm(float("inf")),
    }
    x = torch.complex(values(2, 7, 6), values(2, 7, 6).sin())
    compare(
        ranks, table, {name: OVER[name] for name in ("all", "middle")}, (3,), {0: (1, (5, 0, 2))}, x, gradients=False
    )

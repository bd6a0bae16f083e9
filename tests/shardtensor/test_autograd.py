"""Autograd's own functions on sharded tensors: they act on the tensor itself, and gradients lie as it lies."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard

from shardtensor import OpError, ShardTensor
from shardtensor.spec import Cut, Partial
from shardtensor.testing import assert_close, shard

ROWS = {0: (0, (5, 0, 3))}
WHOLE = torch.randn(8, 4, generator=torch.Generator().manual_seed(8), dtype=torch.float64)


def pair(mesh, requires_grad=True):
    """The same leaf, sharded and plain."""
    return shard(WHOLE, mesh, ROWS, requires_grad=requires_grad), WHOLE.clone().requires_grad_(requires_grad)


def assert_same_grad(found, expected, leaf):
    assert isinstance(found, ShardTensor)
    assert found._spec.layout == leaf._spec.layout
    assert_close(found.full_tensor().detach(), expected.detach(), "gradient")


def test_requires_grad_in_place(ranks):  # T16
    def check(mesh):
        for ask in (lambda t: t.requires_grad_(), lambda t: setattr(t, "requires_grad", True)):
            x, p = pair(mesh, requires_grad=False)
            ask(x)
            ask(p)
            assert x.requires_grad
            (x**2).sum().backward()
            (p**2).sum().backward()
            assert_same_grad(x.grad, p.grad, x)
        assert x.requires_grad_(False) is x
        assert not x.requires_grad

    ranks.run(check, mesh=(3,))


def losses(x, other):
    """Losses whose gradients arrive replicated, expanded, pending or cut along another dim."""
    yield x.sum()
    yield x.redistribute(placements=[Shard(1)]).square().sum() if isinstance(x, ShardTensor) else x.square().sum()
    yield (x @ other).tanh().sum()
    yield (x.full_tensor() if isinstance(x, ShardTensor) else x).pow(3).sum()
    yield x.mean(0).square().sum()


def test_gradients_lie_as_their_tensor(ranks):
    def check(mesh):
        other = torch.randn(4, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        x, p = pair(mesh)
        for mine, right in zip(losses(x, other), losses(p, other), strict=True):
            x.grad = p.grad = None
            mine.backward()
            right.backward()
            assert_same_grad(x.grad, p.grad, x)
        x.sum().backward()
        p.sum().backward()
        assert_same_grad(x.grad, p.grad, x)  # accumulated

    ranks.run(check, mesh=(3,))


def test_factories_that_require_grad(ranks):
    def check(mesh):
        x, _ = pair(mesh)
        for leaf in (torch.zeros_like(x, requires_grad=True), x.detach().clone().requires_grad_(), nn.Parameter(x)):
            assert leaf.is_leaf
            (leaf.redistribute(placements=[Replicate()]) * 2).sum().backward()
            assert_same_grad(leaf.grad, torch.full_like(WHOLE, 2), leaf)

    ranks.run(check, mesh=(3,))


def test_autograd_grad(ranks):  # T18
    def check(mesh):
        x, p = pair(mesh)
        weight, twin = (torch.ones(4, dtype=torch.float64, requires_grad=True) for _ in range(2))
        y, q = (x * weight).exp(), (p * twin).exp()
        found = torch.autograd.grad(y.sum(), [x, weight, y], allow_unused=True)
        right = torch.autograd.grad(q.sum(), [p, twin, q], allow_unused=True)
        assert_same_grad(found[0], right[0], x)
        assert type(found[1]) is torch.Tensor
        assert_close(found[1], right[1], "weight")
        assert x.grad is None
        assert weight.grad is None
        (single,) = torch.autograd.grad((x * x).sum(), x)
        assert_same_grad(single, 2 * p, x)
        (given,) = torch.autograd.grad(x * 3, x, grad_outputs=shard(WHOLE, mesh, ROWS))
        assert_same_grad(given, 3 * p, x)
        z = x.sin()
        (inner,) = torch.autograd.grad(z.cos().sum(), z)  # with respect to what is no leaf
        assert_same_grad(inner, -p.sin().sin(), x)
        assert torch.autograd.grad(x.sum(), weight, allow_unused=True) == (None,)
        zeros = torch.autograd.grad(x.sum(), [x.detach().requires_grad_(), weight], materialize_grads=True)
        assert zeros[0].shape == x.shape
        assert zeros[1].tolist() == [0.0] * 4
        with pytest.raises(RuntimeError, match="scalar outputs"):
            torch.autograd.grad(x * 2, x)
        with pytest.raises(RuntimeError, match="does not require grad"):
            torch.autograd.grad(x.sum(), shard(WHOLE, mesh, ROWS))
        with pytest.raises(RuntimeError, match="not have been used"):
            torch.autograd.grad(x.sum(), weight)

    ranks.run(check, mesh=(3,))


def test_hooks(ranks):  # T18
    def check(mesh):
        x, p = pair(mesh)
        y = x * 3
        seen = []
        handle = y.register_hook(lambda g: seen.append(g) or g * 2)
        y.redistribute(placements=[Shard(1)]).square().sum().backward()
        assert_same_grad(seen[0], 6 * p, y)  # the hook's gradient lies as its tensor too
        assert_same_grad(x.grad, 36 * p, x)
        handle.remove()
        x.grad = None
        leaf = x.register_hook(lambda g: g * 10)
        accumulated = []
        after = x.register_post_accumulate_grad_hook(lambda t: accumulated.append(t.grad))
        (x * 3).sum().backward()
        assert len(seen) == 1
        assert_same_grad(x.grad, torch.full_like(WHOLE, 30), x)
        assert_same_grad(accumulated[0], torch.full_like(WHOLE, 30), x)
        leaf.remove()
        after.remove()

    ranks.run(check, mesh=(3,))


def test_retain_grad(ranks):  # T18
    def check(mesh):
        x, p = pair(mesh)
        y = x.sigmoid()
        y.retain_grad()
        assert y.retains_grad
        y.full_tensor().square().sum().backward()
        assert_same_grad(y.grad, 2 * p.sigmoid(), y)

    ranks.run(check, mesh=(3,))


PENALTY = {
    "power": lambda x, w: (x**3).sum(),
    "linear": lambda x, w: torch.nn.functional.linear(x, w).tanh().sum(),
    "matmul": lambda x, w: (x @ w.t()).square().sum(),
    "mean": lambda x, w: (x.exp().mean() ** 2) * w.sum(),
    "softmax": lambda x, w: (x.softmax(0) * x).sum() * w.mean(),
}


@pytest.mark.parametrize("function", PENALTY.values(), ids=PENALTY)
def test_the_gradient_of_a_gradient_norm(ranks, function):  # T23
    def check(mesh):
        w = torch.randn(3, 4, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
        results = []
        for x, weight in zip(pair(mesh), (w.clone().requires_grad_(), w.clone().requires_grad_()), strict=True):
            (g,) = torch.autograd.grad(function(x, weight), x, create_graph=True)
            penalty = g.square().sum()
            penalty.backward()
            results.append((penalty, x, weight))
        (mine, x, weight), (right, p, twin) = results
        assert_close(mine.full_tensor().detach(), right.detach(), "penalty")
        assert_same_grad(x.grad, p.grad, x)
        if twin.grad is None:
            assert weight.grad is None
        else:
            assert type(weight.grad) is torch.Tensor
            assert_close(weight.grad.detach(), twin.grad.detach(), "weight")

    ranks.run(check, mesh=(3,))


def test_an_error_inside_an_operator_is_seen(ranks):  # T17
    def check(mesh):
        x, _ = pair(mesh, requires_grad=False)
        from shardtensor.registry import RULES  # here: op tables do not travel

        add = torch.ops.aten.add.Tensor
        kept = RULES[add]
        for kind in (NotImplementedError, TypeError):

            def broken(*args, **kwargs):
                raise kind("the cause")  # noqa: B023

            try:
                ShardTensor.register_dispatch_handler(add, broken)
                with pytest.raises(OpError, match=rf"aten.add.Tensor.*{kind.__name__}: the cause") as caught:
                    x + x
            finally:
                RULES[add] = kept
            assert isinstance(caught.value.__cause__, kind)
        with pytest.raises(RuntimeError, match=r"size|shape|broadcast"):
            x + torch.ones(3, 5, dtype=torch.float64)
        with pytest.raises(TypeError, match="unsupported operand"):
            x + "a"

    ranks.run(check, mesh=(3,))


def test_python_values_are_those_of_the_whole(ranks):  # T24
    def check(mesh):
        x, p = pair(mesh, requires_grad=False)
        assert x.sum().item() == pytest.approx(p.sum().item())
        assert float(x.square().mean()) == pytest.approx(float(p.square().mean()))
        assert int(x.max() * 10) == int(p.max() * 10)
        assert bool((x > 0).any()) is True
        assert bool((x > 0).all()) is False
        assert ((x - WHOLE.to(x.dtype)).abs() < 1e-12).all()
        assert not (x > 100).any()
        assert torch.equal(x, x.redistribute(placements=[Shard(1)]))
        assert not torch.equal(x, WHOLE + 1)
        assert torch.allclose(x, WHOLE)
        assert [1, 2, 3][(x > 100).sum()] == 1  # __index__

    ranks.run(check, mesh=(3,))


def test_a_loss_can_be_read_on_one_rank_after_backward(ranks):
    def check(mesh):
        x, p = pair(mesh)
        loss = (x**2).sum()
        assert loss._spec.layout == (Partial("sum"),)
        loss.backward()
        assert loss._spec.layout == (Replicate(),)
        if mesh.get_local_rank() == 0:  # no exchange: the others are not there
            assert loss.item() == pytest.approx((p**2).sum().item())
        assert_same_grad(x.grad, 2 * p, x)

    ranks.run(check, mesh=(3,))


def test_no_grad_detach_and_set_grad(ranks):
    def check(mesh):
        x, _ = pair(mesh)
        with torch.no_grad():
            assert not (x * 2).requires_grad
        assert not x.detach().requires_grad
        y = (x * 2).detach_()
        assert y.is_leaf
        x.sum().backward()
        x.grad.zero_()
        assert x.grad.full_tensor().abs().sum() == 0
        x.grad = None
        assert x.grad is None
        x.grad = x.detach() * 2
        assert_same_grad(x.grad, 2 * WHOLE, x)

    ranks.run(check, mesh=(3,))


def test_in_place_ops_count_versions(ranks):
    def check(mesh):
        x, p = pair(mesh)
        y = x * 2
        z = y.exp()
        z.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            z.sum().backward()
        y, q = x * 2, p * 2
        y.mul_(y.detach().sin())
        q.mul_(q.detach().sin())
        y.sum().backward()
        q.sum().backward()
        assert_same_grad(x.grad, p.grad, x)
        with pytest.raises(RuntimeError, match="leaf"):
            x.add_(1)

    ranks.run(check, mesh=(3,))


def test_custom_functions_and_sums_of_layouts(ranks):
    class Cube(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x**3

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            return 3 * x**2 * grad

    def check(mesh):
        x, p = pair(mesh)
        y = Cube.apply(x)
        moved = x.redistribute(placements=[Shard(1)])  # both uses of x meet in its gradient
        assert moved._spec.layout == (Cut(1, (2, 2, 0)),)
        (y.sum() + (moved * 5).sum()).backward()
        ((p**3).sum() + (p * 5).sum()).backward()
        assert_same_grad(x.grad, p.grad, x)

    ranks.run(check, mesh=(3,))

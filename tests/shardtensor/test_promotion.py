"""Plain weights beside sharded tensors: gradients stay plain and whole, and travel in one message per backward."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from shardtensor import LayoutError, OpError, ShardTensor, TensorPromotionMode, comm_trace, sync_module_over_mesh
from shardtensor.testing import assert_close, shard

ROWS = {0: (1, (5, 1, 3))}  # dim 1 of nine rows


def batch(seed=1):
    return torch.randn(2, 9, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def double(module):
    torch.manual_seed(2)
    for parameter in module.parameters():
        with torch.no_grad():
            parameter.copy_(torch.randn(parameter.shape))
    return module.double()


def gradients(module, *inputs):
    """The gradients of a scalar loss of the module's output."""
    module.zero_grad()
    module(*inputs).tanh().square().sum().backward()
    return {name: parameter.grad for name, parameter in module.named_parameters()}


def same_gradients(mesh, make, inputs=1, synced=True):
    """Weight gradients on sharded inputs against one process; returns the exchanges of forward and backward."""
    module, twin = double(make()), double(make())
    if synced:
        sync_module_over_mesh(module, mesh)
    plain = [batch(seed) for seed in range(inputs)]
    expected = gradients(twin, *plain)
    cut = [shard(x, mesh, ROWS) for x in plain]
    with comm_trace() as trace:
        found = gradients(module, *cut)
    for name, right in expected.items():
        if right is None:
            assert found[name] is None
        else:
            assert type(found[name]) is torch.Tensor
            assert_close(found[name], right, name)
    return trace


class Block(nn.Module):
    """A U-Net block's worth of weights: 14 of them."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(6))
        self.scale = nn.Parameter(torch.ones(4))
        self.shift = nn.Parameter(torch.ones(()))

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x).tanh()
        return x * self.scale + self.shift


def test_one_all_reduce_per_step(ranks):  # T29
    def check(mesh):
        trace = same_gradients(mesh, Block)
        # One for the loss, one for the fourteen gradients.
        assert trace.counts() == {"all_reduce": 2}
        assert max(item.bytes for item in trace.sent) == 8 * sum(p.numel() for p in Block().parameters())

    ranks.run(check, mesh=(3,))


def test_without_a_bucket_one_all_reduce_per_call(ranks):
    def check(mesh):
        trace = same_gradients(mesh, Block, synced=False)
        # The loss, six linear layers (weight and bias together), scale and shift.
        assert trace.counts() == {"all_reduce": 1 + 6 + 2}

    ranks.run(check, mesh=(3,))


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(self.first(x).relu())


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))

    def forward(self, x):
        return (x @ self.weight).sigmoid() @ self.weight


class Derived(nn.Module):
    """Weights that a forward makes of others, as spectral and weight norm do."""

    def __init__(self):
        super().__init__()
        self.v, self.g = nn.Parameter(torch.ones(4, 4)), nn.Parameter(torch.ones(4, 1))

    def forward(self, x):
        return x @ (self.v * self.g / self.v.norm(dim=1, keepdim=True)).t() + self.g.sum()


class Frozen(nn.Module):
    def __init__(self):
        super().__init__()
        self.frozen, self.head = nn.Linear(4, 4), nn.Linear(4, 3)
        self.frozen.requires_grad_(False)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return self.head(self.frozen(x))


class Mixed(nn.Module):
    """Weights of two dtypes: two messages."""

    def __init__(self):
        super().__init__()
        self.layer, self.gate = nn.Linear(4, 4), nn.Parameter(torch.ones(4))

    def double(self):
        self.layer.double()
        return self

    def forward(self, x):
        return self.layer(x) * self.gate.double()


CASES = [(Shared, 1), (Twice, 1), (Derived, 1), (Frozen, 1), (Mixed, 2)]


@pytest.mark.parametrize(("make", "messages"), CASES, ids=[make.__name__ for make, _ in CASES])
@pytest.mark.parametrize("synced", [True, False], ids=["synced", "alone"])
def test_weights_of_every_kind(ranks, make, messages, synced):
    def check(mesh):
        trace = same_gradients(mesh, make, synced=synced)
        if synced and make is not Derived:  # the derived one is no parameter: it goes by itself
            assert trace.counts() == {"all_reduce": 1 + messages}

    ranks.run(check, mesh=(3,))


def test_a_module_called_twice_in_one_forward(ranks):
    class Siamese(nn.Module):
        def __init__(self):
            super().__init__()
            self.tower = nn.Linear(4, 4)

        def forward(self, x, y):
            return self.tower(x) * self.tower(y).tanh()

    def check(mesh):
        assert same_gradients(mesh, Siamese, inputs=2).counts() == {"all_reduce": 2}
        tower, twin = double(nn.Linear(4, 4)), double(nn.Linear(4, 4))
        sync_module_over_mesh(tower, mesh)  # the tower itself is synced: a bucket per call
        for net, xs in (
            (twin, [batch(1), batch(2)]),
            (tower, [shard(batch(1), mesh, ROWS), shard(batch(2), mesh, ROWS)]),
        ):
            (net(xs[0]) * net(xs[1])).sum().backward()
        assert_close(tower.weight.grad, twin.weight.grad, "weight")

    ranks.run(check, mesh=(3,))


def test_gradients_accumulate_over_backwards(ranks):
    def check(mesh):
        layer, twin = double(nn.Linear(4, 4)), double(nn.Linear(4, 4))
        sync_module_over_mesh(layer, mesh)
        for seed in (1, 2):
            layer(shard(batch(seed), mesh, ROWS)).square().sum().backward()
            twin(batch(seed)).square().sum().backward()
        assert_close(layer.weight.grad, twin.weight.grad, "weight")
        assert type(layer.weight.grad) is torch.Tensor

    ranks.run(check, mesh=(3,))


def test_without_gradients_nothing_is_promoted(ranks):
    def check(mesh):
        layer = double(nn.Linear(4, 4))
        x = shard(batch(), mesh, ROWS)
        expected = layer(batch())
        for off in (torch.no_grad, torch.inference_mode):
            with off(), comm_trace() as trace:
                y = layer(x)
                assert not y.requires_grad
                assert not trace.sent
                assert_close(y.full_tensor(), expected.detach(), "values")
        with torch.no_grad():
            y = layer(x)
        y = y + layer.bias  # grad is on again
        y.sum().backward()
        assert layer.weight.grad is None
        assert_close(layer.bias.grad, torch.full((4,), 18.0, dtype=torch.float64), "bias")

    ranks.run(check, mesh=(3,))


def test_a_failing_forward_leaves_no_bucket_open(ranks):
    class Fails(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            self.layer(x)
            raise KeyError("inside")

    def check(mesh):
        from shardtensor import buckets

        module = sync_module_over_mesh(Fails().double(), mesh)
        with pytest.raises(KeyError):
            module(shard(batch(), mesh, ROWS))
        assert not buckets._open.buckets

    ranks.run(check, mesh=(3,))


def test_modes(ranks):
    def check(mesh):
        x, weight = shard(batch(), mesh, ROWS), torch.ones(4, dtype=torch.float64, requires_grad=True)
        assert ShardTensor.get_promotion_mode() is TensorPromotionMode.SILENT
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            x * weight
        with ShardTensor.promotion_mode(TensorPromotionMode.WARN), pytest.warns(UserWarning, match=r"mul: .*\(4,\)"):
            y = x * weight
        assert_close(y.full_tensor().detach(), batch(), "values")
        with ShardTensor.promotion_mode("disabled"):
            assert ShardTensor.get_promotion_mode() is TensorPromotionMode.DISABLED
            with pytest.raises(OpError, match="promotion is disabled"):
                x * weight
            with pytest.raises(OpError, match="promotion is disabled"):
                torch.cat([x, torch.ones(2, 9, 4, dtype=torch.float64)])
            assert (x * 2 + torch.tensor(1.0)).shape == x.shape  # scalars pass
        assert ShardTensor.get_promotion_mode() is TensorPromotionMode.SILENT
        with pytest.raises(ValueError, match="loud"):
            ShardTensor.set_promotion_mode("loud")

    ranks.run(check, mesh=(3,))


def test_dtensor_weights_beside_plain_ones(ranks):
    def check(mesh):
        plain, twin = torch.ones(4, dtype=torch.float64, requires_grad=True), batch()[0, 0].clone().requires_grad_()
        whole = batch()[0, 0].clone()
        weight = distribute_tensor(whole, mesh, [Replicate()]).requires_grad_()
        y = shard(batch(), mesh, ROWS) * weight + plain
        y.square().sum().backward()
        (batch() * twin + 1).square().sum().backward()
        assert isinstance(weight.grad, DTensor)
        assert_close(weight.grad.full_tensor(), twin.grad, "DTensor weight")
        assert type(plain.grad) is torch.Tensor
        position = distribute_tensor(batch()[0], mesh, [Shard(0)]).requires_grad_()  # (3, 3, 3) beside (5, 1, 3)
        (shard(batch(), mesh, ROWS) * position).sum().backward()
        assert_close(position.grad.full_tensor(), batch().sum(0), "sharded DTensor")

    ranks.run(check, mesh=(3,))


def test_a_dtensor_of_another_mesh_is_refused(ranks):
    def check(mesh):
        weight = distribute_tensor(torch.ones(4), mesh["data"], [Replicate()])
        with pytest.raises(LayoutError, match="use one mesh"):
            shard(torch.ones(6, 4), mesh["domain"], {0: (0, (5, 1))}) * weight

    ranks.run(check, mesh=(2, 2))


def test_writing_into_a_plain_tensor(ranks):
    def check(mesh):
        x = shard(batch(), mesh, ROWS, requires_grad=True)
        buffer = torch.zeros(2, 9, 4, dtype=torch.float64)
        buffer += x  # no gradient is lost: the buffer had none
        assert_close(buffer.detach(), batch(), "values")
        (buffer * batch()).sum().backward()
        assert x.grad._spec.layout == x._spec.layout
        assert_close(x.grad.full_tensor(), batch(), "gradient")
        weight = torch.ones(2, 9, 4, dtype=torch.float64, requires_grad=True)
        for write in (
            lambda h: h.add_(x),
            lambda h: h.copy_(x),
            lambda h: h.__setitem__(slice(None), x),
            lambda h: h.__iadd__(x),
        ):
            with pytest.raises(OpError, match="written in place into a plain tensor"):
                write(weight * 2)

    ranks.run(check, mesh=(3,))


def test_a_pre_hook_that_fails_first(ranks):
    def check(mesh):
        layer = sync_module_over_mesh(double(nn.Linear(4, 4)), mesh)
        handle = layer.register_forward_pre_hook(lambda module, args: 1 / 0, prepend=True)
        with pytest.raises(ZeroDivisionError):
            layer(shard(batch(), mesh, ROWS))
        handle.remove()
        assert layer(shard(batch(), mesh, ROWS)).shape == (2, 9, 4)

    ranks.run(check, mesh=(3,))

"""Beside torch's own machinery: DDP, optimizers, clipping, autocast, checkpoints, copies and files."""

from __future__ import annotations

import copy
import io
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

from shardtensor import Shard, ShardTensor, comm_trace, sync_module_over_mesh
from shardtensor.testing import assert_close, shard

ROWS = {0: (2, (5, 1, 3))}  # nine rows of images [B, C, H, W] over three ranks


def images(seed=0, batch=2):
    return torch.randn(batch, 3, 9, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Net(nn.Module):
    """Convolution, norm, a residual branch, tokens through a linear layer."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.GroupNorm(2, 8)
        self.branch = nn.Conv2d(8, 8, 3, padding=1)
        self.mix = nn.Linear(8, 8)
        self.head = nn.Conv2d(8, 3, 1)
        self.checkpointed = None

    def body(self, x):
        x = x + self.branch(F.gelu(self.norm(x)))
        return x + self.mix(x.permute(0, 2, 3, 1)).tanh().permute(0, 3, 1, 2)

    def forward(self, x):
        x = self.stem(x)
        if self.checkpointed is None:
            x = self.body(x)
        else:
            x = checkpoint(self.body, x, use_reentrant=self.checkpointed == "reentrant")
        return self.head(x)


def net(seed=0):
    torch.manual_seed(seed)
    return Net().double()


def loss_of(model, x, y):
    return F.mse_loss(model(x), y)


def same_weights(found, expected, rtol=1e-10):
    for (name, mine), right in zip(found.named_parameters(), expected.parameters(), strict=True):
        assert type(mine) is nn.Parameter
        assert_close(mine.detach(), right.detach(), name, rtol)


OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "AdamW, foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_training_steps_track_one_process(ranks, make):
    def check(mesh):
        model, twin = net(), net()
        sync_module_over_mesh(model, mesh)
        ours, theirs = make(model.parameters()), make(twin.parameters())
        for step in range(4):
            x, y = images(step), images(step + 100)
            ours.zero_grad()
            theirs.zero_grad()
            mine = loss_of(model, shard(x, mesh, ROWS), shard(y, mesh, ROWS))
            right = loss_of(twin, x, y)
            mine.backward()
            right.backward()
            total = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            assert_close(total, nn.utils.clip_grad_norm_(twin.parameters(), 0.1), "gradient norm", 1e-9)
            ours.step()
            theirs.step()
            assert mine.item() == pytest.approx(right.item(), rel=1e-9)
        same_weights(model, twin, 1e-8)
        assert all(type(value) is torch.Tensor for state in ours.state.values() for value in state.values())

    ranks.run(check, mesh=(3,))


def test_sharded_parameters_train_too(ranks):
    """A position table cut like the tokens: its gradient and optimizer state lie as it lies."""

    class Tokens(nn.Module):
        def __init__(self, table):
            super().__init__()
            self.table = nn.Parameter(table)
            self.layer = nn.Linear(4, 4, dtype=torch.float64)

        def forward(self, x):
            return self.layer(x + self.table)

    def check(mesh):
        table, x = torch.randn(9, 4, dtype=torch.float64), torch.randn(2, 9, 4, dtype=torch.float64)
        torch.manual_seed(1)
        model = Tokens(shard(table, mesh, {0: (0, (5, 1, 3))}))
        torch.manual_seed(1)
        twin = Tokens(table.clone())
        assert isinstance(model.table, nn.Parameter)
        assert [name for name, _ in model.named_parameters()] == [name for name, _ in twin.named_parameters()]
        sync_module_over_mesh(model, mesh)
        for make in (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), lambda p: torch.optim.AdamW(p, lr=0.1)):
            ours, theirs = make(model.parameters()), make(twin.parameters())
            for _ in range(2):
                model(shard(x, mesh, {0: (1, (5, 1, 3))})).square().mean().backward()
                twin(x).square().mean().backward()
                ours.step()
                theirs.step()
                ours.zero_grad()
                theirs.zero_grad()
        assert model.table._spec.layout == shard(table, mesh, {0: (0, (5, 1, 3))})._spec.layout
        assert_close(model.table.detach().full_tensor(), twin.table.detach(), "table", 1e-9)
        assert_close(model.layer.weight.detach(), twin.layer.weight.detach(), "weight", 1e-9)

    ranks.run(check, mesh=(3,))


@pytest.mark.parametrize("wrapped_first", [False, True])
def test_ddp_over_the_data_axis(ranks, wrapped_first):
    def check(mesh):
        data, domain = mesh["data"], mesh["domain"]
        model, twin = net(), net()
        if not wrapped_first:
            sync_module_over_mesh(model, domain)
        model = DDP(model, process_group=data.get_group(), gradient_as_bucket_view=True)
        if wrapped_first:
            sync_module_over_mesh(model, domain)
        ours, theirs = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, twin))
        for step in range(3):
            x, y = images(step, 4), images(step + 100, 4)
            here = slice(2 * data.get_local_rank(), 2 * data.get_local_rank() + 2)
            cut = {0: (2, (6, 3))}
            ours.zero_grad()
            theirs.zero_grad()
            with comm_trace() as trace:
                loss_of(model, shard(x[here], domain, cut), shard(y[here], domain, cut)).backward()
            assert trace.counts()["all_reduce"] <= 5  # loss, group norm's statistics twice, weights
            loss_of(twin, x, y).backward()
            for (name, mine), right in zip(model.module.named_parameters(), twin.parameters(), strict=True):
                assert_close(mine.grad, right.grad, name, 1e-10)
            ours.step()
            theirs.step()
        same_weights(model.module, twin)

    ranks.run(check, mesh=(2, 2))


@pytest.mark.parametrize("kind", ["reentrant", "not reentrant"])
@pytest.mark.parametrize("synced", [True, False])
def test_checkpointed_activations(ranks, kind, synced):
    def check(mesh):
        model, twin = net(), net()
        model.checkpointed = kind
        if synced:
            sync_module_over_mesh(model, mesh)
        x, p = shard(images(), mesh, ROWS, requires_grad=True), images().requires_grad_()
        model(x).square().mean().backward()
        twin(p).square().mean().backward()
        assert_close(x.grad.full_tensor(), p.grad, "input", 1e-10)
        assert x.grad._spec.layout == x._spec.layout
        for (name, mine), right in zip(model.named_parameters(), twin.parameters(), strict=True):
            assert type(mine.grad) is torch.Tensor
            assert_close(mine.grad, right.grad, name, 1e-10)

    ranks.run(check, mesh=(3,))


def test_autocast(ranks):
    def check(mesh):
        model, twin = net().float(), net().float()
        sync_module_over_mesh(model, mesh)
        x, y = images().float(), images(1).float()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found, right = model(shard(x, mesh, ROWS)), twin(x)
            assert found.dtype == right.dtype == torch.bfloat16
            mine, theirs = F.mse_loss(found.float(), shard(y, mesh, ROWS)), F.mse_loss(right.float(), y)
        assert_close(found.detach().full_tensor(), right.detach(), "output", 3e-2)
        mine.backward()
        theirs.backward()
        for (name, weight), expected in zip(model.named_parameters(), twin.parameters(), strict=True):
            assert weight.grad.dtype == torch.float32
            assert_close(weight.grad, expected.grad, name, 5e-2)

    ranks.run(check, mesh=(3,))


def test_without_gradients(ranks):
    def check(mesh):
        model = net()
        expected = model(images()).detach()
        for off in (torch.no_grad, torch.inference_mode):
            with off():
                found = model(shard(images(), mesh, ROWS))
                assert not found.requires_grad
                assert_close(found.full_tensor(), expected, off.__name__)
        with torch.inference_mode():
            inside = shard(images(), mesh, ROWS)
            assert_close(model(inside).full_tensor(), expected, "an inference tensor")

    ranks.run(check, mesh=(3,))


def test_a_mesh_of_one_rank(ranks):
    def check(mesh):
        model, twin = sync_module_over_mesh(net(), mesh), net()
        x, p = shard(images(), mesh, {0: (2, (9,))}, requires_grad=True), images().requires_grad_()
        with comm_trace() as trace:
            model(x).square().mean().backward()
        assert not trace.sent
        twin(p).square().mean().backward()
        assert_close(x.grad.full_tensor(), p.grad, "input")
        for (name, mine), right in zip(model.named_parameters(), twin.parameters(), strict=True):
            assert_close(mine.grad, right.grad, name)

    ranks.run(check, mesh=(1,))


def test_copies(ranks):
    def check(mesh):
        x = shard(images(), mesh, ROWS, requires_grad=True)
        (x * 2).sum().backward()
        twin = copy.deepcopy(x)
        assert twin._spec == x._spec
        assert twin.requires_grad
        assert twin.grad._spec == x.grad._spec
        assert torch.equal(twin.grad.to_local(), x.grad.to_local())
        twin.detach().mul_(0)
        assert x.detach().abs().sum() > 0
        twin.grad = None
        twin.sum().backward()
        assert twin.grad._spec == twin._spec
        pair = copy.deepcopy([x, x])
        assert pair[0] is pair[1]
        with pytest.raises(RuntimeError, match="only leaf tensors"):
            copy.deepcopy(x * 2)

        model = sync_module_over_mesh(net(), mesh)
        again = copy.deepcopy(model)
        with comm_trace() as trace:
            again(x).sum().backward()
        assert sum(item.exchange == "all_reduce" and item.bytes > 1000 for item in trace.sent) == 1  # still one bucket
        assert all(parameter.grad is None for parameter in model.parameters())
        assert again.stem.weight.grad is not None

    ranks.run(check, mesh=(3,))


def saved_and_loaded(value, **options):
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer, **options)


def test_files(ranks):
    def check(mesh):
        model = sync_module_over_mesh(net(), mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

        def step(net, opt, seed):
            opt.zero_grad()
            loss_of(net, shard(images(seed), mesh, ROWS), shard(images(seed + 100), mesh, ROWS)).backward()
            opt.step()

        step(model, optimizer, 0)
        state = saved_and_loaded({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
        step(model, optimizer, 1)
        resumed = sync_module_over_mesh(net(5), mesh)
        again = torch.optim.AdamW(resumed.parameters(), lr=0.01)
        resumed.load_state_dict(state["model"])
        again.load_state_dict(state["optimizer"])
        step(resumed, again, 1)
        same_weights(resumed, model, 0)
        Net().load_state_dict(state["model"])  # a plain module of one process takes it

        x = shard(images(), mesh, ROWS, requires_grad=True)
        y = saved_and_loaded(x)  # weights_only, torch's default
        assert type(y) is ShardTensor
        assert y.requires_grad
        assert y._spec == x._spec
        assert torch.equal(y.to_local(), x.to_local())
        parameter = saved_and_loaded(nn.Parameter(x))
        assert isinstance(parameter, nn.Parameter)
        whole = saved_and_loaded(
            sync_module_over_mesh(nn.Sequential(nn.Linear(6, 2).double()), mesh), weights_only=False
        )
        whole(x).sum().backward()
        assert type(whole[0].weight.grad) is torch.Tensor

    ranks.run(check, mesh=(3,))


def test_shapes_values_and_text(ranks):
    def check(mesh):
        plain = images()
        x = shard(plain, mesh, ROWS)
        assert x.shape == x.size() == plain.shape
        assert (x.size(2), x.numel(), x.dim(), x.ndim, len(x)) == (9, plain.numel(), 4, 4, 2)
        assert (x.dtype, x.device, x.stride()) == (plain.dtype, plain.device, plain.stride())
        assert x.is_contiguous()
        assert x.element_size() == 8
        for dtype in (torch.float32, torch.bfloat16, torch.int32, torch.bool):
            assert_close(x.to(dtype).full_tensor(), plain.to(dtype), str(dtype))
        assert x.to(torch.float64) is x
        assert x.cpu().placements == x.placements
        assert_close(x.half().float().full_tensor(), plain.half().float(), "half")
        assert x.tolist() == plain.tolist()
        assert (x.numpy() == plain.numpy()).all()
        import numpy as np

        assert (np.asarray(x) == plain.numpy()).all()
        with pytest.raises(RuntimeError, match="to_local"):
            torch.from_dlpack(x)
        assert "placements=(Shard(dim=2),)" in repr(x)
        assert "shape=(2, 3, 9, 6)" in str(x)
        assert f"{x}" == str(x)
        assert f"{x.sum():.4f}" == f"{plain.sum():.4f}"
        y = x.clone()
        y.data = x * 2
        assert_close(y.full_tensor(), plain * 2, ".data")
        with pytest.raises(RuntimeError, match=r"cannot set \.data"):
            y.data = plain
        with pytest.raises(RuntimeError, match=r"cannot set \.data"):
            y.data = x.float()

    ranks.run(check, mesh=(3,))


def test_hooks_and_modules_of_torch(ranks):
    def check(mesh):
        model, twin = net(), net()
        seen = []
        model.stem.register_forward_hook(lambda module, args, output: seen.append(output))
        model.stem.register_full_backward_hook(lambda module, grad_in, grad_out: seen.append(grad_out[0]))
        model.mix = nn.utils.parametrizations.weight_norm(model.mix)
        twin.mix = nn.utils.parametrizations.weight_norm(twin.mix)
        sync_module_over_mesh(model, mesh)
        model(shard(images(), mesh, ROWS, requires_grad=True)).square().sum().backward()
        twin(images()).square().sum().backward()
        assert [type(item) for item in seen] == [ShardTensor, ShardTensor]
        for (name, mine), right in zip(model.named_parameters(), twin.parameters(), strict=True):
            assert_close(mine.grad, right.grad, name, 1e-10)

    ranks.run(check, mesh=(3,))


def test_ranks_stay_silent(ranks):
    """A training step raises no warning: nothing falls back, nothing is deprecated."""

    def check(mesh):
        model = sync_module_over_mesh(net(), mesh)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            loss_of(model, shard(images(), mesh, ROWS), shard(images(1), mesh, ROWS)).backward()

    ranks.run(check, mesh=(3,))


def test_fsdp2_over_the_data_axis(ranks):
    from torch.distributed.fsdp import fully_shard

    def check(mesh):
        data, domain = mesh["data"], mesh["domain"]
        model, twin = sync_module_over_mesh(net(), domain), net()
        fully_shard(model, mesh=data)
        x, y = images(0, 4), images(100, 4)
        here = slice(2 * data.get_local_rank(), 2 * data.get_local_rank() + 2)
        cut = {0: (2, (6, 3))}
        loss_of(model, shard(x[here], domain, cut), shard(y[here], domain, cut)).backward()
        loss_of(twin, x, y).backward()
        for (name, mine), right in zip(model.named_parameters(), twin.parameters(), strict=True):
            assert mine.placements == (Shard(0),)
            assert_close(mine.grad.full_tensor(), right.grad, name, 1e-10)

    ranks.run(check, mesh=(2, 2))

"""Normalisations: statistics of the whole, wherever samples, channels and pixels lie; running statistics agree."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shardtensor.comm import comm_trace
from shardtensor.registry import strict
from shardtensor.spec import Partial
from shardtensor.testing import assert_close, assert_same_as_plain, shard

aten = torch.ops.aten


def values(*shape, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64).to(dtype)


def trained(module, dtype=torch.float64):
    """The module with weights other than ones and zeros."""
    module = module.to(dtype)
    with torch.no_grad():
        for place, weight in enumerate(module.parameters()):
            weight.copy_(1 + values(*weight.shape) if place == 0 else values(*weight.shape))
    return module


def compare(ranks, table, x, mesh, cuts, **options):
    """Every module or function on the same input; no op may fall back, forward and backward."""

    def check(mesh):
        for name, function in table.items():
            try:
                with strict():
                    assert_same_as_plain(function, [x], mesh, [cuts], **options)
            except Exception as error:
                raise AssertionError(f"{name}, cuts {cuts}: {error}") from error

    ranks.run(check, mesh=mesh)


# Layer norm and its kin: [B, S, C] ----------------------------------------------------------------------------------

ROWS = {
    "layer norm": lambda: nn.LayerNorm(6),
    "without weights": lambda: nn.LayerNorm(6, elementwise_affine=False),
    "without bias": lambda: nn.LayerNorm(6, bias=False),
    "over two dims": lambda: nn.LayerNorm([7, 6]),
    "rms norm": lambda: nn.RMSNorm(6),
    "rms norm over two dims": lambda: nn.RMSNorm([7, 6], eps=1e-3),
    "of flattened rows": lambda: nn.Sequential(nn.Flatten(0, 1), nn.LayerNorm(6), nn.Unflatten(0, (2, 7))),
}
FUNCTIONS = {
    "normalize": lambda x: F.normalize(x, dim=-1),
    "normalize along tokens": lambda x: F.normalize(x, p=3, dim=1),
    "of permuted": lambda x: F.layer_norm(x.transpose(1, 2), (7,)),
    "of an expanded": lambda x: F.layer_norm(x[:, :1].expand(2, 7, 6), (6,)),
    "of a pending sum": lambda x: F.layer_norm(x.sum(1), (6,)),
}
ROW_CUTS = {
    "tokens": ((3,), {0: (1, (3, 1, 3))}),
    "empty block": ((3,), {0: (1, (5, 0, 2))}),
    "batch": ((3,), {0: (0, (1, 0, 1))}),
    "channels": ((2,), {0: (2, (4, 2))}),
    "channels, empty block": ((3,), {0: (2, (5, 0, 1))}),
    "tokens and channels": ((2, 2), {0: (1, (5, 2)), 1: (2, (2, 4))}),
    "batch and tokens": ((2, 2), {0: (0, (1, 1)), 1: (1, (0, 7))}),
}


@pytest.mark.parametrize(("mesh", "cuts"), ROW_CUTS.values(), ids=ROW_CUTS)
def test_rows(ranks, mesh, cuts):
    table = {name: trained(build()) for name, build in ROWS.items()} | FUNCTIONS
    compare(ranks, table, values(2, 7, 6), mesh, cuts)


@pytest.mark.parametrize("cuts", ["tokens", "channels", "tokens and channels"])
def test_fused_rms_norm(ranks, cuts):
    """The op of CUDA and of inference mode, with its backward."""

    def check(mesh, x, weight, grad, cuts):
        plain = x.clone().requires_grad_(), weight.clone().requires_grad_()
        right = F.rms_norm(plain[0], (6,), plain[1], 1e-5)
        right.backward(grad)
        mine, my_grad = shard(x, mesh, cuts), shard(grad, mesh, cuts)
        with strict(), torch.no_grad():
            out, rstd = aten._fused_rms_norm(mine, [6], weight, 1e-5)
            by_input, by_weight = aten._fused_rms_norm_backward(my_grad, mine, [6], rstd, weight, [True, True])
        assert by_input._spec.layout == mine._spec.layout
        for found, expected in ((out, right.detach()), (by_input, plain[0].grad), (by_weight, plain[1].grad)):
            assert_close(found.full_tensor(), expected, "fused rms norm")

    mesh, where = ROW_CUTS[cuts]
    ranks.run(check, values(2, 7, 6), 1 + values(6), values(2, 7, 6).sin(), where, mesh=mesh)


# Group norm: [N, C, H, W] -------------------------------------------------------------------------------------------

GROUPS = {
    "groups": lambda: nn.GroupNorm(2, 6),
    "one group": lambda: nn.GroupNorm(1, 6),
    "a group a channel": lambda: nn.GroupNorm(6, 6),
    "without weights": lambda: nn.GroupNorm(3, 6, affine=False),
}
IMAGE_CUTS = {
    "rows": ((3,), {0: (2, (3, 1, 3))}),
    "empty block": ((3,), {0: (2, (5, 0, 2))}),
    "columns": ((2,), {0: (3, (1, 4))}),
    "rows and columns": ((2, 2), {0: (2, (4, 3)), 1: (3, (1, 4))}),
    "samples": ((2,), {0: (0, (3, 1))}),
    "samples, empty block": ((3,), {0: (0, (2, 0, 2))}),
    "samples and rows": ((2, 2), {0: (0, (1, 3)), 1: (2, (7, 0))}),
    "channels": ((2,), {0: (1, (3, 3))}),
    "channels through groups": ((3,), {0: (1, (1, 0, 5))}),
    "channels and rows": ((2, 2), {0: (1, (3, 3)), 1: (2, (2, 5))}),
}


@pytest.mark.parametrize(("mesh", "cuts"), IMAGE_CUTS.values(), ids=IMAGE_CUTS)
def test_groups(ranks, mesh, cuts):
    compare(ranks, {name: trained(build()) for name, build in GROUPS.items()}, values(4, 6, 7, 5), mesh, cuts)


def test_groups_of_other_shapes(ranks):
    """One sample, no batch dim (channels first all the same), sequences, volumes, permuted memory."""
    groups = trained(nn.GroupNorm(2, 6))
    for x, cuts in (
        (values(1, 6, 7, 5), {0: (2, (5, 0, 2))}),
        (values(4, 6, 7), {0: (2, (5, 0, 2))}),
        (values(6, 6, 7), {0: (0, (1, 4, 1))}),
        (values(4, 6), {0: (0, (1, 2, 1))}),
        (values(2, 6, 3, 4, 2), {0: (3, (1, 1, 2))}),
    ):
        compare(ranks, {f"{tuple(x.shape)}": groups}, x, (3,), cuts)
    channels_last = {"permuted": lambda x: F.group_norm(x.permute(0, 3, 1, 2), 2)}
    compare(ranks, channels_last, values(2, 7, 5, 6), (3,), {0: (1, (5, 0, 2))})
    compare(ranks, channels_last, values(2, 7, 5, 6), (2,), {0: (0, (1, 1))})


# Batch norm and instance norm ---------------------------------------------------------------------------------------

BATCHES = {
    "training": lambda: nn.BatchNorm2d(6),
    "without weights": lambda: nn.BatchNorm2d(6, affine=False),
    "without statistics": lambda: nn.BatchNorm2d(6, track_running_stats=False),
    "cumulative average": lambda: nn.BatchNorm2d(6, momentum=None),
    "eval": lambda: nn.BatchNorm2d(6).eval(),
    "eval without weights": lambda: nn.BatchNorm2d(6, affine=False).eval(),
    "eval without statistics": lambda: nn.BatchNorm2d(6, track_running_stats=False).eval(),
    "instance": lambda: nn.InstanceNorm2d(6, affine=True),
    "instance with statistics": lambda: nn.InstanceNorm2d(6, track_running_stats=True),
}


@pytest.mark.parametrize(("mesh", "cuts"), IMAGE_CUTS.values(), ids=IMAGE_CUTS)
def test_batches(ranks, mesh, cuts):
    compare(ranks, {name: trained(build()) for name, build in BATCHES.items()}, values(4, 6, 7, 5), mesh, cuts)


def test_batches_of_other_shapes(ranks):
    for module, x, cuts in (
        (nn.BatchNorm1d(6), values(4, 6), {0: (0, (1, 3))}),
        (nn.BatchNorm1d(6), values(1, 6, 7), {0: (2, (7, 0))}),
        (nn.BatchNorm3d(6), values(2, 6, 3, 4, 2), {0: (3, (1, 3))}),
        (nn.InstanceNorm1d(6), values(6, 7), {0: (1, (4, 3))}),
        (nn.InstanceNorm3d(6), values(2, 6, 3, 4, 2), {0: (2, (1, 2))}),
    ):
        compare(ranks, {f"{module} of {tuple(x.shape)}": trained(module)}, x, (2,), cuts)


def test_batch_after_batch(ranks):
    """Running statistics over several steps, then their use; the same values on every rank."""
    module = trained(nn.BatchNorm2d(6))

    def check(mesh, module, x):
        mine, plain = copy.deepcopy(module), copy.deepcopy(module)
        for step in range(3):
            batch = x * (step + 1) + step
            assert_close(mine(shard(batch, mesh, {0: (2, (5, 0, 2))})).full_tensor(), plain(batch), f"step {step}")
        for (name, found), right in zip(mine.named_buffers(), plain.buffers(), strict=True):
            assert type(found) is torch.Tensor
            assert_close(found, right, name)
        mine.eval(), plain.eval()
        assert_close(mine(shard(x, mesh, {0: (2, (5, 0, 2))})).full_tensor(), plain(x), "eval")

    ranks.run(check, module, values(2, 6, 7, 5), mesh=(3,))


def test_the_other_names_of_batch_norm(ranks):
    """Ops that torch picks on CUDA, under export or under compile, against the CPU's."""

    def check(mesh, x, grad):
        weight, bias, mean, variance = 1 + values(6), values(6), values(6), 1 + values(6).square()
        right = torch.native_batch_norm(x, weight, bias, mean.clone(), variance.clone(), True, 0.1, 1e-5)
        args = (x, weight, None, None, right[1], right[2])
        back = aten.native_batch_norm_backward(grad, *args, True, 1e-5, [True] * 3)
        still = torch.native_batch_norm(x, weight, bias, mean, variance, False, 0.1, 1e-5)
        cuts = {0: (2, (5, 0, 2))}
        mine, my_grad = shard(x, mesh, cuts), shard(grad, mesh, cuts)
        common = (mine, weight, bias)

        def running():
            return mean.clone(), variance.clone()

        with strict(), torch.no_grad():
            trained = {
                "cudnn": aten.cudnn_batch_norm(*common, *running(), True, 0.1, 1e-5),
                "with update": aten._batch_norm_with_update(*common, *running(), 0.1, 1e-5),
                "legit": aten._native_batch_norm_legit(*common, *running(), True, 0.1, 1e-5),
                "no stats": aten._native_batch_norm_legit.no_stats(*common, True, 0.1, 1e-5),
            }
            evaluated = {
                "cudnn": aten.cudnn_batch_norm(*common, *running(), False, 0.1, 1e-5),
                "no update": aten._batch_norm_no_update(*common, *running(), 0.1, 1e-5),
                "no training": aten._native_batch_norm_legit_no_training(*common, *running(), 0.1, 1e-5),
            }
            statistics = (None, None, right[1], right[2])
            nothing = torch.empty(0, dtype=torch.uint8)
            backward = {
                "cudnn": aten.cudnn_batch_norm_backward(mine, my_grad, weight, *statistics, 1e-5, nothing),
                "update": aten.batch_norm_backward(my_grad, mine, weight, *statistics, True, 1e-5, [True] * 3, nothing),
            }
        for found in trained.values():
            for part, expected in zip(found[:3], right, strict=True):
                assert_close(part.full_tensor(), expected, "training")
        for found in evaluated.values():
            assert_close(found[0].full_tensor(), still[0], "eval")
        for found in backward.values():
            for part, expected in zip(found, back, strict=True):
                assert_close(part.full_tensor(), expected, "backward")

    ranks.run(check, values(4, 6, 7, 5), values(4, 6, 7, 5).sin(), mesh=(3,))


# Precision ----------------------------------------------------------------------------------------------------------

NORMS = {
    "group norm": lambda: nn.GroupNorm(2, 6),
    "batch norm": lambda: nn.BatchNorm2d(6),
    "instance norm": lambda: nn.InstanceNorm2d(6),
    "layer norm": lambda: nn.LayerNorm([6, 31, 5]),
}


@pytest.mark.parametrize("name", NORMS)
def test_beside_a_large_mean(ranks, name):
    """Mean 3000, deviation 1, in float32: at least as near to the truth as one process."""
    module = trained(NORMS[name](), torch.float32)
    x = 3000 + values(2, 6, 31, 5, dtype=torch.float32)
    with torch.no_grad():
        truth = copy.deepcopy(module).double()(x.double()).float()
    allowed = max(1e-5, 2 * ((module(x) - truth).abs().max() / truth.abs().max()).item())

    def check(mesh, module, x):
        assert_close(
            module(shard(x, mesh, {0: (2, (20, 1, 10))})).full_tensor().detach(), truth.detach(), name, allowed
        )

    ranks.run(check, module, x, mesh=(3,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_dtypes(ranks, dtype):
    torch.manual_seed(0)
    table = {name: trained(build(), dtype) for name, build in NORMS.items() if name != "layer norm"}
    compare(ranks, table, values(2, 6, 7, 5, dtype=dtype), (3,), {0: (2, (3, 1, 3))})
    rows = {name: trained(ROWS[name](), dtype) for name in ("layer norm", "over two dims", "rms norm")}
    compare(ranks, rows, values(2, 7, 6, dtype=dtype), (3,), {0: (1, (3, 1, 3))})


def test_half_precision_beside_float32_weights(ranks):
    """As autocast leaves them. Torch's own sums for the weights are kept in half precision."""
    table = {
        "group norm": trained(nn.GroupNorm(2, 6), torch.float32),
        "batch norm": trained(nn.BatchNorm2d(6), torch.float32),
        "layer norm": trained(nn.LayerNorm([6, 7, 5]), torch.float32),
    }
    compare(ranks, table, values(2, 6, 7, 5, dtype=torch.bfloat16), (2,), {0: (2, (4, 3))}, rtol=2e-2)


def test_second_derivatives(ranks):
    def penalty(module, shape):
        def function(x):
            (slope,) = torch.autograd.grad(module(x.view(shape)).pow(3).sum(), x, create_graph=True)
            return slope.pow(2).sum()

        return function

    images, rows = (2, 6, 7, 5), (2, 7, 6)
    for sizes in ((4, 3), (5, 0, 2)):
        mesh = (len(sizes),)
        table = {
            "group norm": penalty(trained(nn.GroupNorm(2, 6)), images),
            "batch norm": penalty(trained(nn.BatchNorm2d(6)), images),
            "instance norm": penalty(nn.InstanceNorm2d(6), images),
        }
        compare(ranks, table, values(*images), mesh, {0: (2, sizes)}, rtol=1e-11)
        table = {name: penalty(trained(ROWS[name]()), rows) for name in ("layer norm", "over two dims", "rms norm")}
        compare(ranks, table, values(*rows), mesh, {0: (1, sizes)}, rtol=1e-11)


# What is sent -------------------------------------------------------------------------------------------------------


def test_one_exchange_each_way(ranks):
    def check(mesh, image, rows):
        def counts(function, x, cuts):
            x = shard(x, mesh, cuts, requires_grad=True)
            with comm_trace() as forward:
                out = function(x)
            with comm_trace() as backward:
                torch.autograd.grad(out, x, torch.ones_like(out))
            return len(forward.sent), len(backward.sent)

        for function in (
            lambda x: F.group_norm(x, 2, weight, weight),
            lambda x: F.batch_norm(x, None, None, weight, weight, True),
            lambda x: F.layer_norm(x, (6, 7, 5)),
        ):
            assert counts(function, image, {0: (2, (4, 3))}) == (1, 1)
        for function, cuts in (
            (lambda x: F.layer_norm(x, (6,), weight, weight), {0: (1, (4, 3))}),
            (lambda x: F.rms_norm(x, (6,), weight), {0: (1, (4, 3))}),
        ):
            assert counts(function, rows, cuts) == (0, 0)
        assert counts(lambda x: F.group_norm(x, 2, weight, weight), image, {0: (0, (1, 1))}) == (0, 0)
        assert counts(lambda x: F.group_norm(x, 2, weight, weight), image, {0: (1, (3, 3))}) == (0, 0)

    weight = values(6)
    ranks.run(check, values(2, 6, 7, 5), values(2, 7, 6))


def test_gradients_of_weights_wait_to_be_summed(ranks):
    def check(mesh, image, rows):
        weight = values(6)
        x, y = shard(image, mesh, {0: (2, (4, 3))}), shard(rows, mesh, {0: (1, (4, 3))})
        with torch.no_grad():
            out, mean, rstd = torch.native_group_norm(x, weight, weight, 2, 6, 35, 2, 1e-5)
            found = aten.native_group_norm_backward(out, x, mean, rstd, weight, 2, 6, 35, 2, [False, True, True])
            out, mean, rstd = torch.native_layer_norm(y, (6,), weight, weight, 1e-5)
            found += aten.native_layer_norm_backward(out, y, (6,), mean, rstd, weight, weight, [True, True, True])
        assert [None if part is None else part.placements for part in found] == [
            None,
            (Partial("sum"),),
            (Partial("sum"),),
            y.placements,
            (Partial("sum"),),
            (Partial("sum"),),
        ]

    ranks.run(check, values(2, 6, 7, 5), values(2, 7, 6))


def test_under_inference_mode_and_autocast(ranks):
    def check(mesh, image, rows):
        weight = values(6, dtype=torch.float32)
        functions = {
            "group norm": (lambda x: F.group_norm(x, 2, weight, weight), image, {0: (2, (5, 0, 2))}),
            "batch norm": (lambda x: F.batch_norm(x, None, None, weight, weight, True), image, {0: (2, (5, 0, 2))}),
            "instance norm": (F.instance_norm, image, {0: (2, (5, 0, 2))}),
            "layer norm": (lambda x: F.layer_norm(x, (6,), weight), rows, {0: (1, (5, 0, 2))}),
            "rms norm": (lambda x: F.rms_norm(x, (6,), weight), rows, {0: (1, (5, 0, 2))}),
            "rms norm over cut rows": (lambda x: F.rms_norm(x, (7, 6)), rows, {0: (1, (5, 0, 2))}),
        }
        for context in (torch.inference_mode(), torch.autocast("cpu", torch.bfloat16)):
            for name, (function, x, cuts) in functions.items():
                mine = shard(x, mesh, cuts)
                with context, strict():
                    found, right = function(mine), function(x)
                assert_close(found.full_tensor(), right, name)

    image, rows = values(2, 6, 7, 5, dtype=torch.float32), values(2, 7, 6, dtype=torch.float32)
    ranks.run(check, image, rows, mesh=(3,))

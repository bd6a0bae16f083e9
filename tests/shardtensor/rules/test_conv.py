"""Convolutions: any geometry, any uneven cut of rows, columns or batch: as one process; only halos travel."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from shardtensor.comm import comm_trace
from shardtensor.errors import OpError
from shardtensor.registry import strict
from shardtensor.testing import assert_close, shard

F64 = torch.float64

# How x [B, C, 16, 9] is cut: mesh and cuts by mesh axis.
CUTS = {
    "rows": ((3,), {0: (2, (5, 6, 5))}),
    "rows not at the stride": ((2,), {0: (2, (7, 9))}),
    "empty block": ((3,), {0: (2, (6, 0, 10))}),
    "narrower than the halo": ((3,), {0: (3, (4, 1, 4))}),
    "batch": ((2,), {0: (0, (2, 0))}),
    "rows and columns": ((2, 2), {0: (2, (7, 9)), 1: (3, (5, 4))}),
    "empty batch and columns": ((2, 2), {0: (0, (0, 2)), 1: (3, (3, 6))}),
    "one rank": ((1,), {0: (2, (16,))}),
}

CONVS = {
    "same 3": lambda: nn.Conv2d(4, 6, 3, padding=1),
    "stride 2": lambda: nn.Conv2d(4, 6, 3, stride=2),
    "stride 2, padded": lambda: nn.Conv2d(4, 6, 3, stride=2, padding=1),
    "patchify": lambda: nn.Conv2d(4, 6, 4, stride=4),
    "wide, groups": lambda: nn.Conv2d(4, 4, 7, padding=3, groups=2, bias=False),
    "depthwise": lambda: nn.Conv2d(4, 4, (5, 3), padding=(2, 0), groups=4),
    "dilated, even": lambda: nn.Conv2d(4, 4, 2, dilation=3, padding=2),
    "padded beyond the kernel": lambda: nn.Conv2d(4, 4, 3, padding=4),
    "points": lambda: nn.Conv2d(4, 6, 1),
    "points apart": lambda: nn.Conv2d(4, 6, 1, stride=3),
    "same, even": lambda: nn.Conv2d(4, 6, 4, padding="same"),
    "circular": lambda: nn.Conv2d(4, 6, 3, padding=1, padding_mode="circular"),
    "transposed": lambda: nn.ConvTranspose2d(4, 6, 3, padding=1),
    "transposed, patches": lambda: nn.ConvTranspose2d(4, 6, 2, stride=2),
    "transposed, stride 2, groups": lambda: nn.ConvTranspose2d(4, 6, 4, stride=2, padding=1, groups=2),
    "transposed, all at once": lambda: nn.ConvTranspose2d(
        4, 4, 3, stride=3, padding=1, output_padding=2, dilation=2, bias=False
    ),
    "transposed, gaps": lambda: nn.ConvTranspose2d(4, 6, 1, stride=3, output_padding=1),
}


class Strictly(nn.Module):
    """A module that may not fall back to gathering."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, *args):
        with strict():
            return self.module(*args)


def values(*shape, dtype=F64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(5), dtype=F64).to(dtype)


def module(make, dtype=F64):
    torch.manual_seed(0)
    return Strictly(make().to(dtype))


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("name", CONVS)
def test_conv2d(ranks, name, cut):
    mesh, cuts = CUTS[cut]
    ranks.same_as_plain(module(CONVS[name]), values(2, 4, 16, 9), cuts=[cuts], mesh=mesh)


@pytest.mark.parametrize("name", ["same 3", "stride 2", "wide, groups", "transposed, stride 2, groups"])
def test_single_precision_and_batch_of_one(ranks, name):
    x = values(1, 4, 21, 9, dtype=torch.float32)
    ranks.same_as_plain(module(CONVS[name], torch.float32), x, dim=2, sizes=(6, 11, 4))


@pytest.mark.parametrize(
    ("make", "shape", "cuts", "mesh"),
    [
        (lambda: nn.Conv1d(3, 4, 5, stride=2, padding=2), (2, 3, 17), {0: (2, (4, 1, 12))}, (3,)),
        (lambda: nn.ConvTranspose1d(3, 4, 4, stride=2, padding=1), (2, 3, 17), {0: (2, (4, 0, 13))}, (3,)),
        (lambda: nn.Conv3d(3, 4, 3, stride=2, padding=1), (2, 3, 9, 8, 7), {0: (2, (5, 4)), 1: (4, (3, 4))}, (2, 2)),
        (lambda: nn.Conv3d(3, 4, 3, padding=1, groups=1), (1, 3, 9, 8, 7), {0: (3, (3, 2, 3))}, (3,)),
        (lambda: nn.ConvTranspose3d(3, 4, 2, stride=2), (1, 3, 5, 4, 3), {0: (2, (2, 3))}, (2,)),
    ],
)
def test_other_dims(ranks, make, shape, cuts, mesh):
    ranks.same_as_plain(module(make), values(*shape), cuts=[cuts], mesh=mesh)


@pytest.mark.parametrize("sizes", [(6, 1, 6), (1, 11, 1), (0, 13, 0)])
def test_halo_wider_than_the_neighbour(ranks, sizes):
    ranks.same_as_plain(module(lambda: nn.Conv2d(2, 3, 7, padding=3)), values(2, 2, 13, 8), dim=2, sizes=sizes)
    ranks.same_as_plain(module(lambda: nn.Conv2d(2, 3, 13)), values(2, 2, 13, 14), dim=2, sizes=sizes)


@pytest.mark.parametrize(("dim", "sizes"), [(1, (7, 9)), (2, (4, 0, 5)), (0, (3, 1))])
def test_unbatched(ranks, dim, sizes):
    ranks.same_as_plain(module(CONVS["same 3"]), values(4, 16, 9), dim=dim, sizes=sizes)


def test_frames_in_the_batch(ranks):
    """Frames [B, T] merged into the batch: T cut stays cut."""

    class Frames(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(4, 6, 3, stride=2)

        def forward(self, x):
            with strict(), comm_trace() as trace:
                out = self.conv(x.flatten(0, 1)).unflatten(0, x.shape[:2])
            assert not trace.sent, str(trace)
            return out

    ranks.same_as_plain(Frames().double(), values(2, 5, 4, 8, 9), dim=1, sizes=(3, 0, 2))


def test_cut_channels_are_gathered(ranks):
    ranks.same_as_plain(module(CONVS["stride 2"]), values(2, 4, 16, 9), dim=1, sizes=(3, 1))
    ranks.same_as_plain(
        module(CONVS["stride 2"]), values(2, 4, 16, 9), cuts=[{0: (1, (3, 1)), 1: (2, (7, 9))}], mesh=(2, 2)
    )


@pytest.mark.parametrize("memory_format", [torch.channels_last, torch.contiguous_format])
def test_memory_format_is_that_of_plain(ranks, memory_format):
    def check(mesh, x, conv):
        x = x.to(memory_format=memory_format)
        conv = conv.to(memory_format=memory_format)
        plain = conv(x)
        cut = shard(x, mesh, {0: (2, (5, 6, 5))}).to(memory_format=memory_format).requires_grad_()
        with strict():
            out = conv(cut)
        assert out.stride() == plain.stride()
        assert out.is_contiguous(memory_format=memory_format)
        assert out.to_local().is_contiguous(memory_format=memory_format)
        assert_close(out.full_tensor().detach(), plain.detach(), "output")
        out.sum().backward()
        assert cut.grad.to_local().shape == cut.to_local().shape

    ranks.run(check, values(2, 4, 16, 9), nn.Conv2d(4, 6, 3, padding=1).double(), mesh=(3,))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(ranks, mode):
    def check(mesh, x, conv, transposed):
        with mode(), strict():
            cut = shard(x, mesh, {0: (2, (5, 6, 5))})
            assert_close(conv(cut).full_tensor(), conv(x), "conv")
            assert_close(transposed(cut).full_tensor(), transposed(x), "transposed")

    x = values(2, 4, 16, 9)
    ranks.run(check, x, nn.Conv2d(4, 6, 3, 2).double(), nn.ConvTranspose2d(4, 6, 3, 2).double(), mesh=(3,))


def test_autocast(ranks):
    def run(x, conv):
        with torch.autocast("cpu", torch.bfloat16):
            return conv(x)

    class Autocast(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(4, 6, 3, padding=1)

        def forward(self, x):
            return run(x, self.conv).float()

    ranks.same_as_plain(Autocast(), values(2, 4, 16, 9, dtype=torch.float32), dim=2, sizes=(7, 9), rtol=2e-2)


def test_only_halos_travel(ranks):
    """Forward and backward send rows next to the cut; weight gradients wait for their common all-reduce."""

    def check(mesh, x, conv):
        cut = shard(x, mesh, {0: (2, (7, 9))}, requires_grad=True)
        with strict(), comm_trace() as forward:
            out = conv(cut)
        with comm_trace() as backward:
            out.sum().backward()
        row = 2 * 4 * 9 * 8  # bytes of a row of x [2, 4, 16, 9]
        assert [(item.exchange, item.bytes) for item in forward.sent] == [("halo_exchange", row)], str(forward)
        own = [(item.exchange, item.bytes) for item in backward.sent if "convolution" in item.op]
        assert own == [("halo_exchange", row), ("halo_reduce", row)], str(backward)

    ranks.run(check, values(2, 4, 16, 9), nn.Conv2d(4, 6, 3, padding=1).double())


@pytest.mark.parametrize(
    ("make", "shape", "sizes"),
    [
        (lambda: nn.Conv2d(2, 2, 3, padding=1), (1, 2, 1031, 1024), (515, 516)),
        (lambda: nn.Conv2d(1, 2, 5, stride=2, dilation=2), (1, 1, 3100, 1024), (1025, 1050, 1025)),
        (lambda: nn.Conv1d(1, 2, 7), (2, 1, 2**20 + 7), (2**19, 2**19 + 7)),
    ],
)
def test_large_blocks_in_parts(ranks, make, shape, sizes):
    """The inner rows of a large block are convolved before its halo has come."""
    conv = module(make)
    ranks.same_as_plain(conv, values(*shape), dim=2, sizes=sizes)

    def check(mesh, x, conv):
        with comm_trace() as trace:
            conv(shard(x, mesh, {0: (2, sizes)}))
        assert trace.counts()["halo_exchange"] == 2
        assert trace.total_bytes <= 8 * 8 * x[:, :, :1].numel()

    ranks.run(check, values(*shape), conv, mesh=(len(sizes),))


def test_aligned_patches_send_nothing(ranks):
    def check(mesh, x, conv):
        cut = shard(x, mesh, {0: (2, (4, 8, 4))}, requires_grad=True)
        with comm_trace() as trace:
            conv(cut).sum().backward()
        assert set(trace.counts()) <= {"all_reduce"}, str(trace)

    ranks.run(check, values(2, 4, 16, 9), nn.Conv2d(4, 6, 4, stride=4).double(), mesh=(3,))


def test_second_derivatives(ranks):
    """The gradient of a gradient's norm, with respect to input and weights."""

    def check(mesh, x, conv):
        def penalty(x, weight):
            out = F.conv2d(x, weight, stride=2, padding=1)
            (grad,) = torch.autograd.grad((out**3).sum(), x, create_graph=True)
            return (grad**2).sum()

        plain, weight = x.clone().requires_grad_(), conv.weight.detach().clone().requires_grad_()
        penalty(plain, weight).backward()
        cut, own = shard(x, mesh, {0: (2, (5, 4))}, requires_grad=True), conv.weight.detach().clone().requires_grad_()
        penalty(cut, own).backward()
        assert_close(cut.grad.full_tensor(), plain.grad, "input", 1e-11)
        assert_close(own.grad, weight.grad, "weight", 1e-11)

    ranks.run(check, values(2, 2, 9, 6), nn.Conv2d(2, 3, 3).double())


def test_output_mask(ranks):
    """A frozen weight or an input without gradient asks for part of the backward."""
    frozen = module(CONVS["same 3"])
    frozen.module.weight.requires_grad_(False)
    ranks.same_as_plain(frozen, values(2, 4, 16, 9), dim=2, sizes=(7, 9))

    def check(mesh, x, conv):
        conv(shard(x, mesh, {0: (2, (7, 9))})).sum().backward()
        found = conv.weight.grad.clone(), conv.bias.grad.clone()
        conv.zero_grad()
        conv(x).sum().backward()
        assert_close(found[0], conv.weight.grad, "weight")
        assert_close(found[1], conv.bias.grad, "bias")

    ranks.run(check, values(2, 4, 16, 9), nn.Conv2d(4, 6, 3, padding=1).double())


def test_errors_come_on_every_rank(ranks):
    def check(mesh, x):
        cut = shard(x, mesh, {0: (2, (7, 0))})
        with pytest.raises(OpError, match="takes 3 channels, the input has 4"):
            F.conv2d(cut, values(6, 3, 3, 3))
        with pytest.raises(RuntimeError, match="Kernel size can't be greater"):
            F.conv2d(cut, values(6, 4, 9, 3))
        with pytest.raises(OpError, match=r"float64.*float32"):
            F.conv2d(cut, values(6, 4, 3, 3, dtype=torch.float32))
        with pytest.raises(OpError, match="stride and dilation"):
            F.conv2d(cut, values(6, 4, 3, 3), stride=0)
        with pytest.raises(OpError, match="output_padding"):
            F.conv_transpose2d(cut, values(4, 6, 3, 3), output_padding=2)

    ranks.run(check, values(2, 4, 7, 9))

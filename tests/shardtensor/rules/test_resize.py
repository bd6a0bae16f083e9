"""Resizing in the coordinates of the whole tensor: any mode, size and scale; shuffles; sampling at points."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from shardtensor.comm import comm_trace
from shardtensor.registry import strict
from shardtensor.testing import assert_close, shard

F64 = torch.float64

# How x [B, C, 16, 9] is cut: mesh and cuts by mesh axis.
CUTS = {
    "rows": ((2,), {0: (2, (7, 9))}),
    "empty block": ((3,), {0: (2, (6, 0, 10))}),
    "columns": ((3,), {0: (3, (4, 1, 4))}),
    "rows and columns": ((2, 2), {0: (2, (7, 9)), 1: (3, (5, 4))}),
    "empty batch and rows": ((2, 2), {0: (0, (2, 0)), 1: (2, (7, 9))}),
    "one rank": ((1,), {0: (2, (16,))}),
}

SIZES = {
    "to 11": {"size": (11, 9)},
    "to 24": {"size": (24, 20)},
    "to 32": {"size": (32, 18)},
    "columns only": {"size": (16, 12)},
    "to one": {"size": (1, 1)},
    "twice": {"scale_factor": 2},
    "three times": {"scale_factor": 3},
    "half": {"scale_factor": 0.5},
    "by 1.7": {"scale_factor": 1.7},
    "by 1.7 of the sizes": {"scale_factor": (1.7, 1.0), "recompute_scale_factor": True},
}

MODES = {
    "nearest": {"mode": "nearest"},
    "nearest-exact": {"mode": "nearest-exact"},
    "bilinear": {"mode": "bilinear"},
    "bilinear, aligned": {"mode": "bilinear", "align_corners": True},
    "bicubic": {"mode": "bicubic"},
    "bicubic, aligned": {"mode": "bicubic", "align_corners": True},
}


def resized(**options):
    def run(x):
        with strict():
            return F.interpolate(x, **options)

    return run


def values(*shape, dtype=F64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(5), dtype=F64).to(dtype)


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("mode", MODES)
def test_resize_2d(ranks, mode, cut):
    mesh, cuts = CUTS[cut]
    for options in SIZES.values():
        ranks.same_as_plain(resized(**options, **MODES[mode]), values(2, 3, 16, 9), cuts=[cuts], mesh=mesh)


@pytest.mark.parametrize("mode", MODES)
def test_single_precision_at_high_rows(ranks, mode):
    """Coordinates far from row 0 are rounded as the plain op rounds them."""
    x = values(1, 2, 721, 6, dtype=torch.float32)
    for options in ({"size": (360, 6)}, {"size": (1440, 8)}, {"scale_factor": 2}, {"scale_factor": 1.9}):
        ranks.same_as_plain(resized(**options, **MODES[mode]), x, dim=2, sizes=(300, 421))


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact", "linear"])
def test_other_dims(ranks, mode):
    for options in ({"size": 11}, {"scale_factor": 2}, {"scale_factor": 0.6}):
        ranks.same_as_plain(resized(**options, mode=mode), values(2, 3, 16), dim=2, sizes=(3, 6, 7))
        deep = resized(**options, mode="trilinear" if mode == "linear" else mode)
        ranks.same_as_plain(deep, values(1, 2, 9, 6, 7), cuts=[{0: (2, (3, 6)), 1: (4, (3, 4))}], mesh=(2, 2))


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
@pytest.mark.parametrize("options", [{"size": (7, 5)}, {"scale_factor": 2}, {"scale_factor": 0.5}])
def test_antialias(ranks, mode, options):
    run = resized(**options, mode=mode, antialias=True)
    for cut in ("rows", "rows and columns", "empty batch and rows"):
        mesh, cuts = CUTS[cut]
        ranks.same_as_plain(run, values(2, 3, 16, 9), cuts=[cuts], mesh=mesh)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8])
def test_short_types_are_rounded_once(ranks, dtype):
    x = (values(2, 3, 16, 9).abs() * 50).to(dtype)
    for mode in ("nearest", "bilinear", "bilinear, aligned", "bicubic"):
        for options in (SIZES["twice"], SIZES["to 11"]):
            ranks.same_as_plain(
                resized(**options, **MODES[mode]), x, dim=2, sizes=(7, 9), rtol=1e-2, gradients=dtype.is_floating_point
            )


def test_missing_values_spread_as_in_plain(ranks):
    x = values(1, 2, 16, 9)
    x[0, 0, 6, 4], x[0, 1, 12, 2] = torch.nan, torch.nan
    for mode in MODES.values():
        for options in (SIZES["twice"], SIZES["to 24"], SIZES["half"]):
            ranks.same_as_plain(resized(**options, **mode), x, dim=2, sizes=(7, 9), gradients=False)


def test_whole_factors_stay_at_home(ranks):
    def check(mesh, x):
        cut = shard(x, mesh, {0: (2, (7, 9))}, requires_grad=True)
        row = 8 * 2 * 3 * 9
        with comm_trace() as trace:
            out = F.interpolate(cut, scale_factor=3)
        assert not trace.sent, str(trace)
        assert out._spec.layout[0].sizes == (21, 27)
        with comm_trace() as trace:
            F.interpolate(cut, scale_factor=2, mode="bilinear")
        assert [item.bytes for item in trace.sent] == [row], str(trace)
        with comm_trace() as trace:
            out.sum().backward()
        assert not [item for item in trace.sent if "upsample" in item.op], str(trace)

    ranks.run(check, values(2, 3, 16, 9))


class UNet(nn.Module):
    """Down and up again to the skip's size."""

    def __init__(self, mode):
        super().__init__()
        self.mode = mode
        self.down = nn.Conv2d(3, 4, 3, stride=2, padding=1)
        self.up = nn.Conv2d(7, 3, 3, padding=1)

    def forward(self, x):
        y = F.interpolate(self.down(x), size=x.shape[-2:], **MODES[self.mode])
        return self.up(torch.cat([x, y], 1))


@pytest.mark.parametrize("mode", ["nearest", "bilinear", "bilinear, aligned"])
def test_skip_of_odd_length(ranks, mode):
    torch.manual_seed(0)
    ranks.same_as_plain(UNet(mode).double(), values(2, 3, 17, 9), dim=2, sizes=(6, 6, 5))


SHUFFLES = {
    "pixel_shuffle": lambda x: F.pixel_shuffle(x, 2),
    "pixel_unshuffle": lambda x: F.pixel_unshuffle(x, 2),
    "there and back": lambda x: F.pixel_unshuffle(F.pixel_shuffle(x, 2), 2),
    "channel_shuffle": lambda x: F.channel_shuffle(x, 2),
}


@pytest.mark.parametrize("name", SHUFFLES)
def test_shuffles(ranks, name):
    def run(x):
        with strict():
            return SHUFFLES[name](x)

    x = values(2, 8, 16, 10)
    for sizes in ((7, 9), (6, 0, 10), (1, 15)):
        ranks.same_as_plain(run, x, dim=2, sizes=sizes)
    ranks.same_as_plain(run, x, dim=1, sizes=(5, 3))
    ranks.same_as_plain(run, x, cuts=[{0: (2, (7, 9)), 1: (3, (3, 7))}], mesh=(2, 2))
    ranks.same_as_plain(run, x, cuts=[{0: (0, (0, 2)), 1: (2, (7, 9))}], mesh=(2, 2))


POINTS = {
    "cut image, cut points": ((2,), {0: (2, (7, 9))}, {0: (1, (2, 3))}),
    "cut image, whole points": ((3,), {0: (2, (7, 0, 9))}, None),
    "whole image, cut points": ((2,), None, {0: (2, (6, 0))}),
    "batch": ((2,), {0: (0, (2, 0))}, {0: (0, (1, 1))}),
    "channels": ((2,), {0: (1, (1, 2))}, None),
    "both": ((2, 2), {0: (2, (7, 9)), 1: (3, (5, 4))}, {0: (1, (2, 3))}),
}


@pytest.mark.parametrize("name", POINTS)
@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
def test_grid_sample(ranks, name, mode):
    def run(image, points):
        with strict():
            return F.grid_sample(image, points, mode=mode, padding_mode="border", align_corners=False)

    mesh, image, points = POINTS[name]
    x, grid = values(2, 3, 16, 9), values(2, 5, 6, 2) * 0.7
    ranks.same_as_plain(run, x, grid, cuts=[image, points], mesh=mesh)


def test_grid_sample_3d(ranks):
    def run(image, points):
        with strict():
            return F.grid_sample(image, points, align_corners=True)

    cuts = [{0: (2, (3, 4))}, {0: (3, (2, 1))}]
    ranks.same_as_plain(run, values(1, 2, 7, 5, 4), values(1, 2, 4, 3, 3) * 0.7, cuts=cuts)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(ranks, mode):
    def check(mesh, x):
        with mode(), strict():
            cut = shard(x, mesh, {0: (2, (7, 9))})
            for options in MODES.values():
                found, plain = (F.interpolate(t, size=(11, 12), **options) for t in (cut, x))
                assert_close(found.full_tensor(), plain, str(options))

    ranks.run(check, values(2, 3, 16, 9))


def test_memory_format_is_that_of_plain(ranks):
    def check(mesh, x):
        x = x.to(memory_format=torch.channels_last)
        cut = shard(x, mesh, {0: (2, (7, 9))}).to(memory_format=torch.channels_last).requires_grad_()
        for options in MODES.values():
            for size in ((11, 12), (32, 18)):
                found, plain = (F.interpolate(t, size=size, **options) for t in (cut, x))
                assert found.stride() == plain.stride(), options
                assert_close(found.full_tensor().detach(), plain, str(options))
                found.sum().backward()

    ranks.run(check, values(2, 4, 16, 9))

"""Pooling: padding, ceil mode and divisors as of the whole tensor, indices global, far windows without gathering."""

from __future__ import annotations

import pytest
import torch
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
    "narrower than the window": ((3,), {0: (3, (4, 1, 4))}),
    "batch": ((2,), {0: (0, (2, 0))}),
    "channels": ((2,), {0: (1, (3, 1))}),
    "rows and columns": ((2, 2), {0: (2, (7, 9)), 1: (3, (5, 4))}),
    "empty batch and columns": ((2, 2), {0: (0, (0, 2)), 1: (3, (5, 4))}),
    "one rank": ((1,), {0: (2, (16,))}),
}


def strictly(function):
    def run(*args):
        with strict():
            return function(*args)

    return run


def unpooled(kernel, stride, padding):
    def run(x):
        y, indices = F.max_pool2d(x, kernel, stride, padding, return_indices=True)
        return F.max_unpool2d(y, indices, kernel, stride, padding, output_size=x.shape[-2:]), y, indices

    return run


def maxima(*args, **options):
    return lambda x: F.max_pool2d(x, *args, return_indices=True, **options)


POOLS = {
    "max": maxima(3),
    "max, padded": maxima(3, 2, 1),
    "max, ceil": maxima(3, 2, 1, ceil_mode=True),
    "max, dilated": maxima((4, 3), 2, (2, 1), dilation=2),
    "max, wide": maxima((11, 7), 2, 3),
    "unpool": unpooled(2, 2, 0),
    "unpool, padded": unpooled(3, 3, 1),
    "avg, padded": lambda x: F.avg_pool2d(x, 3, 3, 1),
    "avg, padded, real rows": lambda x: F.avg_pool2d(x, 3, 3, 1, count_include_pad=False),
    "avg, ceil": lambda x: F.avg_pool2d(x, (4, 3), 3, 1, ceil_mode=True),
    "avg, ceil, real rows": lambda x: F.avg_pool2d(x, (4, 3), 3, 1, ceil_mode=True, count_include_pad=False),
    "avg, divisor": lambda x: F.avg_pool2d(x, 3, 2, 1, divisor_override=5),
    "avg, wide": lambda x: F.avg_pool2d(x, (12, 7), (3, 2), (2, 3)),
    "avg, wide, real rows": lambda x: F.avg_pool2d(x, (12, 7), (3, 2), (2, 3), ceil_mode=True, count_include_pad=False),
    "avg, wide, divisor": lambda x: F.avg_pool2d(x, (12, 7), (3, 2), (2, 3), divisor_override=5),
    "avg, global": lambda x: F.avg_pool2d(x, x.shape[-2:]),
    "adaptive": lambda x: F.adaptive_avg_pool2d(x, (5, 3)),
    "adaptive, one row": lambda x: F.adaptive_avg_pool2d(x, (1, 4)),
    "adaptive, one": lambda x: F.adaptive_avg_pool2d(x, 1),
    "adaptive, more rows than given": lambda x: F.adaptive_avg_pool2d(x, (20, 12)),
    "adaptive max": lambda x: F.adaptive_max_pool2d(x, (5, 3), return_indices=True),
    "lp": lambda x: F.lp_pool2d(x, 2, 3),
}


def values(*shape, dtype=F64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(5), dtype=F64).to(dtype)


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("name", POOLS)
def test_pool2d(ranks, name, cut):
    mesh, cuts = CUTS[cut]
    ranks.same_as_plain(strictly(POOLS[name]), values(2, 4, 16, 9), cuts=[cuts], mesh=mesh)


POOLS_3D = {
    "max": lambda x: F.max_pool3d(x, 3, 2, 1, return_indices=True),
    "avg": lambda x: F.avg_pool3d(x, 3, 2, 1, ceil_mode=True, count_include_pad=False),
    "adaptive": lambda x: F.adaptive_avg_pool3d(x, (3, 2, 5)),
    "adaptive max": lambda x: F.adaptive_max_pool3d(x, (3, 2, 5), return_indices=True),
    "unpool": lambda x: F.max_unpool3d(*F.max_pool3d(x, 2, return_indices=True), 2, output_size=x.shape[-3:]),
}


@pytest.mark.parametrize("name", POOLS_3D)
def test_pool3d(ranks, name):
    x = values(2, 3, 9, 8, 7)
    ranks.same_as_plain(strictly(POOLS_3D[name]), x, dim=2, sizes=(4, 3, 2))
    ranks.same_as_plain(strictly(POOLS_3D[name]), x, cuts=[{0: (3, (5, 3)), 1: (4, (3, 4))}], mesh=(2, 2))


POOLS_1D = {
    "max": lambda x: F.max_pool1d(x, 3, 2, 1, return_indices=True),
    "avg": lambda x: F.avg_pool1d(x, 3, 2, 1),
    "adaptive": lambda x: F.adaptive_avg_pool1d(x, 4),
    "adaptive max": lambda x: F.adaptive_max_pool1d(x, 4),
    "unpool": lambda x: F.max_unpool1d(*F.max_pool1d(x, 2, return_indices=True), 2, output_size=x.shape[-1:]),
}


@pytest.mark.parametrize("name", POOLS_1D)
def test_pool1d(ranks, name):
    ranks.same_as_plain(strictly(POOLS_1D[name]), values(3, 4, 11), dim=2, sizes=(4, 1, 6))


@pytest.mark.parametrize("name", ["max, padded", "unpool", "avg, padded", "adaptive", "adaptive max"])
def test_unbatched_and_single_precision(ranks, name):
    x = values(4, 16, 9, dtype=torch.float32)
    ranks.same_as_plain(strictly(POOLS[name]), x, dim=1, sizes=(7, 9))
    ranks.same_as_plain(strictly(POOLS[name]), x, dim=0, sizes=(1, 3))


@pytest.mark.parametrize("cut", ["rows", "rows and columns"])
def test_indices_where_nothing_is_largest(ranks, cut):
    """Windows of -inf at the padded edge name torch's row, not a padded one; NaN goes through."""
    mesh, cuts = CUTS[cut]
    x = values(2, 4, 16, 9)
    x[:, :, :5] = -torch.inf
    x[1, 2, 12, 3] = torch.nan
    for name in ("max, padded", "max, dilated", "max, ceil"):
        ranks.same_as_plain(strictly(POOLS[name]), x, cuts=[cuts], mesh=mesh, gradients=False)


def test_whole_numbers(ranks):
    x = (100 * values(2, 4, 16, 9)).long()
    for name in ("max, padded", "avg, padded"):
        ranks.same_as_plain(strictly(POOLS[name]), x, dim=2, sizes=(7, 9))


def test_far_windows_send_outputs_only(ranks):
    """A window over all shards does not gather them."""

    def check(mesh, x):
        cut = shard(x, mesh, {0: (2, (7, 9))}, requires_grad=True)
        for name in ("avg, global", "avg, wide", "adaptive, one row", "adaptive, one"):
            with comm_trace() as trace:
                out = POOLS[name](cut)
            assert trace.total_bytes <= 8 * out.numel() < 8 * x.numel() / 4, (name, str(trace))

    ranks.run(check, values(2, 4, 16, 9))


def test_unpooling_does_not_make_the_plane_whole(ranks):
    def check(mesh, x):
        y, indices = F.max_pool2d(shard(x, mesh, {0: (2, (7, 9))}), 2, return_indices=True)
        out = F.max_unpool2d(y, indices, 2, output_size=x.shape[-2:])
        assert out.to_local().shape[2] < 16
        with pytest.raises(OpError, match="output plane of"):
            F.max_unpool2d(y, indices + 144, 2, output_size=x.shape[-2:])

    ranks.run(check, values(2, 4, 16, 9))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(ranks, mode):
    functions = [POOLS["max, padded"], POOLS["avg, padded"], POOLS["adaptive"], POOLS["adaptive, one"], F.max_pool2d]

    def check(mesh, x):
        with mode():
            cut = shard(x, mesh, {0: (2, (7, 9))})
            for function in functions[:-1]:
                found, right = function(cut), function(x)
                pairs = zip(found, right, strict=True) if isinstance(right, tuple) else [(found, right)]
                for mine, plain in pairs:
                    assert_close(mine.full_tensor(), plain, "pooled")
            assert_close(F.max_pool2d(cut, 2).full_tensor(), F.max_pool2d(x, 2), "max_pool2d")

    ranks.run(check, values(2, 4, 16, 9))


def test_memory_format_is_that_of_plain(ranks):
    def check(mesh, x):
        x = x.to(memory_format=torch.channels_last)
        cut = shard(x, mesh, {0: (2, (7, 9))}).to(memory_format=torch.channels_last).requires_grad_()
        for name in ("max, padded", "avg, padded", "avg, wide", "adaptive"):
            found, plain = POOLS[name](cut), POOLS[name](x)
            found, plain = (found[0], plain[0]) if isinstance(found, tuple) else (found, plain)
            assert found.stride() == plain.stride(), name
            assert found.to_local().is_contiguous(memory_format=torch.channels_last), name
            assert_close(found.full_tensor().detach(), plain, name)
            found.sum().backward()

    ranks.run(check, values(2, 4, 16, 9))

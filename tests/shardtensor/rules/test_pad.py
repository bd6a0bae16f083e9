"""Padding of cut and uncut dims in every mode, its gradients, and the modules and convolutions that pad."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shardtensor.comm import comm_trace
from shardtensor.errors import OpError
from shardtensor.registry import strict
from shardtensor.spec import Cut
from shardtensor.testing import assert_same_as_plain, shard


def values(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


# Functions of x [2, 3, 8, 6]; padding lists name the last dim first.
TABLE = {
    "constant": lambda x: F.pad(x, (1, 2, 3, 0)),
    "value": lambda x: F.pad(x, (0, 1, 2, 2), value=3.5),
    "constant, all dims": lambda x: F.pad(x, (1, 0, 0, 2, 1, 1, 2, 0)),
    "cropped": lambda x: F.pad(x, (-1, -2, -3, -1)),
    "cropped and padded": lambda x: F.pad(x, (1, -2, -6, 3), value=1.0),
    "reflect": lambda x: F.pad(x, (2, 1, 3, 2), mode="reflect"),
    "reflect as far as it goes": lambda x: F.pad(x, (5, 5, 7, 7), mode="reflect"),
    "reflect one dim": lambda x: F.pad(x[0], (2, 0), mode="reflect"),
    "reflect volumes": lambda x: F.pad(x[None], (1, 1, 2, 0, 1, 2), mode="reflect"),
    "replicate": lambda x: F.pad(x, (2, 1, 3, 12), mode="replicate"),
    "replicate one dim": lambda x: F.pad(x[0], (2, 9), mode="replicate"),
    "replicate volumes": lambda x: F.pad(x[None], (1, 1, 2, 0, 1, 2), mode="replicate"),
    "circular": lambda x: F.pad(x, (2, 1, 3, 0), mode="circular"),
    "circular once around": lambda x: F.pad(x, (6, 6, 8, 8), mode="circular"),
    "circular, cropped": lambda x: F.pad(x, (2, 1, 2, -3), mode="circular"),
    "circular one dim": lambda x: F.pad(x[0], (0, 2), mode="circular"),
    "circular volumes": lambda x: F.pad(x[None], (1, 1, 2, 0, 1, 2), mode="circular"),
    "circular over longitude, zero over latitude": lambda x: F.pad(
        F.pad(x, (1, 1, 0, 0), mode="circular"), (0, 0, 1, 1)
    ),
    "nothing": lambda x: F.pad(x, (0, 0, 0, 0)) + x,
    "zero module": nn.ZeroPad2d((1, 2, 0, 3)),
    "constant module": nn.ConstantPad2d(2, 1.5),
    "reflection module": nn.ReflectionPad2d((1, 2, 3, 4)),
    "replication module": nn.ReplicationPad2d(3),
    "circular module": nn.CircularPad2d((2, 0, 0, 3)),
}

CUTS = [
    {0: (2, (5, 3))},
    {0: (3, (4, 2))},
    {0: (2, (1, 6, 1))},
    {0: (2, (4, 0, 4))},
    {0: (2, (0, 8, 0))},
    {0: (3, (0, 1, 5))},
    {0: (1, (2, 1))},
    {0: (0, (0, 2))},
]
TWICE = [{0: (2, (5, 3)), 1: (3, (2, 4))}, {0: (3, (1, 5)), 1: (2, (0, 8))}]


@pytest.mark.parametrize("cut", CUTS + TWICE)
def test_padding(ranks, cut):
    def check(mesh):
        for name, function in TABLE.items():
            try:
                with strict():
                    assert_same_as_plain(function, [values(2, 3, 8, 6)], mesh, [cut])
            except Exception as error:
                raise AssertionError(f"{name}, cut {cut}: {error}") from error

    ranks.run(check, mesh=(2, 2) if len(cut) == 2 else (len(cut[0][1]),))


def test_single_batch_and_float32(ranks):
    for mode in ("constant", "reflect", "replicate", "circular"):
        function = lambda x, mode=mode: F.pad(x, (2, 1, 1, 3), mode=mode)  # noqa: E731
        ranks.same_as_plain(function, values(1, 3, 8, 6).float(), dim=2, sizes=(3, 1, 4))


def test_second_derivative_of_circular_padding(ranks):
    def penalty(x):
        y = F.pad(x, (2, 1, 3, 0), mode="circular").pow(3).sum()
        (grad,) = torch.autograd.grad(y, x, create_graph=True)
        return grad.pow(2).sum()

    ranks.same_as_plain(penalty, values(2, 3, 8, 6), dim=2, sizes=(5, 1, 2))


@pytest.mark.parametrize("mode", ["circular", "reflect", "replicate", "zeros"])
@pytest.mark.parametrize("cut", [{0: (2, (5, 3))}, {0: (3, (1, 2, 3))}, {0: (2, (4, 4)), 1: (3, (5, 1))}])
def test_convolutions_that_pad(ranks, mode, cut):
    torch.manual_seed(0)
    conv = nn.Conv2d(3, 4, 3, padding=(1, 2), padding_mode=mode, dtype=torch.float64)
    ranks.same_as_plain(conv, values(2, 3, 8, 6), cuts=[cut], mesh=(2, 2) if len(cut) == 2 else (len(cut[0][1]),))


def test_constant_padding_sends_nothing_and_others_only_their_rows(ranks):
    def check(mesh):
        x = shard(values(2, 3, 8, 6), mesh, {0: (2, (3, 2, 3))})
        row = 2 * 3 * 6 * 8
        for mode, rows in (("constant", 0), ("reflect", 0), ("replicate", 0), ("circular", 2)):
            with strict(), comm_trace() as trace:
                y = F.pad(x, (0, 0, 2, 2), mode=mode)
            assert y._spec.layout == (Cut(2, (5, 2, 5)),)
            assert trace.total_bytes <= rows * row, f"{mode}: {trace}"

    ranks.run(check, mesh=(3,))


def test_padding_too_far_is_refused_alike(ranks):
    def check(mesh):
        x = shard(values(2, 3, 8, 6), mesh, {0: (2, (5, 3))})
        with pytest.raises(OpError, match="more than once"):
            F.pad(x, (0, 0, 9, 0), mode="circular")
        with pytest.raises(OpError, match="reflection padding"):
            F.pad(x, (0, 0, 8, 0), mode="reflect")

    ranks.run(check, mesh=(2,))

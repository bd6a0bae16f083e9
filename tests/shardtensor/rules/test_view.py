"""Views: reshapes carry cuts of any dim, over one or two mesh axes; what only renames dims moves nothing."""

from __future__ import annotations

import pytest
import torch

from shardtensor.comm import comm_trace
from shardtensor.registry import strict

SIZES = [(5, 3), (4, 0), (5, 1, 2), (0, 3, 3)]
F64 = torch.float64


def strictly(function):
    def run(*args):
        with strict():
            return function(*args)

    return run


def free(function):
    """The function, which may neither fall back nor communicate."""

    def run(*args):
        with strict(), comm_trace() as trace:
            result = function(*args)
        assert not trace.sent, str(trace)
        return result

    return run


def values(*shape, dtype=F64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64).to(dtype)


# Functions of x [B, S, C] with any dim cut, and the shape each gives; S is cut into SIZES.
FREE = {
    "flatten batch": lambda x: x.flatten(0, 1),
    "flatten batch and back": lambda x: x.flatten(0, 1).unflatten(0, (x.shape[0], x.shape[1])),
    "merge with channels": lambda x: x.flatten(1, 2),
    "merge all": lambda x: x.reshape(-1),
    "heads": lambda x: x.view(x.shape[0], x.shape[1], 3, 4),
    "heads first": lambda x: x.view(x.shape[0], x.shape[1], 3, 4).transpose(1, 2).flatten(0, 1),
    "heads back": lambda x: x.unflatten(-1, (3, 4)).transpose(1, 2).contiguous().transpose(1, 2).reshape(x.shape),
    "new dims of one": lambda x: x[:, None, :, None].squeeze(3).squeeze(1),
    "unsqueeze": lambda x: x.unsqueeze(0).unsqueeze(-1),
    "squeeze all": lambda x: x.unsqueeze(0).squeeze(),
    "squeeze dims": lambda x: x.unsqueeze(0).unsqueeze(2).squeeze((0, 2)),
    "permute": lambda x: x.permute(2, 0, 1),
    "movedim": lambda x: x.movedim(1, 0),
    "swapaxes": lambda x: x.swapaxes(0, 2),
    "mT": lambda x: x.mT,
    "expand": lambda x: x.unsqueeze(1).expand(-1, 3, -1, -1),
    "expand in front": lambda x: x.expand(2, *x.shape),
    "broadcast_to": lambda x: x.broadcast_to(2, *x.shape),
    "contiguous": lambda x: x.transpose(1, 2).contiguous(),
    "clone": lambda x: x.transpose(1, 2).clone(),
    "view_as": lambda x: x.flatten(0, 1).view_as(x),
    "channels first": lambda x: x.transpose(1, 2).reshape(x.shape[0] * x.shape[2], x.shape[1]),
    "detach": lambda x: x + x.detach(),
    "diagonal of other dims": lambda x: x.unsqueeze(0).expand(3, *x.shape).diagonal(0, 0, 3),
}


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("name", FREE)
def test_cut_sequence(ranks, name, batch, sizes):
    ranks.same_as_plain(free(FREE[name]), values(batch, sum(sizes), 12), dim=1, sizes=sizes)

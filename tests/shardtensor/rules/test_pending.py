"""Point-wise ops on pending sums: what is linear stays pending, what is not is summed first, and values are right."""

from __future__ import annotations

import pytest
import torch

from shardtensor import comm_trace
from shardtensor.spec import Partial
from shardtensor.testing import assert_close, shard

WHOLE = torch.randn(6, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
TWO = torch.tensor(2.0, dtype=torch.float64)

STAYS = {
    "negative": lambda s: -s,
    "times a number": lambda s: s * 3,
    "times a plain scalar": lambda s: s * TWO,
    "by a plain scalar": lambda s: s / TWO,
    "times a replicated scalar": lambda s: s * torch.full_like(s.sum(), 2.0).abs(),
    "plus itself": lambda s: s + s,
    "minus a scaled self": lambda s: s - s * 0.25,
    "in place": lambda s: s.clone().mul_(TWO).div_(4),
    "added in place": lambda s: s.clone().add_(s),
    "detached": lambda s: s.detach(),
}
RESOLVES = {
    "plus a number": lambda s: s + 1,
    "plus a plain scalar": lambda s: s + TWO,
    "plain scalar by it": lambda s: TWO / s,
    "times itself": lambda s: s * s,
    "exponential": lambda s: s.mul(0.1).exp(),
    "times a plain vector": lambda s: s * torch.arange(4.0, dtype=torch.float64),
    "to fewer digits": lambda s: s.float(),
    "compared": lambda s: s > 0,
    "added a number in place": lambda s: s.clone().add_(1),
    "squared in place": lambda s: s.clone().pow_(2),
}
CASES = [(function, True) for function in STAYS.values()] + [(function, False) for function in RESOLVES.values()]


@pytest.mark.parametrize(("function", "stays"), CASES, ids=[*STAYS, *RESOLVES])
def test_values_of_pending_sums(ranks, function, stays):
    def check(mesh):
        x = shard(WHOLE, mesh, {0: (0, (3, 0, 3))})
        for reduce in (lambda t: t.sum(0), lambda t: t.sum()):
            pending, right = reduce(x), reduce(WHOLE)
            assert pending._spec.layout == (Partial("sum"),)
            with comm_trace() as trace:
                found = function(pending)
            assert (found._spec.layout == (Partial("sum"),)) == stays
            assert bool(trace.sent) != stays
            assert_close(found.full_tensor(), function(right), "values", 1e-6 if found.dtype == torch.float32 else None)
            assert_close(pending.full_tensor(), right, "the operand itself")

    ranks.run(check, mesh=(3,))


def test_gradients_through_scaled_sums(ranks):
    def loss(x, scale):
        return (x.sum() * scale + x.square().mean() * 3 - x.sum() / scale).tanh()

    ranks.same_as_plain(loss, WHOLE, TWO, cuts=[(0, (3, 0, 3)), None])

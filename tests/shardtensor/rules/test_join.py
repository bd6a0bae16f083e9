"""Joining and splitting: values, gradients, where the pieces end up, and that none becomes whole on a rank."""

from __future__ import annotations

import pytest
import torch

from shardtensor.comm import comm_trace
from shardtensor.registry import strict
from shardtensor.spec import Cut, Replicate
from shardtensor.testing import assert_same_as_plain, shard

SIZES = [(5, 3), (4, 0, 4), (2, 5, 1), (0, 8)]


def values(*shape, seed=3):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# Functions of x [2, 8, 3] and y of the same shape, cut alike or not.
TABLE = {
    "cat along the cut": lambda x, y: torch.cat([x, y], 1),
    "cat of channels": lambda x, y: torch.cat([x, y * 2, x], -1),
    "cat of batches": lambda x, y: torch.cat([x, y]),
    "cat of slices": lambda x, y: torch.cat([x[:, 3:], y[:, :3], x[:, :1]], 1),
    "periodic by hand": lambda x, y: torch.cat([x[:, -2:], x, x[:, :1]], 1) * 2,
    "cat with plain": lambda x, y: torch.cat([x, torch.ones(2, 4, 3, dtype=x.dtype), y], 1),
    "cat with plain channels": lambda x, y: torch.cat([torch.ones(2, 8, 2, dtype=x.dtype), y], 2),
    "cat with nothing": lambda x, y: torch.cat([x, torch.tensor([], dtype=x.dtype), y], 1),
    "cat of one": lambda x, y: torch.cat([x], 1) + y,
    "cat of two dtypes": lambda x, y: torch.cat([x.float(), y], 1),
    "concat, hstack, vstack": lambda x, y: torch.concat([torch.hstack([x, y]), torch.vstack([x, y])[:2]], 1),
    "stack": lambda x, y: torch.stack([x, y]),
    "stack along the cut": lambda x, y: torch.stack([x, y], 1),
    "stack behind": lambda x, y: torch.stack([x, y, x], -1),
    "stack with plain": lambda x, y: torch.stack([x, torch.ones(2, 8, 3, dtype=x.dtype)], 2) + y.unsqueeze(2),
    "chunk": lambda x, y: sum(x.chunk(2, 1)) * y.chunk(4, 1)[1].sum(),
    "chunk of channels": lambda x, y: [part * k for k, part in enumerate(torch.cat([x, y], 2).chunk(3, 2))],
    "split": lambda x, y: torch.cat(x.split([3, 1, 4], 1)[::-1], 1) + y,
    "split of equal length": lambda x, y: [part.sin() for part in (x * y).split(3, 1)],
    "one part of a split": lambda x, y: x.split(3, 1)[1] + y.tensor_split(3, 1)[0],
    "tensor_split": lambda x, y: torch.cat([(x + y).tensor_split((1, 6), 1)[k] for k in (2, 0)], 1),
    "unbind": lambda x, y: x.unbind(0)[1] * y.unbind(2)[0].unsqueeze(-1)[0],
    "unbind the cut": lambda x, y: torch.stack([row * k for k, row in enumerate((x * y).unbind(1))], 1),
    "repeat": lambda x, y: x.repeat(1, 2, 1).unflatten(1, (2, 8)).sum(1) * y,
    "meshgrid of rows": lambda x, y: torch.meshgrid(x[0, :, 0], y[0, 0], indexing="ij")[0],
}


def compare(ranks, cuts, mesh):
    def check(mesh):
        for name, function in TABLE.items():
            try:
                with strict():
                    assert_same_as_plain(function, [values(2, 8, 3), values(2, 8, 3, seed=4)], mesh, cuts)
            except Exception as error:
                raise AssertionError(f"{name}, cuts {cuts}: {error}") from error

    ranks.run(check, mesh=mesh)


@pytest.mark.parametrize("sizes", SIZES)
def test_cut_alike(ranks, sizes):
    compare(ranks, [{0: (1, sizes)}] * 2, (len(sizes),))


@pytest.mark.parametrize(
    "cuts",
    [
        [{0: (1, (5, 1, 2))}, {0: (1, (2, 2, 4))}],
        [{0: (1, (5, 1, 2))}, {0: (2, (1, 0, 2))}],
        [{0: (1, (5, 1, 2))}, None],
        [None, {0: (0, (1, 0, 1))}],
    ],
)
def test_cut_differently(ranks, cuts):
    compare(ranks, cuts, (3,))


@pytest.mark.parametrize(
    "cuts",
    [
        [{0: (1, (5, 3)), 1: (2, (1, 2))}] * 2,
        [{0: (1, (5, 3)), 1: (2, (1, 2))}, {0: (2, (2, 1)), 1: (1, (4, 4))}],
        [{0: (1, (5, 3))}, {1: (1, (2, 6))}],
    ],
)
def test_cut_twice(ranks, cuts):
    compare(ranks, cuts, (2, 2))


def test_what_was_split_joins_in_place(ranks):
    def check(mesh):
        x = shard(values(2, 8, 3), mesh, {0: (1, (5, 1, 2))}, requires_grad=True)
        with strict(), comm_trace() as trace:
            y = torch.cat(x.split([3, 1, 4], 1), 1)
            y.backward(y.detach())
        assert not trace.sent, str(trace)
        assert y._spec.layout == x.grad._spec.layout == (Cut(1, (5, 1, 2)),)

    ranks.run(check, mesh=(3,))


def test_missing_gradients_of_parts_are_zeros(ranks):
    """Only one part is used: autograd fills in plain zeros for the others; the gradient still lies as the tensor."""

    def check(mesh):
        x = shard(values(2, 8, 3), mesh, {0: (1, (5, 1, 2))}, requires_grad=True)
        y = x * 1
        seen = []
        torch.Tensor.register_hook(y, seen.append)
        y.split([3, 1, 4], 1)[0].sum().backward()
        assert seen[0]._spec.layout == (Cut(1, (5, 1, 2)),)

    ranks.run(check, mesh=(3,))


def test_rows_travel_only_to_their_new_owners(ranks):
    """Joining along the cut dim sends each row once at most, and leaves a cut result."""

    def check(mesh):
        x = shard(values(2, 8, 3), mesh, {0: (1, (4, 4))})
        with strict(), comm_trace() as trace:
            y = torch.cat([x, x], 1)
        assert y._spec.layout == (Cut(1, (8, 8)),)
        assert trace.total_bytes == 4 * 2 * 3 * 8
        with strict(), comm_trace() as trace:
            z = torch.cat([x, torch.zeros(2, 6, 3, dtype=x.dtype)], 1)
        assert z._spec.layout == (Cut(1, (7, 7)),)
        assert x.unbind(2)[0]._spec.layout == (Cut(1, (4, 4)),)
        assert x.unbind(1)[0]._spec.layout == (Replicate(),)

    ranks.run(check, mesh=(2,))


def test_sizes_that_do_not_sum_are_refused(ranks):
    def check(mesh):
        x = shard(values(2, 8, 3), mesh, {0: (1, (4, 4))})
        for sizes in ([3, 4], [9, -1]):
            with pytest.raises((ValueError, RuntimeError), match=r"(?i)sum|negative"):
                x.split(sizes, 1)

    ranks.run(check, mesh=(2,))

"""Softmax along cut and whole dims."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from shardtensor import strict
from shardtensor.testing import Ranks, assert_close, shard

FUNCTIONS: dict[str, Callable[..., torch.Tensor]] = {
    "softmax": torch.softmax,
    "log_softmax": torch.log_softmax,
    "safe_softmax": torch.ops.aten._safe_softmax.default,
    "softmin": F.softmin,
}
SIZES = [(5, 3), (4, 0, 4), (2, 5, 1)]


def run_strictly(name: str, x: torch.Tensor, dim: int) -> torch.Tensor:
    """The function by name, where no op may gather."""
    with strict():
        return FUNCTIONS[name](x, dim)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_softmax(ranks: Ranks, name: str, dim: int, sizes: tuple[int, ...]) -> None:
    ranks.same_as_plain(run_strictly, name, torch.randn(3, 8, 4).double(), dim, cuts=[None, (1, sizes), None])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_softmax_in_other_dtypes_with_large_values(ranks: Ranks, name: str, dtype: torch.dtype) -> None:
    x = (2 * torch.randn(2, 8) + 1000).to(dtype)
    ranks.same_as_plain(run_strictly, name, x, 1, cuts=[None, (1, (5, 3)), None])
    ranks.same_as_plain(run_strictly, name, 50 * x, 1, cuts=[None, (1, (5, 3)), None], gradients=False)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_rows_with_infinities(ranks: Ranks, name: str) -> None:
    x = torch.randn(5, 8).double()
    x[0] = -torch.inf
    x[1, :5] = -torch.inf
    x[2, 6] = -torch.inf
    x[3, 2] = torch.inf
    ranks.same_as_plain(run_strictly, name, x, 1, cuts=[None, (1, (4, 0, 4)), None], gradients=False)


def test_softmax_along_a_dim_cut_by_a_mesh_of_two_axes(ranks: Ranks) -> None:
    cuts = [None, {0: (1, (5, 4)), 1: (2, (3, 4))}, None]
    for dim in (0, 1, 2):
        ranks.same_as_plain(run_strictly, "softmax", torch.randn(2, 9, 7).double(), dim, cuts=cuts, mesh=(2, 2))


def softmax_of_flat_tokens(x: torch.Tensor, dim: int) -> torch.Tensor:
    return torch.softmax(x.reshape(-1, x.shape[-1]), dim)


@pytest.mark.parametrize("dim", [0, 1])
def test_softmax_of_flattened_batches(ranks: Ranks, dim: int) -> None:
    ranks.same_as_plain(softmax_of_flat_tokens, torch.randn(2, 7, 3).double(), dim, cuts=[(1, (4, 1, 2)), None])


def softmax_of_a_pending_sum(mesh: Any, x: torch.Tensor) -> None:
    sharded = shard(x, mesh, {0: (0, (4, 3))})
    assert_close(torch.softmax(sharded.sum(0), 0).full_tensor(), torch.softmax(x.sum(0), 0), "softmax")


def test_softmax_resolves_a_pending_sum_first(ranks: Ranks) -> None:
    ranks.run(softmax_of_a_pending_sum, torch.randn(7, 3).double(), mesh=(2,))

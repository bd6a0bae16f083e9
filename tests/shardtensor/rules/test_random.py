"""Random ops: independent between blocks, the same on replicas, repeated by a seed, and the ranks stay in step."""

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from shardtensor import ShardTensor, strict
from shardtensor.rules import generators
from shardtensor.testing import Ranks, assert_close, assert_spec_matches_block, shard

OPS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "dropout": lambda x: F.dropout(x, 0.4),
    "dropout in place": lambda x: F.dropout(x.clone(), 0.4, inplace=True),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.4, training=True),
    "native_dropout": lambda x: torch.native_dropout(x, 0.4, True)[0],
    "rand_like": torch.rand_like,
    "randn_like": torch.randn_like,
    "randint_like": lambda x: torch.randint_like(x, 100),
    "randint_like from": lambda x: torch.randint_like(x, 3, 100),
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()),
    "bernoulli p": lambda x: torch.bernoulli(x, 0.4),
    "bernoulli_": lambda x: torch.empty_like(x).bernoulli_(0.4),
    "bernoulli_ tensor": lambda x: torch.empty_like(x).bernoulli_(x.sigmoid()),
    "uniform_": lambda x: torch.empty_like(x).uniform_(-1, 1),
    "normal_": lambda x: torch.empty_like(x).normal_(1, 2),
    "exponential_": lambda x: torch.empty_like(x).exponential_(),
    "geometric_": lambda x: torch.empty_like(x).geometric_(0.05),
    "cauchy_": lambda x: torch.empty_like(x).cauchy_(),
    "log_normal_": lambda x: torch.empty_like(x).log_normal_(),
    "random_": lambda x: torch.empty_like(x).random_(),
    "random_ to": lambda x: torch.empty_like(x).random_(100),
    "normal": lambda x: torch.normal(x, x.sigmoid()),
    "normal of means": lambda x: torch.normal(x, 2.0),
    "poisson": lambda x: torch.poisson(20 * x.sigmoid()),
    "rrelu": lambda x: F.rrelu(-x, training=True),
    "gumbel_softmax": lambda x: F.gumbel_softmax(x, dim=1),
    "multinomial": lambda x: torch.multinomial(x[:, :, 0].sigmoid(), 32, replacement=True),
}


def drawn(mesh: Any, x: torch.Tensor, name: str, cuts: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The whole of what the op draws, checked to be repeated by a seed, and the default generator's next numbers."""
    sharded = shard(x, mesh, cuts)
    found = []
    for seed in (5, 5, 6):
        torch.manual_seed(seed)
        with strict():
            out = OPS[name](sharded)
        assert_spec_matches_block(out, name)
        assert isinstance(out, ShardTensor)
        assert out._spec.layout[: len(cuts)] == sharded._spec.layout[: len(cuts)]
        found.append(out.full_tensor())
    assert torch.equal(found[0], found[1]), f"{name}: the same seed gave other numbers"
    assert not torch.equal(found[0], found[2]), f"{name}: another seed gave the same numbers"
    return found[0], torch.rand(4)


@pytest.mark.parametrize("name", OPS)
def test_blocks_differ_and_a_seed_repeats_them(ranks: Ranks, name: str) -> None:
    x = torch.ones(8, 6, 40)  # blocks of equal inputs: what differs was drawn
    found = ranks.run(drawn, x, name, {0: (0, (4, 0, 4))}, mesh=(3,))
    for whole, following in found[1:]:
        assert torch.equal(whole, found[0][0])
        assert torch.equal(following, found[0][1]), "the ranks' default generators are out of step"
    whole = found[0][0]
    assert not torch.equal(whole[:4], whole[4:]), "two blocks drew the same numbers"


@pytest.mark.parametrize("name", OPS)
def test_replicas_agree(ranks: Ranks, name: str) -> None:
    x = torch.ones(8, 6, 40)
    found = ranks.run(drawn, x, name, {1: (0, (5, 3))}, mesh=(2, 2))
    assert all(torch.equal(whole, found[0][0]) and torch.equal(after, found[0][1]) for whole, after in found)


def like_one_process(mesh: Any, x: torch.Tensor, name: str, cut: Any) -> None:
    torch.manual_seed(5)
    expected = OPS[name](x)
    torch.manual_seed(5)
    found = OPS[name](shard(x, mesh, cut))
    assert_close(found.full_tensor(), expected, name)
    after = torch.rand(4)
    torch.manual_seed(5)
    OPS[name](x)
    assert torch.equal(after, torch.rand(4)), f"{name} advances the default generator by another amount"


@pytest.mark.parametrize("name", OPS)
def test_a_whole_tensor_has_the_numbers_of_one_process(ranks: Ranks, name: str) -> None:
    ranks.run(like_one_process, torch.randn(8, 6, 40), name, {}, mesh=(2,))
    ranks.run(like_one_process, torch.randn(8, 6, 40), name, {0: (0, (8,))}, mesh=(1,))


def shares(mesh: Any, x: torch.Tensor) -> tuple[float, float, torch.Tensor]:
    x = shard(x, mesh, {0: (0, (3, 0, 5))}, requires_grad=True)
    out = F.dropout(x, 0.25)
    out.sum().backward()
    assert x.grad is not None
    whole, grad = out.full_tensor().detach(), x.grad.full_tensor()
    assert torch.equal(whole, grad)  # ones went in: what was kept is 1 / (1 - p), and so is its gradient
    return float((whole == 0).double().mean()), float(whole.max()), whole


def test_dropout_drops_its_share_and_scales_the_rest(ranks: Ranks) -> None:
    found = ranks.run(shares, torch.ones(8, 50, 50, dtype=torch.float64), mesh=(3,))
    for dropped, largest, whole in found:
        assert abs(dropped - 0.25) < 0.01
        assert abs(largest - 1 / 0.75) < 1e-12
        assert torch.equal(whole, found[0][2])


def channels(mesh: Any, x: torch.Tensor, name: str, cuts: Any) -> torch.Tensor:
    with strict():
        return getattr(F, name)(shard(x, mesh, cuts), 0.5, training=True).full_tensor()


@pytest.mark.parametrize(
    "cuts", [{0: (2, (5, 3))}, {0: (1, (10, 6))}, {0: (0, (1, 3))}], ids=["rows", "channels", "batch"]
)
@pytest.mark.parametrize("name", ["dropout1d", "dropout2d", "dropout3d", "feature_alpha_dropout"])
def test_dropout_of_channels_drops_them_on_all_ranks(ranks: Ranks, name: str, cuts: Any) -> None:
    x = torch.ones(4, 16, 8, *{"dropout1d": (), "dropout3d": (3, 3)}.get(name, (3,)))
    one, other = ranks.run(channels, x, name, cuts, mesh=(2,))
    assert torch.equal(one, other)
    flat = one.flatten(2)
    assert torch.equal(flat, flat[:, :, :1].expand_as(flat)), "a channel was dropped in part"
    assert len(flat[:, :, 0].unique()) == 2


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop, self.second = nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.second(self.drop(self.first(x)))
        return out


def recomputed(mesh: Any, x: torch.Tensor, reentrant: bool) -> None:
    torch.manual_seed(0)
    module = Dropping().double()
    results = []
    for run in (module, lambda value: checkpoint(module, value, use_reentrant=reentrant)):
        torch.manual_seed(7)
        sharded = shard(x, mesh, {0: (1, (5, 0, 3))}, requires_grad=True)
        module.zero_grad()
        out = run(sharded)
        out.square().sum().backward()
        assert sharded.grad is not None
        assert all(type(weight.grad) is torch.Tensor for weight in module.parameters())
        results.append([out, sharded.grad, *(weight.grad for weight in module.parameters())])
    for one, other in zip(*results, strict=True):
        one, other = (value.full_tensor() if isinstance(value, ShardTensor) else value for value in (one, other))
        assert_close(other.detach(), one.detach(), "recomputed with the mask of the forward")


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_recomputes_with_the_same_mask(ranks: Ranks, reentrant: bool) -> None:
    ranks.run(recomputed, torch.randn(2, 8, 6, dtype=torch.float64), reentrant, mesh=(3,))


def from_a_generator(mesh: Any, x: torch.Tensor, cut: Any) -> torch.Tensor:
    sharded, found = shard(x, mesh, cut), []
    before = torch.get_rng_state()
    for _ in range(2):
        generator = torch.Generator().manual_seed(3)
        first, second = (torch.empty_like(sharded).normal_(generator=generator).full_tensor() for _ in range(2))
        assert not torch.equal(first, second)
        found.append(torch.stack((first, second)))
    assert torch.equal(*found)
    assert torch.equal(before, torch.get_rng_state()), "the default generator was used"
    return found[0]


@pytest.mark.parametrize("cut", [{}, {0: (0, (4, 0, 4))}], ids=["whole", "cut"])
def test_a_generator_that_the_caller_names(ranks: Ranks, cut: Any) -> None:
    found = ranks.run(from_a_generator, torch.ones(8, 20), cut, mesh=(3,))
    assert all(torch.equal(found[0], other) for other in found)
    if not cut:
        generator = torch.Generator().manual_seed(3)
        assert torch.equal(found[0][0], torch.empty(8, 20).normal_(generator=generator))


def out_of_step(mesh: Any, x: torch.Tensor) -> str:
    generators._in_step.clear()
    torch.manual_seed(mesh.get_rank())
    torch.rand_like(shard(x, mesh, {0: (0, (5, 3))}))  # blocks may draw whatever they like
    try:
        with pytest.raises(ValueError, match="one seed on all ranks") as caught:
            F.dropout(shard(x, mesh, {}), 0.5)
    finally:
        generators._in_step.clear()
    return type(caught.value).__name__


def test_replicas_refuse_to_draw_from_generators_out_of_step(ranks: Ranks) -> None:
    assert ranks.run(out_of_step, torch.ones(8, 3), mesh=(2,)) == ["RankDisagreementError"] * 2


PROGRAM = """
import torch
from shardtensor import Replicate, ShardTensor, init_mesh
mesh = init_mesh((2,), ("domain",), device_type="cpu")
torch.manual_seed(0)
torch.nn.functional.dropout(ShardTensor.from_local(torch.ones(4), mesh, [Replicate()]), 0.5)
"""


def test_processes_that_share_no_parent_are_in_step() -> None:
    """Unlike the ranks of the other tests, each hashes with a secret of its own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    environments = [shared | {"RANK": str(rank), "PYTHONHASHSEED": str(rank + 1)} for rank in range(2)]
    started = [subprocess.Popen([sys.executable, "-c", PROGRAM], env=one) for one in environments]
    try:
        assert [process.wait(100) for process in started] == [0, 0]
    finally:
        for process in started:
            process.kill()


def evaluated(x: Any) -> torch.Tensor:
    return F.dropout(x, 0.5, training=False) + F.dropout(x, 0.0) + F.rrelu(x) + torch.native_dropout(x, 0.5, False)[0]


def test_nothing_is_drawn_in_evaluation(ranks: Ranks) -> None:
    ranks.same_as_plain(evaluated, torch.randn(8, 3, dtype=torch.float64), dim=0, sizes=(5, 3))


def test_dropout_of_everything(ranks: Ranks) -> None:
    def all_dropped(x: Any) -> torch.Tensor:
        return F.dropout(x, 1.0) + torch.native_dropout(x, 1.0, True)[0]

    ranks.same_as_plain(all_dropped, torch.randn(8, 3, dtype=torch.float64), dim=0, sizes=(4, 0, 4))

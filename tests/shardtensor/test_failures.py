"""When a rank fails or dies, the others end with an error that names the exchange, within the timeout."""

from __future__ import annotations

import time

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from shardtensor import CollectiveError, Shard, ShardTensor
from shardtensor.testing import RankError, Ranks, shard

TIMEOUT_S = 3.0


@pytest.fixture(scope="module")
def hasty():
    """Three ranks that wait three seconds for each other."""
    pool = Ranks(3, timeout=TIMEOUT_S)
    yield pool
    pool.close()


def failure_of(pool, function):
    """The message of a failing run, and the seconds it took."""
    pool.run(lambda mesh: None, mesh=(3,))  # started
    start = time.monotonic()
    with pytest.raises(RankError) as caught:
        pool.run(function, mesh=(3,))
    return str(caught.value), time.monotonic() - start


EXCHANGES = {
    "all_reduce": lambda x: x.sum().item(),
    "all_gather": lambda x: x.full_tensor(),
    "all_to_all": lambda x: x.redistribute(placements=[Shard(1)]),
    "halo_exchange": lambda x: x.redistribute(sizes={0: (2, 2, 2)}),
    "gather_facts": lambda x: ShardTensor.from_local(x.to_local(), x.device_mesh, [Shard(0)]),
}


@pytest.mark.parametrize("name", EXCHANGES)
def test_a_rank_that_raises_first(hasty, name):
    ask = EXCHANGES[name]

    def check(mesh):
        x = shard(torch.ones(6, 4), mesh, {0: (0, (1, 4, 1))})
        if mesh.get_local_rank() == 1:
            raise ValueError("this rank's own trouble")
        with pytest.raises(CollectiveError) as caught:
            ask(x)
        raise caught.value

    message, seconds = failure_of(hasty, check)
    assert "this rank's own trouble" in message
    for rank in (0, 2):
        assert f"{name} failed on rank {rank} of ranks [0, 1, 2]" in message
    assert "ran into its own error" in message
    assert seconds < TIMEOUT_S + 8


def test_a_rank_that_fails_in_backward(hasty):
    def check(mesh):
        x = shard(torch.ones(6, 4), mesh, {0: (0, (1, 4, 1))}, requires_grad=True)
        y = x.redistribute(placements=[Shard(1)])
        if mesh.get_local_rank() == 0:
            y.register_hook(lambda grad: 1 / 0)
        (y * y).sum().backward()

    message, _ = failure_of(hasty, check)
    assert "ZeroDivisionError" in message
    assert "CollectiveError" in message


def test_a_rank_that_is_killed(hasty):
    def check(mesh):
        import os
        import signal

        x = shard(torch.ones(6, 4), mesh, {0: (0, (1, 4, 1))})
        if mesh.get_local_rank() == 2:
            os.kill(os.getpid(), getattr(signal, "SIGKILL", signal.SIGTERM))
        x.full_tensor()

    message, seconds = failure_of(hasty, check)
    assert "--- rank 2:\nthe process died" in message
    assert "all_gather failed on rank" in message
    assert seconds < TIMEOUT_S + 8


def test_ranks_that_ask_for_different_exchanges(hasty):
    def check(mesh):
        x = shard(torch.ones(6, 4), mesh, {0: (0, (1, 4, 1))})
        if mesh.get_local_rank() == 0:
            x.full_tensor()
        else:
            x.redistribute(sizes={0: (2, 2, 2)})

    message, _ = failure_of(hasty, check)
    assert "failed on rank" in message


def test_the_pool_works_again_after_a_failure(hasty):
    failure_of(hasty, lambda mesh: 1 / 0)
    assert hasty.run(lambda mesh: mesh.get_local_rank(), mesh=(3,)) == [0, 1, 2]


def test_the_pool_works_again_after_an_interrupt(hasty, monkeypatch):
    """A late answer of the call that was broken off is not taken for that of the next one."""

    def interrupted(self, count):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        hasty.run(lambda mesh: None, mesh=(3,))
        patch.setattr(Ranks, "_collect", interrupted)
        with pytest.raises(KeyboardInterrupt):
            hasty.run(lambda mesh: "late", mesh=(3,))
    assert hasty.run(lambda mesh: mesh.get_local_rank(), mesh=(3,)) == [0, 1, 2]


def test_groups_of_some_ranks_leave_all_in_step(hasty):
    """A rank that is not among those that make a group goes on counting groups as the others do."""

    def grid(mesh):
        return DeviceMesh("cpu", mesh.mesh[:, None], mesh_dim_names=("a", "b"))["a"].size()

    assert hasty.run(grid, mesh=(2,)) == [2, 2]
    assert hasty.run(grid, mesh=(3,)) == [3, 3, 3]


def test_a_hung_rank_is_ended():
    pool = Ranks(2, timeout=1.0)

    def sleeps(mesh):
        if mesh.get_local_rank() == 1:
            time.sleep(600)

    try:
        with pytest.raises(RankError, match="no answer in time"):
            pool.run(sleeps, mesh=(2,))
        assert not pool.processes
        with pytest.raises(RankError, match=r"no mesh \(3,\) on 2 ranks"):
            pool.run(sleeps, mesh=(3,))
    finally:
        pool.close()


def test_what_cannot_be_sent_back_says_so(hasty):
    message, _ = failure_of(hasty, lambda mesh: (x for x in ()))
    assert "cannot be sent back" in message

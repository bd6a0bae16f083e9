"""Ranks that end, are late or stop: the others are told who, soon."""

from __future__ import annotations

import os
import signal
import time

import pytest

from shardio.collective import Group
from shardio.errors import RankLostError, RankTimeoutError, ReadCancelledError
from shardtensor.ranks import RankError
from shardtensor.testing import Ranks


def test_steps_say_what_others_said(ranks):
    def steps(mesh):
        group = Group.join(mesh, mesh.get_rank())
        said = [group.step(f"{mesh.get_rank()} in {number}" if number % 2 else "") for number in range(5)]
        group.begin(7)
        said.append(group.step("again"))
        group.close()
        return said

    found = ranks.run(steps, mesh=(3,))
    assert found[0] == found[1] == found[2]
    assert found[0][3] == ["0 in 3", "1 in 3", "2 in 3"]
    assert found[0][4:] == [["", "", ""], ["again"] * 3]


def _error(step):
    began = time.monotonic()
    try:
        step()
    except (RankLostError, RankTimeoutError, ReadCancelledError) as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - began
    return "fine", 0.0


@pytest.mark.parametrize("nodes", ["aaa", "abc"])
def test_a_late_rank_is_named_on_all(ranks, nodes):
    def late(mesh):
        rank = mesh.get_rank()
        group = Group.join(mesh, rank, timeout=1.0, node=nodes[rank])
        if rank == 1:
            time.sleep(2.5)
        said = _error(group.step), _error(group.step)
        group.close()
        return said

    found = ranks.run(late, mesh=(3,))
    for rank in (0, 2):
        assert found[rank][0][0].startswith("RankTimeoutError: rank 1 did not read along within 1 s")
    assert any(said.startswith("RankTimeoutError: rank 1") for said, _ in found[1])  # told what the others waited for


def test_who_stops_ends_the_waiting_of_others(ranks):
    def stops(mesh):
        rank = mesh.get_rank()
        group = Group.join(mesh, rank)
        if rank == 0:
            group.cancel()
        said = _error(group.step)
        group.begin(1)
        again = _error(group.step)
        group.close()
        return said[0], again[0]

    found = ranks.run(stops, mesh=(2,))
    assert [again for _, again in found] == ["fine", "fine"]
    assert found[0][0].startswith("ReadCancelledError")
    assert found[1][0] in ("fine", "ReadCancelledError: rank 0 has ended its iteration")


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_is_named_within_seconds(tmp_path, victim):
    """Also that through whose store the ranks agree."""
    pool = Ranks(3)

    def killed(mesh):
        rank = mesh.get_rank()
        group = Group.join(mesh, rank)
        group.step()
        if rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        said, took = _error(group.step)
        (tmp_path / f"{rank}").write_text(f"{took:.1f} {said}")

    try:
        with pytest.raises(RankError):
            pool.run(killed, mesh=(3,))
    finally:
        pool.close()
    for rank in {0, 1, 2} - {victim}:
        took, said = (tmp_path / f"{rank}").read_text().split(" ", 1)
        assert said.startswith(f"RankLostError: rank {victim}")
        assert float(took) < 5

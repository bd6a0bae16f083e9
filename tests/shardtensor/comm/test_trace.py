"""comm_trace: every exchange with its bytes and the op it served, on this rank, backward included."""

from __future__ import annotations

import torch
from torch import nn

from shardtensor import comm, comm_trace
from shardtensor.testing import shard


def test_exchanges_are_listed_with_bytes(ranks):
    def check(mesh):
        group = comm.group_of(mesh, 0)
        with comm_trace() as trace:
            comm.all_reduce(torch.ones(5), "sum", group)
            comm.all_gather(torch.ones(2, 3), 0, (2, 2), group)
            comm.all_to_all(torch.ones(2, 4), 1, (1, 3), 0, (2, 2), group)
        assert [item.exchange for item in trace.sent] == ["all_reduce", "all_gather", "all_to_all"]
        kept = (1, 3)[mesh.get_local_rank()] * 2 * 4
        assert [item.bytes for item in trace.sent] == [20, 24, 32 - kept]
        assert trace.total_bytes == 76 - kept
        assert trace.counts() == {"all_reduce": 1, "all_gather": 1, "all_to_all": 1}

    ranks.run(check, mesh=(2,))


def test_the_op_is_named_in_forward_and_backward(ranks):
    def check(mesh):
        x = shard(torch.randn(6, 4), mesh, {0: (0, (5, 1))}, requires_grad=True)
        layer = nn.Linear(4, 3)
        with comm_trace() as trace:
            y = layer(x).max()
            y.backward()
        ops = {item.op for item in trace.sent}
        assert "aten.max.default" in ops
        assert trace.sent
        assert "aten.max.default" in str(trace)
        assert str(comm.CommTrace()) == "no exchange"

    ranks.run(check, mesh=(2,))


def test_traces_nest_and_end(ranks):
    def check(mesh):
        group = comm.group_of(mesh, 0)
        with comm_trace() as outer:
            with comm_trace() as inner:
                comm.all_reduce(torch.ones(1), "sum", group)
            comm.all_reduce(torch.ones(1), "sum", group)
        comm.all_reduce(torch.ones(1), "sum", group)
        assert (len(outer.sent), len(inner.sent)) == (2, 1)

    ranks.run(check, mesh=(2,))


def test_a_single_rank_sends_nothing(ranks):
    def check(mesh):
        group = comm.group_of(mesh, 0)
        with comm_trace() as trace:
            comm.all_reduce(torch.ones(3), "sum", group)
            comm.all_gather(torch.ones(3), 0, (3,), group)
            comm.halo_exchange(torch.ones(3), 0, (3,), [(-1, 4)], group)
            comm.ring_shift(torch.ones(3), (3,), group)
        assert not trace.sent

    ranks.run(check, mesh=(1,))

"""Handing out: scatter_tensor sends each rank its piece only; one set of weights; meshes without a launcher."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardtensor import (
    LayoutError,
    RankDisagreementError,
    Replicate,
    Shard,
    comm_trace,
    init_mesh,
    scatter_tensor,
    sync_module_over_mesh,
)
from shardtensor.spec import Cut, Partial
from shardtensor.testing import assert_close, assert_spec_matches_block

WHOLE = torch.randn(7, 4, generator=torch.Generator().manual_seed(6))


@pytest.mark.parametrize("source", [0, 2])
@pytest.mark.parametrize("dim", [0, 1])
def test_scatter(ranks, source, dim):
    def check(mesh):
        mine = WHOLE if dist.get_rank() == source else None
        x = scatter_tensor(mine, source, mesh, (Shard(dim - 2),))
        assert x.is_leaf
        assert not x.requires_grad
        assert x._spec.layout == (Cut(dim, (3, 3, 1) if dim == 0 else (2, 2, 0)),)  # as torch.chunk
        assert_spec_matches_block(x, "scattered")
        assert_close(x.full_tensor(), WHOLE, "values")
        told = scatter_tensor(mine, source, mesh, (Shard(dim),), WHOLE.shape, WHOLE.dtype, requires_grad=True)
        assert told.requires_grad
        assert told._spec == x._spec
        (told * 2).sum().backward()
        assert told.grad._spec == told._spec

    ranks.run(check, mesh=(3,))


def test_each_rank_is_sent_its_piece_only(ranks):  # T20
    def check(mesh):
        rank, received = mesh.get_local_rank(), []
        with pytest.MonkeyPatch.context() as patch, comm_trace() as trace:
            start = dist.batch_isend_irecv

            def counted(ops):
                received.extend(op.tensor.numel() for op in ops if op.op is dist.irecv)
                return start(ops)

            patch.setattr(dist, "batch_isend_irecv", counted)
            patch.setattr(dist, "broadcast", None)
            patch.setattr(dist, "scatter", None)
            x = scatter_tensor(WHOLE if rank == 1 else None, 1, mesh, (Shard(0),), WHOLE.shape, WHOLE.dtype)
        piece = x._local_tensor.numel() * 4
        if rank == 1:
            assert trace.total_bytes == WHOLE.numel() * 4 - piece
        else:
            assert received == [piece]  # bytes
            assert trace.total_bytes == 0

    ranks.run(check, mesh=(3,))


def test_a_replicated_scatter(ranks):
    def check(mesh):
        x = scatter_tensor(WHOLE if dist.get_rank() == 0 else None, 0, mesh, (Replicate(),))
        assert torch.equal(x.to_local(), WHOLE)
        x._local_tensor.zero_()
        assert WHOLE.any()  # a copy on the source too

    ranks.run(check, mesh=(2,))


@pytest.mark.parametrize("source", [0, 3])
def test_scatter_over_a_2d_mesh(ranks, source):
    def check(mesh):
        mine = WHOLE if dist.get_rank() == source else None
        x = scatter_tensor(mine, source, mesh, (Shard(0), Shard(1)))
        assert x._spec.layout == (Cut(0, (4, 3)), Cut(1, (2, 2)))
        assert_close(x.full_tensor(), WHOLE, "values")
        y = scatter_tensor(mine, source, mesh, (Replicate(), Shard(0)))
        assert_close(y.full_tensor(), WHOLE, "values")

    ranks.run(check, mesh=(2, 2))


def test_scatter_within_each_row_of_a_mesh(ranks):
    def check(mesh):
        domain = mesh["domain"]
        source = int(domain.mesh[0])
        own = WHOLE + mesh.get_coordinate()[0]
        x = scatter_tensor(own if dist.get_rank() == source else None, source, domain, (Shard(0),))
        assert x.device_mesh == domain
        assert_close(x.full_tensor(), own, "values")

    ranks.run(check, mesh=(2, 2))


def test_scatter_refuses_on_all_ranks(ranks):
    def check(mesh):
        with pytest.raises(LayoutError, match="global_src is 7, which is not among the mesh's ranks"):
            scatter_tensor(WHOLE, 7, mesh, (Shard(0),))
        with pytest.raises(LayoutError, match="its tensor is None"):
            scatter_tensor(None, 0, mesh, (Shard(0),))
        with pytest.raises(LayoutError, match="a tensor with 2 dims"):
            scatter_tensor(WHOLE, 0, mesh, (Shard(2),))
        with pytest.raises(LayoutError, match="no pending reduction"):
            scatter_tensor(WHOLE, 0, mesh, (Partial(),))

    ranks.run(check, mesh=(2,))


def test_all_ranks_get_the_weights_of_the_first(ranks):
    def check(mesh):
        torch.manual_seed(dist.get_rank())
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2, dtype=torch.float64))
        with torch.no_grad():
            model[1].running_mean.fill_(dist.get_rank())
            model[1].num_batches_tracked.fill_(dist.get_rank())
        names = [(name, value.data_ptr()) for name, value in model.state_dict().items()]
        assert sync_module_over_mesh(model, mesh) is model
        assert [(name, value.data_ptr()) for name, value in model.state_dict().items()] == names
        torch.manual_seed(0)
        first = nn.Linear(3, 4)
        assert torch.equal(model[0].weight, first.weight)
        assert model[1].running_mean.sum() == 0
        assert model[1].num_batches_tracked == 0
        assert all(type(parameter) is nn.Parameter for parameter in model.parameters())
        hooks = len(model._forward_hooks)
        sync_module_over_mesh(model, mesh)
        assert len(model._forward_hooks) == hooks

    ranks.run(check, mesh=(2, 2))


def test_weights_over_one_axis_of_a_mesh(ranks):
    def check(mesh):
        torch.manual_seed(dist.get_rank())
        layer = nn.Linear(2, 2)
        sync_module_over_mesh(layer, mesh["domain"])
        torch.manual_seed(2 * mesh.get_coordinate()[0])
        assert torch.equal(layer.weight, nn.Linear(2, 2).weight)

    ranks.run(check, mesh=(2, 2))


def test_modules_that_differ_are_refused_on_all_ranks(ranks):
    def check(mesh):
        width = 3 + mesh.get_local_rank()
        with pytest.raises(RankDisagreementError, match=r"\('0.weight', \(3, 2\)") as caught:
            sync_module_over_mesh(nn.Sequential(nn.Linear(2, width)), mesh)
        assert "(4, 2)" in str(caught.value)
        with pytest.raises(RankDisagreementError, match="None"):
            sync_module_over_mesh(nn.Linear(2, 2, bias=mesh.get_local_rank() == 0), mesh)

    ranks.run(check, mesh=(2,))


def test_init_mesh_among_running_ranks(ranks):
    def check(mesh):
        found = init_mesh((2, -1), ("data", "domain"), device_type="cpu")
        assert tuple(found.shape) == (2, 2)
        assert found.mesh_dim_names == ("data", "domain")
        assert init_mesh((-1,), ("domain",), device_type="cpu").size() == 4
        for shape, names in (((3,), ("domain",)), ((2, 3), ("data", "domain")), ((8, -1), ("data", "domain"))):
            with pytest.raises(LayoutError, match=r"does not fit 4 running rank"):
                init_mesh(shape, names, device_type="cpu")
        with pytest.raises(LayoutError, match=r"1 axes has 2 names.*give each axis one"):
            init_mesh((4,), ("data", "domain"), device_type="cpu")
        for mesh in (None, 2):
            with pytest.raises(LayoutError, match=f"needs a DeviceMesh, got {mesh}"):
                sync_module_over_mesh(torch.nn.Linear(1, 1), mesh)

    ranks.run(check, mesh=(4,))


def run_program(code, **environment):
    kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    kept |= {"OMP_NUM_THREADS": "1", **environment}
    return subprocess.run([sys.executable, "-c", code], env=kept, capture_output=True, text=True, timeout=90)


ONE_PROCESS = """
import torch, torch.distributed as dist
from torch import nn
from shardtensor import ShardTensor, Shard, init_mesh, scatter_tensor, sync_module_over_mesh
mesh = init_mesh((1, -1), ("data", "domain"), device_type="cpu")["domain"]
assert dist.get_world_size() == 1 and tuple(mesh.shape) == (1,)
model = sync_module_over_mesh(nn.Linear(3, 2), mesh)
x = scatter_tensor(torch.randn(5, 3), 0, mesh, (Shard(0),))
model(x).relu().sum().backward()
assert type(model.weight.grad) is torch.Tensor
try:
    init_mesh((2,), ("domain",), device_type="cpu")
except ValueError as error:
    print(error)
"""


def test_one_process_needs_no_launcher():
    done = run_program(ONE_PROCESS)
    assert done.returncode == 0, done.stderr
    assert "does not fit 1 running rank(s): start 2 (torchrun --nproc-per-node 2) or change the mesh" in done.stdout


def test_a_launcher_is_joined():
    code = (
        "import torch.distributed as dist; from shardtensor import init_mesh; "
        "mesh = init_mesh((-1,), ('domain',), device_type='cpu'); print(mesh.size(), dist.get_rank())"
    )
    done = run_program(code, RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["1", "0"]


def test_meshes_compare_by_their_ranks(ranks):
    def check(mesh):
        again = DeviceMesh("cpu", mesh.mesh, mesh_dim_names=mesh.mesh_dim_names)
        x = scatter_tensor(WHOLE if dist.get_rank() == 0 else None, 0, mesh, (Shard(0),))
        y = scatter_tensor(WHOLE if dist.get_rank() == 0 else None, 0, again, (Shard(0),))
        assert_close((x + y).full_tensor(), 2 * WHOLE, "sum")

    ranks.run(check, mesh=(2,))

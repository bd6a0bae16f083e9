"""Names, arguments and meaning that users of physicsnemo.domain_parallel know."""

from __future__ import annotations

import inspect

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import shardtensor
from shardtensor import ShardTensor, ShardTensorSpec, TensorPromotionMode, scatter_tensor, sync_module_over_mesh
from shardtensor.testing import assert_close, shard

WHOLE = torch.arange(7.0)


def parameters_of(function):
    return [name for name in inspect.signature(function).parameters if name != "self"]


def test_names_and_arguments():
    for name in ("ShardTensor", "ShardTensorSpec", "scatter_tensor", "sync_module_over_mesh", "TensorPromotionMode"):
        assert name in shardtensor.__all__
    known = {
        ShardTensor.from_local: ["local_tensor", "device_mesh", "placements", "sharding_shapes", "global_shape"],
        ShardTensor.to_local: ["grad_placements"],
        ShardTensor.full_tensor: ["grad_placements"],
        ShardTensor.redistribute: ["device_mesh", "placements", "async_op"],
        ShardTensor.offsets: ["mesh_dim"],
        ShardTensor.from_dtensor: ["dtensor"],
        ShardTensor.register_dispatch_handler: ["op", "handler"],
        ShardTensor.register_function_handler: ["func", "handler"],
        ShardTensor.register_named_function_handler: ["func_name", "handler"],
        ShardTensor.set_promotion_mode: ["mode"],
        ShardTensor.promotion_mode: ["mode"],
        ShardTensorSpec.offsets: ["mesh_dim"],
        ShardTensorSpec.sharding_shapes: ["mesh_dim"],
        scatter_tensor: ["tensor", "global_src", "mesh", "placements", "global_shape", "dtype", "requires_grad"],
        sync_module_over_mesh: ["module", "mesh"],
    }
    for function, names in known.items():
        found = parameters_of(function)
        assert [name for name in found if name in names] == names, function
    assert parameters_of(ShardTensor.__new__)[1:] == ["local_tensor", "spec", "requires_grad"]
    assert {mode.name: mode.value for mode in TensorPromotionMode} == {
        "DISABLED": "disabled",
        "WARN": "warn",
        "SILENT": "silent",
    }


def test_the_spec(ranks):
    def check(mesh):
        rank = mesh.get_local_rank()
        x = scatter_tensor(WHOLE.view(7, 1) if rank == 0 else None, 0, mesh, (Shard(0),))
        spec = x._spec
        assert spec.mesh == mesh
        assert spec.placements == (Shard(0),)
        assert spec.sharding_shapes() == {0: ((3, 1), (3, 1), (1, 1))}
        assert spec.sharding_shapes(mesh_dim=0) == ((3, 1), (3, 1), (1, 1))
        assert spec.tensor_meta.shape == torch.Size([7, 1])
        assert spec.tensor_meta.stride == (1, 1)
        assert spec.tensor_meta.dtype == torch.float32
        assert spec.local_shape == x._local_tensor.shape
        assert spec.offsets(mesh_dim=0) == x.offsets(0) == 3 * rank
        again = ShardTensor.from_local(x._local_tensor, mesh, [Shard(0)], sharding_shapes=spec.sharding_shapes())
        assert again._spec == spec
        made = ShardTensor(x._local_tensor, spec, requires_grad=True)
        assert made.requires_grad
        assert made.device_mesh == mesh
        assert isinstance(made, torch.Tensor)
        assert not isinstance(made, DTensor)

    ranks.run(check, mesh=(3,))


@pytest.fixture
def fresh_ranks(ranks):
    """Ranks whose tables a test may change: they are started anew afterwards."""
    yield ranks
    ranks.close()


def sharded_dot(func, types, args, kwargs):
    """The example of the ShardTensor talk, as it stands there."""
    x, y = args
    out = torch.dot(x.to_local(), y.to_local())  # each rank: its own piece
    dist.all_reduce(out, group=x._spec.mesh.get_group())  # sum over ranks
    return ShardTensor.from_local(out, x._spec.mesh, (Replicate(),))


def test_a_function_handler(fresh_ranks):
    def check(mesh):
        ShardTensor.register_function_handler(torch.dot, sharded_dot)
        x, y = (shard(WHOLE + k, mesh, {0: (0, (4, 1, 2))}, requires_grad=True) for k in (0, 1))
        out = torch.dot(x, y)
        assert out.placements == (Replicate(),)
        assert out.item() == torch.dot(WHOLE, WHOLE + 1).item()
        out.backward()
        assert_close(x.grad.full_tensor(), WHOLE + 1, "gradient")
        assert x.grad._spec == x._spec
        assert_close(torch.dot(WHOLE, WHOLE), (WHOLE**2).sum(), "plain tensors are left alone")

    fresh_ranks.run(check, mesh=(3,))


def test_handlers_get_plain_tensors_as_replicated(fresh_ranks):
    def check(mesh):
        seen = []

        def handler(func, types, args, kwargs):
            seen.extend([*args, *kwargs.values()])
            return func(*[a.to_local() for a in args])

        ShardTensor.register_function_handler(torch.hypot, handler)
        weight = torch.ones(7, requires_grad=True)
        x = shard(WHOLE, mesh, {})
        y = torch.hypot(x, weight)
        assert all(isinstance(value, ShardTensor) for value in seen)
        assert seen[1].placements == (Replicate(),)
        y.sum().backward()
        assert_close(weight.grad, 1 / torch.hypot(WHOLE, torch.ones(7)), "gradient")

    fresh_ranks.run(check, mesh=(2,))


def test_a_named_function_handler(fresh_ranks):
    def check(mesh):
        @torch.library.custom_op("shardtensor_tests::scaled", mutates_args=())
        def scaled(x: torch.Tensor, factor: float) -> torch.Tensor:
            return x * factor

        def handler(func, types, args, kwargs):
            x, factor = args
            return ShardTensor.from_local(func(x.to_local(), factor), x._spec.mesh, x._spec.placements)

        ShardTensor.register_named_function_handler("shardtensor_tests.scaled.default", handler)
        x = shard(WHOLE, mesh, {0: (0, (4, 1, 2))})
        for call in (scaled, torch.ops.shardtensor_tests.scaled, torch.ops.shardtensor_tests.scaled.default):
            y = call(x, 3.0)
            assert y.placements == (Shard(0),)
            assert_close(y.full_tensor(), 3 * WHOLE, "values")

    fresh_ranks.run(check, mesh=(3,))


def test_a_dispatch_handler(fresh_ranks):
    def check(mesh):
        from shardtensor.tensor import wrap

        aten = torch.ops.aten
        ShardTensor.register_dispatch_handler(
            aten.sinh.default, lambda x: wrap(aten.sinh.default(x._local_tensor) + 1, x._spec)
        )
        x = shard(WHOLE, mesh, {0: (0, (4, 1, 2))}, requires_grad=True)
        y = torch.sinh(x)
        assert_close(y.detach().full_tensor(), WHOLE.sinh() + 1, "values")
        y.sum().backward()  # autograd stands above the handler
        assert_close(x.grad.full_tensor(), WHOLE.cosh(), "gradient")

    fresh_ranks.run(check, mesh=(3,))


def test_the_training_script_of_the_talk(ranks):
    def check(mesh):
        torch.manual_seed(dist.get_rank())
        model = nn.Sequential(nn.Linear(3, 8), nn.GELU(), nn.Linear(8, 1))
        domain = mesh["domain"]
        sync_module_over_mesh(model, domain)
        model = nn.parallel.DistributedDataParallel(model, process_group=mesh["data"].get_group())
        src = dist.get_global_rank(domain.get_group(), 0)
        x = torch.randn(1, 5, 3)
        x = scatter_tensor(x, src, domain, placements=(Shard(1),), global_shape=x.shape, dtype=x.dtype)
        target = scatter_tensor(torch.zeros(1, 5, 1), src, domain, placements=(Replicate(),))
        nn.functional.mse_loss(model(x), target).backward()
        grads = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
        everyone = ShardTensor.from_local(grads[None], mesh, [Shard(0), Replicate()])  # checks that domains agree
        assert everyone.shape[0] == 2
        assert_close(everyone.full_tensor()[0], everyone.full_tensor()[1], "the same on all ranks")

    ranks.run(check, mesh=(2, 2))


def test_gradients_as_contributions(ranks):
    def check(mesh):
        x = shard(WHOLE, mesh, {}, requires_grad=True)
        local = x.to_local(grad_placements=[Partial()])
        (local * (1.0 if mesh.get_local_rank() == 0 else 0.5)).sum().backward()
        assert_close(x.grad.full_tensor(), torch.full((7,), 1.5), "gradient")

    ranks.run(check, mesh=(2,))

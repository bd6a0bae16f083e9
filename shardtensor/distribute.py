"""Set up the ranks, hand a tensor out to them, and give them the same weights."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from itertools import product, zip_longest
from math import prod

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from shardtensor import comm
from shardtensor.buckets import close_bucket, open_bucket
from shardtensor.comm.agree import gather_facts
from shardtensor.comm.scatter import broadcast_value, broadcast_values, scatter_blocks
from shardtensor.errors import LayoutError, RankDisagreementError
from shardtensor.infer import layout_like
from shardtensor.spec import DeviceMesh, Placement, ShardTensorSpec, mesh_sizes, replicate
from shardtensor.tensor import ShardTensor

__all__ = ["init_mesh", "scatter_tensor", "sync_module_over_mesh"]


def init_mesh(
    shape: Sequence[int],
    names: Sequence[str],
    *,
    device_type: str | None = None,
    timeout: timedelta = timedelta(minutes=5),
) -> DeviceMesh:
    """The device mesh of this run; starts ``torch.distributed`` where it is not running yet.

    Under ``torchrun`` (or any launcher that sets RANK and WORLD_SIZE) it joins the launched ranks; without one it is a
    run of one process.

    Args:
        shape: ranks per mesh axis, e.g. ``(data, domain)``; one entry may be -1: what is left of the world size.
        names: a name per axis; ``data`` (or ``ddp``, ``dp``) is the axis over which samples differ.
        device_type: "cuda" or "cpu"; default: "cuda" where there is one.
        timeout: after which a collective fails instead of waiting.

    Raises:
        LayoutError: the shape does not multiply to the number of ranks, or has not a name per axis.
    """
    if len(shape) != len(names):
        raise LayoutError(f"a mesh of {len(shape)} axes has {len(names)} names, {tuple(names)}: give each axis one")
    device_type = device_type or ("cuda" if torch.cuda.is_available() else "cpu")
    if device_type == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo"
        if dist.is_torchelastic_launched() or {"RANK", "WORLD_SIZE"} <= set(os.environ):
            dist.init_process_group(backend, timeout=timeout)
        else:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    world = dist.get_world_size()
    known = prod(ranks for ranks in shape if ranks != -1)
    shape = tuple(max(1, world // max(1, known)) if ranks == -1 else ranks for ranks in shape)
    if prod(shape) != world:
        raise LayoutError(
            f"a mesh of {' x '.join(map(str, shape))} ranks, axes {tuple(names)}, does not fit {world} running "
            f"rank(s): start {prod(shape)} (torchrun --nproc-per-node {prod(shape)}) or change the mesh"
        )
    return init_device_mesh(device_type, shape, mesh_dim_names=tuple(names))


def scatter_tensor(
    tensor: torch.Tensor | None,
    global_src: int,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    global_shape: Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
    requires_grad: bool = False,
) -> ShardTensor:
    """Hand the tensor of one rank out over the mesh; every rank is sent only its block.

    Args:
        tensor: the whole tensor on rank ``global_src``; ignored elsewhere, where it may be None.
        global_src: global rank of the source, one of the mesh.
        mesh: the ranks that share the tensor.
        placements: one per mesh axis; sharded dims are cut as ``torch.chunk`` does, empty last shards included.
        global_shape: shape of the whole tensor; with ``dtype``, saves telling the ranks.
        dtype: its dtype.
        requires_grad: whether the result is a leaf that requires grad.

    Raises:
        LayoutError: the source is not a rank of the mesh or has no tensor, or the placements do not fit.
    """
    where = (mesh.mesh == global_src).nonzero().tolist()
    if not where:
        raise LayoutError(f"global_src is {global_src!r}, which is not among the mesh's ranks {mesh.mesh.tolist()}")
    is_source = dist.get_rank() == global_src
    if global_shape is None or dtype is None:
        facts = None if tensor is None or not is_source else (tuple(tensor.shape), tensor.dtype)
        for axis in range(mesh.ndim):
            facts = broadcast_value(facts, where[0][axis], comm.group_of(mesh, axis))
        if facts is None:
            raise LayoutError(f"rank {global_src} is the source, but its tensor is None")
        global_shape, dtype = facts
    whole = ShardTensorSpec.of(mesh, replicate(mesh.ndim), global_shape, dtype)
    spec = whole.with_layout(layout_like(whole, placements))
    if spec.partial_axes:
        raise LayoutError(f"cannot scatter to {tuple(placements)}: a tensor handed out has no pending reduction")
    blocks = None
    if is_source:
        if tensor is None or tensor.shape != whole.shape or tensor.dtype != dtype:
            found = None if tensor is None else (tuple(tensor.shape), tensor.dtype)
            raise LayoutError(f"rank {global_src} holds {found}, but {tuple(global_shape)} {dtype} was announced")
        blocks = {int(mesh.mesh[at]): _block(tensor.detach(), spec, at) for at in _coordinates(mesh)}
    device = torch.device("cuda", torch.cuda.current_device()) if mesh.device_type == "cuda" else torch.device("cpu")
    group = comm.group_of(mesh, 0) if mesh.ndim == 1 else None
    local = scatter_blocks(blocks, spec.local_shape, dtype, device, global_src, group)
    return ShardTensor(local, spec, requires_grad=requires_grad)


def _coordinates(mesh: DeviceMesh) -> list[tuple[int, ...]]:
    return list(product(*(range(ranks) for ranks in mesh_sizes(mesh))))


def _block(tensor: torch.Tensor, spec: ShardTensorSpec, at: tuple[int, ...]) -> torch.Tensor:
    """The block of ``tensor`` that the rank at coordinate ``at`` holds."""
    for axis, cut in spec.cuts:
        tensor = tensor.narrow(cut.dim, sum(cut.sizes[: at[axis]]), cut.sizes[at[axis]])
    return tensor


def sync_module_over_mesh(module: torch.nn.Module, mesh: DeviceMesh) -> torch.nn.Module:
    """Give all ranks of the mesh the weights and buffers of its first rank.

    From then on the gradients of the module's weights travel together: one all-reduce per backward and dtype. Call it
    before ``DistributedDataParallel``.

    Args:
        module: the model, changed in place.
        mesh: the domain mesh: the ranks that share a sample.

    Returns:
        The module.

    Raises:
        RankDisagreementError: the ranks' modules have different parameters or buffers.
        LayoutError: that is no device mesh.
    """
    if not isinstance(mesh, DeviceMesh):
        raise LayoutError(f"sync_module_over_mesh needs a DeviceMesh, got {mesh!r}; make one with init_mesh")
    named = [*module.named_parameters(), *module.named_buffers()]
    plain = [(name, tensor) for name, tensor in named if not isinstance(tensor, DTensor | ShardTensor)]
    facts = gather_facts([(name, tuple(tensor.shape), tensor.dtype) for name, tensor in plain], mesh)
    first = next(iter(facts.values()))
    for at, found in facts.items():
        if found != first:
            odd = next((pair for pair in zip_longest(first, found) if pair[0] != pair[1]), None)
            raise RankDisagreementError(
                f"the module differs between ranks: the first rank has {odd and odd[0]} where the rank at mesh "
                f"coordinate {at} has {odd and odd[1]}. Build the same module on all ranks of the mesh"
            )
    for axis in range(mesh.ndim):
        broadcast_values([tensor for _, tensor in plain], 0, comm.group_of(mesh, axis))
    if open_bucket not in module._forward_pre_hooks.values():
        module.register_forward_pre_hook(open_bucket)
        module.register_forward_hook(close_bucket, always_call=True)
    return module

"""Every exchange against its adjoint, <A x, y> == <x, A* y>, and the plain result, on uneven and empty blocks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from shardtensor import comm
from shardtensor.comm.halo import pieces

SIZES = [(5, 3), (4, 0), (0, 6), (5, 1, 4), (4, 0, 3), (0, 0, 2)]


def _blocks(sizes, dim=1):
    """The whole tensor, the same on every rank, and its blocks."""
    shape = [2, 3]
    shape.insert(dim, sum(sizes))
    whole = torch.randn(shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    return whole, whole.split(sizes, dim)


def _mine(mesh):
    return comm.group_of(mesh, 0), mesh.get_local_rank()


def _noise(shape, rank):
    return torch.randn(shape, generator=torch.Generator().manual_seed(100 + rank), dtype=torch.float64)


def _dot(a, b):
    total = (a * b).sum()
    dist.all_reduce(total, group=_dot.group)
    return total.item()


def _check_adjoint(mesh, forward, adjoint, x):
    _dot.group = mesh.get_group()
    image = forward(x)
    y = _noise(image.shape, mesh.get_local_rank() + 50)
    left, right = _dot(image, y), _dot(x, adjoint(y))
    assert abs(left - right) <= 1e-10 * max(1.0, abs(left)), (left, right)


@pytest.mark.parametrize("sizes", SIZES)
def test_gather_and_reduce_scatter(ranks, sizes):
    def check(mesh):
        group, rank = _mine(mesh)
        whole, blocks = _blocks(sizes)
        assert torch.equal(comm.all_gather(blocks[rank], 1, sizes, group), whole)
        _check_adjoint(
            mesh,
            lambda x: comm.all_gather(x, 1, sizes, group),
            lambda y: comm.reduce_scatter(y, 1, sizes, group),
            _noise(blocks[rank].shape, rank),
        )

    ranks.run(check, mesh=(len(sizes),))


@pytest.mark.parametrize("sizes", SIZES)
def test_all_to_all(ranks, sizes):
    other = tuple(reversed(sizes))

    def check(mesh):
        group, rank = _mine(mesh)
        whole = torch.arange(2.0 * sum(sizes) * sum(other), dtype=torch.float64).view(2, sum(sizes), sum(other))
        mine = whole.split(sizes, 1)[rank]
        moved = comm.all_to_all(mine, 2, other, 1, sizes, group)
        assert torch.equal(moved, whole.split(other, 2)[rank])
        _check_adjoint(
            mesh,
            lambda x: comm.all_to_all(x, 2, other, 1, sizes, group),
            lambda y: comm.all_to_all(y, 1, sizes, 2, other, group),
            _noise(mine.shape, rank),
        )

    ranks.run(check, mesh=(len(sizes),))


@pytest.mark.parametrize("periodic", [False, True])
@pytest.mark.parametrize("width", [1, 3, 5])
@pytest.mark.parametrize("sizes", SIZES)
def test_halo_reaches_as_far_as_it_must(ranks, sizes, width, periodic):
    def check(mesh):
        group, rank = _mine(mesh)
        whole, blocks = _blocks(sizes)
        total, edge, windows = sum(sizes), 0, []
        for size in sizes:
            windows.append((edge - width, edge + size + width - 1))
            edge += size
        rows = torch.arange(*windows[rank])
        inside = (rows >= 0) & (rows < total)
        expected = whole[:, rows % total] if periodic else whole.new_full((2, len(rows), 3), -7.0)
        if not periodic:
            expected[:, inside] = whole[:, rows[inside]]
        found = comm.halo_exchange(blocks[rank], 1, sizes, windows, group, periodic=periodic, fill=-7.0)
        assert torch.equal(found, expected)
        _check_adjoint(
            mesh,
            lambda x: comm.halo_exchange(x, 1, sizes, windows, group, periodic=periodic),
            lambda y: comm.halo_reduce(y, 1, sizes, windows, group, periodic=periodic),
            _noise(blocks[rank].shape, rank),
        )

    ranks.run(check, mesh=(len(sizes),))


@pytest.mark.parametrize("shift", [1, -1, 2])
@pytest.mark.parametrize("sizes", [(5, 9, 2), (4, 0, 3), (3, 4)])
def test_ring_shift_with_uneven_blocks(ranks, sizes, shift):
    def check(mesh):
        group, rank = _mine(mesh)
        _, blocks = _blocks(sizes)
        world = len(sizes)
        came_from = blocks[(rank - shift) % world]
        assert torch.equal(comm.ring_shift(blocks[rank], came_from.shape, group, shift), came_from)
        _check_adjoint(
            mesh,
            lambda x: comm.ring_shift(x, came_from.shape, group, shift),
            lambda y: comm.ring_shift(y, blocks[rank].shape, group, -shift),
            _noise(blocks[rank].shape, rank),
        )

    ranks.run(check, mesh=(len(sizes),))


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.complex64, torch.int64, torch.bool]
)
def test_all_reduce_and_movement_keep_every_dtype(ranks, dtype):
    def check(mesh):
        group, rank = _mine(mesh)
        mine = torch.tensor([rank, 1, 0]).to(dtype)
        if dtype == torch.bool:
            assert comm.all_reduce(mine, "max", group).tolist() == [True, True, False]
        else:
            assert comm.all_reduce(mine, "sum", group).tolist() == [3, 3, 0]
        gathered = comm.all_gather(mine[: rank + 1], 0, (1, 2, 3), group)
        assert gathered.dtype == dtype
        assert gathered.shape == (6,)

    ranks.run(check, mesh=(3,))


def test_all_reduce_is_its_own_adjoint(ranks):
    def check(mesh):
        group, rank = _mine(mesh)
        _check_adjoint(
            mesh,
            lambda x: comm.all_reduce(x, "sum", group),
            lambda y: comm.all_reduce(y, "sum", group),
            _noise((4, 3), rank),
        )

    ranks.run(check, mesh=(3,))


def test_pieces_name_owner_and_place():
    assert pieces((3, 0, 2), -1, 6, periodic=True) == ((2, 1, 1, 0), (0, 0, 3, 1), (2, 0, 2, 4), (0, 0, 1, 6))
    assert pieces((3, 0, 2), -1, 6, periodic=False) == ((0, 0, 3, 1), (2, 0, 2, 4))
    assert pieces((3, 2), 9, 12, periodic=False) == ()

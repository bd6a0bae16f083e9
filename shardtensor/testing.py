"""Test sharded code against one process: ranks that stay up, and `assert_same_as_plain`.

def test_conv(ranks):  # the fixture of the pytest plugin
    ranks.same_as_plain(nn.Conv2d(3, 8, 3, padding=1), torch.randn(2, 3, 16, 9), dim=2, sizes=(5, 6, 5))
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from shardtensor.ranks import RankError, RankPool
from shardtensor.redistribute import redistribute_local
from shardtensor.spec import Cut, DeviceMesh, Layout, Replicate, ShardTensorSpec, even_sizes, replicate
from shardtensor.tensor import ShardTensor, wrap

__all__ = ["RankError", "Ranks", "assert_close", "assert_same_as_plain", "assert_spec_matches_block", "shard", "uneven"]

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def shard(
    tensor: torch.Tensor, mesh: DeviceMesh, cuts: dict[int, tuple[int, Sequence[int]]], *, requires_grad: bool = False
) -> ShardTensor:
    """Shard a tensor that every rank holds whole, without communication.

    Args:
        tensor: the whole tensor, the same on every rank.
        mesh: the ranks.
        cuts: by mesh axis: the dim it cuts and the rows of every rank, ``{0: (2, (5, 6, 5))}``.
        requires_grad: whether the result is a leaf that requires grad.
    """
    layout: Layout = tuple(
        Cut(cuts[axis][0] % tensor.dim(), tuple(cuts[axis][1])) if axis in cuts else Replicate()
        for axis in range(mesh.ndim)
    )
    whole = ShardTensorSpec.of(mesh, replicate(mesh.ndim), tensor.shape, tensor.dtype)
    local = redistribute_local(tensor.detach(), whole, layout).clone(memory_format=torch.contiguous_format)
    result = wrap(local, whole.with_layout(layout))
    return result.requires_grad_() if requires_grad else result  # type: ignore[return-value]


def assert_close(found: torch.Tensor, expected: torch.Tensor, what: str, rtol: float | None = None) -> None:
    """Same shape, dtype and values: the largest difference is at most ``rtol`` times the largest expected value.

    Default ``rtol``: 1e-12 for float64, 1e-5 for float32, 2e-2 for bfloat16; exact for integers and bools.
    """
    assert found.shape == expected.shape, f"{what}: shape {tuple(found.shape)}, expected {tuple(expected.shape)}"
    assert found.dtype == expected.dtype, f"{what}: dtype {found.dtype}, expected {expected.dtype}"
    if not expected.numel():
        return
    if not (expected.is_floating_point() or expected.is_complex()):
        assert torch.equal(found, expected), f"{what}: {int((found != expected).sum())} of {expected.numel()} differ"
        return
    same = (found == expected) | (found.isnan() & expected.isnan())
    scale = expected[expected.isfinite()].abs().max().item() if expected.isfinite().any() else 0.0
    error = torch.where(same, 0.0, (found - expected).abs().double()).max().item()
    limit = TOLERANCE.get(expected.dtype, TOLERANCE[torch.float32]) if rtol is None else rtol
    relative = error / max(scale, 1e-30)
    assert relative <= limit, f"{what}: off by {relative:.3e} of the largest value, {scale:.3e}; allowed {limit:.0e}"


def assert_spec_matches_block(tensor: torch.Tensor, what: str) -> None:
    """A sharded tensor whose block has the shape and dtype that its spec says."""
    assert isinstance(tensor, ShardTensor), f"{what} is a {type(tensor).__name__}, not a ShardTensor"
    spec, local = tensor._spec, tensor._local_tensor
    assert local.shape == spec.local_shape, f"{what}: block {tuple(local.shape)}, spec says {tuple(spec.local_shape)}"
    assert tensor.shape == spec.shape, f"{what}: wrapper {tuple(tensor.shape)}, spec {tuple(spec.shape)}"
    assert local.dtype == spec.dtype == tensor.dtype, f"{what}: dtypes {local.dtype}, {spec.dtype}, {tensor.dtype}"


def assert_same_as_plain(
    function: Callable[..., Any],
    inputs: Sequence[Any],
    mesh: DeviceMesh,
    cuts: Sequence[dict[int, tuple[int, Sequence[int]]] | None],
    *,
    rtol: float | None = None,
    gradients: bool = True,
    kwargs: dict[str, Any] | None = None,
) -> Any:
    """Run a function or module on sharded inputs and compare with the plain run: outputs and all gradients.

    Call it on every rank of the mesh with the same arguments (same seeds).

    Args:
        function: a function or ``nn.Module``; its parameters' gradients are compared too.
        inputs: whole tensors (floating ones get gradients) or other values.
        mesh: the ranks.
        cuts: for every input: how to shard it (see `shard`), or None to pass it plain.
        rtol: largest difference allowed, relative to the largest value; default by dtype, see `assert_close`.
        gradients: compare gradients of inputs and parameters.
        kwargs: passed on to the function.

    Returns:
        The sharded outputs.

    Raises:
        AssertionError: naming what differs and by how much.
    """
    kwargs = kwargs or {}
    plain_function, sharded_function = copy.deepcopy(function), copy.deepcopy(function)
    plain_in = [_leaf(value, gradients) for value in inputs]
    sharded_in = [
        shard(value, mesh, cut, requires_grad=gradients and value.is_floating_point())
        if isinstance(value, torch.Tensor) and cut is not None
        else _leaf(value, gradients)
        for value, cut in zip(inputs, cuts, strict=True)
    ]
    torch.manual_seed(0)
    expected = plain_function(*plain_in, **kwargs)
    torch.manual_seed(0)
    found = sharded_function(*sharded_in, **kwargs)
    pairs = list(zip(_tensors(found), _tensors(expected), strict=True))
    for place, (mine, right) in enumerate(pairs):
        if isinstance(mine, ShardTensor):
            assert_spec_matches_block(mine, f"output {place}")
        assert_close(_whole(mine), right.detach(), f"output {place}", rtol)
    if gradients:
        _backward([right for _, right in pairs])
        _backward([mine for mine, _ in pairs])
        for place, (mine, right) in enumerate(zip(sharded_in, plain_in, strict=True)):
            if isinstance(mine, torch.Tensor):
                _same_grad(mine, right, f"gradient of input {place}", rtol)
        if isinstance(plain_function, nn.Module) and isinstance(sharded_function, nn.Module):
            buffers = zip(sharded_function.named_buffers(), plain_function.buffers(), strict=True)
            for (name, mine), right in buffers:
                assert_close(_whole(mine), right, f"buffer {name}", rtol)
            weights = zip(sharded_function.named_parameters(), plain_function.parameters(), strict=True)
            for (name, mine), right in weights:
                assert type(mine.grad) in (torch.Tensor, type(None)), f"gradient of {name} is a {type(mine.grad)}"
                _same_grad(mine, right, f"gradient of {name}", rtol)
    return found


def _leaf(value: Any, gradients: bool) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().clone().requires_grad_(gradients and value.is_floating_point())


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    parts = list(value.values()) if isinstance(value, dict) else value
    return [item for part in parts for item in _tensors(part)] if isinstance(parts, list | tuple) else []


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, ShardTensor) else tensor).detach()


def _backward(outputs: list[torch.Tensor]) -> None:
    """Backward with a fixed random cotangent per output."""
    generator = torch.Generator().manual_seed(1)
    total = []
    for output in outputs:
        cotangent = torch.randn(output.shape, generator=generator, dtype=torch.float64).to(output.dtype)
        if output.requires_grad:
            total.append((output * cotangent).sum())
    if total:
        sum(total[1:], total[0]).backward()


def _same_grad(mine: torch.Tensor, right: torch.Tensor, what: str, rtol: float | None) -> None:
    if right.grad is None or mine.grad is None:
        assert right.grad is None or not right.grad.any(), f"{what} is missing"
        assert mine.grad is None or not _whole(mine.grad).any(), f"{what} should be None"
        return
    if isinstance(mine, ShardTensor):
        assert_spec_matches_block(mine.grad, what)
        assert mine.grad._spec.layout == mine._spec.layout, f"{what} lies as {mine.grad._spec.layout}"  # type: ignore[attr-defined]
    assert_close(_whole(mine.grad), right.grad, what, rtol)


class Ranks(RankPool):
    """Processes that stay up, run functions together and compare with one process; see `RankPool`."""

    def same_as_plain(
        self,
        function: Callable[..., Any],
        *inputs: Any,
        dim: int | None = None,
        sizes: Sequence[int] | None = None,
        cuts: Sequence[Any] | None = None,
        mesh: tuple[int, ...] | None = None,
        **options: Any,
    ) -> None:
        """`assert_same_as_plain` on the ranks.

        Give ``dim`` and ``sizes`` to cut every tensor input alike, or ``cuts``, one entry per input: None (plain),
        ``(dim, sizes)`` for a 1-D mesh, or a dict by mesh axis. The mesh follows from the sizes, or is given.
        """
        __tracebackhide__ = True
        if cuts is None:
            if dim is None or sizes is None:
                raise ValueError("same_as_plain needs dim and sizes, or cuts")
            cuts = [(dim, tuple(sizes)) if isinstance(value, torch.Tensor) else None for value in inputs]
        by_axis = [{0: cut} if isinstance(cut, tuple) else cut for cut in cuts]
        if mesh is None:
            mesh = (next(len(cut[0][1]) for cut in by_axis if cut is not None),)
        self.run(_same_on_rank, function, inputs, by_axis, options, mesh=mesh)


def _same_on_rank(mesh: DeviceMesh, function: Any, inputs: Any, cuts: Any, options: dict[str, Any]) -> None:
    assert_same_as_plain(function, inputs, mesh, cuts, **options)


def uneven(length: int, parts: int) -> tuple[int, ...]:
    """Sizes that are no even split: balanced ones with a row moved from the last rank to the first where possible."""
    sizes = list(even_sizes(length, parts))
    if parts > 1 and sizes[-1] > 1:
        sizes[0], sizes[-1] = sizes[0] + 1, sizes[-1] - 1
    return tuple(sizes)

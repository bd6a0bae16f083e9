"""``as_strided``: elements by their place in memory. Caught as a function, and made of a flat view and a row look-up.

Below autograd a block's memory is not the tensor's, so nothing else can be done there.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardtensor.errors import OpError
from shardtensor.registry import function_rule, rule
from shardtensor.tensor import ShardTensor, wrap

__all__ = ["as_strided"]

aten = torch.ops.aten


@function_rule(torch.as_strided, torch.Tensor.as_strided)
def as_strided(
    input: torch.Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> torch.Tensor:
    """As ``torch.as_strided``; unless it is the tensor as it lies, the result is a copy, cut along its first dim."""
    if tuple(size) == tuple(input.shape) and tuple(stride) == input.stride() and not storage_offset:
        return input.view(tuple(size))
    assert isinstance(input, ShardTensor)
    _check(input)
    order = sorted(range(input.dim()), key=lambda dim: -input.stride()[dim])
    places = torch.tensor(storage_offset or 0, device=input.device)
    for dim, (length, step) in enumerate(zip(size, stride, strict=True)):
        ones = [1] * (len(size) - dim - 1)
        places = places + (torch.arange(length, device=input.device) * step).view(-1, *ones)
    return input.permute(order).flatten()[places]


@rule(aten.as_strided.default)
def as_strided_below_autograd(
    self: ShardTensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> ShardTensor:
    """The tensor as it lies.

    Raises:
        OpError: anything else is asked for.
    """
    spec = self._spec
    if tuple(size) == tuple(spec.shape) and tuple(stride) == spec.tensor_meta.stride and not storage_offset:
        return wrap(aten.alias.default(self._local_tensor), spec)
    raise OpError(
        f"as_strided to size {tuple(size)}, stride {tuple(stride)} of a sharded tensor {tuple(spec.shape)}: a block's "
        f"memory is not the tensor's. Use view, permute, slices or indexing"
    )


def _check(tensor: ShardTensor) -> None:
    if not tensor._spec.is_dense:
        raise OpError(
            f"as_strided needs a tensor without repeated or skipped elements, got strides {tensor.stride()} for "
            f"{tuple(tensor.shape)}: call contiguous() first, or use view, permute and slices"
        )

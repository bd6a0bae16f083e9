"""Where exchanges become torch ops: one library, one way to define an op with its kernel and its fake."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _resolve_process_group

from shardtensor.comm.trace import record
from shardtensor.errors import CollectiveError

__all__ = ["LIBRARY", "as_bytes", "defined_op", "exchange", "finished", "group_of", "resolve", "with_length"]

LIBRARY = torch.library.Library("shardtensor", "DEF")

Kernel = TypeVar("Kernel", bound=Callable[..., Any])


def defined_op(schema: str, fake: Callable[..., Any]) -> Callable[[Kernel], Kernel]:
    """Define ``shardtensor::<schema>`` with the decorated kernel on every device and ``fake`` under tracing.

    ``Library.define`` costs about 2 us a call above the kernel; ``torch.library.custom_op`` about 15.
    """
    name = schema.split("(", 1)[0]

    def define(kernel: Kernel) -> Kernel:
        LIBRARY.define(schema)
        LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")
        torch.library.register_fake(f"shardtensor::{name}", fake, lib=LIBRARY)
        # A rank that has no use for what it receives must send all the same: no trace may drop an exchange.
        torch.fx.node.has_side_effect(getattr(torch.ops.shardtensor, name).default)
        return kernel

    return define


def group_of(mesh: DeviceMesh, axis: int) -> str:
    """Name of the process group of one mesh axis, as the ops below take it."""
    return mesh.get_group(axis).group_name


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes as one dim, in which every backend can send every dtype; a view where ``x`` is contiguous."""
    flat = x.resolve_conj().resolve_neg().flatten()
    if flat.stride(0) != 1:  # a column of a matrix; torch calls one of a single element contiguous, too
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8)


def with_length(x: torch.Tensor, dim: int, length: int) -> list[int]:
    """The shape of ``x`` with another length along ``dim``."""
    return [*x.shape[:dim], length, *x.shape[dim + 1 :]]


def finished(x: torch.Tensor) -> torch.Tensor:
    """``x`` itself, or what it becomes where it is the promise of a collective of torch's that still runs."""
    return x.wait() if isinstance(x, AsyncCollectiveTensor) else x


def resolve(group: str) -> tuple[dist.ProcessGroup, int, int]:
    """The process group of that name, this rank's place in it and its size."""
    found = _resolve_process_group(group)  # type: ignore[arg-type]
    return found, found.rank(), found.size()


@contextmanager
def exchange(name: str, group: dist.ProcessGroup, sent_bytes: int | None = None) -> Iterator[None]:
    """Name the exchange in whatever goes wrong inside; with ``sent_bytes`` also count it in the running traces."""
    if sent_bytes is not None:
        record(name, sent_bytes)
    try:
        yield
    except (RuntimeError, ValueError) as error:
        peers = dist.get_process_group_ranks(group)
        raise CollectiveError(
            f"{name} failed on rank {dist.get_rank()} of ranks {peers}: {error}. A rank of the group died, ran into "
            f"its own error (look at its output first), or did not reach this exchange within the timeout"
        ) from error

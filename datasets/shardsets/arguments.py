"""Arguments of the loader that make no sense are refused here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shardsets.errors import SampleError
from shardtensor.spec import DeviceMesh

__all__ = ["check_choices", "check_float", "check_mesh", "check_not_negative", "dims_of", "only_defaults"]


def check_not_negative(**arguments: float) -> None:
    """Raise SampleError for a number below 0."""
    for name, value in arguments.items():
        if value < 0:
            raise SampleError(f"{name} is {value}; it must be 0 or more")


def check_choices(**arguments: tuple[Any, tuple[str, ...]]) -> None:
    """Raise SampleError for a value that is none of those known: name=(value, known)."""
    for name, (value, known) in arguments.items():
        if value not in known:
            raise SampleError(f"{name} is {value!r}; use one of {', '.join(map(repr, known))}")


def check_float(on_bad: str, dtype: torch.dtype) -> None:
    """Raise SampleError if bad data shall become NaN in a dtype that has none."""
    if on_bad == "fill" and not dtype.is_floating_point:
        raise SampleError(f"on_bad='fill' puts NaN where data is bad, which {dtype} cannot hold: ask for a float dtype")


def check_mesh(mesh: Any) -> None:
    """Raise SampleError if that is no device mesh."""
    if not (mesh is None or isinstance(mesh, DeviceMesh)):
        raise SampleError(f"mesh is {mesh!r}; pass a DeviceMesh, as shardtensor.init_mesh makes it, or None")


def dims_of(names: str | Sequence[str]) -> tuple[str, ...]:
    """One dim, or several."""
    return (names,) if isinstance(names, str) else tuple(names)


def only_defaults(**arguments: Any) -> None:
    """Raise SampleError if choices from a store are made for a sample set; numbers of steps default to 1."""
    given = [name for name, value in arguments.items() if value not in (None, 1)]
    if given:
        raise SampleError(f"{given} choose from a store, but the source is a sample set: make those choices there")

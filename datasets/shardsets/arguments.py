"""Arguments of the loader that make no sense are refused here."""

from __future__ import annotations

from typing import Any

import torch

from shardsets.errors import SampleError

__all__ = ["check_choices", "check_float", "check_not_negative", "only_defaults"]


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


def only_defaults(**arguments: Any) -> None:
    """Raise SampleError if choices from a store are made for a sample set."""
    given = [name for name, value in arguments.items() if value is not None]
    if given:
        raise SampleError(f"{given} choose from a store, but the source is a sample set: make those choices there")

"""The op table: which rule serves which aten op, which handler serves which function. Add, find, print."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch._ops import OpOverload, OpOverloadPacket

from shardtensor.errors import ShardTensorError

__all__ = [
    "FUNCTIONS",
    "NAMED_FUNCTIONS",
    "RULES",
    "function_rule",
    "is_strict",
    "named_handler",
    "rule",
    "strict",
    "table",
]

Rule = Callable[..., Any]
Decorated = TypeVar("Decorated", bound=Rule)

RULES: dict[torch._ops.OpOverload, Rule] = {}
"""Rules by aten op. A rule has the op's own signature and is called below autograd."""

FUNCTIONS: dict[Callable[..., Any], Rule] = {}
"""Handlers ``(func, types, args, kwargs)`` by function, called above autograd, before the function decomposes."""

NAMED_FUNCTIONS: dict[str, Rule] = {}
"""Handlers like those of `FUNCTIONS`, found by ``str(func)``, for ops made with ``torch.library``."""


def rule(*ops: torch._ops.OpOverload) -> Callable[[Decorated], Decorated]:
    """Enter the decorated function as the rule of ``ops``.

    Raises:
        ShardTensorError: an op has a rule already.
    """

    def enter(function: Decorated) -> Decorated:
        for op in ops:
            if op in RULES:
                raise ShardTensorError(f"{op} has a rule already, in {RULES[op].__module__}: one op, one rule")
            RULES[op] = function
        return function

    return enter


def function_rule(*functions: Callable[..., Any]) -> Callable[[Decorated], Decorated]:
    """Enter the decorated function, of the same signature, in place of torch functions that decompose too early."""

    def enter(replacement: Decorated) -> Decorated:
        def handler(func: Rule, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return replacement(*args, **kwargs)

        handler.__module__ = replacement.__module__
        for function in functions:
            if function in FUNCTIONS:
                raise ShardTensorError(f"{function} has a handler already, in {FUNCTIONS[function].__module__}")
            FUNCTIONS[function] = handler
        return replacement

    return enter


def named_handler(func: Any) -> Rule | None:
    """The handler of an op made with ``torch.library``, called as op or as overload."""
    if isinstance(func, OpOverload):
        return NAMED_FUNCTIONS.get(str(func))
    return NAMED_FUNCTIONS.get(f"{func}.default") if isinstance(func, OpOverloadPacket) else None


_strict = 0


def is_strict() -> bool:
    """Whether an op without a rule raises."""
    return _strict > 0


@contextmanager
def strict() -> Iterator[None]:
    """Inside the block, an op without a rule raises `MissingRuleError` instead of running on gathered inputs."""
    global _strict
    _strict += 1
    try:
        yield
    finally:
        _strict -= 1


def table() -> str:
    """Every op that has a rule, with the module that holds it, as text."""
    rows = sorted((str(op), getattr(found, "__module__", "") or "") for op, found in RULES.items())
    return "\n".join(f"{name:<60} {module}" for name, module in rows)

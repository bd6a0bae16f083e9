"""Count what is sent: `comm_trace()` lists every exchange with its bytes and the op that asked for it."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

__all__ = ["CommTrace", "Sent", "comm_trace", "op_scope", "record", "running"]


@dataclass(frozen=True)
class Sent:
    """One exchange as seen by this rank: its name, the bytes this rank sent and the op it served."""

    exchange: str
    bytes: int
    op: str


@dataclass(eq=False)
class CommTrace:
    """Exchanges of this rank, in order."""

    sent: list[Sent] = field(default_factory=list)

    @property
    def total_bytes(self) -> int:
        """Bytes that this rank sent."""
        return sum(item.bytes for item in self.sent)

    def counts(self) -> dict[str, int]:
        """Number of exchanges by name."""
        return dict(Counter(item.exchange for item in self.sent))

    def __str__(self) -> str:
        rows = Counter((item.op, item.exchange) for item in self.sent)
        volume = Counter[tuple[str, str]]()
        for item in self.sent:
            volume[item.op, item.exchange] += item.bytes
        lines = [f"{op:<50} {name:<16} {count:>6} x {volume[op, name]:>14,} B" for (op, name), count in rows.items()]
        return "\n".join(lines) or "no exchange"


running: list[CommTrace] = []
"""The traces that are open, outermost first; shared by all threads, as backward may run in one of its own."""


class _Ops(threading.local):
    def __init__(self) -> None:
        self.stack: list[str] = []


_ops = _Ops()


def record(exchange: str, sent_bytes: int) -> None:
    """Add one exchange to the running traces."""
    if running:
        item = Sent(exchange, sent_bytes, _ops.stack[-1] if _ops.stack else "")
        for trace in running:
            trace.sent.append(item)


@contextmanager
def op_scope(op: str) -> Iterator[None]:
    """Name the op that the exchanges inside serve."""
    _ops.stack.append(op)
    try:
        yield
    finally:
        _ops.stack.pop()


@contextmanager
def comm_trace() -> Iterator[CommTrace]:
    """Record the exchanges of this rank inside the block, backward threads included.

    Example:
        >>> with comm_trace() as trace:
        ...     model(x).sum().backward()
        >>> print(trace)
    """
    trace = CommTrace()
    running.append(trace)
    try:
        yield trace
    finally:
        running.remove(trace)

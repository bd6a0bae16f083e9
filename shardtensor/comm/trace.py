"""Count what is sent: `comm_trace()` lists every exchange with its bytes and the op that asked for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

__all__ = ["CommTrace", "Sent", "comm_trace", "op_scope", "record", "tracing"]


@dataclass(frozen=True)
class Sent:
    """One exchange as seen by this rank: its name, the bytes this rank sent and the op it served."""

    exchange: str
    bytes: int
    op: str


@dataclass
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


_traces: list[CommTrace] = []
_op: list[str] = []


def tracing() -> bool:
    """Whether a `comm_trace` is running."""
    return bool(_traces)


def record(exchange: str, sent_bytes: int) -> None:
    """Add one exchange to the running traces."""
    if _traces:
        item = Sent(exchange, sent_bytes, _op[-1] if _op else "")
        for trace in _traces:
            trace.sent.append(item)


@contextmanager
def op_scope(op: str) -> Iterator[None]:
    """Name the op that the exchanges inside serve."""
    _op.append(op)
    try:
        yield
    finally:
        _op.pop()


@contextmanager
def comm_trace() -> Iterator[CommTrace]:
    """Record the exchanges of this rank inside the block, backward threads included.

    Example:
        >>> with comm_trace() as trace:
        ...     model(x).sum().backward()
        >>> print(trace)
    """
    trace = CommTrace()
    _traces.append(trace)
    try:
        yield trace
    finally:
        _traces.remove(trace)

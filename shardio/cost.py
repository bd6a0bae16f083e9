"""What reading an array takes each rank for itself, and together: a small model, with rates measured at start.

Own: the rank that must decode most needs `decode` seconds per byte for it. Together: each rank decodes its share,
copies what it needs of the others' from shared memory (`copy`) or gets it from another machine (`link`), and waits at a
step per round. `decode` is measured by reading one piece of the array on all ranks at the same time, from the store to
decoded values, so that fetching and the ranks' competition for cores are in it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from shardio.collective.exchange import Exchange
from shardio.collective.group import Group

COPIED = 8 << 20
"""Bytes that are copied to measure copying."""
SENT = 1 << 20
"""Bytes that are sent to each rank to measure sending between machines."""
LONG_S = 0.03
"""Seconds of a read that is long beside what a first read takes once."""
GAIN = 0.85
"""Part of the time that reading together may take to be chosen for its speed: handing out many chunks takes more than
the model knows."""
TIE = 1.2
"""Times as long that reading together may take where it saves what a whole rank decodes."""
BUDGET_S = 0.5
"""Seconds that measuring the arrays may take; those left over get the mean of the others."""


@dataclass(frozen=True)
class Rates:
    """Seconds per byte to copy and to send between machines, and seconds per step; those of the slowest rank."""

    copy: float
    link: float
    step: float


@dataclass(frozen=True)
class Work:
    """What the busiest rank does for one sample of an array.

    Attributes:
        own: bytes it decodes when each rank reads for itself.
        together: bytes it decodes when they share chunks.
        copied, sent: bytes it then takes from shared memory, and from other machines.
        rounds: rounds that takes.
        saved: bytes that all ranks together decode less when they share chunks.
    """

    own: int
    together: int
    copied: int
    sent: int
    rounds: int
    saved: int = 0


@dataclass(frozen=True)
class Choice:
    """How an array is read, and why.

    Attributes:
        read: "own" or "collective".
        why: the figures in words.
    """

    read: str
    why: str

    def __str__(self) -> str:
        return f"{self.read}: {self.why}"


def work(own: Sequence[int], exchange: Exchange, group: Group) -> Work:
    """The work of one array.

    Args:
        own: bytes that each member decodes when it reads for itself.
        exchange: who reads what when they share.
        group: the ranks.
    """
    copied, sent = [0] * group.size, [0] * group.size
    for unit in (unit for units in exchange.rounds for unit in units):
        itemsize = unit.nbytes // max(1, unit.elements)
        for at, member in enumerate(group.members):
            nbytes = sum(need.elements for need in unit.of(member.part)) * itemsize
            (copied if member.node == group.members[unit.owner].node else sent)[at] += nbytes
    return Work(
        own=max(own),
        together=max(exchange.decoded(member) for member in range(group.size)),
        copied=max(copied),
        sent=max(sent),
        rounds=len(exchange.rounds),
        saved=sum(own) - sum(exchange.decoded(member) for member in range(group.size)),
    )


def choose(work: Work, decode: float, rates: Rates) -> Choice:
    """The faster way, with its reason; of two that are about as fast, the one that leaves cores to others.

    Args:
        work: of one sample of the array.
        decode: seconds per decoded byte of this array.
        rates: see Rates.
    """
    own = work.own * decode
    steps = (work.rounds + 1) * rates.step
    together = work.together * decode + work.copied * rates.copy + work.sent * (rates.copy + rates.link) + steps
    tie = work.saved >= work.own and together < TIE * own  # a chunk for all ranks: one decodes, the others' cores rest
    read = "collective" if together < GAIN * own or tie else "own"
    sent = f" and {work.sent / 1e6:.3g} MB sent at {_speed(rates.link)}" if work.sent else ""
    return Choice(
        read,
        f"{together * 1e3:.3g} ms together (the busiest rank decodes {work.together / 1e6:.3g} MB at {_speed(decode)}, "
        f"{work.copied / 1e6:.3g} MB are copied at {_speed(rates.copy)}{sent}, {work.rounds + 1} steps of "
        f"{rates.step * 1e6:.3g} us) against {own * 1e3:.3g} ms own ({work.own / 1e6:.3g} MB)"
        + (f", and {work.saved / 1e6:.3g} MB less are decoded in all" if tie else ""),
    )


def measure_rates(group: Group) -> Rates:
    """Measure what does not depend on the array; all ranks of the group together."""
    source = np.ones(COPIED, np.uint8)
    target = np.empty_like(source)
    target[...] = source  # the first time, memory is taken
    group.step()
    copy = _timed(lambda: np.copyto(target, source)) / COPIED
    step = _timed(lambda: [group.step() for _ in range(8)]) / 8
    link = 0.0
    if group.channel is not None:
        outgoing = torch.zeros(SENT * group.size, dtype=torch.uint8)
        incoming = torch.empty_like(outgoing)
        channel = group.channel

        def send() -> None:
            channel.alltoall_base(incoming, outgoing, [], []).wait()  # type: ignore[attr-defined]

        send()
        link = _timed(send) / (SENT * group.size)
    said = [json.loads(text) for text in group.step(json.dumps([copy, link, step]))]
    return Rates(*(max(values) for values in zip(*said, strict=True)))


def measure_decoding(group: Group, reads: Sequence[Callable[[], int]]) -> list[float]:
    """Seconds per decoded byte of several arrays; the same on all ranks, which measure at the same time.

    Args:
        group: the ranks.
        reads: reads a piece of each array and returns the bytes decoded. What fails here fails again when it is read
            for good, so it is only left out.
    """
    began = time.monotonic()
    found: list[float | None] = []
    for read in reads:
        measured = _per_byte(read) if time.monotonic() - began < BUDGET_S else None
        found.append(None if measured is None else float(f"{measured:.3g}"))
    said = [json.loads(text) for text in group.step(json.dumps(found))]
    slowest = [
        max((value for value in values if value is not None), default=None) for values in zip(*said, strict=True)
    ]
    known = [value for value in slowest if value is not None]
    mean = sum(known) / len(known) if known else 1e-9
    return [mean if value is None else value for value in slowest]


def _per_byte(read: Callable[[], int]) -> float | None:
    """Of the second read, because the first opens files and takes memory; of the first if that took long."""
    try:
        for again in (True, False):
            began = time.perf_counter()
            nbytes = read()
            took = time.perf_counter() - began
            if not again or took > LONG_S:
                break
    except Exception:
        return None
    return took / nbytes if nbytes else None


def _timed(what: Callable[[], Any]) -> float:
    began = time.perf_counter()
    what()
    return time.perf_counter() - began


def _speed(seconds_per_byte: float) -> str:
    return f"{1e-9 / seconds_per_byte:.3g} GB/s" if seconds_per_byte else "no cost"

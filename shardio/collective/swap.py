"""What goes between machines in one round: each rank sends the others the parts that they need of what it has read."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch

from shardio.box import Box, Span, shape_of, slices
from shardio.collective.exchange import Unit
from shardio.collective.group import Group

Array = np.ndarray[Any, np.dtype[Any]]
Key = tuple[int, tuple[int, ...]]
Dtypes = Callable[[int], np.dtype[Any]]
Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Pieces = list[tuple[Box, Array]]
"""Boxes of an array with their stored values."""

MESSAGE = 1 << 30
"""Bytes of one message at most; gloo counts them in 32 bits."""


def swap(
    group: Group,
    units: Sequence[Unit],
    values: Callable[[Unit], Array],
    dtypes: Dtypes,
    *,
    message: int = MESSAGE,
) -> dict[Key, Pieces]:
    """Send and receive the parts of a round's units; returns what this rank needs of units read on other machines.

    Args:
        group: the ranks; all call this with the same units.
        units: those of the round.
        values: the stored values of a unit that this rank has read, of the shape of its box.
        dtypes: array number -> dtype of its stored values.
        message: bytes of one message.

    Raises RuntimeError where a message fails: the other rank has ended, or is late.
    """
    channel = group.channel
    if channel is None:
        return {}
    me, part = group.me, group.members[group.me].part
    far = [member for member in range(group.size) if not group.near(member)]
    outgoing = {at: _packed([u for u in units if u.owner == me], group.members[at].part, values, dtypes) for at in far}
    incoming = {at: np.empty(_size(units, at, part, dtypes), np.uint8) for at in far}
    work = [
        handle
        for at in far
        for handle in (
            *_messages(channel.recv, incoming[at], at, message),  # type: ignore[attr-defined]
            *_messages(channel.send, outgoing[at], at, message),  # type: ignore[attr-defined]
        )
    ]
    for handle in work:
        handle.wait(timedelta(seconds=group.timeout))
    return {unit.key: pieces for at in far for unit, pieces in _unpacked(units, at, part, incoming[at], dtypes)}


def _size(units: Iterable[Unit], owner: int, part: int, dtypes: Dtypes) -> int:
    """Bytes that one part gets from one owner."""
    return sum(
        math.prod(shape_of(box)) * dtypes(unit.array).itemsize
        for unit in units
        if unit.owner == owner
        for box in unit.boxes(part)
    )


def _messages(post: Callable[..., Any], buffer: Bytes, member: int, message: int) -> list[Any]:
    """Send or receive a buffer in messages of limited size."""
    parts = torch.from_numpy(buffer).split(message) if len(buffer) else ()
    return [post([part], member, number) for number, part in enumerate(parts)]


def _packed(units: Iterable[Unit], part: int, values: Callable[[Unit], Array], dtypes: Dtypes) -> Bytes:
    """All that one part needs of these units, one box after the other."""
    boxes = [(unit, box) for unit in units for box in unit.boxes(part)]
    sizes = [math.prod(shape_of(box)) * dtypes(unit.array).itemsize for unit, box in boxes]
    buffer, at = np.empty(sum(sizes), np.uint8), 0
    for (unit, box), size in zip(boxes, sizes, strict=True):
        into = buffer[at : at + size].view(dtypes(unit.array)).reshape(shape_of(box))
        into[...] = values(unit)[slices(within(box, unit.box))]
        at += size
    return buffer


def _unpacked(
    units: Iterable[Unit], owner: int, part: int, buffer: Bytes, dtypes: Dtypes
) -> Iterable[tuple[Unit, Pieces]]:
    at = 0
    for unit in units:
        if unit.owner != owner:
            continue
        pieces: Pieces = []
        for box in unit.boxes(part):
            size = math.prod(shape_of(box)) * dtypes(unit.array).itemsize
            pieces.append((box, buffer[at : at + size].view(dtypes(unit.array)).reshape(shape_of(box))))
            at += size
        yield unit, pieces


def within(box: Box, outer: Box) -> Box:
    """A box counted from another's corner."""
    return tuple(Span(a - first, z - first) for (a, z), (first, _) in zip(box, outer, strict=True))

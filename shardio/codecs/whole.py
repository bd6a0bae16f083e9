"""Chunks whose codecs cannot skip: fetched whole, decoded step by step in memory that is used again, the box copied."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from shardio.blocks import copy_stretch
from shardio.box import Box
from shardio.codecs.base import Array, Bytes, Counted, Extent, Pipeline, Share, fetched_whole, in_turn, scratch
from shardio.codecs.native import address
from shardio.errors import CorruptChunkError

Room = Callable[[], Bytes]


class Step(NamedTuple):
    """One codec.

    Attributes:
        decode: called with the stored bytes and a function that gives memory to decode into, of `nbytes`, all of which
            it must fill; gives the decoded bytes, there or elsewhere. Raises CorruptChunkError, ValueError or
            RuntimeError.
        nbytes: bytes that it decodes to; None if it only takes a checksum away, whatever the length.
        name: for errors.
    """

    decode: Callable[[Bytes, Room], Bytes]
    nbytes: int | None
    name: str


class WholePipeline(Pipeline):
    """A chunk behind codecs that decode all of it.

    Attributes:
        steps: the codecs in the order of decoding; the last gives the values.
        swap: the bytes of an element are not in native order.
    """

    def __init__(
        self,
        shape: Sequence[int],
        dtype: np.dtype[Any],
        steps: Sequence[Step],
        order: Sequence[int] | None = None,
        *,
        swap: bool = False,
    ) -> None:
        super().__init__(shape, dtype, order)
        self.steps = tuple(steps)
        self.swap = swap

    def block(self, extent: Extent) -> int | None:
        """See Pipeline.block."""
        return 0

    def read(self, extent: Extent, box: Box, out: Array, share: Share = in_turn) -> Counted | None:
        """See Pipeline.read."""
        stored = fetched_whole(extent, max(self.nbytes, *(step.nbytes or 0 for step in self.steps)))
        if stored is None:
            return None
        size = len(stored)
        box, out, shape = self.stored(box, out)
        place = out.reshape(-1).view(np.uint8) if box == self._everything and out.flags.c_contiguous else None
        data = stored
        for at, step in enumerate(self.steps, start=1):
            room: Room = partial(scratch, f"step {at % 2}", step.nbytes or 0)
            if at == len(self.steps) and place is not None:
                room = partial(np.asarray, place)
            try:
                data = step.decode(data, room)
            except (CorruptChunkError, ValueError, RuntimeError) as error:
                raise CorruptChunkError(f"{step.name}: {error}") from error
            if step.nbytes is not None and len(data) != step.nbytes:
                raise CorruptChunkError(f"{step.name} decodes {len(data)} bytes; expected are {step.nbytes}")
        if place is None or address(data) != address(place):
            copy_stretch(data.view(self.dtype), 0, shape, box, out)
        if self.swap:
            out.byteswap(inplace=True)
        return Counted(self.nbytes, size)

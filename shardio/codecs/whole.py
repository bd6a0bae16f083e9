"""Chunks whose codecs cannot skip: fetched whole, decoded step by step in memory that is used again, the box copied."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from shardio.blocks import copy_stretch
from shardio.box import Box, whole
from shardio.codecs.base import Array, Bytes, Counted, Extent, Pipeline, Share, in_turn, scratch
from shardio.errors import CorruptChunkError

TOO_LARGE = 1 << 20
"""Stored bytes that a chunk has at most beyond those of its values; what is larger was not written by any codec."""


class Step(NamedTuple):
    """One codec: decodes `stored` into `into`, of which it must fill all; raises CorruptChunkError or ValueError.

    Attributes:
        decode: called with (stored, into), both contiguous bytes.
        nbytes: bytes that it decodes to.
        name: for errors.
    """

    decode: Callable[[Bytes, Bytes], None]
    nbytes: int
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
        size = extent.store.size(extent.key) if extent.stop is None else extent.stop
        if size is None:
            return None
        size -= extent.start
        if size > 2 * max(self.nbytes, *(step.nbytes for step in self.steps)) + TOO_LARGE:
            raise CorruptChunkError(f"it has {size} bytes, but decoded only {self.nbytes}")
        stored = scratch("stored", size)
        if not extent.store.read_into(extent.key, extent.start, stored.data):
            return None
        box, out, shape = self.stored(box, out)
        direct = box == whole(shape) and out.flags.c_contiguous
        values = out.reshape(-1).view(np.uint8) if direct else scratch("values", self.nbytes)
        data = stored
        for at, step in enumerate(self.steps):
            last = at == len(self.steps) - 1
            into = values if last else scratch(f"step {at % 2}", step.nbytes)
            try:
                step.decode(data, into)
            except (CorruptChunkError, ValueError, RuntimeError) as error:
                raise CorruptChunkError(f"{step.name}: {error}") from error
            data = into
        if not direct:
            copy_stretch(values.view(self.dtype), 0, shape, box, out)
        if self.swap:
            out.byteswap(inplace=True)
        return Counted(self.nbytes, size)

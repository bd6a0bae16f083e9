"""Bytes stored as all first bytes of the elements, all second bytes, ...: put together again, by blosc's vector code.

numcodecs does not export blosc's unshuffling, but to decode a blosc buffer whose one block is stored as it is does just
that.
"""

from __future__ import annotations

import struct

import numpy as np

from shardio.blocks import stretches
from shardio.box import Box, slices, whole
from shardio.codecs import native
from shardio.codecs.base import Array, Bytes, scratch

HEADER = struct.Struct("<4B5I")
"""Version and flags, element size; bytes decoded, of a block, stored; where the block begins, its stored bytes."""
FLAGS = 0x31
"""Shuffled, of lz4, not split."""
PIECE = 1 << 20
"""Bytes put together by one call."""
COPIED = 256 << 10
"""The same where the planes must be brought together first; more would not stay in a core's cache."""
APART = 1024
"""Where in a page the planes begin; see shardio.aligned, whose trap memcpy falls into, too."""
SHORT = 16 << 10
"""Bytes of a stretch below which a call costs more than it saves."""


def room(nbytes: int) -> Bytes | None:
    """Memory of this thread from which `unshuffle` takes planes without copying them; None if they are too many."""
    return scratch("planes", APART + PIECE)[APART : APART + nbytes] if nbytes <= PIECE else None


def unshuffle(planes: Bytes, box: Box, out: Array, *, swapped: bool = False) -> None:
    """Put the bytes of a box of a chunk together.

    Args:
        planes: first bytes of all elements, second bytes, ...: [itemsize, *shape of the chunk].
        box: the elements wanted.
        out: where they go, [*shape of the box].
        swapped: the stored byte order is not this machine's.
    """
    width, shape = len(planes), planes.shape[1:]
    if width > 255:  # more than a blosc header can say
        out[..., None].view(np.uint8)[...] = np.moveaxis(
            planes[(slice(None, None, -1 if swapped else 1), *slices(box))], 0, -1
        )
        return
    starts, size, along = stretches(box, shape)
    if size * width < SHORT or not native.available() or not out[(0,) * along].flags.c_contiguous:
        parts = out[..., None].view(np.uint8)
        for at, plane in enumerate(planes):
            parts[..., width - 1 - at if swapped else at] = plane[slices(box)]
        return
    mine = room(planes.nbytes)
    if mine is not None and native.address(mine) == native.address(planes):
        if box == whole(shape) and out.flags.c_contiguous and not swapped:
            _piece(width, planes.nbytes, out.reshape(-1).view(np.uint8))
            return
        planes = planes.copy()  # its memory is needed
    flat = planes.reshape(width, -1)[:: -1 if swapped else 1]
    outer = np.ndindex(*(span.size for span in box[:along]))
    for start, index in zip(starts.tolist(), outer, strict=True):
        _stretch(flat, start, np.asarray(out[index]).reshape(-1))


def _stretch(planes: Bytes, start: int, out: Array) -> None:
    """Put elements from number `start` on together, as many as `out` holds."""
    width = len(planes)
    most = COPIED // width
    buffer = scratch("planes", APART + PIECE)[APART:]
    into = out.view(np.uint8)
    for first in range(0, len(out), most):
        count = min(most, len(out) - first)
        nbytes = count * width
        buffer[:nbytes].reshape(width, count)[...] = planes[:, start + first : start + first + count]
        _piece(width, nbytes, into[first * width : first * width + nbytes])


def _piece(width: int, nbytes: int, into: Bytes) -> None:
    """Put together what lies in this thread's room."""
    frame = scratch("planes", APART + PIECE)[APART - HEADER.size : APART + nbytes]
    HEADER.pack_into(frame.data, 0, 2, 1, FLAGS, width, nbytes, nbytes, len(frame), HEADER.size - 4, nbytes)
    native.blosc(frame, into)

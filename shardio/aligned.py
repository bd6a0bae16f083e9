"""Memory to read files into, placed where the kernel copies to it fast.

On Zen 3 and Zen 4 the processor's string copy, by which Linux fills a buffer from the page cache, is five times slower
where the address lies 1 to 31 bytes further into its page than the file's bytes do into theirs; which is just where
malloc, and so numpy, puts large arrays. With address and offset equal modulo 64 it never happens.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

PAGE, LINE = 4096, 64


def empty_bytes(nbytes: int, offset: int = 0) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Uninitialised bytes, [nbytes], to be filled from byte `offset` of a file."""
    buffer = np.empty(nbytes + PAGE + LINE, np.uint8)
    start = -buffer.ctypes.data % PAGE + offset % LINE
    return buffer[start : start + nbytes]


def empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """An uninitialised array, to be filled from the first byte of a page of a file."""
    if dtype.hasobject or dtype.kind not in "iufcb":
        return np.empty(shape, dtype)
    return empty_bytes(math.prod(shape) * dtype.itemsize).view(dtype).reshape(shape)

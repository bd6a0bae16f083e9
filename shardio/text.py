"""Names stored as text: fixed or variable length, bytes or unicode, objects or arrays of characters, all alike."""

from __future__ import annotations

from typing import Any

import numpy as np

from shardio.errors import DecodeError
from shardio.source import Source


def strings(source: Source) -> list[str]:
    """The texts of a 1-D array (or of a 2-D one of single characters), trailing blanks and zeros removed.

    Raises DecodeError if the array holds no text.
    """
    values = source.read()
    if values.ndim == 2 and values.dtype.kind in "SU" and values.dtype.itemsize in (1, 4):
        values = np.array(["".join(map(_text, row)) for row in values], dtype=object)
    if values.ndim > 1 or values.dtype.kind not in "SUOT":
        raise DecodeError(
            f"{source.name!r} is {values.dtype} with dims {source.dims}; one dim of texts is needed to read names"
        )
    return [_text(value).rstrip("\0 ") for value in np.atleast_1d(values)]


def _text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)

"""What tells the entries of a dim apart: the values of its coordinate (500, 850), or its texts ("u10m", "t2m")."""

from __future__ import annotations

from shardio.cf import decoded
from shardio.roles import coordinate
from shardio.source import Store
from shardio.text import strings


def labels(store: Store, dim: str, size: int) -> list[str] | None:
    """One text for each of the `size` entries of a dim; None if the store has no coordinate for it.

    Raises ReadError, DecodeError if it cannot be read or decoded.
    """
    found = coordinate(store, dim, size) or store.get(dim)  # texts of single characters are 2-D
    if found is None or found.dims[:1] != (dim,) or found.shape[0] != size:
        return None
    if found.dtype.kind in "iuf" and len(found.shape) == 1:
        values = decoded(found)
        texts = [f"{value:g}" for value in values]
        return texts if len(set(texts)) == len(texts) else [f"{value:.17g}" for value in values]
    return strings(found) if found.dtype.kind in "SUOT" else None

"""Balanced cut: sizes differ by at most one row, the larger ones first (721 over 4 are 181, 180, 180, 180)."""

from __future__ import annotations

from shardio.errors import PartitionError


def even(size: int, parts: int, chunk: int = 1) -> tuple[int, ...]:
    """Rows of each of `parts` ranks, out of `size` rows; `chunk` plays no part.

    Raises PartitionError if there are more ranks than rows.
    """
    if parts < 1:
        raise PartitionError(f"{parts} parts asked for; at least 1 is needed")
    if parts > size:
        raise PartitionError(f"{size} rows cannot be cut over {parts} ranks: a rank would have none; use fewer ranks")
    base, extra = divmod(size, parts)
    return tuple(base + (part < extra) for part in range(parts))

"""Cut into the sizes that the caller names."""

from __future__ import annotations

from collections.abc import Sequence

from shardio.errors import PartitionError


def explicit(size: int, sizes: Sequence[int], parts: int | None = None) -> tuple[int, ...]:
    """The given sizes, checked: none negative, their sum `size`, and (if said) one for each of `parts` ranks."""
    sizes = tuple(int(rows) for rows in sizes)
    if parts is not None and len(sizes) != parts:
        raise PartitionError(f"{len(sizes)} sizes {sizes} were given for {parts} ranks; give one size per rank")
    if any(rows < 0 for rows in sizes):
        raise PartitionError(f"sizes {sizes} hold a negative one; sizes are numbers of rows")
    if sum(sizes) != size:
        raise PartitionError(f"sizes {sizes} hold {sum(sizes)} rows, but the dimension has {size}; they must add up")
    return sizes

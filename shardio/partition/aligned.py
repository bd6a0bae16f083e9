"""Cut at chunk boundaries only, as balanced as they allow, so that no chunk is decoded by two ranks."""

from __future__ import annotations

from shardio.errors import PartitionError
from shardio.partition.even import even


def aligned(size: int, parts: int, chunk: int) -> tuple[int, ...]:
    """Rows of each of `parts` ranks, out of `size` rows stored in chunks of `chunk` rows; the largest is minimal.

    Raises PartitionError if there are fewer chunks than ranks.
    """
    if chunk < 1:
        raise PartitionError(f"chunks of {chunk} rows; at least 1 is needed")
    chunks = -(-size // chunk)
    if chunks < parts:
        raise PartitionError(
            f"{size} rows in {chunks} chunks of {chunk} cannot be cut at chunk boundaries over {parts} ranks; "
            f"use partition='even', or fewer ranks"
        )
    # The ranks with one chunk more come last, where the short last chunk makes up for it.
    sizes = [count * chunk for count in reversed(even(chunks, parts))]
    sizes[-1] -= chunks * chunk - size
    return tuple(sizes)

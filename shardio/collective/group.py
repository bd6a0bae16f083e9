"""The ranks that share samples, and the steps they take together."""

from __future__ import annotations

from typing import Self

from torch.distributed.device_mesh import DeviceMesh

TIMEOUT_S = 300.0


class Group:
    """The ranks that share samples: all of the mesh it was made of."""

    size: int

    @classmethod
    def join(cls, mesh: DeviceMesh, part: int, *, timeout: float = TIMEOUT_S, node: str | None = None) -> Self:
        """Join the ranks of a mesh; called by all of them at the same point, on the main thread.

        Args:
            mesh: the ranks that share samples (`Placement.domain`: every axis but the data axis).
            part: this rank's number in the partition (`Placement.rank`); ranks that hold copies have the same.
            timeout: seconds that the ranks wait for a slow one.
            node: name of this rank's machine, by default found out; ranks of one machine share memory.
        """
        raise NotImplementedError

    def begin(self, sequence: int) -> None:
        """Start a sequence of reads (an iteration over the loader) with a number that was not used before.

        Called on every rank at the same point of the program, while no read runs; no communication.
        """

    def cancel(self) -> None:
        """End the running sequence: a read that waits for other ranks here or there ends with ReadCancelledError.

        Called from any thread, when the iteration ends early; afterwards `begin` the next one.
        """

    def close(self) -> None:
        """Leave the group. The loader that joined it closes it, after its reader."""

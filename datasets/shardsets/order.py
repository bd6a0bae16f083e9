"""Which samples come when: a pure function of (seed, epoch), the same for every number of ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardsets.errors import SampleError

__all__ = ["Order"]


@dataclass(frozen=True)
class Order:
    """The order of one data set, dealt to data groups.

    Every step takes the next ``groups * batch_size`` samples of the epoch's order, ``batch_size`` for each group in
    turn. What has been seen after k steps is therefore a prefix of the order, whatever the number of groups.

    Attributes:
        samples: number of samples.
        groups: data groups, each of which gets samples of its own.
        batch_size: samples per group and step.
        shuffle: a new permutation every epoch; otherwise 0, 1, 2, ...
        seed: of the permutations.
        drop_last: leave out what does not fill a whole step; otherwise the last step is smaller, and where it cannot
            be dealt evenly it starts over with the epoch's first samples.
    """

    samples: int
    groups: int
    batch_size: int
    shuffle: bool
    seed: int
    drop_last: bool

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise SampleError(f"batch_size is {self.batch_size}; it must be 1 or more")
        if self.samples < 1:
            raise SampleError("the data set has no sample")
        if self.drop_last and self.samples < self.step:
            raise SampleError(
                f"{self.groups} data group(s) x batch_size {self.batch_size} need {self.step} samples a step, but the "
                f"data set has {self.samples} and drop_last=True would leave no batch: take a smaller batch_size or "
                f"drop_last=False"
            )

    def state(self, epoch: int, consumed: int) -> dict[str, Any]:
        """What `check` accepts: where a loader stands after so many samples of an epoch."""
        return {
            "epoch": epoch,
            "consumed": consumed,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "samples": self.samples,
        }

    def check(self, state: Mapping[str, Any]) -> None:
        """Raise SampleError if a saved state is not of this order: what it says was seen would be something else."""
        missing = [name for name in ("epoch", "consumed", "seed", "samples") if name not in state]
        if missing:
            raise SampleError(f"this is no state of a loader: it has no {missing}, only {sorted(state)}")
        for name in ("seed", "samples", "shuffle"):
            own = getattr(self, name)
            if state.get(name, own) != own:
                raise SampleError(
                    f"the state was saved with {name} {state[name]}, this loader has {own}: the order would differ"
                )
        if not 0 <= state["consumed"] <= self.samples or state["epoch"] < 0:
            raise SampleError(
                f"the state says epoch {state['epoch']} and {state['consumed']} samples seen, of {self.samples}; it is "
                f"damaged"
            )

    @property
    def step(self) -> int:
        """Samples of one step, all groups together."""
        return self.groups * self.batch_size

    def epoch(self, epoch: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """All samples in the order of that epoch."""
        if not self.shuffle:
            return np.arange(self.samples)
        generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence((self.seed, epoch))))
        return generator.permutation(self.samples)

    def steps(self, consumed: int = 0) -> int:
        """Steps of an epoch that are left once ``consumed`` samples were seen; the same for all groups."""
        left = max(0, self.samples - consumed)
        return left // self.step if self.drop_last else -(-left // self.step)

    def batches(self, epoch: int, consumed: int, group: int) -> list[list[int]]:
        """The samples of one group in every step of an epoch that is left once ``consumed`` samples were seen."""
        order, steps = self.epoch(epoch), self.steps(consumed)
        full = min(steps, (self.samples - consumed) // self.step)
        dealt = order[consumed : consumed + full * self.step].reshape(full, self.groups, self.batch_size)[:, group]
        rest = [self.batch(order, consumed + step * self.step, group) for step in range(full, steps)]
        return [*dealt.tolist(), *rest]

    def batch(self, order: np.ndarray[tuple[int], np.dtype[np.int64]], consumed: int, group: int) -> list[int]:
        """The samples of one group in the step that follows ``consumed`` samples."""
        taken = order[consumed : consumed + self.step]
        share = -(-len(taken) // self.groups)
        places = np.arange(group * share, (group + 1) * share)
        # Only the last step of an epoch can fall short: then it starts over with the first samples.
        short = places >= len(taken)
        return [
            int(order[(place - len(taken)) % len(order)] if over else taken[place])
            for place, over in zip(places, short, strict=True)
        ]

"""What all ranks do about bad data in the same step: raise, skip or fill; and the books about it."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from shardsets.agreement import Agreement
from shardsets.bad import BadData, OnBad, Skipped, reason_of
from shardsets.batches import FIELDS, Batch, Batches
from shardsets.placement import Placement
from shardsets.samples import SampleSet
from shardtensor import CollectiveError
from shardtensor.comm import totals

__all__ = ["Judge"]

FINE, FILLED, BAD, FAILED = range(4)
LISTED = 1000
"""How many cases the report lists one by one; further ones are only counted."""
LOGGED = 10
DESCRIBED = 3
"""How many samples of a step an error finds in their files."""

log = logging.getLogger("shardsets")


@dataclass
class Judge:
    """Decides with all ranks what becomes of a step.

    Attributes:
        on_bad: what the user wants.
        ranks: all ranks.
        samples, here: the data set and this rank's part.
        batches: what made the batches.
        skipped, filled: the first cases of each.
        skips, fills: how many there were.
    """

    on_bad: OnBad
    ranks: Agreement
    samples: SampleSet
    here: Placement
    batches: Batches
    skipped: list[Skipped] = field(default_factory=list)
    filled: list[BadData] = field(default_factory=list)
    skips: int = 0
    fills: int = 0

    def use(self, batch: Batch, epoch: int, samples: Sequence[int]) -> bool:
        """Whether all ranks use the step, or all leave it out; called by all of them.

        Args:
            batch: this rank's.
            epoch, samples: of the step, all data groups together.

        Raises:
            the batch's error, or BatchError naming the ranks that have one: it is no bad data, or on_bad is "raise".
        """
        use = self._agreed(batch.error, batch.bad, epoch, samples)
        if not use or self.batches.finite.limit == 1:
            return use
        cells = math.prod(self.samples.sizes[dim] for dim in self.samples.spatial)
        beyond = self.batches.beyond(batch, self._nonfinite(batch), cells)
        error = beyond[0][1] if beyond and self.on_bad != "fill" else None
        return self._agreed(error, [bad for bad, _ in beyond], epoch, samples)

    def _nonfinite(self, batch: Batch) -> dict[str, torch.Tensor]:
        """`Batch.nonfinite` of all ranks that share the samples together."""
        if self.here.domain is None:
            return batch.nonfinite
        mine = torch.cat([batch.nonfinite[name].flatten() for name in FIELDS]) * int(self.here.counted)
        sizes = [batch.nonfinite[name].numel() for name in FIELDS]
        with self.ranks.naming():
            parts = torch.tensor(totals(mine.tolist(), self.here.domain)).split(sizes)
        return {name: part.view_as(batch.nonfinite[name]) for name, part in zip(FIELDS, parts, strict=True)}

    def _agreed(self, error: Exception | None, bad: Sequence[BadData], epoch: int, samples: Sequence[int]) -> bool:
        skippable = self.on_bad == "skip" and (error is None or reason_of(error) is not None)
        grade = FINE if error is None and not bad else FILLED if error is None else BAD if skippable else FAILED
        try:
            worst = self.ranks.worst(grade)
        except CollectiveError as lost:
            failed = error or lost
            failed.add_note(f"in {_step(epoch, samples)}, rank {self.ranks.rank}: {self._files(samples)}")
            raise failed from (lost if error else lost.__cause__)
        if worst == FINE:
            return True
        if worst == FAILED:
            step = _step(epoch, samples)
            if error is not None:
                error.add_note(f"{step}, rank {self.ranks.rank}")
            self.ranks.fail(f"{step} could not be read", error)
        every = [item for said in self.ranks.facts(tuple(bad)).values() for item in said]
        told = tuple(dict.fromkeys(every))  # ranks that share the reading say the same
        if worst == FILLED:
            self._note_filled(told)
        else:
            self._note_skipped(Skipped(epoch, tuple(samples), told))
        return worst == FILLED

    def _files(self, samples: Sequence[int]) -> str:
        """Words that find the samples of a step in their files."""
        told = [self.batches.reader.describe(sample) for sample in samples[:DESCRIBED]]
        return "; ".join([*told, "..."] if len(samples) > DESCRIBED else told)

    def _note_filled(self, told: Sequence[BadData]) -> None:
        self._log("filled", self.fills, [str(bad) for bad in told])
        self.filled += told[: max(0, LISTED - len(self.filled))]
        self.fills += len(told)

    def _note_skipped(self, step: Skipped) -> None:
        self._log("skipped", self.skips, [f"samples {list(step.samples)}, because of {step.because[0]}"])
        if len(self.skipped) < LISTED:
            self.skipped.append(step)
        self.skips += 1

    def _log(self, what: str, before: int, lines: Sequence[str]) -> None:
        if self.ranks.rank:
            return
        for number, line in enumerate(lines, before):
            if number < LOGGED:
                log.warning("%s: %s", what, line)
            elif number == LOGGED:
                log.warning("more is %s; loader.report() tells what", what)


def _step(epoch: int, samples: Sequence[int]) -> str:
    return f"the step of samples {list(samples)} in epoch {epoch}"

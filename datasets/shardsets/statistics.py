"""Mean and standard deviation per channel: given by the user, or computed once by all ranks together."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shardsets.agreement import Agreement
from shardsets.errors import SampleError
from shardsets.grid import GridSamples
from shardsets.placement import Placement
from shardsets.samples import SampleSet

__all__ = ["ChannelStatistics", "Moments", "agreed_statistics", "given_statistics"]


@dataclass(frozen=True)
class ChannelStatistics:
    """Mean and standard deviation of every channel of one step, in the units of the data.

    Attributes:
        channels: their names.
        mean, std: one value per channel.
    """

    channels: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __post_init__(self) -> None:
        bad = [name for name, m, s in zip(self.channels, self.mean, self.std, strict=True) if not math.isfinite(m + s)]
        if bad:
            raise SampleError(f"statistics of {bad} are not finite: those channels hold no values, or infinite ones")

    def normalize_(self, field: torch.Tensor) -> None:
        """(x - mean) / std in place on [B, steps * channels, ...]; a constant channel (std 0) is only centred."""
        view = field.unflatten(1, (-1, len(self.channels)))
        mean, scale = self._columns(field)
        view.sub_(mean).div_(scale)

    def denormalized(self, field: torch.Tensor) -> torch.Tensor:
        """The inverse of `normalize_`, as a new tensor; plain or sharded."""
        steps = field.shape[1] // len(self.channels)
        mean, scale = (torch.cat([column] * steps) for column in self._columns(field))
        return field * scale + mean

    def _columns(self, field: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mean = torch.tensor(self.mean, dtype=field.dtype, device=field.device)
        scale = torch.tensor([value or 1.0 for value in self.std], dtype=field.dtype, device=field.device)
        shape = (-1, *[1] * (field.dim() - 2))
        return mean.view(shape), scale.view(shape)


def given_statistics(given: Any, samples: SampleSet) -> ChannelStatistics:
    """Statistics from a JSON file of ``shardio stats``, a `shardio.statistics.Statistics`, or {name: (mean, std)}.

    A mapping may name channels ("t_850") or, for samples of a store, variables ("t").

    Raises:
        SampleError: there is no such file, a channel has no statistics, or statistics of a store were given for other
            samples.
    """
    if isinstance(given, ChannelStatistics):
        given = dict(zip(given.channels, zip(given.mean, given.std, strict=True), strict=True))
    if isinstance(given, str | Path):
        from shardio.statistics import Statistics

        if not Path(given).is_file():
            raise SampleError(f"statistics={str(given)!r} is neither 'compute' nor a file that shardio stats wrote")
        given = Statistics.from_json(given)
    owner: dict[str, str] = {}
    if isinstance(samples, GridSamples):
        owner = {name: field.source.name for field in samples.fields for name in samples.names(field)}
    pairs = given if isinstance(given, Mapping) else _by_channel(given, samples)
    found = {}
    for channel in samples.channels:
        key = channel if channel in pairs else owner.get(channel, channel)
        if key not in pairs:
            raise SampleError(f"statistics have no entry for channel {channel!r}; they have {sorted(pairs)}")
        found[channel] = pairs[key]
    return ChannelStatistics(
        samples.channels,
        tuple(float(pair[0]) for pair in found.values()),
        tuple(float(pair[1]) for pair in found.values()),
    )


def _by_channel(statistics: Any, samples: SampleSet) -> dict[str, tuple[float, float]]:
    if not isinstance(samples, GridSamples):
        raise SampleError(
            f"statistics of a store's variables do not say what the channels of {type(samples).__name__} are: give "
            f"{{channel: (mean, std)}}"
        )
    pairs = {}
    for field in samples.fields:
        known = statistics.variables.get(field.source.name)
        if known is None:
            continue
        if len(field.levels) > 1 and not known.levels:
            raise SampleError(
                f"the statistics of {field.source.name!r} are of all its {len(field.levels)} channels together: take "
                f"those of shardio stats STORE --level {samples.grid.level}, or statistics='compute', or give "
                f"{{channel: (mean, std)}}"
            )
        for place, name in enumerate(samples.names(field)):
            entry = known
            if field.levels and known.levels:
                at = field.levels[place]
                entry = known.level(at, samples.labels[at], len(samples.labels))
                if entry is None:
                    raise SampleError(
                        f"statistics have no entry for channel {name!r}: of {field.source.name!r} they have "
                        f"{list(known.names) or f'{len(known.levels)} levels without names'}; they are of other data"
                    )
            pairs[name] = (entry.mean, entry.std)
    return pairs


@dataclass
class Moments:
    """Count, mean and sum of squared deviations per channel, float64, merged as Chan et al. (1983) do."""

    count: torch.Tensor
    mean: torch.Tensor
    squares: torch.Tensor

    @classmethod
    def empty(cls, channels: int) -> Moments:
        """No value seen."""
        return cls(*(torch.zeros(channels, dtype=torch.float64) for _ in range(3)))

    @classmethod
    def of(cls, field: torch.Tensor) -> Moments:
        """Of the values of [steps, channels, ...] that are finite."""
        values = field.transpose(0, 1).flatten(1).double()
        there = values.isfinite()
        count = there.sum(1).double()
        mean = torch.where(there, values, 0.0).sum(1) / count.clamp(min=1)
        squares = torch.where(there, values - mean[:, None], 0.0).square().sum(1)
        return cls(count, mean, squares)

    def merge(self, other: Moments) -> None:
        """Take in the values of another."""
        total = self.count + other.count
        delta = other.mean - self.mean
        share = other.count / total.clamp(min=1)
        self.squares += other.squares + delta.square() * self.count * share
        self.mean += delta * share
        self.count = total

    def statistics(self, channels: Sequence[str]) -> ChannelStatistics:
        """As mean and (population) standard deviation."""
        empty = self.count == 0
        mean = torch.where(empty, torch.nan, self.mean)
        std = (self.squares / self.count.clamp(min=1)).sqrt()
        return ChannelStatistics(tuple(channels), tuple(mean.tolist()), tuple(std.tolist()))


def agreed_statistics(
    given: Any, samples: SampleSet, here: Placement, ranks: Agreement, **how: Any
) -> ChannelStatistics | None:
    """The statistics that the user gives, or asks for with "compute"; on all ranks the same.

    Args:
        given: see `DomainDataLoader`.
        samples: the data set.
        here: this rank's part.
        ranks: all ranks.
        how: keyword arguments of `SampleSet.slab_reader`.
    """
    if given is None:
        return None
    if given != "compute":
        return ranks.together("statistics do not fit", lambda: given_statistics(given, samples))
    mine = ranks.together("statistics could not be computed", lambda: _measured(samples, here, how))
    total = Moments.empty(len(samples.channels))
    for part in ranks.facts(mine).values():
        total.merge(part)
    return ranks.together("statistics do not fit", lambda: total.statistics(samples.channels))


def _measured(samples: SampleSet, here: Placement, how: dict[str, Any]) -> Moments:
    """The moments of this rank's rows, times dealt to the data groups, one time in memory at once."""
    if not isinstance(samples, GridSamples):
        raise SampleError(
            f"statistics='compute' works on stores; give {{channel: (mean, std)}} for {type(samples).__name__}"
        )
    moments = Moments.empty(len(samples.channels))
    if not here.counted and how.get("group") is None:  # nobody waits for the reads of this rank
        return moments
    windows = samples.windows
    rows = range(windows.first + here.group, windows.first + windows.count, here.groups)
    reader = samples.slab_reader(here.partition, here.rank, 0, (), **how)
    try:
        if reader.cache is not None:
            reader.cache.expect([[row] for row in rows])
        for row in rows:
            field = reader.read_times([[row]], dtype=torch.float32)[0]
            if here.counted:
                moments.merge(Moments.of(field))
    finally:
        reader.close()
    return moments

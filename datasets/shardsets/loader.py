"""The loader that users point at a store: every rank reads its own slab, and gets it as a sharded tensor."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from shardio import ReadStats
from shardio.plan import Halo
from shardsets.errors import BatchError, NotANumberError, SampleError
from shardsets.grid import GridSamples, GridSlabReader, Levels
from shardsets.order import Order
from shardsets.placement import Placement, Shards, place
from shardsets.samples import SampleSet, Slab
from shardsets.statistics import ChannelStatistics, Moments, given_statistics, measure
from shardsets.windows import TimeChoice
from shardtensor import RankDisagreementError, ShardTensor
from shardtensor.comm import any_rank, gather_facts
from shardtensor.spec import DeviceMesh

__all__ = ["DomainDataLoader"]

Transform = Callable[[dict[str, Any]], dict[str, Any]]
FIELDS = ("input", "target")


class DomainDataLoader:
    """Batches of samples of which every rank of a domain group reads and holds only its own slab.

    Iterating gives dicts:

    - ``input`` [B, input_steps * C, H, W] and ``target`` [B, target_steps * C, H, W]: ShardTensors over the domain
      axes of the mesh (plain tensors with ``mesh=None``), channels in the order of ``loader.channels`` step by step;
    - ``time`` [B]: valid times of the last inputs, and ``target_time`` [B, target_steps] (numpy datetimes, or cftime
      objects in model calendars);
    - ``index`` [B]: sample numbers.

    The order of samples is a pure function of (seed, epoch). Each data group gets its own samples, the ranks of a
    domain group the same ones, and all ranks the same number of batches. What goes wrong on one rank is raised on all.

    Args:
        source: path or URL of a store, an ``xarray.Dataset``, or a `SampleSet`.
        mesh: the device mesh; its data axis is the one named ``data``, ``ddp`` or ``dp``. None: one process.
        variables, levels, time, input_steps, target_steps, lead: see `GridSamples`.
        shard: {dim: mesh axis}; default: the first spatial dim over the first axis that is not the data axis. Naming
            both spatial dims, ``{"row": "domain", "col": None}``, also says which they are.
        partition: "even", "aligned" (to chunks), or rows per rank, also by dim.
        halo: rows beside the slab that ``transform`` sees: a number, (below, above), or one of these by dim.
        periodic: dims whose halo wraps around; default: a longitude that goes around the globe.
        batch_size: samples per data group and step.
        shuffle, seed: a permutation of its own for every epoch.
        drop_last: leave out the last, incomplete step.
        prefetch: batches read ahead by a background thread; 0 reads when asked. Memory is bounded by them.
        dtype: of the fields.
        device: where batches go; default: the mesh's device. Host memory is page-locked where that is a GPU.
        statistics: normalize channels to (x - mean) / std: "compute" (once, all ranks together), a JSON file of
            ``shardio stats``, or {channel or variable: (mean, std)}. Default: values as stored.
        transform: called on each batch of plain tensors with their halo, in the reading thread; also gets ``slab``
            (a `Slab`). It returns the batch; the halo is cut off afterwards, so a stencil is exact at the cut.
        nan: "raise" on NaN in a batch, "allow" it, or a number to put in its place (after normalizing).

    Raises:
        ShardIOError, SampleError: see there; on every rank.
        RankDisagreementError: the ranks passed different arguments or see different stores.
    """

    def __init__(
        self,
        source: Any,
        mesh: DeviceMesh | None = None,
        *,
        variables: str | Sequence[str] | None = None,
        levels: Levels = None,
        time: TimeChoice = None,
        input_steps: int = 1,
        target_steps: int = 1,
        lead: int = 1,
        shard: Shards = None,
        partition: str | Sequence[int] | Mapping[str, Sequence[int]] = "even",
        halo: Halo = 0,
        periodic: Sequence[str] | None = None,
        batch_size: int = 1,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool = True,
        prefetch: int = 2,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        statistics: Any = None,
        transform: Transform | None = None,
        nan: str | float = "raise",
    ) -> None:
        self._mesh = mesh
        self._owns_samples = not isinstance(source, SampleSet)
        self.dtype, self.transform, self.prefetch = dtype, transform, prefetch
        self.device = torch.device(device or ("cpu" if mesh is None else mesh.device_type))

        def prepare() -> None:
            if prefetch < 0:
                raise SampleError(f"prefetch is {prefetch}; it must be 0 or more")
            if not (nan in ("raise", "allow") or isinstance(nan, int | float)):
                raise SampleError(f"nan is {nan!r}; use 'raise', 'allow' or a number")
            self.nan = nan
            if isinstance(source, SampleSet):
                _only_defaults(variables=variables, levels=levels, time=time)
                self.samples = source
            else:
                self.samples = GridSamples(
                    source,
                    variables=variables,
                    levels=levels,
                    time=time,
                    input_steps=input_steps,
                    target_steps=target_steps,
                    lead=lead,
                    spatial=tuple(shard) if isinstance(shard, Mapping) and len(shard) == 2 else None,
                )
            self.placement: Placement = place(mesh, self.samples, shard, partition)
            self.order = Order(len(self.samples), self.placement.groups, batch_size, shuffle, seed, drop_last)
            wraps = self.samples.periodic if periodic is None else tuple(periodic)
            self._reader = self.samples.slab_reader(self.placement.partition, self.placement.rank, halo, wraps)

        self._together("the loader could not be made", prepare)
        facts = (self.samples.facts(), self.order, self.placement.partition, str(dtype), statistics is None)
        self._agree_on(facts)
        self.channels = self.samples.channels
        self.slab: Slab = self._reader.slab
        self.statistics: ChannelStatistics | None = self._statistics(statistics)
        self._epoch, self._consumed, self._start = 0, 0, 0
        self._iterator: _Ahead | None = None

    # Agreement between ranks ------------------------------------------------------------------------------------

    def _together(self, what: str, step: Callable[[], None]) -> None:
        """Do a step on every rank; if it fails on any, raise on all."""
        error: Exception | None = None
        try:
            step()
        except Exception as caught:
            error = caught
        self._raise_together(what, error)

    def _raise_together(self, what: str, error: Exception | None) -> None:
        if self._mesh is None or not any_rank(error is not None, self._mesh):
            if error is not None:
                raise error
            return
        text = None if error is None else f"{type(error).__name__}: {error}"
        told = {at: said for at, said in gather_facts(text, self._mesh).items() if said is not None}
        if error is not None:
            raise error
        raise BatchError(f"{what} on " + "; ".join(f"rank {at}: {said}" for at, said in told.items()))

    def _agree_on(self, facts: Any) -> None:
        if self._mesh is None:
            return
        said = gather_facts(repr(facts), self._mesh)
        if len(set(said.values())) > 1:
            raise RankDisagreementError(
                f"the ranks' loaders differ; they must get the same arguments and see the same store: {said}"
            )

    # Statistics ---------------------------------------------------------------------------------------------------

    def _statistics(self, given: Any) -> ChannelStatistics | None:
        if given is None:
            return None
        found: list[ChannelStatistics] = []
        if given != "compute":
            self._together("statistics do not fit", lambda: found.append(given_statistics(given, self.samples)))
            return found[0]
        moments: list[Moments] = []
        self._together("statistics could not be computed", lambda: moments.append(self._measured()))
        every = moments if self._mesh is None else list(gather_facts(moments[0], self._mesh).values())
        total = Moments.empty(len(self.channels))
        for part in every:
            total.merge(part)
        self._together("statistics do not fit", lambda: found.append(total.statistics(self.channels)))
        return found[0]

    def _measured(self) -> Moments:
        """The moments of this rank's rows, times dealt to the data groups."""
        samples, here = self.samples, self.placement
        if not isinstance(samples, GridSamples):
            raise SampleError(
                f"statistics='compute' works on stores; give {{channel: (mean, std)}} for {type(samples).__name__}"
            )
        if not here.counted:
            return Moments.empty(len(self.channels))
        windows = samples.windows
        rows = range(windows.first + here.group, windows.first + windows.count, here.groups)
        reader = GridSlabReader(samples, here.partition, here.rank, 0, ())
        try:
            return measure(samples, reader, rows)
        finally:
            reader.close()

    # Iterating ----------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Batches of an epoch, the same on every rank."""
        return self.order.steps()

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that the next iteration gives; from its start, unless a loaded state stands inside it."""
        if epoch != self._epoch:
            self._epoch, self._consumed, self._start = epoch, 0, 0

    def state_dict(self) -> dict[str, int]:
        """Where the loader stands: batches handed out count, batches read ahead do not."""
        return {
            "epoch": self._epoch,
            "consumed": self._consumed,
            "seed": self.order.seed,
            "samples": self.order.samples,
        }

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on where `state_dict` was taken: the next iteration gives the rest of that epoch.

        Raises:
            SampleError: the state is of another data set or seed.
        """
        for name, own in (("seed", self.order.seed), ("samples", self.order.samples)):
            if state[name] != own:
                raise SampleError(
                    f"the state was saved with {name} {state[name]}, this loader has {own}: the order would differ"
                )
        self._stop()
        self._epoch, self._consumed, self._start = state["epoch"], state["consumed"], state["consumed"]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self._stop()
        order, start = self.order.epoch(self._epoch), self._start
        self._consumed, self._start = start, 0
        starts = [start + step * self.order.step for step in range(self.order.steps(start))]
        batches = [self.order.batch(order, seen, self.placement.group) for seen in starts]
        ahead = self._iterator = _Ahead(self._read, batches, self.prefetch)
        try:
            for seen in starts:
                batch, error = ahead.next()
                self._raise_together("a batch could not be read", error)
                assert batch is not None
                self._consumed = min(seen + self.order.step, self.order.samples)
                yield self._delivered(batch)
            if ahead is self._iterator:
                self._epoch, self._consumed = self._epoch + 1, 0
        finally:
            ahead.stop()

    def _read(self, indices: list[int]) -> dict[str, Any]:
        """One batch of this rank's plain tensors, the halo cut off; called in the background."""
        batch = self._reader.read(indices, dtype=self.dtype, pin=self.device.type == "cuda")
        if self.statistics is not None:
            for name in FIELDS:
                self.statistics.normalize_(batch[name])
        if self.transform is not None:
            batch = self.transform({**batch, "slab": self.slab})
            if not isinstance(batch, dict) or any(name not in batch for name in FIELDS):
                raise SampleError("transform must return the batch, a dict with 'input' and 'target'")
            batch.pop("slab", None)
        for name in FIELDS:
            batch[name] = self._interior(batch[name], name)
            self._look_for_nan(batch[name], name, indices)
        return batch

    def _interior(self, field: torch.Tensor, name: str) -> torch.Tensor:
        """The rank's own rows, contiguous."""
        if tuple(field.shape[2:]) != self.slab.shape:
            raise SampleError(
                f"transform returned {name!r} with grid {tuple(field.shape[2:])}; it must keep the slab's "
                f"{self.slab.shape}, halo included (the loader cuts it off)"
            )
        for dim, (below, above) in enumerate(self.slab.halo):
            if below or above:
                field = field.narrow(2 + dim, below, self.slab.shape[dim] - below - above)
        return field.contiguous()

    def _look_for_nan(self, field: torch.Tensor, name: str, indices: list[int]) -> None:
        if self.nan == "allow" or not field.is_floating_point():
            return
        if isinstance(self.nan, int | float):
            field.nan_to_num_(nan=float(self.nan), posinf=torch.inf, neginf=-torch.inf)
            return
        found = field.isnan()
        if not found.any():
            return
        sample, channel = (int(place) for place in found.flatten(2).any(2).nonzero()[0])
        label = self.channels[channel % len(self.channels)] if self.transform is None else f"channel {channel}"
        raise NotANumberError(
            f"{self._reader.describe(indices[sample])}: {name!r} has NaN in {int(found[sample, channel].sum())} cells "
            f"of {label!r}. Missing values or a mask? nan='allow' lets them through, nan=0.0 replaces them"
        )

    def _delivered(self, batch: dict[str, Any]) -> dict[str, Any]:
        """On the device, as sharded tensors."""
        for name in FIELDS:
            local = batch[name].to(self.device, non_blocking=True)
            if self.placement.domain is not None:
                local = ShardTensor(local, self.placement.spec(local, self.samples.spatial))
            batch[name] = local
        return batch

    # Seeing and closing -------------------------------------------------------------------------------------------

    @property
    def stats(self) -> ReadStats:
        """What this rank has read so far, batches read ahead included."""
        return self._reader.reader.stats

    def close(self) -> None:
        """Stop reading ahead and close the files that the loader opened."""
        self._stop()
        self._reader.close()
        if self._owns_samples:
            self.samples.close()

    def _stop(self) -> None:
        if self._iterator is not None:
            self._iterator.stop()
            self._iterator = None


def _only_defaults(**arguments: Any) -> None:
    given = [name for name, value in arguments.items() if value is not None]
    if given:
        raise SampleError(f"{given} choose from a store, but the source is a sample set: make those choices there")


class _Ahead:
    """Reads batches one after the other on a background thread, at most ``ahead`` before they are asked for."""

    def __init__(self, read: Callable[[list[int]], dict[str, Any]], batches: list[list[int]], ahead: int) -> None:
        self._read, self._waiting = read, deque(batches)
        self._ahead = ahead
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="shardsets-ahead") if ahead else None
        self._flying: deque[Future[dict[str, Any]]] = deque()
        self._fill()

    def _fill(self) -> None:
        while self._pool is not None and self._waiting and len(self._flying) < self._ahead:
            self._flying.append(self._pool.submit(self._read, self._waiting.popleft()))

    def next(self) -> tuple[dict[str, Any] | None, Exception | None]:
        """The next batch, or what went wrong with it."""
        try:
            if self._pool is None:
                return self._read(self._waiting.popleft()), None
            batch = self._flying.popleft().result()
            self._fill()
            return batch, None
        except Exception as error:
            return None, error

    def stop(self) -> None:
        """Drop what was read ahead, and wait for the read that runs."""
        self._waiting.clear()
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._flying.clear()

"""The loader that users point at a store: every rank reads its own slab, and gets it as a sharded tensor."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self, get_args

import torch
from torch.profiler import record_function

from shardio import ReadStats
from shardio.collective import Group, Read
from shardio.plan import Halo
from shardsets.agreement import Agreement
from shardsets.ahead import Ahead
from shardsets.arguments import check_choices, check_float, check_mesh, check_not_negative, dims_of, only_defaults
from shardsets.bad import OnBad
from shardsets.batches import FIELDS, Batch, Batches, Transform
from shardsets.errors import BatchError
from shardsets.finite import Finite
from shardsets.grid import GridSamples, Levels
from shardsets.judge import Judge
from shardsets.order import Order
from shardsets.placement import Placement, Shards, place
from shardsets.report import Report
from shardsets.samples import SampleSet, Slab
from shardsets.statistics import ChannelStatistics, agreed_statistics
from shardsets.windows import TimeChoice
from shardtensor import ShardTensor
from shardtensor.spec import DeviceMesh

__all__ = ["DomainDataLoader"]


class DomainDataLoader:
    """Batches of samples of which every rank of a domain group reads and holds only its own slab.

    Iterating gives dicts:

    - ``input`` [B, input_steps * C, H, W] and ``target`` [B, target_steps * C, H, W]: ShardTensors over the domain
      axes of the mesh (plain tensors with ``mesh=None``), channels in the order of ``loader.channels`` step by step;
    - ``time`` [B]: valid times of the last inputs, and ``target_time`` [B, target_steps] (numpy datetimes, or cftime
      objects in model calendars);
    - ``index`` [B]: sample numbers.

    The order of samples is a pure function of (seed, epoch). Each data group gets its own samples, the ranks of a
    domain group the same ones, and all ranks the same number of batches. What goes wrong on one rank is raised on all;
    a rank that dies ends in an error on the others. Making a loader, starting an iteration, asking for a batch and
    loading a state are done by all ranks together. ``torch.profiler`` shows ``shardsets.wait``, ``.agree`` and
    ``.deliver`` of every step, and ``.read`` and ``.prepare`` of the reading thread where it records all threads.

    Args:
        source: path or URL of a store, an opened `shardio.Store`, an ``xarray.Dataset``, or a `SampleSet`.
        mesh: the device mesh; its data axis is the one named ``data``, ``ddp`` or ``dp``. None: one process.
        variables, levels, time, input_steps, target_steps, lead: see `GridSamples`.
        open_options: passed to `shardio.open_store`: ``{"storage_options": {...}}``, ``{"missing": "fill"}``, ...
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
        transform: called on each batch of plain tensors with their halo, in the reading thread; ``batch["slab"]`` is
            the `Slab`. It returns the batch; the halo is cut off afterwards, so a stencil is exact at the cut.
        nan: NaN in a batch is bad data ("raise"), is let through ("allow"), or becomes this number (after normalizing).
        inf: the same for infinite values.
        max_nonfinite: share of a channel's cells that may be NaN or infinite in one sample, all ranks together; more
            is bad data whatever ``nan`` and ``inf`` say.
        on_bad: bad data is a chunk that is missing, corrupt or out of reach (no permission, no connection), NaN or
            infinite values as above, and an irregular time axis. "raise" an error on all ranks; "skip" the step on all
            ranks, all data groups (and leave out samples that reach over an irregular time), or "fill" with NaN (with
            the number ``nan``, if it is one) what is missing or corrupt. What is out of reach is never filled.
            `report` tells what was skipped and filled.
        read: how the ranks that share samples read: "own", each for itself; "collective", each chunk by one of them;
            "auto", by array whichever takes less time.
        cache_bytes: memory for decoded times, on each rank, where a chunk holds several that cannot be decoded apart;
            what will be needed last goes first. 0 keeps none. Decoding takes up to as much again while it runs.
        timeout: seconds that ranks which read collectively wait for a slow one.

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
        open_options: Mapping[str, Any] | None = None,
        shard: Shards = None,
        partition: str | Sequence[int] | Mapping[str, Sequence[int]] = "even",
        halo: Halo = 0,
        periodic: str | Sequence[str] | None = None,
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
        inf: str | float = "raise",
        max_nonfinite: float = 1.0,
        on_bad: OnBad = "raise",
        read: Read = "auto",
        cache_bytes: int = 256 << 20,
        timeout: float = 300.0,
    ) -> None:
        check_mesh(mesh)
        self.prefetch = prefetch
        self._owns_samples = not isinstance(source, SampleSet)
        self.device = torch.device(device or ("cpu" if mesh is None else mesh.device_type))
        self._ranks = Agreement.watching(mesh)

        def prepare() -> None:
            check_not_negative(prefetch=prefetch, cache_bytes=cache_bytes, timeout=timeout)
            check_choices(on_bad=(on_bad, get_args(OnBad)), read=(read, get_args(Read)))
            check_float(on_bad, dtype)
            self._finite = Finite(nan, inf, max_nonfinite)
            if isinstance(source, SampleSet):
                only_defaults(variables=variables, levels=levels, time=time, open_options=open_options)
                only_defaults(input_steps=input_steps, target_steps=target_steps, lead=lead)
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
                    skip_irregular=on_bad == "skip",
                    **(open_options or {}),
                )
            self.placement: Placement = place(mesh, self.samples, shard, partition)
            self.order = Order(len(self.samples), self.placement.groups, batch_size, shuffle, seed, drop_last)

        self._ranks.together("the loader could not be made", prepare)
        facts = (self.samples.facts(), self.order, self.placement.partition, str(dtype), statistics is None)
        differ = "the ranks' loaders differ; they must get the same arguments and see the same store"
        self._ranks.same(differ, (*facts, self._finite, on_bad, read, prefetch, cache_bytes))
        domain = self.placement.domain
        self._group = (
            None if read == "own" or domain is None else Group.join(domain, self.placement.rank, timeout=timeout)
        )
        self._sequence = 0
        self._begin()
        how: dict[str, Any] = {"read": read, "group": self._group, "cache_bytes": cache_bytes}
        wraps = self.samples.periodic if periodic is None else dims_of(periodic)
        self._reader = self._ranks.together(
            "the loader could not be made",
            lambda: self.samples.slab_reader(
                self.placement.partition, self.placement.rank, halo, wraps, **how, fill=on_bad == "fill"
            ),
        )
        self.channels = self.samples.channels
        self.slab: Slab = self._reader.slab
        self.statistics: ChannelStatistics | None = agreed_statistics(
            statistics, self.samples, self.placement, self._ranks, **how, fill=on_bad != "raise"
        )
        self._batches = Batches(
            self._reader,
            self.channels,
            self._finite,
            on_bad == "fill",
            self._ranks.rank,
            dtype,
            self.device.type == "cuda",
            self.statistics,
            transform,
        )
        self._judge = Judge(on_bad, self._ranks, self.samples, self.placement, self._batches)
        self._steps, self._waited = 0, 0.0
        self._epoch, self._consumed, self._start = 0, 0, 0
        self._ahead: Ahead[Batch] | None = None

    # Iterating ----------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Batches of an epoch, the same on every rank; those that are skipped count."""
        return self.order.steps()

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that the next iteration gives; from its start, unless a loaded state stands inside it."""
        if epoch != self._epoch:
            self._epoch, self._consumed, self._start = epoch, 0, 0

    def state_dict(self) -> dict[str, Any]:
        """Where the loader stands: batches handed out count, batches read ahead do not.

        The state is the same on all ranks and fits any mesh and batch size: what was seen is the beginning of the
        epoch's order.
        """
        return self.order.state(self._epoch, self._consumed)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken: the next iteration gives the rest of that epoch. All ranks call it.

        Raises:
            SampleError: the state is of another data set or order, or no state.
            RankDisagreementError: the ranks loaded different states.
        """
        self._ranks.together("the state does not fit", lambda: self.order.check(state))
        self._ranks.same("the ranks' states differ; all must load the same", (state["epoch"], state["consumed"]))
        self._stop()
        self._epoch, self._consumed, self._start = state["epoch"], state["consumed"], state["consumed"]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self._stop()
        epoch, start = self._epoch, self._start
        self._ranks.same("the ranks' loaders stand at different (epoch, samples seen)", (epoch, start))
        self._begin()
        self._consumed, self._start = start, 0
        order, skips = self.order, self._judge.skips
        batches = order.batches(epoch, start, self.placement.group)
        if self._reader.cache is not None:
            self._reader.expect([*batches, *order.batches(epoch + 1, 0, self.placement.group)])
        shuffled = order.epoch(epoch)
        ahead = self._ahead = Ahead(self._batches.read, batches, self.prefetch)
        try:
            for seen in range(start, start + len(batches) * order.step, order.step):
                batch = ahead.next()
                with record_function("shardsets.agree"):
                    use = self._judge.use(batch, epoch, shuffled[seen : seen + order.step].tolist())
                self._consumed = min(seen + order.step, order.samples)
                if use:
                    self._steps += 1
                    yield self._delivered(batch.values or {})
            if ahead is self._ahead:
                self._epoch, self._consumed = epoch + 1, 0
            if len(batches) == len(self) == self._judge.skips - skips:
                raise BatchError(f"every step of epoch {epoch} was skipped: {self._judge.skipped[-1].because[0]}")
        finally:
            self._waited += ahead.waited
            ahead.waited = 0.0
            ahead.stop(self._cancel)

    def _begin(self) -> None:
        """Begin a sequence of reads with the ranks that share them."""
        self._sequence += 1
        if self._group is not None:
            self._group.begin(self._sequence)

    def _cancel(self) -> None:
        if self._group is not None:
            self._group.cancel()

    def _delivered(self, values: dict[str, Any]) -> dict[str, Any]:
        """On the device, as sharded tensors."""
        with record_function("shardsets.deliver"):
            for name in FIELDS:
                local = values[name].to(self.device, non_blocking=True)
                if self.placement.domain is not None:
                    local = ShardTensor(local, self.placement.spec(local, self.samples.spatial))
                values[name] = local
        return values

    # Seeing and closing -------------------------------------------------------------------------------------------

    @property
    def stats(self) -> ReadStats:
        """What this rank has read so far, batches read ahead included."""
        return self._reader.reader.stats

    def report(self) -> Report:
        """What was skipped and filled, bytes, cache hits, time reading and waiting so far; see `Report`."""
        waited = self._waited + (self._ahead.waited if self._ahead is not None else 0.0)
        return Report.of(self._judge, self._batches, self.samples, steps=self._steps, waited=waited)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop reading ahead and close the files that the loader opened."""
        self._stop()
        self._reader.close()
        if self._group is not None:
            self._group.close()
        self._ranks.close()
        if self._owns_samples:
            self.samples.close()

    def _stop(self) -> None:
        if self._ahead is not None:
            self._ahead.stop(self._cancel)
            self._ahead = None

"""The loader against the store's own values: windows, slabs, halos, statistics, resuming, and what it refuses."""

from __future__ import annotations

import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
import xarray as xr

from shardio import ShardIOError, find_grid, open_store
from shardio.errors import TimeAxisError
from shardio.statistics import Statistics, compute
from shardsets import BatchError, DomainDataLoader, GridSamples, NotANumberError, SampleError, SampleSet
from shardsets.statistics import given_statistics
from shardtensor import ShardTensor


def _fields(truth, index, input_steps, target_steps, lead):
    rows = [*range(index, index + input_steps)]
    targets = [rows[-1] + lead * (step + 1) for step in range(target_steps)]
    stack = [torch.from_numpy(truth[which].reshape(-1, *truth.shape[2:])) for which in (rows, targets)]
    return stack[0], stack[1]


@pytest.mark.parametrize(("input_steps", "target_steps", "lead"), [(1, 1, 1), (2, 3, 1), (3, 2, 4)])
def test_windows_hold_the_right_times(store, truth, input_steps, target_steps, lead):
    loader = DomainDataLoader(store, input_steps=input_steps, target_steps=target_steps, lead=lead, batch_size=2)
    assert loader.channels == ("t_500", "t_850", "t_1000", "u")
    assert len(loader) == (12 - (input_steps + lead * target_steps) + 1) // 2
    times = xr.open_zarr(store).time.values
    count = 0
    for batch in loader:
        for at, index in enumerate(batch["index"].tolist()):
            given, wanted = _fields(truth, index, input_steps, target_steps, lead)
            assert torch.equal(batch["input"][at], given)
            assert torch.equal(batch["target"][at], wanted)
            last = index + input_steps - 1
            assert batch["time"][at] == times[last]
            assert list(batch["target_time"][at]) == [times[last + lead * (k + 1)] for k in range(target_steps)]
            count += 1
    assert count == 2 * len(loader)
    loader.close()


@pytest.mark.parametrize("dims", [("time", "lat", "lon"), ("lat", "time", "lon"), ("lon", "lat", "time")])
def test_any_order_of_dims_gives_rows_then_columns(store, truth, dims):
    data = xr.open_zarr(store)[["u"]].load().transpose(*dims)
    loader = DomainDataLoader(data, target_steps=2)
    batch = next(iter(loader))
    assert torch.equal(batch["input"][0, 0], torch.from_numpy(truth[0, 3]))
    assert torch.equal(batch["target"][0, 1], torch.from_numpy(truth[2, 3]))
    assert batch["input"].is_contiguous()


def test_chooses_variables_levels_and_times(store, truth):
    chosen = DomainDataLoader(
        store, variables=["t", "orography"], levels=[1000, 500], time=("2020-01-01T12", "2020-01-02T00"), target_steps=0
    )
    assert chosen.channels == ("t_1000", "t_500", "orography")
    batches = list(chosen)
    assert [str(batch["time"][0])[:13] for batch in batches] == ["2020-01-01T12", "2020-01-01T18", "2020-01-02T00"]
    assert torch.equal(batches[1]["input"][0, :2], torch.from_numpy(truth[3, [2, 0]]))
    assert torch.equal(batches[1]["input"][0, 2], torch.from_numpy(xr.open_zarr(store).orography.values))
    assert batches[0]["target"].shape == (1, 0, 11, 8)


def _on_ranks(mesh, store, truth, options):
    """Every batch's global values on every rank; asserts that each rank holds only its slab."""
    loader = DomainDataLoader(store, mesh, **options)
    domain = mesh if mesh.ndim == 1 else mesh["domain"]
    seen = []
    for batch in loader:
        for name in ("input", "target"):
            field = batch[name]
            assert isinstance(field, ShardTensor)
            assert field.device_mesh == domain
            assert field._local_tensor.shape == field._spec.local_shape
            whole = field.full_tensor()
            steps = {"input": options.get("input_steps", 1), "target": options.get("target_steps", 1)}
            for at, index in enumerate(batch["index"].tolist()):
                expected = _fields(truth, index, steps["input"], steps["target"], options.get("lead", 1))
                assert torch.equal(whole[at], expected[name == "target"])
        seen.append(batch["index"].tolist())
    loader.close()
    return seen


@pytest.mark.parametrize("mesh", [(1,), (2,), (3,), (2, 2), (2, 1), (1, 3)])
def test_ranks_of_a_domain_share_samples_and_data_groups_do_not(ranks, store, truth, mesh):
    options = {"input_steps": 2, "shuffle": True, "seed": 3, "batch_size": 1}
    seen = ranks.run(_on_ranks, str(store), truth, options, mesh=mesh)
    groups = mesh[0] if len(mesh) == 2 else 1
    by_group = [seen[group * (len(seen) // groups)] for group in range(groups)]
    for group, batches in enumerate(by_group):
        width = len(seen) // groups
        assert all(other == batches for other in seen[group * width : (group + 1) * width])
    together = [sample for step in zip(*by_group, strict=True) for batch in step for sample in batch]
    plain = [int(batch["index"]) for batch in DomainDataLoader(store, input_steps=2, shuffle=True, seed=3)]
    assert together == plain[: len(together)]


@pytest.mark.parametrize("partition", ["even", (2, 6, 3), (11, 0, 0)])
def test_partitions(ranks, store, truth, partition):
    ranks.run(_on_ranks, str(store), truth, {"partition": partition, "batch_size": 2}, mesh=(3,))


def test_aligned_partition_cuts_at_chunks_and_reads_each_chunk_once(ranks, globe, tmp_path):
    data = globe[["u"]]
    data.to_zarr(tmp_path / "rows.zarr", zarr_format=2, encoding={"u": {"chunks": (1, 3, 8)}})

    def check(mesh):
        loader = DomainDataLoader(str(tmp_path / "rows.zarr"), mesh, partition="aligned", target_steps=0)
        assert loader.placement.partition.cuts[0].sizes == (6, 5)
        for batch in loader:
            assert torch.equal(batch["input"].full_tensor()[0, 0], torch.from_numpy(data.u.values[batch["index"][0]]))
        return loader.stats.chunks

    assert sum(ranks.run(check, mesh=(2,))) == 4 * 12


def test_cut_along_longitude_and_along_both(ranks, store, truth):
    ranks.run(_on_ranks, str(store), truth, {"shard": {"lon": "domain"}}, mesh=(3,))

    def both(mesh):
        from torch.distributed.device_mesh import DeviceMesh

        grid = DeviceMesh("cpu", mesh.mesh, mesh_dim_names=("y", "x"))
        loader = DomainDataLoader(str(store), grid, shard={"lat": "y", "lon": "x"})
        field = next(iter(loader))["input"]
        assert tuple(field._local_tensor.shape[2:]) == (6 - grid.get_local_rank("y"), 4)
        assert torch.equal(field.full_tensor()[0], torch.from_numpy(truth[0]))

    ranks.run(both, mesh=(2, 2))


def _smoothed(field: torch.Tensor) -> torch.Tensor:
    """A 3 x 3 mean, periodic in longitude; rows at the poles see themselves twice."""
    field = torch.nn.functional.pad(field, (1, 1, 0, 0), mode="circular")
    return torch.nn.functional.avg_pool2d(torch.nn.functional.pad(field, (0, 0, 1, 1), mode="replicate"), 3, 1)


def _stencil(batch):
    """The same by the slab's halo: what is missing at the poles is replicated, what is there is used."""
    slab = batch["slab"]
    for name in ("input", "target"):
        field = batch[name]
        (below, above), (left, right) = slab.halo
        padded = torch.nn.functional.pad(field, (1 - left, 1 - right, 1 - below, 1 - above), mode="replicate")
        inner = torch.nn.functional.avg_pool2d(padded, 3, 1)
        out = field.clone()
        rows = slice(below, field.shape[2] - above)
        columns = slice(left, field.shape[3] - right)
        out[:, :, rows, columns] = inner
        batch[name] = out
    return batch


@pytest.mark.parametrize("mesh", [(1,), (3,)])
def test_a_stencil_in_the_transform_is_exact_at_the_cut(ranks, store, truth, mesh):
    def check(mesh):
        halo = {"lat": 1, "lon": 1}
        loader = DomainDataLoader(str(store), mesh, halo=halo, transform=_stencil, shuffle=True)
        for batch in loader:
            expected = _smoothed(torch.from_numpy(truth[batch["index"].tolist()]))
            assert torch.allclose(batch["input"].full_tensor(), expected, rtol=1e-6)

    ranks.run(check, mesh=mesh)


@pytest.mark.parametrize("mesh", [(1,), (3,), (2, 2)])
def test_statistics_are_those_of_all_cells_and_times(ranks, store, truth, mesh):
    def check(mesh):
        loader = DomainDataLoader(str(store), mesh, statistics="compute")
        found = loader.statistics
        values = truth.astype("f8").transpose(1, 0, 2, 3).reshape(4, -1)
        np.testing.assert_allclose(found.mean, values.mean(1), rtol=1e-10)
        np.testing.assert_allclose(found.std, values.std(1), rtol=1e-10)
        batch = next(iter(loader))
        back = found.denormalized(batch["input"]).full_tensor()
        assert torch.allclose(back[0], torch.from_numpy(truth[int(batch["index"])]), rtol=1e-5, atol=1e-4)
        assert batch["input"].full_tensor().abs().max() < 6

    ranks.run(check, mesh=mesh)


def test_statistics_skip_nan_and_can_be_given(store, truth):
    data = xr.open_zarr(store)[["u"]].load()
    data.u[:, :4] = np.nan
    loader = DomainDataLoader(data, statistics="compute", nan=0.0)
    there = data.u.values[:, 4:].astype("f8")
    assert loader.statistics.mean[0] == pytest.approx(there.mean(), rel=1e-9)
    assert next(iter(loader))["input"][0, 0, :4].eq(0).all()
    given = DomainDataLoader(store, statistics={"t": (280.0, 10.0), "u": (0.0, 2.0)})
    assert torch.allclose(next(iter(given))["input"][0, 3], torch.from_numpy(truth[0, 3]) / 2)
    with pytest.raises(SampleError, match="no entry for channel 'u'"):
        DomainDataLoader(store, statistics={"t": (280.0, 10.0)})


def test_statistics_of_a_store_are_taken_by_level(store, tmp_path):
    computed = DomainDataLoader(store, statistics="compute").statistics
    with open_store(store) as opened:
        compute(opened).to_json(tmp_path / "stats.json")
    found = DomainDataLoader(store, levels=[850, 1000], statistics=tmp_path / "stats.json").statistics
    assert found.channels == computed.channels[1:]
    np.testing.assert_allclose(found.mean, computed.mean[1:], rtol=1e-10)
    np.testing.assert_allclose(found.std, computed.std[1:], rtol=1e-10)


@pytest.mark.parametrize("names", [[500.0, 700.0, 850.0], ["u10m", "t2m", "refc"]])
def test_statistics_are_found_by_the_name_of_a_channel(tmp_path, names):
    """A part of the store, in another order, takes its own channels' numbers; other channels are refused."""
    values = np.random.default_rng(0).normal([[[[0.0]], [[100.0]], [[1e4]]]], 1, (6, 3, 4, 5)).astype("f4")
    data = xr.Dataset({"t": (("time", "channel", "lat", "lon"), values)}, {"channel": names})
    compute(open_store(data), grid=find_grid(open_store(data), level="channel")).to_json(tmp_path / "a.json")
    part = data.isel(channel=[2, 1])
    loader = DomainDataLoader(part, levels="channel", statistics=tmp_path / "a.json")
    assert next(iter(loader))["input"].abs().max() < 6
    for channels in ([2, 2], [0, 1]):
        other = data.isel(channel=channels).assign_coords(channel=[names[channels[0]], names[0] * 2])
        with pytest.raises(SampleError, match="no entry for channel"):
            DomainDataLoader(other, levels="channel", statistics=tmp_path / "a.json")


def test_statistics_without_names_must_be_as_many(tmp_path):
    """As files of before have them: by position, if the numbers of levels are the same."""
    data = xr.Dataset({"t": (("time", "channel", "lat", "lon"), np.random.default_rng(0).random((6, 3, 4, 5)))})
    compute(open_store(data), grid=find_grid(open_store(data), level="channel")).to_json(tmp_path / "a.json")
    DomainDataLoader(data, levels="channel", statistics=tmp_path / "a.json")
    with pytest.raises(SampleError, match="3 levels without names"):
        DomainDataLoader(data.isel(channel=[0, 2]), levels="channel", statistics=tmp_path / "a.json")


def test_channels_are_chosen_by_their_texts():
    values = np.arange(3.0)[None, :, None, None] + np.zeros((4, 3, 2, 2))
    data = xr.Dataset({"t": (("time", "channel", "lat", "lon"), values)}, {"channel": ["u10m", "t2m", "refc"]})
    loader = DomainDataLoader(data, levels={"channel": ["refc", "u10m"]})
    assert loader.channels == ("t_refc", "t_u10m")
    assert next(iter(loader))["input"][0, :, 0, 0].tolist() == [2, 0]
    for wanted in (["sp"], [500.0]):
        with pytest.raises(SampleError, match="u10m"):
            DomainDataLoader(data, levels={"channel": wanted})


def test_one_variable_by_its_name(store):
    data = xr.open_zarr(store)[["t"]].isel(level=0, drop=True).rename(t="t2m")
    assert DomainDataLoader(data, variables="t2m").channels == ("t2m",)


def test_levels_of_a_store_without_levels_are_refused(store):
    data = xr.open_zarr(store)[["t"]].isel(level=0, drop=True)
    with pytest.raises(SampleError, match=r"no dim of .* is recognised as levels"):
        DomainDataLoader(data, levels=[500])


def test_statistics_that_are_no_file(store):
    with pytest.raises(SampleError, match="'computed' is neither 'compute' nor a file"):
        DomainDataLoader(store, statistics="computed")


def test_statistics_of_samples_that_are_no_store():
    class Other(SampleSet):
        channels = ("a",)

        def __len__(self):
            return 1

        def slab_reader(self, *_):
            raise NotImplementedError

        def close(self): ...

    assert given_statistics({"a": (1.0, 2.0)}, Other()).mean == (1.0,)
    with pytest.raises(SampleError, match="no entry for channel 'a'"):
        given_statistics({"b": (1.0, 2.0)}, Other())
    with pytest.raises(SampleError, match=r"give \{channel"):
        given_statistics(Statistics({}), Other())


def test_closes_only_what_it_opened(store):
    closed = []
    with open_store(store) as opened:
        watched = replace(opened, closers=(lambda: closed.append(True),))
        samples = GridSamples(watched)
        DomainDataLoader(samples).close()
        DomainDataLoader(watched).close()
        samples.close()
        assert not closed


@pytest.mark.parametrize("prefetch", [0, 3])
def test_resumes_exactly(store, prefetch):
    """Case R4, Case R13: after each number of batches, 0 and all among them, and a second time in the same epoch."""

    def ids(loader, batches=None):
        found = []
        for batch in loader:
            found.append(batch["index"].tolist())
            if len(found) == batches:
                break
        return found

    def make():
        return DomainDataLoader(store, shuffle=True, seed=4, batch_size=2, prefetch=prefetch)

    whole = make()
    epochs = [ids(whole) for _ in range(3)]
    assert epochs[0] != epochs[1]
    for done in range(len(epochs[1]) + 1):
        first = make()
        first.set_epoch(1)
        if done:
            assert ids(first, done) == epochs[1][:done]
        state = first.state_dict()
        again = make()
        again.load_state_dict(state)
        middle = ids(again, 1) if done < len(epochs[1]) else []
        # a second stop in the same epoch
        last = make()
        last.load_state_dict(again.state_dict() if middle else state)
        assert middle + ids(last) == epochs[1][done:]
        assert ids(last) == epochs[2]


def test_a_state_of_another_data_set_is_refused(store):
    state = DomainDataLoader(store, seed=1).state_dict()
    with pytest.raises(SampleError, match="seed 1, this loader has 0"):
        DomainDataLoader(store).load_state_dict(state)


REFUSED = [
    ({"source": "nowhere.zarr"}, FileNotFoundError, "nowhere.zarr"),
    ({"variables": ["q"]}, KeyError, "no array 'q'"),
    ({"variables": ["orography"]}, SampleError, "time="),
    ({"levels": [700]}, SampleError, "level 700"),
    ({"time": ("1999-01-01", "1999-02-01")}, SampleError, "chooses no row"),
    ({"input_steps": 12}, SampleError, "one sample needs 13 times"),
    ({"batch_size": 12}, SampleError, "need 12 samples"),
    ({"prefetch": -1}, SampleError, "prefetch"),
    ({"lead": 0}, SampleError, "lead"),
    ({"partition": (5, 5)}, ValueError, "11"),
    ({"partition": (5, 5, 1)}, ValueError, "2"),
    ({"partition": "odd"}, ValueError, "odd"),
    ({"shard": {"time": "domain"}}, SampleError, "names dim 'time'"),
    ({"shard": {"lat": "model"}}, SampleError, "mesh axis 'model'"),
]


@pytest.mark.parametrize(("changed", "kind", "said"), REFUSED, ids=lambda value: str(value)[:40])
def test_refuses_on_every_rank_with_a_reason(ranks, store, changed, kind, said):
    def check(mesh):
        arguments = {"source": str(store), **changed}
        with pytest.raises(kind, match=said):
            DomainDataLoader(arguments.pop("source"), mesh, **arguments)

    ranks.run(check, mesh=(2,))


def test_more_ranks_than_rows(ranks, store):
    def check(mesh):
        data = xr.open_zarr(str(store))[["u"]].isel(lat=[0, 1])
        with pytest.raises(ShardIOError, match="2 rows"):
            DomainDataLoader(data, mesh, shard={"lat": "domain", "lon": None})

    ranks.run(check, mesh=(3,))


def test_unknown_dims_name_the_argument_that_helps(store):
    data = xr.open_zarr(store)[["u"]].load().drop_vars(["lat", "lon"]).rename(lat="p", lon="q")
    with pytest.raises(ShardIOError, match="shard="):
        DomainDataLoader(data)
    loader = DomainDataLoader(data, shard={"p": "domain", "q": None})
    assert next(iter(loader))["input"].shape == (1, 1, 11, 8)


def test_one_failing_rank_stops_all_with_its_reason(ranks, store):
    def missing_on_one(mesh):
        bad = mesh.get_local_rank() == 1
        with pytest.raises(FileNotFoundError if bad else BatchError, match="nowhere"):
            DomainDataLoader("nowhere.zarr" if bad else str(store), mesh)

    ranks.run(missing_on_one, mesh=(3,))

    def nan_in_one_slab(mesh):
        data = xr.open_zarr(str(store))[["u"]].load()
        data.u[4, 10, 2] = np.nan  # in the last rank's rows only
        loader = DomainDataLoader(data, mesh, prefetch=2)
        last = mesh.get_local_rank() == 2
        batches = iter(loader)
        for _ in range(3):
            next(batches)
        with pytest.raises(NotANumberError if last else BatchError, match=r"2020-01-01T18.* 1 cells of 'u'"):
            next(batches)
        assert len(list(DomainDataLoader(data, mesh, nan="allow"))) == 11

    ranks.run(nan_in_one_slab, mesh=(3,))


def test_ranks_that_differ_are_told(ranks, store):
    def check(mesh):
        from shardtensor import RankDisagreementError

        with pytest.raises(RankDisagreementError, match="loaders differ"):
            DomainDataLoader(str(store), mesh, seed=mesh.get_local_rank())

    ranks.run(check, mesh=(2,))


def test_an_irregular_time_axis_is_refused_with_its_place(store):
    data = xr.open_zarr(store)[["u"]].load()
    times = data.time.values.copy()
    times[7:] += np.timedelta64(1, "D")
    with pytest.raises(ValueError, match="position 6"):
        DomainDataLoader(data.assign_coords(time=times))
    assert len(DomainDataLoader(data.assign_coords(time=times), time=slice(None, 7))) == 6


@pytest.mark.filterwarnings("ignore:Times can't be serialized faithfully")
def test_times_appended_in_another_unit_are_refused(ranks, store, tmp_path):
    """Case R18: one row is written in days, so 6, 12 and 18 hours are appended as 6, 12 and 18, and 24 as 1."""
    data, path = xr.open_zarr(store)[["u"]].load().drop_encoding(), str(tmp_path / "a.zarr")
    data[{"time": slice(1)}].to_zarr(path, zarr_format=2)
    for row in range(1, 5):
        data[{"time": slice(row, row + 1)}].to_zarr(path, append_dim="time")
    with open_store(path) as appended:
        assert appended["time"].read().tolist() == [0, 6, 12, 18, 1]

    def check(mesh):
        with pytest.raises(TimeAxisError, match="does not increase: position 3 is 2020-01-19T00:00:00, position 4 is"):
            DomainDataLoader(path, mesh)

    ranks.run(check, mesh=(2,))


def test_reading_ahead_is_bounded_and_stops(store):
    loader = DomainDataLoader(store, prefetch=2)
    reads = []
    read = loader._reader.read
    loader._reader.read = lambda indices, **how: reads.append(indices) or read(indices, **how)
    iterator = iter(loader)
    next(iterator)
    loader.close()
    assert len(reads) <= 4
    with pytest.raises(BatchError, match="was ended"):
        next(iterator)


def test_options_of_the_store_and_arguments_of_the_wrong_kind(store, truth):
    with pytest.raises(ShardIOError, match="format 'grib9' is not known"):
        DomainDataLoader(store, open_options={"format": "grib9"})
    with DomainDataLoader(store, open_options={"format": "zarr", "missing": "fill"}) as loader:
        assert torch.equal(next(iter(loader))["input"][0, 3], torch.from_numpy(truth[0, 3]))
    with pytest.raises(SampleError, match="mesh is 2; pass a DeviceMesh"):
        DomainDataLoader(store, 2)
    with (
        DomainDataLoader(store, halo=1, periodic="lon") as one,
        DomainDataLoader(store, halo=1, periodic=["lon"]) as two,
    ):
        assert one.slab.halo == two.slab.halo
    for argument in ({"open_options": {"format": "zarr"}}, {"target_steps": 2}, {"lead": 3}, {"input_steps": 2}):
        with pytest.raises(SampleError, match=f"{next(iter(argument))}.*choose from a store"):
            DomainDataLoader(GridSamples(store), **argument)


def test_loaders_that_read_ahead_start_and_stop_many_times(store, truth):
    """Case R29: three at once, each left in mid-epoch 200 times; right values, and no thread stays behind."""
    before = {thread for thread in threading.enumerate() if thread.name.startswith("shardsets")}
    loaders = [DomainDataLoader(store, prefetch=2, shuffle=True, seed=seed) for seed in range(3)]
    for round_ in range(200):
        iterators = [iter(loader) for loader in loaders]
        for _ in range(1 + round_ % 3):
            for iterator in iterators:
                batch = next(iterator)
                assert torch.equal(batch["input"][0], torch.from_numpy(truth[int(batch["index"])]))
    for loader in loaders:
        loader.close()
    assert {thread for thread in threading.enumerate() if thread.name.startswith("shardsets")} == before

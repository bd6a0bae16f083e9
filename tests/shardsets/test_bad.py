"""Bad data: raised, skipped or filled, by all ranks in the same step, and told of afterwards."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
import xarray as xr
from numcodecs import Zlib

from shardio import ShardIOError
from shardio.errors import CorruptChunkError, MissingChunkError, ReadError
from shardsets import BatchError, DomainDataLoader, NotANumberError, NotFiniteError, SampleError

MISSING, CORRUPT = 3, 7
"""Rows of the time axis where u is missing, and t cut off."""


@pytest.fixture
def damaged(store, tmp_path) -> Path:
    """The store, with the lower rows (6 of 11) of u at one time lost, and t at another cut short."""
    path = tmp_path / "damaged.zarr"
    data = xr.open_zarr(store).load()
    for name in data.variables:
        data[name].encoding = {}
    chunks = {"t": (1, 3, 11, 8), "u": (1, 5, 8)}
    data.to_zarr(path, zarr_format=2, encoding={name: {"chunks": size} for name, size in chunks.items()})
    (path / "u" / f"{MISSING}.1.0").unlink()
    whole = (path / "t" / f"{CORRUPT}.0.0.0").read_bytes()
    (path / "t" / f"{CORRUPT}.0.0.0").write_bytes(whole[: len(whole) // 2])
    return path


def test_raises_by_default(damaged):
    with pytest.raises(MissingChunkError, match=r"3\.1\.0"):
        list(DomainDataLoader(damaged, variables=["u"]))
    with pytest.raises(CorruptChunkError, match="t"):
        list(DomainDataLoader(damaged, variables=["t"], time=(5, None)))


@pytest.mark.parametrize("read", ["own", "collective"])
@pytest.mark.parametrize(
    ("variable", "row", "kind"), [("u", MISSING, MissingChunkError), ("t", CORRUPT, CorruptChunkError)]
)
def test_all_ranks_stop_at_the_step_and_name_rank_sample_and_chunk(ranks, damaged, variable, row, kind, read):
    """Case R5: u's lost file lies in the second rank's rows alone; reading together, any rank may be who reads it."""

    def check(mesh):
        options = {"variables": [variable], "target_steps": 0, "partition": (5, 6), "read": read}
        loader = DomainDataLoader(str(damaged), mesh, **options)
        batches = iter(loader)
        for index in range(row):
            assert int(next(batches)["index"]) == index
        with pytest.raises((kind, BatchError)) as caught:
            next(batches)
        told = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
        loader.close()
        return isinstance(caught.value, kind), told

    found = ranks.run(check, mesh=(2,))
    assert any(own for own, _ in found)
    for _, told in found:
        assert f"the step of samples [{row}] in epoch 0" in told
        assert "rank 1" in told or (read, variable) != ("own", "u")
        assert "rank " in told
        assert ("'u/3.1.0'" if variable == "u" else "'t'") in told
        assert str(damaged) in told


def _indices(loader) -> list[int]:
    return [index for batch in loader for index in batch["index"].tolist()]


@pytest.mark.parametrize("prefetch", [0, 2])
def test_skips_what_has_a_bad_chunk_and_says_so(damaged, truth, prefetch):
    loader = DomainDataLoader(damaged, on_bad="skip", prefetch=prefetch)
    assert _indices(loader) == [0, 1, 4, 5, 8, 9, 10]
    report = loader.report()
    assert report.skips == 4
    assert [step.samples for step in report.skipped] == [(2,), (3,), (6,), (7,)]
    because = [step.because[0] for step in report.skipped]
    assert [bad.reason for bad in because] == ["missing", "missing", "corrupt", "corrupt"]
    assert because[0].samples == (2,)
    assert because[0].times == ("times 2020-01-01T12:00:00 to 2020-01-01T18:00:00",)
    assert because[0].rank == 0
    assert "3.1.0" in because[0].error
    assert "missing" in str(report)
    assert len(loader) == 11  # steps that are skipped count


def test_a_step_is_skipped_for_one_bad_sample_of_its_batch(damaged):
    loader = DomainDataLoader(damaged, on_bad="skip", batch_size=4, target_steps=0)
    assert _indices(loader) == [8, 9, 10, 11]
    assert [step.samples for step in loader.report().skipped] == [(0, 1, 2, 3), (4, 5, 6, 7)]


@pytest.mark.parametrize("nan", ["raise", "allow", 0.0])
def test_fills_on_request_only_what_is_bad(damaged, truth, nan):
    loader = DomainDataLoader(damaged, on_bad="fill", nan=nan, target_steps=0, batch_size=2)
    place = float("nan") if nan != 0.0 else 0.0
    expected = torch.from_numpy(truth.copy())
    expected[MISSING, 3, 5:10] = place
    expected[CORRUPT, :3] = place
    for batch in loader:
        for at, index in enumerate(batch["index"].tolist()):
            torch.testing.assert_close(batch["input"][at], expected[index], equal_nan=True, rtol=0, atol=0)
    filled = loader.report().filled
    assert [(bad.samples, bad.reason) for bad in filled] == [((MISSING,), "missing"), ((CORRUPT,), "corrupt")]
    assert loader.report().skips == 0


def test_statistics_leave_bad_chunks_out(damaged, truth):
    loader = DomainDataLoader(damaged, on_bad="skip", statistics="compute")
    values = truth[:, 3].astype("f8")
    values[MISSING, 5:10] = np.nan
    assert loader.statistics.mean[3] == pytest.approx(np.nanmean(values), rel=1e-9)
    assert loader.statistics.std[3] == pytest.approx(np.nanstd(values), rel=1e-9)
    with pytest.raises(MissingChunkError):
        DomainDataLoader(damaged, statistics="compute", variables=["u"])


@pytest.mark.parametrize("mesh", [(2,), (2, 2)])
@pytest.mark.parametrize("read", ["own", "collective"])
def test_all_ranks_of_all_groups_skip_the_same_steps(ranks, damaged, truth, mesh, read):
    def check(mesh):
        loader = DomainDataLoader(str(damaged), mesh, on_bad="skip", read=read, shard={"lat": "domain"})
        seen = []
        for batch in loader:
            whole = batch["input"].full_tensor()
            seen.append(batch["index"].tolist())
            for at, index in enumerate(seen[-1]):
                assert torch.equal(whole[at], torch.from_numpy(truth[index]))
        report = loader.report()
        loader.close()
        return seen, [(step.samples, [(bad.reason, bad.rank) for bad in step.because]) for step in report.skipped]

    told = ranks.run(check, mesh=mesh)
    assert all(report == told[0][1] for _, report in told)
    groups = mesh[0] if len(mesh) == 2 else 1
    samples = [step for step, _ in told[0][1]]
    assert samples == ([(2,), (3,), (6,), (7,)] if groups == 1 else [(2, 3), (6, 7)])
    assert len({len(seen) for seen, _ in told}) == 1
    first = told[0][1][0][1]
    assert all(reason == "missing" for reason, _ in first)
    if read == "own" and groups == 1:
        assert first == [("missing", 0), ("missing", 1)]  # rows 5 to 9: both ranks need some of the chunk


@pytest.mark.parametrize("read", ["own", "collective"])
def test_ranks_fill_alike(ranks, damaged, truth, read):
    expected = torch.from_numpy(truth.copy())
    expected[MISSING, 3, 5:10] = torch.nan
    expected[CORRUPT, :3] = torch.nan

    def check(mesh):
        loader = DomainDataLoader(str(damaged), mesh, on_bad="fill", read=read, target_steps=0)
        for batch in loader:
            whole = batch["input"].full_tensor()[0]
            torch.testing.assert_close(whole, expected[int(batch["index"])], equal_nan=True, rtol=0, atol=0)
        filled = loader.report().filled
        loader.close()
        return [(bad.samples[0], bad.reason, bad.rank) for bad in filled]

    told = ranks.run(check, mesh=(2,))
    assert told[0] == told[1]
    assert sorted(told[0]) == [(3, "missing", 0), (3, "missing", 1), (7, "corrupt", 0), (7, "corrupt", 1)]


@pytest.fixture(params=["zarr", "hdf5"])
def flipped(request, globe, tmp_path) -> tuple[str, str]:
    """A store of u, deflated, with eight bytes of the chunk at time 5 flipped, and what an error calls that chunk."""
    data, chunks = globe[["u"]], (1, 11, 8)
    if request.param == "zarr":
        path, chunk = tmp_path / "a.zarr", "'u/5.0.0'"
        data.to_zarr(path, zarr_format=2, encoding={"u": {"chunks": chunks, "compressors": Zlib()}})
        file, start, size = path / "u/5.0.0", 0, (path / "u/5.0.0").stat().st_size
    else:
        file = path = tmp_path / "a.nc"
        chunk = "chunk (5, 0, 0) of 'u'"
        data.to_netcdf(path, engine="h5netcdf", encoding={"u": {"chunksizes": chunks, "zlib": True}})
        with h5py.File(path) as opened:
            stored = opened["u"].id.get_chunk_info_by_coord((5, 0, 0))
        start, size = stored.byte_offset, stored.size
    content = bytearray(file.read_bytes())
    middle = start + size // 2
    content[middle : middle + 8] = bytes(byte ^ 0xFF for byte in content[middle : middle + 8])
    file.write_bytes(content)
    return str(path), chunk


@pytest.mark.parametrize("read", ["own", "collective"])
def test_flipped_bytes_of_a_chunk(ranks, flipped, truth, read):
    """Case R38: raised, skipped or filled by both ranks at the same step, and told with file and chunk."""
    path, chunk = flipped

    def check(mesh):
        told = []
        with DomainDataLoader(path, mesh, target_steps=0, read=read) as loader:
            batches = iter(loader)
            assert [int(next(batches)["index"]) for _ in range(5)] == [0, 1, 2, 3, 4]
            with pytest.raises((CorruptChunkError, BatchError)) as caught:
                next(batches)
            told.append(str(caught.value))
        for on_bad, rows in (("skip", [0, 1, 2, 3, 4, 6, 7, 8, 9, 10, 11]), ("fill", list(range(12)))):
            with DomainDataLoader(path, mesh, target_steps=0, read=read, on_bad=on_bad) as loader:
                found = {int(batch["index"]): batch["input"].full_tensor()[0, 0] for batch in loader}
                report = loader.report()
            assert list(found) == rows
            for row in {*rows} - {5}:
                assert torch.equal(found[row], torch.from_numpy(truth[row, 3]))
            assert on_bad == "skip" or found[5].isnan().all()
            because = report.skipped[0].because if on_bad == "skip" else report.filled
            assert {(bad.samples, bad.reason) for bad in because} == {((5,), "corrupt")}
            told += [bad.error for bad in because]
        return told

    one, other = ranks.run(check, mesh=(2,))
    assert one[1:] == other[1:]
    for text in {*one, *other}:
        assert path in text
        assert chunk in text


def _forbid(loader: DomainDataLoader, row: int) -> None:
    """Make one time of u unreadable as a missing permission does."""
    source = loader.samples.store["u"]
    read = source.read_counted

    def refused(box, out, *share):
        if box[0].start <= row < box[0].stop:
            raise PermissionError(13, "Permission denied", "u")
        return read(box, out, *share)

    source.read_counted = refused


def test_refused_permission_is_neither_missing_nor_filled(store):
    for on_bad in ("raise", "fill"):
        loader = DomainDataLoader(store, variables=["u"], on_bad=on_bad, read="own")
        _forbid(loader, 2)
        with pytest.raises(ReadError, match="may not read") as caught:
            list(loader)
        assert not isinstance(caught.value, MissingChunkError | CorruptChunkError)
    loader = DomainDataLoader(store, variables=["u"], on_bad="skip", read="own")
    _forbid(loader, 2)
    assert _indices(loader) == [0, 3, 4, 5, 6, 7, 8, 9, 10]
    assert {bad.reason for step in loader.report().skipped for bad in step.because} == {"unreachable"}


def test_an_error_that_is_not_about_data_is_never_skipped(store):
    def broken(batch):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        list(DomainDataLoader(store, transform=broken, on_bad="skip"))


def test_an_epoch_without_any_step_is_an_error(damaged):
    loader = DomainDataLoader(damaged, time=(2, 5), input_steps=2, on_bad="skip")
    with pytest.raises(BatchError, match=r"every step of epoch 0 was skipped.*missing"):
        list(loader)


def _odd(store, *values: tuple[int, float]) -> xr.Dataset:
    data = xr.open_zarr(store)[["u"]].load()
    for row, value in values:
        data.u[row, 4, 2] = value
    return data


def test_values_that_are_not_finite(store):
    data = _odd(store, (2, np.nan), (5, np.inf))
    with pytest.raises(NotANumberError, match=r"sample 1 .*'target' has NaN in 1 cells of 'u'"):
        list(DomainDataLoader(data))
    with pytest.raises(NotFiniteError, match="infinite values in 1 cells of 'u'"):
        list(DomainDataLoader(data, nan="allow"))
    assert len(list(DomainDataLoader(data, nan="allow", inf="allow"))) == 11
    loader = DomainDataLoader(data, nan=0.0, inf=-1.0, target_steps=0)
    fields = torch.cat([batch["input"] for batch in loader])
    assert fields[2, 0, 4, 2] == 0
    assert fields[5, 0, 4, 2] == -1
    skipping = DomainDataLoader(data, on_bad="skip", target_steps=0)
    assert _indices(skipping) == [0, 1, 3, 4, 6, 7, 8, 9, 10, 11]
    assert {bad.reason for step in skipping.report().skipped for bad in step.because} == {"not finite"}
    filling = DomainDataLoader(data, on_bad="fill", target_steps=0)
    fields = torch.cat([batch["input"] for batch in filling])
    assert fields[[2, 5], 0, 4, 2].isnan().all()
    assert [bad.samples for bad in filling.report().filled] == [(2,), (5,)]


def test_the_limit_is_a_share_of_all_ranks_cells(ranks, store):
    """20 of 88 cells are NaN at time 6, all in the first rank's rows: more than 0.2 of the whole grid."""
    data = xr.open_zarr(store)[["u"]].load()
    data.u[6, :2, :] = np.nan
    data.u[6, 2, :4] = np.nan
    data.u[8, 0, :4] = np.nan

    def check(mesh):
        for limit, left_out in ((0.2, [6]), (0.24, [])):
            options = {"nan": 0.0, "target_steps": 0, "on_bad": "skip", "max_nonfinite": limit}
            loader = DomainDataLoader(data, mesh, **options)
            assert [index for index in range(12) if index not in _indices(loader)] == left_out
            reasons = [(bad.samples, bad.reason) for step in loader.report().skipped for bad in step.because]
            assert set(reasons) == {((index,), "not finite") for index in left_out}
            loader.close()
        loader = DomainDataLoader(data, mesh, nan=0.0, target_steps=0, max_nonfinite=0.2)
        with pytest.raises(NotFiniteError, match=r"20 of 88 cells of 'u', more than max_nonfinite=0.2"):
            list(loader)

    ranks.run(check, mesh=(3,))


def test_samples_over_an_irregular_time_are_left_out(store, truth):
    data = xr.open_zarr(store)[["u"]].load()
    times = data.time.values.copy()
    times[7:] += np.timedelta64(1, "D")
    times[10] = times[9] - np.timedelta64(1, "h")
    odd = data.assign_coords(time=times)
    for on_bad in ("raise", "fill"):
        with pytest.raises(ShardIOError, match="position"):
            DomainDataLoader(odd, on_bad=on_bad)
    loader = DomainDataLoader(odd, on_bad="skip")
    assert loader.report().left_out == 3  # over 6 | 7, 9 | 10, 10 | 11
    rows = [0, 1, 2, 3, 4, 5, 7, 8]
    for batch, row in zip(loader, rows, strict=True):
        assert batch["time"][0] == times[row]
        assert batch["target_time"][0][0] - batch["time"][0] == np.timedelta64(6, "h")
        assert torch.equal(batch["target"][0, 0], torch.from_numpy(truth[row + 1, 3]))
    backward = data.assign_coords(time=data.time.values[::-1])
    with pytest.raises(ShardIOError, match="does not increase"):
        DomainDataLoader(backward, on_bad="skip")


def _joined(folder: Path, truth, scales: tuple[float, float]) -> Path:
    """u in two files of six times, joined by a third."""
    layout = h5py.VirtualLayout(shape=(12, 11, 8), dtype="f4")
    for half, scale in enumerate(scales):
        with h5py.File(folder / f"{half}.h5", "w") as file:
            file["u"] = truth[6 * half : 6 * half + 6, 3]
            file["u"].attrs["scale_factor"] = scale
        layout[6 * half : 6 * half + 6] = h5py.VirtualSource(folder / f"{half}.h5", "u", shape=(6, 11, 8))
    with h5py.File(folder / "all.h5", "w") as file:
        data = file.create_virtual_dataset("u", layout)
        data.attrs["scale_factor"] = scales[0]
        for dim, name in zip(data.dims, ("time", "lat", "lon"), strict=True):
            dim.label = name
    return folder / "all.h5"


def test_a_virtual_dataset_with_a_file_gone(truth, tmp_path):
    path = _joined(tmp_path, truth, (1.0, 1.0))
    (tmp_path / "1.h5").unlink()
    with pytest.raises(MissingChunkError, match=r"1\.h5' is missing"):
        list(DomainDataLoader(path))
    loader = DomainDataLoader(path, on_bad="skip")
    assert _indices(loader) == [0, 1, 2, 3, 4]
    assert {bad.reason for step in loader.report().skipped for bad in step.because} == {"missing"}
    loader = DomainDataLoader(path, on_bad="fill", target_steps=0)
    fields = torch.cat([batch["input"] for batch in loader])[:, 0]
    assert torch.equal(fields[:6], torch.from_numpy(truth[:6, 3]))
    assert fields[6:].isnan().all()


def test_mixed_packing_is_refused_at_once(truth, tmp_path):
    for on_bad in ("raise", "skip", "fill"):
        with pytest.raises(ShardIOError, match="not packed alike"):
            DomainDataLoader(_joined(tmp_path, truth, (1.0, 2.0)), on_bad=on_bad)


@pytest.mark.parametrize(("changed", "said"), [
    ({"on_bad": "ignore"}, "on_bad is 'ignore'"),
    ({"read": "all"}, "read is 'all'"),
    ({"on_bad": "fill", "dtype": torch.int32}, "cannot hold"),
    ({"max_nonfinite": 2}, "max_nonfinite is 2"),
    ({"inf": "drop"}, "inf is 'drop'"),
    ({"cache_bytes": -1}, "cache_bytes is -1"),
])  # fmt: skip
def test_refuses_arguments_with_a_reason(store, changed, said):
    with pytest.raises(SampleError, match=said):
        DomainDataLoader(store, **changed)


def test_nothing_relies_on_assert(damaged):
    """The same under python -O."""
    program = f"""
from shardio.errors import MissingChunkError
from shardsets import DomainDataLoader
loader = DomainDataLoader({str(damaged)!r}, on_bad="skip")
print([int(batch["index"]) for batch in loader])
try:
    list(DomainDataLoader({str(damaged)!r}, variables=["u"]))
except MissingChunkError:
    print("missing")
"""
    done = subprocess.run([sys.executable, "-O", "-c", program], capture_output=True, text=True, timeout=100)
    assert done.stdout.split("\n")[:2] == ["[0, 1, 4, 5, 8, 9, 10]", "missing"], done.stderr

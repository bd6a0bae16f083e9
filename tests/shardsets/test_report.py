"""What the loader counts and keeps: bytes, cache hits, seconds, labels for the profiler; and that memory stays flat."""

from __future__ import annotations

import gc
import json
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
import xarray as xr

from shardsets import DomainDataLoader

CELLS = 11 * 8 * 4
"""Bytes of one field."""


@pytest.fixture(scope="module")
def slow_chunks(store, tmp_path_factory) -> Path:
    """The store with four times to a chunk, compressed so that one time cannot be decoded alone."""
    from numcodecs import Zlib

    path = tmp_path_factory.mktemp("chunks") / "four.zarr"
    data = xr.open_zarr(store).load()
    for name in data.variables:
        data[name].encoding = {}
    encoding = {
        "t": {"chunks": (4, 3, 11, 8), "compressors": Zlib()},
        "u": {"chunks": (4, 6, 8), "compressors": Zlib()},
    }
    data.to_zarr(path, zarr_format=2, encoding=encoding)
    return path


def test_counts_bytes_and_seconds(store):
    loader = DomainDataLoader(store, prefetch=0, transform=lambda batch: time.sleep(0.01) or batch)
    nothing = loader.report()
    assert (nothing.steps, nothing.bytes_needed, nothing.seconds_waiting) == (0, 0, 0)
    assert len(list(loader)) == 11
    report = loader.report()
    assert report.steps == 11
    assert report.bytes_needed == report.bytes_decoded == 11 * 2 * 4 * CELLS
    assert report.bytes_fetched is None or 0 < report.bytes_fetched < report.bytes_decoded
    assert report.chunks == 11 * 2 * 2
    assert report.seconds_waiting >= report.seconds_reading >= 0.11
    assert report.hit_rate == 0
    assert json.loads(json.dumps(report.as_dict()))["steps"] == 11
    assert "11 steps" in str(report)


def test_reading_ahead_hides_the_waiting(store):
    loader = DomainDataLoader(store, prefetch=2, transform=lambda batch: time.sleep(0.02) or batch)
    for _ in loader:
        time.sleep(0.06)
    report = loader.report()
    assert report.seconds_reading >= 0.22
    assert report.seconds_waiting < report.seconds_reading


@pytest.mark.parametrize("shuffle", [False, True])
def test_chunks_of_several_times_are_decoded_once_while_they_are_kept(slow_chunks, truth, shuffle):
    loader = DomainDataLoader(slow_chunks, shuffle=shuffle, seed=1, read="own")
    for _ in range(2):
        for batch in loader:
            index = int(batch["index"])
            assert torch.equal(batch["input"][0], torch.from_numpy(truth[index]))
            assert torch.equal(batch["target"][0], torch.from_numpy(truth[index + 1]))
    report = loader.report()
    stored = 12 * (3 * CELLS + 12 * 8 * 4)  # chunks of u hang over the last row
    assert report.bytes_decoded == stored
    assert report.cache_misses > 0
    assert report.hit_rate > 0.8
    assert "hits" in str(report)
    loader.close()
    plain = DomainDataLoader(slow_chunks, shuffle=shuffle, seed=1, read="own", cache_bytes=0)
    assert len(list(plain)) == 11
    assert plain.report().bytes_decoded > 2 * stored
    assert plain.report().cache_misses == plain.report().cache_hits == 0
    plain.close()


def test_gzip_chunks_of_8_times_are_decoded_once(ranks, tmp_path):
    """Case R12: a rank takes 1 or 7 of 8 rows, 16 times; a cache smaller than a chunk decodes each chunk once."""
    values = np.random.default_rng(0).normal(size=(16, 8, 16)).astype("f4")
    data, path = xr.Dataset({"u": (("time", "lat", "lon"), values)}), str(tmp_path / "a.nc")
    data.to_netcdf(path, engine="h5netcdf", encoding={"u": {"chunksizes": (8, 8, 16), "zlib": True}})
    chunk = 8 * 8 * 16 * 4

    def decoded(mesh, **options):
        options = {"partition": (1, 7), "target_steps": 0, "read": "own", **options}
        with DomainDataLoader(path, mesh, **options) as loader:
            for batch in loader:
                at = int(batch["index"]) + (options.get("time") or (0,))[0]
                assert torch.equal(batch["input"].full_tensor()[0, 0], torch.from_numpy(values[at]))
            return loader.report().bytes_decoded

    def check(mesh):
        assert decoded(mesh, cache_bytes=chunk * 7 // 8) == 2 * chunk
        assert decoded(mesh, cache_bytes=0) == 16 * chunk
        assert sum(decoded(mesh, time=(at, at + 1)) for at in range(16)) == 16 * chunk

    ranks.run(check, mesh=(2,))


def test_the_cache_stays_in_its_budget(slow_chunks, truth):
    budget = 5 * CELLS
    loader = DomainDataLoader(slow_chunks, shuffle=True, seed=2, cache_bytes=budget, read="own")
    for batch in loader:
        assert torch.equal(batch["input"][0], torch.from_numpy(truth[int(batch["index"])]))
        assert loader.report().cache_bytes <= budget
    assert loader.report().cache_hits > 0


def test_statistics_decode_every_chunk_once_too(slow_chunks, truth):
    loader = DomainDataLoader(slow_chunks, statistics="compute")
    np.testing.assert_allclose(loader.statistics.mean, truth.astype("f8").mean((0, 2, 3)), rtol=1e-9)


@pytest.mark.parametrize("read", ["own", "collective"])
def test_ranks_with_a_cache(ranks, slow_chunks, truth, read):
    def check(mesh):
        loader = DomainDataLoader(str(slow_chunks), mesh, read=read, halo=1)
        for batch in loader:
            assert torch.equal(batch["input"].full_tensor()[0], torch.from_numpy(truth[int(batch["index"])]))
        report = loader.report()
        loader.close()
        return report.bytes_decoded, report.hit_rate

    told = ranks.run(check, mesh=(2,))
    stored = 12 * (3 * CELLS + 12 * 8 * 4)
    decoded = sum(nbytes for nbytes, _ in told)
    assert all(hits > 0.5 for _, hits in told)
    if read == "collective":
        assert decoded == stored
    else:
        assert decoded == 12 * (
            2 * 3 * CELLS + 4 * 6 * 8 * 4
        )  # each for itself, with a halo row in the other's chunk of u


def test_tells_how_each_array_is_read_and_why(ranks, store):
    alone = {read: DomainDataLoader(store, read=read).report().reading for read in ("own", "collective", "auto")}
    assert alone["own"] == {"t": "own: as asked", "u": "own: as asked"}
    assert alone["collective"] == alone["auto"] == dict.fromkeys("tu", "own: no other rank shares the samples")

    def check(mesh):
        found = {}
        for read in ("own", "collective", "auto"):
            loader = DomainDataLoader(str(store), mesh, read=read)
            found[read] = loader.report().reading
            assert all(line in str(loader.report()) for line in ("t: ", "u: "))
            loader.close()
        return found

    told = ranks.run(check, mesh=(2,))
    assert told[0] == told[1]
    assert told[0]["own"] == alone["own"]
    assert told[0]["collective"] == dict.fromkeys("tu", "collective: as asked")
    assert all(" ms own" in why for why in told[0]["auto"].values())


def test_the_profiler_sees_the_steps(store):
    loader = DomainDataLoader(store, prefetch=0)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        next(iter(loader))
    names = {event.name for event in profile.events()}
    assert names >= {f"shardsets.{what}" for what in ("wait", "read", "prepare", "agree", "deliver")}


def test_memory_stays_flat(slow_chunks):
    """Over hundreds of reads through the cache, what Python, numpy and the process hold does not grow."""
    loader = DomainDataLoader(slow_chunks, shuffle=True, cache_bytes=8 * CELLS, prefetch=3)
    statm = Path("/proc/self/statm")

    def held() -> tuple[int, int]:
        for _ in range(15):
            for _ in loader:
                pass
        gc.collect()
        pages = int(statm.read_text().split()[1]) if statm.exists() else 0
        return tracemalloc.get_traced_memory()[0], pages * 4096

    tracemalloc.start()
    try:
        held()
        before, after = held(), held()
    finally:
        tracemalloc.stop()
    assert after[0] - before[0] < 100_000
    assert after[1] - before[1] < 8 << 20

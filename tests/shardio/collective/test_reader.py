"""Ranks that read chunks once for all of them, against each reading for itself; and what they decode, by the store."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
import zarr
from torch.distributed.device_mesh import DeviceMesh
from zarr.codecs import ZstdCodec

from shardio import Cut, OwnReader, Partition, Request, open_store, plan
from shardio.collective import CollectiveReader, Group
from shardio.errors import CorruptChunkError, MissingChunkError, ShardIOError
from shardio.partition import even

SHAPE = (8, 3, 23, 17)
DIMS = ("time", "level", "lat", "lon")
VALUES = np.random.default_rng(0).normal(280, 9, SHAPE).astype(np.float32)
PACKED = np.random.default_rng(1).integers(-900, 900, (8, 23, 17)).astype(np.int16)
PACKED[:, 3:5, 2] = -999

LAYOUTS: dict[str, dict[str, Any]] = {
    "one chunk": {"chunks": (1, 3, 23, 17)},
    "tiles": {"chunks": (1, 1, 5, 4)},
    "times": {"chunks": (4, 3, 23, 9)},
    "rows": {"chunks": (1, 3, 1, 17)},
    "raw": {"chunks": (1, 3, 6, 17), "compressors": None},
    "shards": {"chunks": (1, 1, 6, 17), "shards": (2, 3, 24, 17)},
    "blosc": {"chunks": (2, 3, 23, 17), "compressors": zarr.codecs.BloscCodec(blocksize=512)},
}


def write(path: Path, layout: str) -> str:
    """A store with t [time, level, lat, lon] in this layout, and p [time, lat, lon], packed, whole in space."""
    if layout.startswith("hdf5"):
        chunks = {"hdf5": None, "hdf5 gzip": (1, 3, 23, 17), "hdf5 times": (4, 1, 12, 17)}[layout]
        with h5py.File(path / "a.h5", "w") as file:
            file.create_dataset("t", data=VALUES, chunks=chunks, compression="gzip" if chunks else None)
            packed = file.create_dataset("p", data=PACKED, chunks=(1, 23, 17), compression="gzip")
            packed.attrs.update({"scale_factor": 0.01, "add_offset": 273.15, "_FillValue": np.int16(-999)})
            for name, dims in (("t", DIMS), ("p", ("time", "lat", "lon"))):
                for at, dim in enumerate(dims):
                    file[name].dims[at].label = dim
                    file[name].attrs["DIMENSION_LABELS"] = list(dims)
        return str(path / "a.h5")
    group = zarr.open_group(path / "a.zarr", mode="w", zarr_format=3)
    options = {"compressors": ZstdCodec(), **LAYOUTS[layout]}
    group.create_array("t", shape=SHAPE, dtype="float32", dimension_names=DIMS, **options)[...] = VALUES
    packed = group.create_array(
        "p", shape=PACKED.shape, dtype="int16", chunks=(1, 23, 17), dimension_names=("time", "lat", "lon")
    )
    packed[...] = PACKED
    packed.attrs.update({"scale_factor": 0.01, "add_offset": 273.15, "_FillValue": -999})
    return str(path / "a.zarr")


def placed(mesh: DeviceMesh, cuts: dict[str, str]) -> tuple[Partition, int]:
    """Who owns what, and this rank's part. Axes that no dim is cut over hold copies."""
    names = mesh.mesh_dim_names or ()
    sizes = {"lat": 23, "lon": 17}
    partition = Partition(tuple(Cut(dim, at, even(sizes[dim], mesh.size(names.index(at)))) for dim, at in cuts.items()))
    rank = 0
    for axis in cuts.values():
        rank = rank * mesh.size(names.index(axis)) + mesh.get_local_rank(axis)
    return partition, rank


def requests(store: Any, partition: Partition, rank: int, halo: Any, times: list[list[int]]) -> list[Request]:
    """Two samples of both arrays; one with levels chosen out of order, one with a mask."""
    made = []
    for rows in times:
        for name, index in (("t", {"time": rows, "level": [2, 0]}), ("p", {"time": rows})):
            source = store[name]
            plans = plan(partition, source.layout, halo=halo, periodic=("lon",))
            mine = plans[rank].at(index)
            out = torch.full(mine.result_shape, -1.0)
            valid = torch.zeros(mine.result_shape, dtype=torch.bool) if name == "p" else None
            made.append(Request(source, mine, out, valid, plans, index))
    return made


def read_both(
    mesh: DeviceMesh,
    path: str,
    cuts: dict[str, str],
    halo: Any = 0,
    budget: int = 1 << 20,
    nodes: tuple[str, ...] | None = None,
    message: int = 1 << 30,
    times: tuple[list[list[int]], ...] = ([[1, 2], [2, 3]], [[7, 0], [5, 6]]),
) -> dict[str, Any]:
    """Read together and alone, and compare; what this rank decoded, and all planned to."""
    partition, rank = placed(mesh, cuts)
    group = Group.join(mesh, rank, node=None if nodes is None else nodes[mesh.get_rank()])
    fetched = planned = rounds = chunks = 0
    with open_store(path) as store, CollectiveReader(group, threads=2, budget=budget, message=message) as reader:
        for number, rows in enumerate(times):
            if number:
                group.begin(number)
            together, alone = (requests(store, partition, rank, halo, rows) for _ in range(2))
            reader.read_all(together)
            with OwnReader(threads=1) as own:
                own.read_all(alone)
            for one, other in zip(together, alone, strict=True):
                torch.testing.assert_close(one.out, other.out, rtol=0, atol=0, equal_nan=True)
                if one.valid is not None:
                    assert torch.equal(one.valid, other.valid)
            exchanged = reader.plan(together)
            fetched += exchanged.decoded(group.me)
            planned += sum(exchanged.decoded(member) for member in range(group.size))
            chunks += sum(unit.chunks for unit in exchanged.units)
            rounds = max(rounds, len(exchanged.rounds))
            assert all(
                max(sizes) <= max(budget, *(u.nbytes + 64 for u in exchanged.units)) for sizes in exchanged.sizes
            )
        stats = reader.stats
    group.close()
    assert stats.bytes_fetched == fetched, "counted as planned"
    return {"fetched": stats.bytes_fetched, "planned": planned, "rounds": rounds, "chunks": chunks, "t": stats.chunks}


def needed_once(path: str, times: list[list[int]]) -> int:
    """Bytes of the chunks that hold what any rank needs, each counted once."""
    total = 0
    with open_store(path) as store:
        for name, levels in (("t", [2, 0]), ("p", None)):
            layout = store[name].layout
            rows = sorted({row for sample in times for row in sample})
            along = [rows] if levels is None else [rows, levels]
            along += [list(range(23)), list(range(17))]
            numbers = [{row // n for row in rows} for rows, n in zip(along, layout.chunks, strict=True)]
            if layout.partial:
                total += math.prod(map(len, along)) * layout.itemsize
            else:
                total += math.prod(map(len, numbers)) * math.prod(layout.chunks) * layout.itemsize
    return total


MESHES = [
    ((1,), {"lat": "domain"}),
    ((2,), {"lat": "domain"}),
    ((3,), {"lon": "domain"}),
    ((4,), {"lat": "domain"}),
    ((2, 2), {"lat": "data", "lon": "domain"}),
    ((2, 2), {"lat": "domain"}),
]
TIMES = ([[1, 2], [2, 3]], [[7, 0], [5, 6]])


@pytest.mark.parametrize(("mesh", "cuts"), MESHES)
@pytest.mark.parametrize("layout", [*LAYOUTS, "hdf5", "hdf5 gzip", "hdf5 times"])
def test_values_are_those_of_the_own_reader_and_every_chunk_is_decoded_once(ranks, tmp_path, layout, mesh, cuts):
    path = write(tmp_path, layout)
    halo = {"lat": (1, 2), "lon": (2, 1)} if layout != "tiles" else 0
    found = ranks.run(read_both, path, cuts, halo, mesh=mesh)
    total = sum(one["fetched"] for one in found)
    assert {one["planned"] for one in found} == {total}
    if layout == "blosc":  # only the blocks that are needed
        assert total < sum(needed_once(path, rows) for rows in TIMES)
    else:
        assert total == sum(needed_once(path, rows) for rows in TIMES)


@pytest.mark.parametrize("budget", [64, 1_000])
def test_rounds_keep_to_the_budget(ranks, tmp_path, budget):
    found = ranks.run(read_both, write(tmp_path, "tiles"), {"lat": "domain"}, {"lat": 3}, budget, mesh=(3,))
    assert min(one["rounds"] for one in found) > 1


@pytest.mark.parametrize("layout", ["one chunk", "tiles", "times", "raw"])
@pytest.mark.parametrize("nodes", ["abcd", "aabb", "abab"])
def test_between_machines(ranks, tmp_path, layout, nodes):
    """In messages of 512 bytes, so that parts are cut as those of 2 GiB would be."""
    halo = {"lat": (1, 2), "lon": (2, 1)}
    path = write(tmp_path, layout)
    cuts = {"lat": "data", "lon": "domain"}
    found = ranks.run(read_both, path, cuts, halo, 9_000, tuple(nodes), 512, mesh=(2, 2))
    assert sum(one["fetched"] for one in found) == sum(needed_once(path, rows) for rows in TIMES)


def test_the_store_gives_every_chunk_once(ranks, tmp_path):
    """Case R1: four ranks, and chunks that hold the whole grid; each is fetched and decoded once, not four times."""
    path = write(tmp_path, "one chunk")

    def gets(mesh):
        from zarr.storage import LocalStore

        from shardio.testing import CountingStore

        counting = CountingStore(LocalStore(path, read_only=True))
        partition, rank = placed(mesh, {"lat": "domain"})
        group = Group.join(mesh, rank)
        with open_store(counting) as store, CollectiveReader(group, threads=1) as reader:
            made = requests(store, partition, rank, 2, [[3], [4]])
            counting.reset()
            reader.read_all(made)
        group.close()
        return dict(counting.gets), reader.stats.bytes_fetched

    counted: dict[str, int] = {}
    decoded = 0
    for one, nbytes in ranks.run(gets, mesh=(4,)):
        decoded += nbytes
        for key, times in one.items():
            counted[key] = counted.get(key, 0) + times
    assert counted == {"t/c/3/0/0/0": 1, "t/c/4/0/0/0": 1, "p/c/3/0/0": 1, "p/c/4/0/0": 1}
    assert decoded == needed_once(path, [[3], [4]])


def errors(mesh: DeviceMesh, path: str, nodes: tuple[str, ...] | None) -> list[str]:
    """The errors of three batches of which the second is bad."""
    partition, rank = placed(mesh, {"lat": "domain"})
    group = Group.join(mesh, rank, node=None if nodes is None else nodes[mesh.get_rank()])
    said = []
    with open_store(path) as store, CollectiveReader(group, threads=1, budget=6000) as reader:
        for rows in ([0, 1], [4, 5], [2, 3]):
            try:
                made = requests(store, partition, rank, 1, [rows])
                reader.read_all(made)
                expected = VALUES[rows][:, [2, 0]]
                span = partition.spans(rank)["lat"]
                start, stop = max(0, span.start - 1), min(23, span.stop + 1)
                assert np.array_equal(made[0].out.numpy(), expected[:, :, start:stop])
                said.append("fine")
            except ShardIOError as error:
                said.append(f"{type(error).__name__}: {error}")
    group.close()
    return said


@pytest.mark.parametrize("nodes", [None, "abc"])
@pytest.mark.parametrize("kind", [MissingChunkError, CorruptChunkError])
def test_an_error_of_one_rank_is_raised_on_all_and_the_next_batch_is_read(ranks, tmp_path, kind, nodes):
    path = write(tmp_path, "one chunk")
    chunk = Path(path, "t", "c", "5", "0", "0", "0")
    chunk.unlink() if kind is MissingChunkError else chunk.write_bytes(b"nonsense")
    found = ranks.run(errors, path, nodes if nodes is None else tuple(nodes), mesh=(3,))
    assert all(said == found[0] for said in found)
    first, second, third = found[0]
    assert first == third == "fine"
    assert second.startswith(f"{kind.__name__}: rank ")
    assert "'t'" in second or "t/c/5/0/0/0" in second


def test_requests_without_the_plans_of_all_ranks_are_refused(ranks, tmp_path):
    path = write(tmp_path, "one chunk")

    def without(mesh):
        partition, rank = placed(mesh, {"lat": "domain"})
        group = Group.join(mesh, rank)
        with open_store(path) as store, CollectiveReader(group) as reader:
            (one, *_) = requests(store, partition, rank, 0, [[0]])
            with pytest.raises(ShardIOError, match="no plan of all ranks"):
                reader.read_all([Request(one.source, one.plan, one.out)])
        group.close()

    ranks.run(without, mesh=(2,))


def test_no_memory_is_left_behind(ranks, tmp_path):
    """Names of shared memory are gone while it is in use."""
    path = write(tmp_path, "tiles")

    def left(mesh):
        from shardio.collective.segment import folders

        partition, rank = placed(mesh, {"lat": "domain"})
        group = Group.join(mesh, rank)
        with open_store(path) as store, CollectiveReader(group, budget=2000) as reader:
            for rows in ([0], [1, 2], [3]):
                reader.read_all(requests(store, partition, rank, 3, [rows]))
            during = {file.name for folder in folders() for file in folder.glob(f"shardio-{group.name}*")}
        group.close()
        return during

    for during in ranks.run(left, mesh=(2,)):
        assert during == set()

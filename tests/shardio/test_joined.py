"""Grids joined to one list of cells, against numpy, and which chunks a slab of it takes."""

from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr
import zarr
from torch.distributed.device_mesh import DeviceMesh
from zarr.storage import MemoryStore

from shardio import Cut, GridPart, OwnReader, Partition, Span, Store, find_grid, join, open_store, plan, read
from shardio.collective import CollectiveReader, Group
from shardio.errors import DecodeError, DimensionError, NoVariableError
from shardio.labels import labels
from shardio.partition import even
from shardio.read import Request
from shardio.testing import CountingStore
from shardtensor.testing import Ranks

RANDOM = np.random.default_rng(0)
FINE, COARSE = RANDOM.normal(size=(3, 2, 30, 24)).astype("f4"), RANDOM.normal(size=(3, 2, 19, 36)).astype("f4")
KEEP = RANDOM.random((19, 36)) > 0.2  # holes all over
KEEP[5:12, 8:20] = False  # where the fine grid lies
CELLS = np.concatenate([FINE.reshape(3, 2, -1), COARSE[..., KEEP]], axis=-1)
DIMS = ("time", "level", "lat", "lon")


def stored(values: np.ndarray, chunks: tuple[int, ...], dims: tuple[str, ...] = DIMS) -> tuple[CountingStore, Store]:
    counting = CountingStore(MemoryStore())
    group = zarr.open_group(counting, mode="w", zarr_format=3)
    array = group.create_array(
        "t", shape=values.shape, dtype=values.dtype, chunks=chunks, compressors=None, dimension_names=dims
    )
    array[...] = values
    return counting, open_store(counting)


def both(fine: tuple[int, ...] = (1, 2, 7, 24), coarse: tuple[int, ...] = (1, 2, 4, 9)) -> tuple[Any, Store]:
    one, first = stored(FINE, fine)
    other, second = stored(COARSE, coarse)
    joined = join([first, GridPart(second, KEEP)])
    one.reset()
    other.reset()
    return (one, other), joined


def wanted_chunks(cells: list[int], fine: tuple[int, ...], coarse: tuple[int, ...]) -> set[tuple[int, int, int]]:
    """(part, chunk row, chunk column) of the chunks that hold one of the cells."""
    kept = np.argwhere(KEEP)
    found = set()
    for cell in cells:
        part, (y, x) = (0, divmod(cell, 24)) if cell < 720 else (1, kept[cell - 720].tolist())
        rows, columns = (fine, coarse)[part][2:]
        found.add((part, y // rows, x // columns))
    return found


def got_chunks(counting: Any) -> dict[tuple[int, int, int], int]:
    found: dict[tuple[int, int, int], int] = {}
    for part, store in enumerate(counting):
        for key, times in store.gets.items():
            *_, y, x = map(int, key.split("/")[2:])
            found[part, y, x] = found.get((part, y, x), 0) + times
    return found


TENTH = len(CELLS[0, 0]) // 10


EMPTIED = 720 + int(KEEP[:8].sum()) - 5
"""A first cell from which a tenth goes on through rows 8 to 11 of the coarse grid, where the mask empties a chunk."""


@pytest.mark.parametrize("first", [0, 100, 720 - TENTH // 2, 720, EMPTIED, len(CELLS[0, 0]) - TENTH])
@pytest.mark.parametrize(("fine", "coarse"), [((1, 2, 7, 24), (1, 2, 4, 9)), ((1, 2, 30, 24), (1, 2, 19, 36))])
def test_a_tenth_takes_the_chunks_of_its_cells_once(first: int, fine: Any, coarse: Any) -> None:
    """Case R2: as a slice and as a list of numbers, the same chunks, and byte by byte the same values."""
    counting, joined = both(fine, coarse)
    source = joined["t"]
    cells = list(range(first, first + TENTH))
    expected = wanted_chunks(cells, fine, coarse)
    cut = Partition((Cut("cell", "domain", (TENTH,), start=first),))
    found = []
    for planned in (
        plan(cut, source.layout, index={"time": 1}),
        plan(Partition(()), source.layout, index={"time": 1, "cell": cells}),
    ):
        for store in counting:
            store.reset()
        with OwnReader(threads=1) as reader:
            found.append(reader.read(source, planned))
        assert got_chunks(counting) == dict.fromkeys(expected, 1)
        assert reader.stats.bytes_fetched == sum(store.bytes for store in counting)
    np.testing.assert_array_equal(found[0].numpy(), CELLS[1][..., cells])
    assert torch.equal(*found)


def test_cells_far_apart_do_not_take_what_lies_between() -> None:
    counting, joined = both((1, 2, 3, 24), (1, 2, 2, 9))
    source = joined["t"]
    cells = [3, 4, 700, len(CELLS[0, 0]) - 1, 9]
    found = read(source, plan(Partition(()), source.layout, index={"time": 2, "cell": cells}))
    np.testing.assert_array_equal(found.numpy(), CELLS[2][..., cells])
    assert set(got_chunks(counting)) == wanted_chunks(cells, (1, 2, 3, 24), (1, 2, 2, 9))


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("threads", [1, 3])
def test_slabs_with_halo(ranks: int, threads: int) -> None:
    counting, joined = both()
    source, total = joined["t"], CELLS.shape[-1]
    partition = Partition((Cut("cell", "domain", even(total, ranks)),))
    planned = plan(partition, source.layout, halo=5, index={"time": [2, 0]})
    for rank in range(ranks):
        span = partition.spans(rank)["cell"]
        rows = range(max(0, span.start - 5), min(total, span.stop + 5))
        for store in counting:
            store.reset()
        with OwnReader(threads=threads) as reader:
            found, valid = reader.read(source, planned, rank, dtype=torch.float64, mask=True)
        np.testing.assert_array_equal(found.numpy(), CELLS[[2, 0]][..., rows])
        assert valid.all()
        got = got_chunks(counting)
        assert set(got) == wanted_chunks(list(rows), (1, 2, 7, 24), (1, 2, 4, 9))
        # Two times. Threads meet within a band of chunks, and both read it then.
        assert set(got.values()) <= ({2} if threads == 1 else {2, 4})


def test_uncompressed_parts_are_read_by_bands_of_rows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """HDF5 in one piece: what is read is the rows of the cells, with what the mask leaves out of them."""
    monkeypatch.setattr("shardio.joined.ROWS_BYTES", 4 * 36 * 4)  # four rows of the coarse grid, six of the fine one
    for name, values in (("fine", FINE), ("coarse", COARSE)):
        xr.Dataset({"t": (DIMS, values)}).to_netcdf(tmp_path / f"{name}.nc", engine="h5netcdf")
    joined = join([open_store(tmp_path / "fine.nc"), GridPart(open_store(tmp_path / "coarse.nc"), KEEP)])
    source = joined["t"]
    assert source.partial
    start = 720 + int(KEEP[:2].sum())
    cut = Partition((Cut("cell", "domain", (int(KEEP[2:7].sum()),), start=start),))
    with OwnReader(threads=1) as reader:
        found = reader.read(source, plan(cut, source.layout, index={"time": 1}))
    np.testing.assert_array_equal(found.numpy(), COARSE[1][:, 2:7][..., KEEP[2:7]])
    rows_of_levels = 2 * 5
    assert reader.stats.bytes_fetched <= rows_of_levels * 36 * 4


def read_together(mesh: DeviceMesh, fine: tuple[int, ...], coarse: tuple[int, ...]) -> dict[Any, int]:
    """Read a part of the cells, sharing chunks; how often this rank took each chunk from the stores."""
    counting, joined = both(fine, coarse)
    source, rank, index = joined["t"], mesh.get_rank(), {"time": [0, 1, 2]}
    partition = Partition((Cut("cell", "domain", even(CELLS.shape[-1], mesh.size())),))
    plans = plan(partition, source.layout)
    mine = plans[rank].at(index)
    request = Request(source, mine, torch.empty(mine.result_shape), plans=plans, index=index)
    group = Group.join(mesh, rank)
    with CollectiveReader(group, threads=2) as reader:
        reader.read_all([request])
    group.close()
    span = partition.spans(rank)["cell"]
    np.testing.assert_array_equal(request.out.numpy(), CELLS[..., span.start : span.stop])
    return got_chunks(counting)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(("fine", "coarse"), [((1, 2, 30, 24), (1, 2, 19, 36)), ((1, 2, 7, 8), (1, 2, 4, 9))])
def test_ranks_together_take_each_chunk_once(ranks: Ranks, size: int, fine: Any, coarse: Any) -> None:
    """Of three times. A chunk smaller than a field is taken twice at most, where joined chunks end in it."""
    total: Counter[Any] = Counter()
    for found in ranks.run(read_together, fine, coarse, mesh=(size,)):
        total.update(found)
    assert set(total) == wanted_chunks(list(range(CELLS.shape[-1])), fine, coarse)
    assert set(total.values()) <= ({3} if fine[2] == 30 else {3, 6})


def test_the_joined_store_is_found_and_knows_where_its_cells_are() -> None:
    """Of a 2-D and a 1-D latitude and longitude; with levels and times of their own."""
    times = np.datetime64("2020-01-01", "ns") + np.arange(3) * np.timedelta64(6, "h")
    along = {"time": times, "level": ("level", [500.0, 850.0], {"units": "hPa"})}
    lat2, lon2 = np.meshgrid(np.linspace(50, 47, 30), np.linspace(5, 8, 24), indexing="ij")
    curved = {
        "latitude": (("y", "x"), lat2, {"units": "degrees_north"}),
        "longitude": (("y", "x"), lon2, {"units": "degrees_east"}),
    }
    lat, lon = np.linspace(90, -90, 19), np.arange(36) * 10.0
    straight = {"lat": ("lat", lat, {"units": "degrees_north"}), "lon": ("lon", lon, {"units": "degrees_east"})}
    fine = xr.Dataset({"t": (("time", "level", "y", "x"), FINE)}, {**along, **curved})
    coarse = xr.Dataset(
        {"t": (DIMS, COARSE), "only_here": (DIMS[2:], COARSE[0, 0]), "u": (DIMS, COARSE)}, {**along, **straight}
    )
    joined = join([open_store(fine), GridPart(open_store(coarse), KEEP)])
    grid = find_grid(joined)
    assert (grid.variables, grid.spatial, grid.level, grid.time) == (("t",), ("cell",), "level", "time")
    assert grid.times is not None
    np.testing.assert_array_equal(grid.times.values, times)
    np.testing.assert_array_equal(grid.levels, [500, 850])
    there = np.argwhere(KEEP)
    np.testing.assert_array_equal(joined["latitude"].read(), np.concatenate([lat2.ravel(), lat[there[:, 0]]]))
    np.testing.assert_array_equal(joined["longitude"].read(), np.concatenate([lon2.ravel(), lon[there[:, 1]]]))
    np.testing.assert_array_equal(joined["t"].read(), CELLS)


@pytest.mark.parametrize("dims", [("lat", "lon", "time", "level"), ("time", "lat", "level", "lon")])
def test_dims_in_any_order(dims: tuple[str, ...]) -> None:
    order = [DIMS.index(dim) for dim in dims]
    stores = [open_store(xr.Dataset({"t": (dims, values.transpose(order))})) for values in (FINE, COARSE)]
    joined = join([stores[0], GridPart(stores[1], KEEP)])
    np.testing.assert_array_equal(joined["t"].read(), CELLS)


def test_parts_packed_differently_come_decoded() -> None:
    packed = np.round(RANDOM.normal(size=FINE.shape) * 1000).astype("i2")
    packed[0, 0, 0, :3] = -9999
    one = xr.Dataset({"t": (DIMS, packed, {"scale_factor": 0.01, "add_offset": 273.15, "_FillValue": np.int16(-9999)})})
    two = xr.Dataset({"t": (DIMS, COARSE)})
    joined = join([open_store(one), GridPart(open_store(two), KEEP)])
    decoded = (packed * np.float32(0.01) + np.float32(273.15)).astype("f4")
    decoded[0, 0, 0, :3] = np.nan
    expected = np.concatenate([decoded.reshape(3, 2, -1), COARSE[..., KEEP]], axis=-1)
    found = read(joined["t"], plan(Partition(()), joined["t"].layout))
    np.testing.assert_array_equal(found.numpy(), expected)


def test_alike_packed_parts_pass_as_stored() -> None:
    attrs = {"scale_factor": 0.5, "_FillValue": np.int16(-1)}
    values = [np.arange(n, dtype="i2").reshape(shape) - 1 for n, shape in ((6, (1, 2, 3)), (8, (1, 2, 4)))]
    dims = ("time", "lat", "lon")
    joined = join([open_store(xr.Dataset({"t": (dims, each, attrs)})) for each in values])
    assert joined["t"].dtype == np.int16
    expected = np.concatenate([each.ravel() for each in values]) * 0.5
    expected[[0, 6]] = np.nan
    np.testing.assert_array_equal(read(joined["t"], plan(Partition(()), joined["t"].layout)).numpy()[0], expected)


def grid(
    shape: tuple[int, ...] = (3, 4, 5), name: str = "t", start: str = "2020-01-01", names: Any = None, **attrs: str
) -> Store:
    """Zeros [time, lat, lon], or [channel, lat, lon] if names are given."""
    times = np.datetime64(start, "ns") + np.arange(shape[0]) * np.timedelta64(1, "h")
    first, entries = ("time", times) if names is None else ("channel", names)
    return open_store(xr.Dataset({name: ((first, "lat", "lon"), np.zeros(shape), attrs)}, {first: entries}))


def zeros(**dims: Any) -> Store:
    """Zeros [a dim of 3, lat, lon]; the dim has no coordinate, or one in these units."""
    ((dim, told),) = dims.items()
    coords = {} if told is None else {dim: (dim, told[1], {"units": told[0]})}
    return open_store(xr.Dataset({"t": ((dim, "lat", "lon"), np.zeros((3, 4, 5)))}, coords))


def model(calendar: str) -> Store:
    times = xr.date_range("2020-01-01", periods=3, calendar=calendar, use_cftime=True)
    return open_store(xr.Dataset({"t": (("time", "lat", "lon"), np.zeros((3, 4, 5)))}, {"time": times}))


REFUSED: list[tuple[Any, type[Exception], str]] = [
    (lambda: [], NoVariableError, "no part"),
    (lambda: [grid(), grid(name="u")], NoVariableError, "no variable is in all parts"),
    (lambda: [GridPart(grid(), np.ones((5, 4), bool))], DimensionError, r"mask of .* is bool \(5, 4\)"),
    (lambda: [GridPart(grid(), np.ones((4, 5), np.int64))], DimensionError, r"mask of .* is int64 \(4, 5\)"),
    (lambda: [grid(), GridPart(grid(), np.zeros((4, 5), bool))], DimensionError, "keeps no cell"),
    (lambda: [grid(), grid(start="2021-01-01")], DimensionError, "'time' is not the same.* entry 0 is 2020.* 2021"),
    (lambda: [grid(), grid((4, 4, 5))], DimensionError, r"'t' has \{'time': 3\} beside space .* \{'time': 4\}"),
    (lambda: [grid(names=list("abc")), grid(names=list("acb"))], DimensionError, "entry 1 is b in .* c in"),
    (lambda: [grid(names=[1.0, 2, 3]), grid(names=[1.0, 2, 3.001])], DimensionError, "entry 2 is 3.0 in .* 3.001"),
    (
        lambda: [grid(), zeros(time=None), grid(start="2021-01-01")],
        DimensionError,
        "'time' is not the same.* 2020.* 2021",
    ),
    (lambda: [grid(), grid(units="K"), grid(units="degC")], DecodeError, "'t' is in 'K' in .* 'degC'"),
    (lambda: [zeros(level=("m", [1.0, 2, 3])), zeros(level=("km", [1.0, 2, 3]))], DecodeError, "'level' is in 'm'"),
    (lambda: [model("noleap"), model("360_day")], DimensionError, r"entry 0 is 2020-01-01.* \(noleap\) in .*360_day"),
    (lambda: [zeros(cell=None)], DimensionError, "'t' has the dim 'cell' beside space"),
    (lambda: [grid(units="K"), grid(units="degC")], DecodeError, "'t' is in 'K' in .* 'degC'.*convert one"),
]


@pytest.mark.parametrize(("parts", "kind", "said"), REFUSED)
def test_what_does_not_fit_is_refused(parts: Any, kind: type[Exception], said: str) -> None:
    with pytest.raises(kind, match=said):
        join(parts())


def test_levels_may_be_stored_in_another_dtype() -> None:
    names = [0.1, 0.2, 0.3]
    joined = join([grid(names=names), grid(names=np.array(names, np.float32))])
    assert joined["t"].shape == (3, 40)


def test_variables_can_be_chosen_where_others_do_not_fit() -> None:
    one = xr.Dataset({"t": (("lat", "lon"), np.zeros((2, 3))), "s": (("soil", "lat", "lon"), np.zeros((2, 2, 3)))})
    two = xr.Dataset({"t": (("lat", "lon"), np.ones((2, 3))), "s": (("soil", "lat", "lon"), np.zeros((4, 2, 3)))})
    with pytest.raises(DimensionError, match=r"'s' has .*leave it out with variables="):
        join([open_store(one), open_store(two)])
    assert join([open_store(one), open_store(two)], variables=["t"])["t"].read().tolist() == [0] * 6 + [1] * 6


def test_a_list_of_cells_and_a_grid() -> None:
    """Of arrays along the cells of a part alone none is taken over; fields without time are joined, too."""
    listed = xr.Dataset(
        {"t": (("time", "cell"), np.zeros((2, 5))), "orog": ("cell", np.arange(5.0)), "area": ("cell", np.ones(5))}
    )
    plain = xr.Dataset({"t": (("time", "lat", "lon"), np.ones((2, 2, 3))), "orog": (("lat", "lon"), np.ones((2, 3)))})
    joined = join([open_store(listed), open_store(plain)])
    assert set(joined) == {"t", "orog"}
    assert joined["t"].read().tolist() == [[0] * 5 + [1] * 6] * 2
    assert joined["orog"].read().tolist() == [0, 1, 2, 3, 4, *[1] * 6]
    found = find_grid(joined)
    assert (set(found.variables), found.spatial) == ({"t", "orog"}, ("cell",))


def test_joined_parts_join_again() -> None:
    """Of several chunks each: the inner read works in other memory than the outer one."""
    inner = join([stored(FINE, (1, 2, 7, 8))[1], GridPart(stored(COARSE, (1, 2, 4, 9))[1], KEEP)])
    outer = join([inner, stored(FINE, (1, 1, 5, 5))[1]])
    expected = np.concatenate([CELLS, FINE.reshape(3, 2, -1)], axis=-1)
    np.testing.assert_array_equal(outer["t"].read(), expected)


def test_a_chunk_that_the_mask_empties_need_not_be_there() -> None:
    """Uncompressed chunks, of which any rows can be read alone, too."""
    store = MemoryStore()
    group = zarr.open_group(store, mode="w")
    array = group.create_array(
        "t", shape=(4, 30), chunks=(4, 10), dtype="f4", compressors=None, dimension_names=("lat", "lon")
    )
    array[:, :10], array[:, 20:] = 1, 2
    keep = np.ones((4, 30), bool)
    keep[:, 10:20] = False
    found = join([GridPart(open_store(store), keep)])["t"].read()
    assert found.tolist() == ([1.0] * 10 + [2.0] * 10) * 4


def test_few_cells_of_many_times_take_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A read is cut along the other dims, between chunks."""
    monkeypatch.setattr("shardio.joined.MAX_BYTES", 2 * 30 * 24 * 4)
    counting, store = stored(FINE, (1, 1, 30, 24))
    keep = np.zeros((30, 24), bool)
    keep[[0, 29], [3, 20]] = True
    rooms: list[int] = []
    monkeypatch.setattr(
        "shardio.joined.scratch", lambda name, nbytes: (rooms.append(nbytes), np.empty(nbytes, "u1"))[1]
    )
    counting.reset()
    found = join([GridPart(store, keep)])["t"].read()
    np.testing.assert_array_equal(found, FINE[..., keep])
    assert max(rooms) <= 2 * 30 * 24 * 4
    assert set(counting.gets.values()) == {1}


@pytest.mark.parametrize("box", [(0, 0), (2, 2)])
def test_nothing_of_a_leading_dim(box: tuple[int, int]) -> None:
    _, joined = both()
    found = joined["t"].read((Span(*box), Span(0, 2), Span(0, CELLS.shape[-1])))
    assert found.shape == (0, 2, CELLS.shape[-1])


def test_names_as_rows_of_characters_are_kept() -> None:
    names = np.array([list("u10m"), list("refc")], "S1")
    data = xr.Dataset({"H": (("channel", "lat", "lon"), np.zeros((2, 3, 4))), "channel": (("channel", "n"), names)})
    joined = join([open_store(data), open_store(data)])
    assert labels(joined, "channel", 2) == ["u10m", "refc"]


def test_a_mask_with_dims_is_turned_to_the_grids() -> None:
    store = open_store(xr.Dataset({"t": (("lat", "lon"), np.arange(9.0).reshape(3, 3))}))
    keep = xr.DataArray(np.zeros((3, 3), bool), dims=("lon", "lat"))
    keep[0, 1:] = True
    assert join([GridPart(store, keep)])["t"].read().tolist() == [3, 6]


def test_what_open_store_takes_is_opened() -> None:
    data = xr.Dataset({"t": (("lat", "lon"), np.zeros((2, 3)))})
    assert join([data, data])["t"].shape == (12,)
    with pytest.raises(TypeError, match="a list of stores, but was given a str"):
        join("path")  # type: ignore[arg-type]


def test_a_grid_is_preferred_to_tables_of_cells() -> None:
    tables = {f"x{at}": (("n", "cell"), np.zeros((2, 4))) for at in range(3)}
    store = open_store(xr.Dataset({"t": (("time", "lat", "lon"), np.zeros((2, 3, 4))), **tables}))
    assert find_grid(store).spatial == ("lat", "lon")


def test_closing_closes_the_parts() -> None:
    closed: list[int] = []
    parts = [stored(FINE, (1, 2, 7, 24))[1] for _ in range(2)]
    with join([replace(part, closers=(partial(closed.append, at),)) for at, part in enumerate(parts)]) as joined:
        assert joined["t"].shape == (3, 2, 1440)
    assert closed == [0, 1]

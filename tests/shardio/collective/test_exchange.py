"""Who reads what for whom: against brute force over every cell, without ranks and files."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardio import Cut, Layout, Partition, plan
from shardio.box import slices
from shardio.collective.exchange import Exchange, Wanted, exchange
from shardio.collective.segment import ALIGNED
from shardio.partition import even

SHAPE = (9, 3, 13, 10)
DIMS = ("time", "level", "lat", "lon")


def wanted(
    layout: Layout, parts: tuple[int, int], halo: int, indexes: list[dict[str, Any]], array: int = 0
) -> list[Wanted]:
    """Several requests for one array cut over lat and lon."""
    partition = Partition((Cut("lat", "y", even(13, parts[0])), Cut("lon", "x", even(10, parts[1]))))
    plans = plan(partition, layout, halo=halo, periodic=("lon",))
    return [
        Wanted(array, layout, {rank.rank: rank for rank in plans.at(index).ranks}, partition.dims) for index in indexes
    ]


def cells(requests: list[Wanted], part: int) -> np.ndarray:
    """True where one part needs something of the array."""
    found = np.zeros(SHAPE, bool)
    for request in requests:
        for box in request.parts[part].boxes:
            found[slices(box)] = True
    return found


def check(found: Exchange, requests: list[Wanted], members: list[int], layout: Layout, budget: int) -> None:
    for part in set(members):
        got = np.zeros(SHAPE, bool)
        for unit in found.units:
            inside = np.zeros(SHAPE, bool)
            inside[slices(unit.box)] = True
            sent = np.zeros(SHAPE, bool)
            for box in unit.boxes(part):
                assert not sent[slices(box)].any(), "no cell is sent twice"
                sent[slices(box)] = True
            assert not (sent & ~inside).any()
            got |= sent
        assert np.array_equal(got, cells(requests, part)), "a part gets what it needs and no more"
    for unit in found.alone:
        assert [member for member, part in enumerate(members) if unit.of(part)] == [unit.owner]
    for units, sizes in zip(found.rounds, found.sizes, strict=True):
        for member, size in enumerate(sizes):
            own = sorted((unit.offset, unit.nbytes) for unit in units if unit.owner == member)
            assert all(a + n <= b for (a, n), (b, _) in itertools.pairwise(own)), "no two units lie on each other"
            assert all(at % ALIGNED == 0 for at, _ in own)
            assert not own or sum(own[-1]) <= size
            assert size <= budget or len(own) == 1


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_everybody_gets_what_it_needs_and_every_chunk_is_read_once(data: st.DataObject) -> None:
    chunks = tuple(data.draw(st.integers(1, size)) for size in SHAPE)
    layout = Layout(DIMS, SHAPE, chunks, 4, block=data.draw(st.sampled_from([0, 0, 1])))
    parts = data.draw(st.sampled_from([(1, 1), (2, 1), (1, 3), (2, 2), (4, 1)]))
    times = data.draw(st.lists(st.lists(st.integers(0, 8), min_size=1, max_size=3), min_size=1, max_size=3))
    level = data.draw(st.sampled_from([[0, 1, 2], [2, 0], [1]]))
    requests = wanted(layout, parts, data.draw(st.integers(0, 4)), [{"time": rows, "level": level} for rows in times])
    copies = data.draw(st.integers(1, 2))
    members = [part for part in range(math.prod(parts)) for _ in range(copies)]
    budget = data.draw(st.sampled_from([64, 1000, 1 << 20]))
    found = exchange(requests, members, budget)
    check(found, requests, members, layout, budget)
    if layout.block == 0:
        need = np.logical_or.reduce([cells(requests, part) for part in set(members)])
        numbers = {tuple(at // n for at, n in zip(cell, chunks, strict=True)) for cell in np.argwhere(need).tolist()}
        assert sum(unit.chunks for unit in found.units) == len(numbers)
        assert sum(map(found.decoded, range(len(members)))) == len(numbers) * math.prod(chunks) * 4


@pytest.mark.parametrize("members", [2, 3, 4])
def test_work_is_balanced(members: int) -> None:
    layout = Layout(DIMS, SHAPE, (1, 1, 13, 10), 4)
    requests = wanted(layout, (members, 1), 1, [{"time": [1, 2, 3, 4]}])
    found = exchange(requests, list(range(members)), 1 << 20)
    loads = [found.decoded(member) for member in range(members)]
    assert max(loads) - min(loads) <= 3 * 13 * 10 * 4  # one unit: the three levels of a time


def test_chunks_of_several_times_keep_their_owner() -> None:
    layout = Layout(DIMS, SHAPE, (4, 1, 13, 5), 4)
    owners: dict[tuple[int, ...], set[int]] = {}
    for times in itertools.product([[0, 1]], [[1], [2, 3], [5, 6], [0, 8]]):
        requests = wanted(layout, (2, 1), 0, [{"time": rows} for rows in times])
        for unit in exchange(requests, [0, 1], 1 << 20).units:
            owners.setdefault(unit.number, set()).add(unit.owner)
    assert all(len(found) == 1 for found in owners.values())
    assert {owner for found in owners.values() for owner in found} == {0, 1}


def test_what_one_rank_needs_is_not_shared_where_chunks_fit_the_cut() -> None:
    layout = Layout(DIMS, SHAPE, (1, 3, 1, 10), 1 << 20)  # rows of so large values that none are joined
    found = exchange(wanted(layout, (2, 1), 1, [{"time": [3]}]), [0, 1], 1 << 30)
    shared = {unit.number[2] for units in found.rounds for unit in units}
    assert shared == {6, 7}  # the rows at the cut, of which each is in the other's halo; 0:7 | 7:13
    assert len(found.alone) == 11

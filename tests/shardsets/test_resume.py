"""A saved state fits any mesh and batch size: nothing is lost, nothing comes twice."""

from __future__ import annotations

import json
from itertools import islice

import numpy as np
import pytest
import xarray as xr

from shardsets import BatchError, DomainDataLoader, SampleError
from shardsets.order import Order
from shardtensor import RankDisagreementError

KILLS = 50


def test_fuzz_of_the_order_over_kills_meshes_and_batch_sizes():
    random = np.random.default_rng(1)
    for drop_last in (False, True):
        for _ in range(KILLS):
            samples, seed = int(random.integers(40, 90)), int(random.integers(1000))
            state, seen = {"epoch": 0, "consumed": 0}, []
            for _ in range(KILLS):
                groups, batch_size = (int(n) for n in random.integers(1, 6, size=2))
                order = Order(samples, groups, batch_size, True, seed, drop_last)
                dealt = [order.batches(0, state["consumed"], group) for group in range(groups)]
                steps = order.steps(state["consumed"])
                assert {len(batches) for batches in dealt} == {steps}
                done = int(random.integers(0, steps + 1)) if random.random() < 0.5 else min(steps, 1)
                for step in range(done):
                    seen += [sample for batches in dealt for sample in batches[step]]
                state["consumed"] = min(state["consumed"] + done * order.step, samples)
            whole = Order(samples, 1, 1, True, seed, drop_last).epoch(0).tolist()
            assert seen[:samples] == whole[: len(seen)]
            assert len(seen) == state["consumed"] or (not drop_last and state["consumed"] == samples)
            if not drop_last:
                assert len(seen) - samples < 5  # fewer than groups start over to fill the last step


@pytest.mark.parametrize("drop_last", [False, True])
def test_fuzz_of_the_loader_over_kills(store, drop_last):
    """Stopped at random places, with reads in flight, and made anew from the last state saved."""
    random = np.random.default_rng(2)
    state: dict | None = None
    seen: dict[int, list[int]] = {}
    kills = 0
    while kills < KILLS:
        options = {"batch_size": int(random.integers(1, 4)), "prefetch": int(random.integers(0, 4))}
        loader = DomainDataLoader(
            store, variables=["u"], shuffle=True, seed=5, drop_last=drop_last, target_steps=0, **options
        )
        if state is not None:
            loader.load_state_dict(json.loads(json.dumps(state)))
        unsaved: list[tuple[int, list[int]]] = []
        killed = False
        while not killed:
            epoch = loader.state_dict()["epoch"]
            for batch in loader:
                unsaved.append((epoch, batch["index"].tolist()))
                if random.random() < 0.4:  # a checkpoint
                    state = loader.state_dict()
                    for number, indices in unsaved:
                        seen.setdefault(number, []).extend(indices)
                    unsaved = []
                killed = random.random() < 0.3
                if killed:
                    break
        kills += 1
        if random.random() < 0.5:
            loader.close()
    assert state is not None
    assert len(seen) > 4
    for epoch, indices in seen.items():
        whole = Order(12, 1, 1, True, 5, False).epoch(epoch).tolist()
        assert indices == whole[: len(indices)]
        if epoch < state["epoch"]:  # left behind: all of it was seen, but for what filled no batch
            assert len(indices) == 12 if not drop_last else len(indices) > 12 - 3
        else:
            assert len(indices) == state["consumed"]


@pytest.mark.parametrize("prefetch", [0, 3])
def test_one_loader_is_taken_back_many_times(store, prefetch):
    """Case R13: one loader, which has read ahead; back to batch 0, the middle, the last and the end, 3 times each."""

    def rest(batches):
        return [int(batch["index"]) for batch in batches]

    loader = DomainDataLoader(store, shuffle=True, seed=3, prefetch=prefetch)
    states, whole = [loader.state_dict()], []
    for batch in loader:
        whole.append(int(batch["index"]))
        states.append(loader.state_dict())
    after = rest(loader)
    assert sorted(whole) == sorted(after) == list(range(11))
    for done in (0, 5, 10, 11, 5):
        for _ in range(2):
            loader.load_state_dict(states[done])
            assert [int(batch["index"]) for batch in islice(loader, 2)] == whole[done:][:2]
        loader.load_state_dict(states[done])
        assert rest(loader) == whole[done:]
        assert rest(loader) == after


def _some(mesh, store, state, count, options):
    """Load a state, hand out so many batches; the samples of this rank's group, and the state."""
    loader = DomainDataLoader(store, mesh, shuffle=True, seed=7, target_steps=0, drop_last=False, **options)
    loader.set_epoch(1)
    if state is not None:
        loader.load_state_dict(state)
    found = []
    batches = iter(loader) if count != 0 else None
    while batches is not None and len(found) != count:
        batch = next(batches, None)
        if batch is None:
            break
        found.append(batch["index"].tolist())
    state = loader.state_dict()
    loader.close()
    return found, state


@pytest.mark.parametrize("read", ["own", "collective"])
def test_resumes_on_another_mesh(ranks, store, read):
    """(2 x 2) at batch 0, (1 x 3), (2 x 2) again, one process to the last batch, then the next epoch on (2 x 1)."""
    seen: list[int] = []
    state = None
    for mesh, count, prefetch in (((2, 2), 0, 2), ((1, 3), 3, 3), ((2, 2), 2, 1), ((1, 2), 1, 0)):
        told = ranks.run(_some, str(store), state, count, {"prefetch": prefetch, "read": read}, mesh=mesh)
        assert all(after == told[0][1] for _, after in told)
        state = told[0][1]
        width = mesh[1]
        by_group = [found for found, _ in told[::width]]
        assert all(told[at][0] == by_group[at // width] for at in range(len(told)))
        seen += [sample for step in zip(*by_group, strict=True) for batch in step for sample in batch]
    assert state["consumed"] == len(seen) == 3 + 4 + 1
    found, state = _some(None, str(store), state, 4, {"batch_size": 1})
    seen += [sample for batch in found for sample in batch]
    order = Order(12, 1, 1, True, 7, False)
    assert seen == order.epoch(1).tolist()
    assert state["consumed"] == 12  # the last batch is out, but the epoch has not ended
    told = ranks.run(_some, str(store), state, -1, {"read": read}, mesh=(2, 1))
    assert [found for found, _ in told] == [[], []]
    assert told[0][1]["epoch"] == 2
    found, _ = _some(None, str(store), told[0][1], -1, {})
    assert [sample for batch in found for sample in batch] == order.epoch(2).tolist()


def test_ranks_with_different_states_are_told(ranks, store):
    def check(mesh):
        loader = DomainDataLoader(str(store), mesh, shuffle=True)
        state = loader.state_dict()
        rank = mesh.get_local_rank()
        with pytest.raises(RankDisagreementError, match=r"states differ.*ranks 0, 2: \(0, 0\); rank 1: \(0, 4\)"):
            loader.load_state_dict({**state, "consumed": 4 if rank == 1 else 0})
        loader.set_epoch(rank // 2)
        with pytest.raises(RankDisagreementError, match=r"ranks 0, 1: \(0, 0\); rank 2: \(1, 0\)"):
            next(iter(loader))
        loader.set_epoch(0)
        with pytest.raises(SampleError if rank == 0 else BatchError, match="damaged"):
            loader.load_state_dict({**state, "consumed": -4 if rank == 0 else 0})
        assert len(list(loader)) == 11

    ranks.run(check, mesh=(3,))


@pytest.mark.parametrize(("changed", "said"), [
    ({"seed": 2}, "seed 2, this loader has 0"),
    ({"samples": 99}, "samples 99, this loader has 11"),
    ({"shuffle": False}, "shuffle False, this loader has True"),
    ({"consumed": 12}, "12 samples seen, of 11"),
    ({"epoch": -1}, "epoch -1"),
])  # fmt: skip
def test_a_state_that_does_not_fit_is_refused(store, changed, said):
    loader = DomainDataLoader(store, shuffle=True)
    with pytest.raises(SampleError, match=said):
        loader.load_state_dict({**loader.state_dict(), **changed})
    with pytest.raises(SampleError, match="no state of a loader"):
        loader.load_state_dict({"model": 1})


def test_skipped_steps_are_neither_lost_nor_repeated(store):
    """A state saved between skipped steps resumes to the same sequence."""
    data = xr.open_zarr(store)[["u"]].load()
    for row in (2, 3, 7):
        data.u[row, 0, 0] = np.nan
    options = {"on_bad": "skip", "shuffle": True, "seed": 3, "target_steps": 0}
    whole = [int(batch["index"]) for batch in DomainDataLoader(data, **options)]
    assert sorted(whole) == [0, 1, 4, 5, 6, 8, 9, 10, 11]
    for done in range(1, len(whole)):
        first = DomainDataLoader(data, **options)
        batches = iter(first)
        found = [int(next(batches)["index"]) for _ in range(done)]
        again = DomainDataLoader(data, **options)
        again.load_state_dict(first.state_dict())
        assert found + [int(batch["index"]) for batch in again] == whole

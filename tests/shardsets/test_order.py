"""The order of samples: a pure function of (seed, epoch), dealt to any number of groups, resumed exactly."""

from __future__ import annotations

import pytest

from shardsets import SampleError
from shardsets.order import Order


def _epoch(order: Order, epoch: int, consumed: int = 0) -> list[list[list[int]]]:
    """What every step gives to every group."""
    permutation = order.epoch(epoch)
    return [
        [order.batch(permutation, consumed + step * order.step, group) for group in range(order.groups)]
        for step in range(order.steps(consumed))
    ]


def _seen(steps: list[list[list[int]]]) -> list[int]:
    return [sample for step in steps for group in step for sample in group]


@pytest.mark.parametrize("shuffle", [False, True])
def test_every_world_size_sees_the_same_order(shuffle):
    orders = [Order(24, groups, 12 // groups // 2, shuffle, 5, True) for groups in (1, 2, 3, 6)]
    sequences = [_seen(_epoch(order, 3)) for order in orders]
    assert all(sequence == sequences[0] for sequence in sequences)
    assert sorted(sequences[0]) == list(range(24))


def test_epochs_and_seeds_differ_and_repeat():
    order = Order(50, 1, 1, True, 0, True)
    assert list(order.epoch(0)) == list(Order(50, 3, 2, True, 0, True).epoch(0))
    assert list(order.epoch(0)) != list(order.epoch(1))
    assert list(order.epoch(0)) != list(Order(50, 1, 1, True, 1, True).epoch(0))


@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize(
    ("samples", "groups", "batch_size"), [(145, 3, 16), (10, 4, 1), (7, 2, 2), (5, 1, 2), (13, 4, 3)]
)
def test_all_groups_get_the_same_number_of_equal_batches(samples, groups, batch_size, drop_last):
    order = Order(samples, groups, batch_size, True, 1, drop_last)
    steps = _epoch(order, 0)
    for step in steps:
        assert len({len(batch) for batch in step}) == 1
        assert 0 < len(step[0]) <= batch_size
    seen = _seen(steps)
    if drop_last:
        assert len(steps) == samples // (groups * batch_size)
        assert len(set(seen)) == len(seen) == len(steps) * groups * batch_size
    else:
        assert set(seen) == set(range(samples))
        assert len(seen) - samples < groups


@pytest.mark.parametrize("groups_after", [1, 3])
def test_what_was_seen_is_a_prefix_so_other_meshes_can_go_on(groups_after):
    before, after = Order(60, 2, 2, True, 9, True), Order(60, groups_after, 4, True, 9, True)
    first = _seen(_epoch(before, 2))[: 3 * before.step]
    rest = _seen(_epoch(after, 2, consumed=len(first)))
    whole = list(before.epoch(2))
    assert first + rest == whole[: len(first) + len(rest)]


@pytest.mark.parametrize(("arguments", "said"), [
    ((3, 2, 2, False, 0, True), "need 4 samples a step"),
    ((3, 1, 0, False, 0, True), "batch_size is 0"),
    ((0, 1, 1, False, 0, True), "no sample"),
])  # fmt: skip
def test_refuses_what_leaves_no_batch(arguments, said):
    with pytest.raises(SampleError, match=said):
        Order(*arguments)

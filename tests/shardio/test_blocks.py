"""Stretches and blocks of a box in a chunk, against numpy's own idea of where elements lie."""

import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from shardio.blocks import copy_stretch, decoded_bytes, stretches, touched
from shardio.box import Box, Span, shape_of, slices


@st.composite
def chunks(draw: st.DrawFn) -> tuple[tuple[int, ...], Box]:
    shape = tuple(draw(st.lists(st.integers(1, 7), min_size=1, max_size=4)))
    starts = [draw(st.integers(0, size - 1)) for size in shape]
    return shape, tuple(
        Span(start, draw(st.integers(start + 1, size))) for start, size in zip(starts, shape, strict=True)
    )


@settings(max_examples=200, deadline=None)
@given(chunks(), st.integers(1, 40))
def test_stretches_and_blocks_hold_the_box(chunk: tuple[tuple[int, ...], Box], block: int) -> None:
    shape, box = chunk
    numbers = np.arange(math.prod(shape)).reshape(shape)[slices(box)].ravel()
    starts, size, _ = stretches(box, shape)
    assert (starts[:, None] + np.arange(size)).ravel().tolist() == numbers.tolist()
    blocks = [at for first, last in touched(starts, size, block) for at in range(first, last)]
    assert blocks == sorted(set((numbers // block).tolist()))


@settings(max_examples=200, deadline=None)
@given(chunks(), st.data())
def test_decoded_bytes_are_those_of_the_blocks_touched(chunk: tuple[tuple[int, ...], Box], data: st.DataObject) -> None:
    shape, box = chunk
    order = tuple(data.draw(st.permutations(range(len(shape)))))
    block = 8 * data.draw(st.integers(1, 20))
    stored = np.arange(math.prod(shape)).reshape([shape[at] for at in order]).transpose(np.argsort(order))
    total = math.prod(shape) * 8
    numbers = set((stored[slices(box)].ravel() * 8 // block).tolist())
    expected = sum(min(total, (at + 1) * block) - at * block for at in numbers)
    assert decoded_bytes(box, shape, order, 8, block) == expected
    assert decoded_bytes(box, shape, order, 8, 1) == math.prod(shape_of(box)) * 8
    assert decoded_bytes(box, shape, order, 8, 0) == decoded_bytes(box, shape, order, 8, 12) == total


@settings(max_examples=300, deadline=None)
@given(chunks(), st.data())
def test_what_a_stretch_holds_of_a_box_is_copied(chunk: tuple[tuple[int, ...], Box], data: st.DataObject) -> None:
    shape, box = chunk
    values = np.arange(math.prod(shape))
    first = data.draw(st.integers(0, len(values) - 1))
    last = data.draw(st.integers(first + 1, len(values)))
    out = np.full(shape_of(box), -1)
    copy_stretch(values[first:last], first, shape, box, out)
    wanted = values.reshape(shape)[slices(box)]
    np.testing.assert_array_equal(out, np.where((wanted >= first) & (wanted < last), wanted, -1))

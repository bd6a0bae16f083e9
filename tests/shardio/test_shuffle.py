"""Shuffled bytes put together: any element size, box, order and byte order, beside plain numpy."""

import numpy as np
import pytest

from shardio.box import Span, slices
from shardio.codecs.shuffle import COPIED, room, unshuffle

SHAPES = {"row": (100_003,), "field": (3, 181, 360), "small": (2, 3, 5), "one": (1,)}


@pytest.mark.parametrize("width", [1, 2, 3, 4, 8, 16, 300])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("swapped", [False, True])
def test_boxes_of_all_kinds(width: int, shape: tuple[int, ...], swapped: bool) -> None:
    values = np.random.default_rng(0).integers(0, 256, (*shape, width)).astype(np.uint8)
    planes = np.ascontiguousarray(np.moveaxis(values[..., ::-1] if swapped else values, -1, 0))
    boxes = [
        tuple(Span(0, size) for size in shape),
        tuple(Span(size // 3, size) for size in shape),
        (*(Span(0, size) for size in shape[:-1]), Span(0, max(1, shape[-1] // 2))),
    ]
    for box in boxes:
        wanted = values[slices(box)]
        for out in (np.zeros(wanted.shape[:-1], f"V{width}"), np.zeros((*wanted.shape[:-1], 2), f"V{width}")[..., 0]):
            unshuffle(planes, box, out, swapped=swapped)
            assert np.array_equal(np.ascontiguousarray(out)[..., None].view(np.uint8), wanted)


def test_planes_that_lie_where_they_need_not_be_copied() -> None:
    values = np.random.default_rng(0).integers(0, 256, (256, 400, 4)).astype(np.uint8)
    for box in ((Span(0, 256), Span(0, 400)), (Span(5, 250), Span(0, 400)), (Span(0, 256), Span(3, 397))):
        for swapped in (False, True):
            planes = room(values.nbytes)
            assert planes is not None
            planes = planes.reshape(4, 256, 400)
            planes[...] = np.moveaxis(values[..., ::-1] if swapped else values, -1, 0)
            wanted = values[slices(box)]
            for out in (np.zeros(wanted.shape[:-1], "f4"), np.zeros((*wanted.shape[:-1], 2), "f4")[..., 0]):
                kept = planes.copy()
                unshuffle(planes, box, out, swapped=swapped)
                assert np.array_equal(np.ascontiguousarray(out)[..., None].view(np.uint8), wanted)
                planes[...] = kept


def test_more_than_one_piece_is_covered() -> None:
    assert np.prod(SHAPES["field"]) * 4 > 2 * COPIED

"""Who owns which outputs and reads which rows, against brute force over many geometries."""

from __future__ import annotations

from itertools import accumulate, pairwise, product

import pytest

from shardtensor.rules.stencil import adaptive_spans, resized_sizes, slide, span_touches, spread

CUTS = [(7, 9), (5, 6, 5), (6, 0, 10), (0, 16, 0), (1, 14, 1), (0, 0, 16)]
GEOMETRIES = list(product((1, 2, 3, 4, 7), (1, 2, 3, 5), (0, 1, 2, 4), (1, 2)))  # kernel, stride, padding, dilation


def blocks(sizes):
    return list(pairwise((0, *accumulate(sizes))))


@pytest.mark.parametrize("sizes", CUTS)
def test_slide_reads_all_that_its_outputs_need(sizes):
    length = sum(sizes)
    for kernel, stride, padding, dilation in GEOMETRIES:
        span = dilation * (kernel - 1)
        count = (length + 2 * padding - span - 1) // stride + 1
        if count < 1:
            continue
        out_sizes, windows = slide(sizes, count, kernel, stride, padding, dilation)
        assert sum(out_sizes) == count
        assert all(out >= 0 for out in out_sizes)
        for size, out, window, (first, stop) in zip(sizes, out_sizes, windows, blocks(out_sizes), strict=True):
            assert size or not out, "an empty rank got outputs"
            read = {j * stride - padding + dilation * t for j in range(first, stop) for t in range(kernel)}
            assert window == ((min(read), max(read) + 1) if read else (0, 0))


@pytest.mark.parametrize("sizes", CUTS)
def test_spread_reads_all_that_adds_to_its_outputs(sizes):
    length = sum(sizes)
    for kernel, stride, padding, dilation in GEOMETRIES:
        for extra in range(max(stride, dilation)):
            count = (length - 1) * stride - 2 * padding + dilation * (kernel - 1) + extra + 1
            if count < 1:
                continue
            out_sizes, windows, trims = spread(sizes, count, kernel, stride, padding, dilation)
            assert sum(out_sizes) == count
            for window, trim, (first, stop) in zip(windows, trims, blocks(out_sizes), strict=True):
                if first == stop:
                    continue
                for row in range(length):
                    made = {row * stride - padding + dilation * t for t in range(kernel)}
                    assert window[0] <= row < window[1] or not made & set(range(first, stop))
                full = (window[1] - window[0] - 1) * stride + dilation * (kernel - 1) + 1
                assert trim == first - (window[0] * stride - padding) >= 0
                assert trim + stop - first <= full


@pytest.mark.parametrize("sizes", CUTS)
def test_same_convolutions_keep_the_sizes(sizes):
    for kernel, dilation in product((1, 3, 5, 7), (1, 2)):
        assert slide(sizes, sum(sizes), kernel, 1, dilation * (kernel // 2), dilation)[0] == sizes


@pytest.mark.parametrize("sizes", CUTS)
def test_spans_touched_are_those_that_meet_the_rows(sizes):
    for count in (1, 2, 5, 16, 23):
        spans = adaptive_spans(sum(sizes), count)
        for (start, stop), (first, last) in zip(blocks(sizes), span_touches(sizes, spans), strict=True):
            met = {j for j, (a, b) in enumerate(spans) if set(range(a, b)) & set(range(start, stop))}
            assert met == set(range(first, last))


def test_balanced_shards_come_back_after_halving_and_doubling():
    for sizes in ((6, 4, 6), (181, 180, 180, 180), (361, 360), (3, 2, 2), (6, 0, 10)):
        length = sum(sizes)
        half = -(-length // 2)
        halved = resized_sizes(sizes, half)
        assert halved == slide(sizes, half, 3, 2, 1, 1)[0] == slide(sizes, half, 2, 2, 0, 1)[0]
        for longer in (length, 2 * length, length + 3):
            assert resized_sizes(resized_sizes(sizes, longer), length) == sizes
        assert resized_sizes(halved, length) == sizes

"""Values that are not finite, found in one pass, counted, and replaced as asked."""

from __future__ import annotations

import math

import pytest
import torch

from shardsets import NotANumberError, NotFiniteError
from shardsets.finite import Finite


def _name(sample: int, channel: int) -> tuple[str, str]:
    return f"sample {sample}", f"channel {channel}"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_finite_values_pass_untouched_also_where_their_sum_overflows(dtype):
    field = torch.full((2, 3, 50, 50), torch.finfo(dtype).max, dtype=dtype)
    before = field.clone()
    bad, counts = Finite(limit=0.5).check_(field, _name, fill=False)
    assert bad == []
    assert torch.equal(field, before)
    assert not counts.any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_one_bad_cell_is_found(dtype, value):
    field = torch.zeros(2, 3, 5, 4, dtype=dtype)
    field[1, 2, 4, 0] = value
    ((at, error),), counts = Finite(limit=0.5).check_(field, _name, fill=False)
    assert at == 1
    assert isinstance(error, NotANumberError) == math.isnan(value)
    assert "sample 1 has" in str(error)
    assert "1 cells of channel 2" in str(error)
    assert counts.tolist() == [[0, 0, 0], [0, 0, 1]]


def test_opposite_infinities_do_not_hide_each_other():
    field = torch.zeros(1, 1, 2, 2)
    field[0, 0] = torch.tensor([[math.inf, -math.inf], [0, 0]])
    ((_, error),), _ = Finite().check_(field, _name, fill=False)
    assert type(error) is NotFiniteError


def test_replaced_as_asked():
    field = torch.tensor([math.nan, math.inf, -math.inf, 1.0]).view(1, 1, 2, 2)
    assert Finite(nan=7.0, inf=-1).check_(field, _name, fill=False)[0] == []
    assert field.flatten().tolist() == [7, -1, -1, 1]


def test_integers_are_finite():
    field = torch.full((1, 1, 2, 2), 2**31 - 1, dtype=torch.int32)
    assert Finite().check_(field, _name, fill=False)[0] == []


def test_the_limit_is_a_share_of_cells():
    counts = torch.tensor([[3, 0], [4, 5]])
    found = Finite(limit=0.3).beyond(counts, 10, _name)
    assert [at for at, _ in found] == [1]
    assert "4 of 10 cells of channel 0, more than max_nonfinite=0.3" in str(found[0][1])

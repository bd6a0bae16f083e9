"""In-place writes through views reach the tensor that they show, or are refused on every rank: never lost."""

from __future__ import annotations

import itertools
import warnings

import pytest
import torch

from shardtensor import OpError
from shardtensor.testing import assert_same_as_plain, shard

WHOLE = torch.randn(4, 5, 6, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
CUTS = {"rows": (0, (1, 0, 3)), "columns": (1, (1, 1, 3)), "last": (2, (0, 4, 2))}
SOURCES = {
    "a tensor": lambda x: x.clone(),
    "a permuted one": lambda x: x.clone().permute(2, 0, 1),
    "a slice": lambda x: x.clone()[:, 1:],
    "a sum": lambda x: x.sum(0) + 0,
    "a pending sum": lambda x: x.sum(0),
}
VIEWS = {
    "select first": lambda x: x[0],
    "select last": lambda x: x[..., -1],
    "slice": lambda x: x[1:, ..., ::2],
    "narrow": lambda x: x.narrow(-1, 1, 2),
    "transpose": lambda x: x.transpose(0, -1),
    "diagonal": lambda x: x.diagonal(0, 0, 1) if x.dim() > 1 else x,
    "diagonal below": lambda x: x.diagonal(1, -1, 0) if x.dim() > 1 else x,
    "unfold": lambda x: x.unfold(-1, 2, 2),
    "unfold first": lambda x: x.unfold(0, 2, 2),
    "flatten": lambda x: x.view(-1) if x.is_contiguous() else x,
    "unflatten": lambda x: x.unflatten(-1, (-1, 1)),
    "squeeze": lambda x: x[:1].squeeze(0),
    "unbind": lambda x: x.unbind(0)[-1],
    "split": lambda x: x.split(2, -1)[-1],
    "alias": lambda x: x.view_as(x),
}
WRITES = {
    "zero_": lambda x: x.zero_(),
    "mul_": lambda x: x.mul_(3),
    "copy_": lambda x: x.copy_(2 * x + 1),
    "assign": lambda x: x.__setitem__(0, 7.0),
    "masked_fill_": lambda x: x.masked_fill_(x > 0, 2.0),
    "without a rule": lambda x: x.cumsum_(0),
    "out": lambda x: torch.add(x.detach(), 1, out=x) if not x.requires_grad else x.add_(1),
}


def written(source, views, write, grads):
    def function(x):
        base = SOURCES[source](x if grads else x.detach())
        view = base
        for name in views:
            view = VIEWS[name](view)
        WRITES[write](view)
        return base, view

    return function


@pytest.mark.parametrize("grads", [True, False], ids=["with gradients", "without"])
@pytest.mark.parametrize("source", SOURCES)
def test_a_write_through_a_view_arrives_or_is_refused(ranks, source, grads):
    def check(mesh):
        warnings.simplefilter("ignore")
        refused = 0
        pairs = [(name,) for name in VIEWS] + list(itertools.pairwise([*VIEWS, *list(VIEWS)[::2], *list(VIEWS)[1::3]]))
        cases = zip(pairs, itertools.cycle(WRITES), itertools.cycle(CUTS.values()), strict=False)
        for views, write, cut in cases:
            function = written(source, views, write, grads)
            try:
                function(WHOLE.clone().requires_grad_(grads))
            except (RuntimeError, IndexError):  # the plain tensor refuses it: overlapping memory, too few dims
                continue
            try:
                assert_same_as_plain(function, [WHOLE], mesh, [{0: cut}])
            except Exception as error:
                if isinstance(error, OpError) and "would not reach" in str(error):
                    refused += 1
                    continue
                raise AssertionError(f"{views}, {write}, cut {cut}: {error}") from error
        return refused

    refused = ranks.run(check, mesh=(3,))
    assert len(set(refused)) == 1, f"ranks disagree: {refused}"
    assert 0 < refused[0] < 40


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_views_of_views_that_moved(ranks, mode):
    def check(mesh):
        with mode():
            x = shard(WHOLE, mesh, {0: CUTS["last"]}) + 0
            row = x[..., -1]
            for view in (row[0], row.T, row.detach(), row.unbind(0)[1], row.view(-1)[3:], row[0][None]):
                with pytest.raises(OpError, match="would not reach"):
                    view.add_(1)
            row.clone().add_(1)
            row.T.contiguous().add_(1)

    ranks.run(check, mesh=(3,))


def test_a_tensor_written_and_read_by_an_op_without_a_rule(ranks):
    def check(mesh):
        from shardtensor.fallback import run_replicated

        warnings.simplefilter("ignore")
        x, other = (shard(WHOLE, mesh, {0: cut}) for cut in (CUTS["rows"], CUTS["last"]))
        run_replicated(torch.ops.aten.add_.Tensor, x, x)
        assert torch.equal(x.full_tensor(), 2 * WHOLE)
        moved = other[..., -1]
        run_replicated(torch.ops.aten.add_.Tensor, x[..., -1], moved)  # one that is only read may have moved
        assert torch.equal(x.full_tensor()[..., -1], 3 * WHOLE[..., -1])

    ranks.run(check, mesh=(3,))


def read_after(source, views, write, grads):
    def function(x):
        base = SOURCES[source](x if grads else x.detach())
        view = base
        for name in views:
            view = VIEWS[name](view)
        WRITES[write](base)
        return base, view * 1

    return function


@pytest.mark.parametrize("grads", [True, False], ids=["with gradients", "without"])
@pytest.mark.parametrize("source", SOURCES)
def test_a_view_shows_what_was_written_after_it_was_made_or_is_refused(ranks, source, grads):
    def check(mesh):
        warnings.simplefilter("ignore")
        refused, right = 0, 0
        pairs = [(name,) for name in VIEWS] + list(itertools.pairwise([*VIEWS, *list(VIEWS)[::2], *list(VIEWS)[1::3]]))
        cases = zip(pairs, itertools.cycle(WRITES), itertools.cycle(CUTS.values()), strict=False)
        for views, write, cut in cases:
            function = read_after(source, views, write, grads)
            try:
                function(WHOLE.clone().requires_grad_(grads))
            except (RuntimeError, IndexError):
                continue
            try:
                assert_same_as_plain(function, [WHOLE], mesh, [{0: cut}])
                right += 1
            except Exception as error:
                if isinstance(error, OpError) and "holds old values" in str(error):
                    refused += 1
                    continue
                raise AssertionError(f"{views}, {write}, cut {cut}: {error}") from error
        return refused, right

    counts = ranks.run(check, mesh=(3,))
    assert len(set(counts)) == 1, f"ranks disagree: {counts}"
    refused, right = counts[0]
    assert right > 0
    assert refused < 40


def test_a_stale_view_is_refused_wherever_it_is_read(ranks):
    def check(mesh):
        x = shard(WHOLE, mesh, {0: CUTS["last"]}) + 0
        for read in (torch.Tensor.sum, lambda v: v.full_tensor() + 0, lambda v: v + 1, lambda v: v.T @ v, torch.clone):
            view, kept = x[..., -1], x[..., -1].clone()
            x[0, 0, 0] = 3.0
            with pytest.raises(OpError, match="holds old values"):
                read(view)
            read(kept)
        assert x[..., -1].sum().isfinite()

    ranks.run(check, mesh=(3,))

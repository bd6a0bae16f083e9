"""Ops without a rule: right values on gathered inputs, said once, and refused under strict()."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

from shardtensor import MissingRuleError, OpError, ShardTensor, comm_trace, strict
from shardtensor.testing import assert_close, shard

WHOLE = torch.randn(6, 6, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
ROWS = {0: (0, (3, 0, 3))}


def missing(name):
    """Take the rule of an aten op away, and forget that it was warned about; returns the op."""
    from shardtensor import fallback
    from shardtensor.registry import RULES

    packet, overload = name.split(".")
    op = getattr(getattr(torch.ops.aten, packet), overload)
    RULES.pop(op, None)
    fallback._warned.discard(op)
    return op


@pytest.fixture
def fresh_ranks(ranks):
    """Ranks whose op tables a test may change: they are started anew afterwards."""
    yield ranks
    ranks.close()


def test_right_values_and_one_warning(fresh_ranks):
    def check(mesh):
        missing("logcumsumexp.default")
        x = shard(WHOLE, mesh, ROWS, requires_grad=True)
        with pytest.warns(
            UserWarning, match=r"aten.logcumsumexp.default has no sharding rule.*gathered 288 bytes"
        ) as seen:
            y = torch.logcumsumexp(x, 0)
        assert len(seen) == 1
        assert y.placements == (Replicate(),)
        assert_close(y.full_tensor(), torch.logcumsumexp(WHOLE, 0), "values")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            torch.logcumsumexp(x.detach(), 0)  # said once
        p = WHOLE.clone().requires_grad_()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            y.sum().backward()
        torch.logcumsumexp(p, 0).sum().backward()
        assert x.grad._spec.layout == x._spec.layout
        assert_close(x.grad.full_tensor(), p.grad, "gradient")

    fresh_ranks.run(check, mesh=(3,))


def test_strict_refuses_before_anything_is_sent(fresh_ranks):
    def check(mesh):
        missing("logcumsumexp.default")
        x = shard(WHOLE, mesh, ROWS)
        with strict(), comm_trace() as trace:
            with pytest.raises(MissingRuleError, match=r"aten.logcumsumexp.default has no rule.*\(6, 6\)"):
                torch.logcumsumexp(x, 0)
            (x + 1).exp()
            assert not trace.sent
        with pytest.warns(UserWarning, match="logcumsumexp"):
            torch.logcumsumexp(x, 0)

    fresh_ranks.run(check, mesh=(3,))


def test_several_results_and_lists_of_tensors(fresh_ranks):
    def check(mesh):
        missing("linalg_qr.default")
        missing("block_diag.default")
        x = shard(WHOLE, mesh, ROWS)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            q, r = torch.linalg.qr(x)
            assert_close((q @ r).full_tensor(), WHOLE, "q r", 1e-10)
            assert_close(torch.block_diag(x, x).full_tensor(), torch.block_diag(WHOLE, WHOLE), "block_diag")

    fresh_ranks.run(check, mesh=(3,))


SQUARES = torch.randn(3, 5, 7, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
VIEWS = {
    "whole": lambda x: x[..., :5].contiguous(),
    "sliced": lambda x: x[..., :5],
    "transposed": lambda x: x[..., :5].contiguous().mT,
    "expanded": lambda x: x[:1, :, :5].expand(3, 5, 5),
    "overlapping": lambda x: x.unfold(-1, 3, 1)[:, 0, :3],
    "permuted": lambda x: x[:, :3, :5].permute(2, 1, 0),
}
CHOOSING = {
    "det": torch.linalg.det,
    "slogdet": lambda x: torch.linalg.slogdet(x)[1],
    "solve": lambda x: torch.linalg.solve(x, torch.eye(x.shape[-1], dtype=x.dtype)),
    "inverse": torch.linalg.inv,
}


@pytest.mark.parametrize("name", CHOOSING)
def test_kernels_that_choose_by_strides(ranks, name):
    """They factor A or A^T, and the backward formula looks at the strides of A to know which."""
    for view in VIEWS.values():
        for cut in ((0, (1, 0, 2)), (1, (2, 0, 3)), (2, (4, 1, 2))):
            ranks.same_as_plain(lambda x, v=view: CHOOSING[name](v(x)), SQUARES, cuts=[cut], rtol=1e-10)


def test_in_place_ops_write_the_blocks(fresh_ranks):
    def check(mesh):
        missing("tril_.default")
        missing("relu_.default")
        x = shard(WHOLE, mesh, ROWS)
        with pytest.warns(UserWarning, match="tril_"):
            assert x.tril_() is x
        assert x._spec.layout == shard(WHOLE, mesh, ROWS)._spec.layout
        assert_close(x.full_tensor(), WHOLE.tril(), "values")
        pending = shard(WHOLE, mesh, ROWS).sum(0)
        with pytest.warns(UserWarning, match="relu_"):
            pending.relu_()
        assert_close(pending.full_tensor(), WHOLE.sum(0).relu(), "a pending sum")

    fresh_ranks.run(check, mesh=(3,))


def test_written_outputs(fresh_ranks):
    def check(mesh):
        missing("cumsum.out")
        x, out = shard(WHOLE, mesh, ROWS), shard(torch.zeros_like(WHOLE), mesh, {0: (1, (6, 0, 0))})
        plain = torch.zeros_like(WHOLE)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.cumsum(x, 0, out=out)
            torch.cumsum(x, 0, out=plain)
        assert_close(out.full_tensor(), WHOLE.cumsum(0), "sharded out")
        assert_close(plain, WHOLE.cumsum(0), "plain out")

    fresh_ranks.run(check, mesh=(3,))


def test_a_shape_changed_in_place_is_refused(fresh_ranks):
    def check(mesh):
        missing("unsqueeze_.default")
        x = shard(WHOLE, mesh, ROWS)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with pytest.raises(OpError, match=r"changes a shape in place, \(6, 6\) to \(1, 6, 6\)"):
                x.unsqueeze_(0)

    fresh_ranks.run(check, mesh=(3,))


def test_random_results_are_the_same_on_all_ranks(fresh_ranks):
    def check(mesh):
        missing("multinomial.default")
        torch.manual_seed(mesh.get_local_rank())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            drawn = torch.multinomial(shard(WHOLE.abs(), mesh, ROWS), 5)
        everyone = shard(drawn.to_local(), mesh, {})
        gathered = ShardTensor.from_local(drawn.to_local()[None], mesh, [Shard(0)])
        assert (gathered.full_tensor() == everyone.to_local()).all()

    fresh_ranks.run(check, mesh=(3,))


def test_a_custom_op_runs_and_can_be_given_a_rule(fresh_ranks):
    def check(mesh):
        @torch.library.custom_op("shardtensor_tests::plus_total", mutates_args=())
        def plus_total(x: torch.Tensor) -> torch.Tensor:
            return x + x.sum()

        x = shard(WHOLE, mesh, ROWS)
        with pytest.warns(UserWarning, match="shardtensor_tests.plus_total.default"):
            y = plus_total(x)
        assert_close(y.full_tensor(), WHOLE + WHOLE.sum(), "values")
        ShardTensor.register_dispatch_handler(torch.ops.shardtensor_tests.plus_total.default, lambda x: x + x.sum())
        with strict():
            y = plus_total(x)
        assert y._spec.layout == x._spec.layout
        assert_close(y.full_tensor(), WHOLE + WHOLE.sum(), "values")

    fresh_ranks.run(check, mesh=(3,))

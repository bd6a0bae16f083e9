"""Losses of tensors cut every way: values, means over the whole and gradients as in one process."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from shardtensor import comm_trace, strict
from shardtensor.testing import Ranks, assert_close, shard

DTYPE = torch.float64
SIZES = [(5, 3), (4, 0, 4)]
REDUCTIONS = ["none", "mean", "sum"]


def probabilities(x: torch.Tensor) -> torch.Tensor:
    return x.sigmoid()


def signs(x: torch.Tensor) -> torch.Tensor:
    return x.sign()


def as_is(x: torch.Tensor) -> torch.Tensor:
    return x


# Name of the loss, what its input and its target must look like, its options.
LOSSES: list[tuple[str, Callable[..., Any], Callable[..., Any], dict[str, Any]]] = [
    ("mse_loss", as_is, as_is, {}),
    ("l1_loss", as_is, as_is, {}),
    ("smooth_l1_loss", as_is, as_is, {}),
    ("smooth_l1_loss", as_is, as_is, {"beta": 0.3}),
    ("huber_loss", as_is, as_is, {}),
    ("huber_loss", as_is, as_is, {"delta": 0.3}),
    ("soft_margin_loss", as_is, signs, {}),
    ("binary_cross_entropy", probabilities, probabilities, {}),
    ("binary_cross_entropy_with_logits", as_is, probabilities, {}),
    ("kl_div", as_is, probabilities, {}),
    ("poisson_nll_loss", as_is, probabilities, {}),
    ("hinge_embedding_loss", as_is, signs, {}),
]
every_loss = pytest.mark.parametrize(("name", "make_input", "make_target", "options"), LOSSES)


def loss(x: Any, target: Any, name: str, reduction: str, options: dict[str, Any]) -> torch.Tensor:
    """The loss by name, where no op may gather."""
    if name == "soft_margin_loss":  # torch has no gradient for its targets
        target = target.detach()
    with strict():
        out: torch.Tensor = getattr(F, name)(x, target, reduction=reduction, **options)
    return out


@pytest.mark.filterwarnings("ignore:reduction")
@every_loss
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_losses_by_element(
    ranks: Ranks, name: str, make_input: Any, make_target: Any, options: dict[str, Any], reduction: str
) -> None:
    x, target = make_input(torch.randn(2, 8, 3, dtype=DTYPE)), make_target(torch.randn(2, 8, 3, dtype=DTYPE))
    for sizes in SIZES:
        cuts = [(1, sizes), (1, sizes), None, None, None]
        ranks.same_as_plain(loss, x, target, name, reduction, options, cuts=cuts)


TARGETS = {
    "plain": ((1, (5, 3)), None),
    "cut otherwise": ((1, (5, 3)), (1, (2, 6))),
    "another dim": ((1, (5, 3)), (0, (1, 1))),
    "only the target": (None, (1, (5, 3))),
}


@pytest.mark.parametrize("cuts", TARGETS)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("name", ["mse_loss", "huber_loss", "binary_cross_entropy_with_logits"])
def test_targets_laid_out_otherwise(ranks: Ranks, name: str, reduction: str, cuts: str) -> None:
    x, target = torch.randn(2, 8, 3, dtype=DTYPE), torch.rand(2, 8, 3, dtype=DTYPE)
    ranks.same_as_plain(loss, x, target, name, reduction, {}, cuts=[*TARGETS[cuts], None, None, None])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_mse_in_other_dtypes(ranks: Ranks, reduction: str, dtype: torch.dtype) -> None:
    x, target = torch.randn(2, 8, 3, dtype=dtype), torch.randn(2, 8, 3, dtype=dtype)
    ranks.same_as_plain(loss, x, target, "mse_loss", reduction, {}, cuts=[(1, (5, 3))] * 2 + [None] * 3)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_losses_on_a_mesh_of_two_axes(ranks: Ranks, reduction: str) -> None:
    x, target = torch.randn(2, 9, 7, dtype=DTYPE), torch.randn(2, 9, 7, dtype=DTYPE)
    cuts = [{0: (1, (5, 4)), 1: (2, (3, 4))}, {0: (1, (4, 5))}, None, None, None]
    ranks.same_as_plain(loss, x, target, "mse_loss", reduction, {}, cuts=cuts, mesh=(2, 2))


@pytest.mark.filterwarnings("ignore:Using a target size")
def test_a_target_that_is_broadcast(ranks: Ranks) -> None:
    x, target = torch.randn(2, 8, 3, dtype=DTYPE), torch.randn(8, 1, dtype=DTYPE)
    for target_cut in ((0, (4, 4)), None):
        cuts = [(1, (5, 3)), target_cut, None, None, None]
        ranks.same_as_plain(loss, x, target, "mse_loss", "mean", {}, cuts=cuts)


def weighted_bce(x: Any, target: Any, weight: Any, pos_weight: Any, reduction: str) -> torch.Tensor:
    with strict():
        logits = F.binary_cross_entropy_with_logits(x, target, weight, pos_weight=pos_weight, reduction=reduction)
        plain = F.binary_cross_entropy(x.sigmoid(), target, weight, reduction=reduction)
    return logits + 2 * plain


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_weights_of_binary_cross_entropy(ranks: Ranks, reduction: str) -> None:
    x, target, weight = torch.randn(2, 8, 3, dtype=DTYPE), *torch.rand(2, 2, 8, 3, dtype=DTYPE)
    cuts = [(1, (5, 3)), (1, (5, 3)), None, None, None]
    ranks.same_as_plain(weighted_bce, x, target, weight.float().double(), None, reduction, cuts=cuts, gradients=False)
    pos_weight = torch.rand(3, dtype=DTYPE)
    ranks.same_as_plain(weighted_bce, x, target, None, pos_weight, reduction, cuts=cuts, gradients=False)


def gaussian(x: Any, target: Any, var: Any) -> torch.Tensor:
    return F.gaussian_nll_loss(x, target, var)


def cosine(x: Any, target: Any, _: Any) -> torch.Tensor:
    return F.cosine_embedding_loss(x.flatten(0, 1), target.flatten(0, 1), torch.ones(16, dtype=DTYPE))


@pytest.mark.parametrize("function", [gaussian, cosine])
def test_losses_that_torch_composes(ranks: Ranks, function: Any) -> None:
    x, target, var = torch.randn(2, 8, 3, dtype=DTYPE), torch.randn(2, 8, 3, dtype=DTYPE), torch.rand(2, 8, 3).double()
    ranks.same_as_plain(function, x, target, var + 0.1, dim=1, sizes=(5, 3))


# Classes -------------------------------------------------------------------------------------------------------------


def cross_entropy(x: Any, target: Any, weight: Any, options: dict[str, Any]) -> torch.Tensor:
    with strict():
        return F.cross_entropy(x, target, weight, **options)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("shape", [(8, 8), (3, 8, 8), (3, 8, 4, 8)], ids=str)
def test_cross_entropy(ranks: Ranks, shape: tuple[int, ...], weighted: bool, reduction: str) -> None:
    x = torch.randn(shape, dtype=DTYPE)
    target = torch.randint(0, shape[1], (shape[0], *shape[2:]))
    target.view(-1)[[1, -1]] = 2  # the class that is ignored
    weight = torch.rand(shape[1], dtype=DTYPE).requires_grad_(False) if weighted else None
    options = {"reduction": reduction, "ignore_index": 2}
    points = len(shape) - 1
    own = (0, (5, 3)) if points == 1 else (points, (4, 0, 4))
    on_target = (own[0] - (own[0] > 1), own[1])
    for cuts in (
        (own, on_target),
        (own, None),
        (None, on_target),
        ((1, (4, 0, 4)), None),
        ((1, (5, 3)), (0, _rows(shape))),
    ):
        ranks.same_as_plain(cross_entropy, x, target, weight, options, cuts=[*cuts, None, None], gradients=not weighted)
    ranks.same_as_plain(cross_entropy, x, target, None, options, cuts=[(1, (5, 3)), None, None, None])


def _rows(shape: tuple[int, ...]) -> tuple[int, int]:
    return (shape[0] - 1, 1)


def test_cross_entropy_of_one_sample(ranks: Ranks) -> None:
    x, target = torch.randn(8, dtype=DTYPE), torch.tensor(3)
    ranks.same_as_plain(cross_entropy, x, target, None, {}, cuts=[(0, (4, 0, 4)), None, None, None])


@pytest.mark.parametrize("cut", [(0, (5, 3)), (1, (5, 3))], ids=str)
def test_label_smoothing_and_targets_of_probabilities(ranks: Ranks, cut: Any) -> None:
    x, target = torch.randn(8, 8, dtype=DTYPE), torch.randint(0, 8, (8,))
    ranks.same_as_plain(cross_entropy, x, target, None, {"label_smoothing": 0.1}, cuts=[cut, None, None, None])
    shares = torch.rand(8, 8, dtype=DTYPE).softmax(1)
    ranks.same_as_plain(cross_entropy, x, shares, None, {}, cuts=[cut, cut, None, None])


def test_all_targets_ignored(ranks: Ranks) -> None:
    x, target = torch.randn(8, 4, dtype=DTYPE), torch.full((8,), -100)
    cuts = [(0, (5, 3)), (0, (5, 3)), None, None]
    ranks.same_as_plain(cross_entropy, x, target, None, {}, cuts=cuts)  # 0 / 0, as in one process


def test_flattened_tokens(ranks: Ranks) -> None:
    def per_token(x: Any, target: Any) -> torch.Tensor:
        with strict():
            return F.cross_entropy(x.reshape(-1, 4), target.reshape(-1))

    ranks.same_as_plain(
        per_token, torch.randn(2, 7, 4, dtype=DTYPE), torch.randint(0, 4, (2, 7)), dim=1, sizes=(4, 0, 3)
    )


def foreign_class(mesh: Any, x: torch.Tensor) -> None:
    x = shard(x, mesh, {0: (1, (2, 2))})
    with pytest.raises(RuntimeError, match="classes are 0 to 3"):
        F.cross_entropy(x, torch.tensor([1, 7]))


def test_a_target_that_is_no_class(ranks: Ranks) -> None:
    ranks.run(foreign_class, torch.randn(2, 4), mesh=(2,))


# Second derivatives --------------------------------------------------------------------------------------------------


def gradient_penalty(x: Any, target: Any, name: str) -> torch.Tensor:
    with strict():
        total = cross_entropy(x, target, None, {}) if name == "cross_entropy" else loss(x, target, name, "mean", {})
        (grad,) = torch.autograd.grad(total, x, create_graph=True)
        return grad.square().sum() + total


@pytest.mark.parametrize("name", ["mse_loss", "huber_loss", "smooth_l1_loss", "binary_cross_entropy_with_logits"])
def test_second_derivatives(ranks: Ranks, name: str) -> None:
    x, target = torch.randn(2, 8, 3, dtype=DTYPE), torch.rand(2, 8, 3, dtype=DTYPE)
    ranks.same_as_plain(gradient_penalty, x, target, name, cuts=[(1, (5, 3)), (1, (5, 3)), None])


@pytest.mark.parametrize("cut", [(0, (5, 3)), (1, (5, 3))], ids=str)
def test_second_derivatives_of_cross_entropy(ranks: Ranks, cut: Any) -> None:
    x, target = torch.randn(8, 8, dtype=DTYPE), torch.randint(0, 8, (8,))
    ranks.same_as_plain(gradient_penalty, x, target, "cross_entropy", cuts=[cut, None, None])


# What is sent --------------------------------------------------------------------------------------------------------


def sent(mesh: Any, x: torch.Tensor) -> list[int]:
    one, other = (shard(value, mesh, {0: (0, (5, 3))}, requires_grad=True) for value in (x, 2 * x))
    counts = []
    with comm_trace() as trace:
        total = F.mse_loss(one, other)
        counts.append(len(trace.sent))
        total.backward()
        counts.append(len(trace.sent))
        assert_close(total.detach().full_tensor(), F.mse_loss(x, 2 * x), "loss")
        assert one.grad is not None
        counts.append(len(trace.sent))
    return counts


def test_a_loss_sends_one_number(ranks: Ranks) -> None:
    assert ranks.run(sent, torch.randn(8, 3), mesh=(2,)) == [[0, 1, 1]] * 2

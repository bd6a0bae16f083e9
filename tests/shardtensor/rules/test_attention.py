"""Scaled dot-product attention with queries and keys cut every way: same numbers as one process."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shardtensor import comm_trace, strict
from shardtensor.rules.attention_plan import Tile, tiles
from shardtensor.testing import Ranks, assert_close, shard

SEQ = (2, (5, 9, 2))
OTHER = (2, (4, 0, 12))
HEADS = (1, (1, 3))
# Cuts of queries, keys and values.
CUTS = {
    "alike": (SEQ, SEQ, SEQ),
    "otherwise": (SEQ, OTHER, OTHER),
    "empty queries": (OTHER, SEQ, SEQ),
    "all three otherwise": (SEQ, OTHER, SEQ),
    "whole keys": (SEQ, None, None),
    "whole queries": (None, SEQ, SEQ),
    "whole values": (SEQ, OTHER, None),
    "batch": ((0, (1, 0, 1)),) * 3,
    "heads": (HEADS, HEADS, HEADS),
    "heads and rows": (HEADS, (2, (10, 6)), (2, (10, 6))),
    "rows and heads": ((2, (10, 6)), HEADS, HEADS),
    "whole queries, heads": (None, HEADS, HEADS),
    "features": ((3, (5, 3)),) * 3,
}
DTYPE = torch.float64


def attend(q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False, **options: Any) -> torch.Tensor:
    """Attention where no op may gather."""
    with strict():
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, **options)


def operands(batch: int = 2, dtype: torch.dtype = DTYPE) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(batch, 4, 16, 8, dtype=dtype, generator=generator) for _ in range(3)]


def bool_mask(*shape: int) -> torch.Tensor:
    return torch.rand(shape) > 0.4


def hidden_rows(dtype: torch.dtype) -> torch.Tensor:
    """A mask [16, 16] that hides all of three rows, and from one row all that the first rank of `SEQ` holds."""
    visible = bool_mask(16, 16)
    visible[[3, 7, 15]] = False
    visible[9, :5], visible[9, 5:] = False, True
    return visible if dtype == torch.bool else torch.randn(16, 16, dtype=dtype).masked_fill(~visible, -math.inf)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("cuts", CUTS)
def test_layouts(ranks: Ranks, cuts: str, batch: int, causal: bool) -> None:
    placed = [(0, (0, 1, 0))] * 3 if cuts == "batch" and batch == 1 else CUTS[cuts]
    ranks.same_as_plain(attend, *operands(batch), None, causal, cuts=[*placed, None, None])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cuts", ["otherwise", "whole queries"])
def test_dtypes(ranks: Ranks, cuts: str, dtype: torch.dtype) -> None:
    ranks.same_as_plain(attend, *operands(dtype=dtype), cuts=CUTS[cuts])


@pytest.mark.parametrize("cuts", ["alike", "otherwise", "whole queries", "whole keys"])
@pytest.mark.parametrize("shape", [(16, 16), (2, 1, 16, 16), (2, 4, 1, 16), (1, 16), (16,)], ids=str)
def test_masks(ranks: Ranks, shape: tuple[int, ...], cuts: str) -> None:
    q, k, v = operands()
    mask = bool_mask(*shape) if len(shape) > 1 else bool_mask(*shape).expand(16, 16)
    bias = torch.randn(mask.shape, dtype=DTYPE)  # its gradient is compared as well
    for given in (mask, bias):
        ranks.same_as_plain(attend, q, k, v, given, cuts=[*CUTS[cuts], None])


@pytest.mark.parametrize("dim", [0, 1])
def test_masks_that_are_cut(ranks: Ranks, dim: int) -> None:
    ranks.same_as_plain(attend, *operands(), torch.randn(16, 16, dtype=DTYPE), cuts=[SEQ, SEQ, SEQ, (dim, OTHER[1])])


@pytest.mark.parametrize("cuts", ["alike", "otherwise", "whole queries"])
@pytest.mark.parametrize("dtype", [torch.bool, DTYPE])
def test_rows_in_which_all_is_hidden_are_zero(ranks: Ranks, dtype: torch.dtype, cuts: str) -> None:
    ranks.same_as_plain(attend, *operands(), hidden_rows(dtype), cuts=[*CUTS[cuts], None])


def test_mask_and_causal_together(ranks: Ranks) -> None:
    ranks.same_as_plain(attend, *operands(), bool_mask(16, 16), True, cuts=[SEQ, OTHER, OTHER, None, None])


@pytest.mark.parametrize("cuts", ["alike", "otherwise", "whole queries"])
def test_values_of_zero(ranks: Ranks, cuts: str) -> None:
    q, k, v = operands()
    ranks.same_as_plain(attend, q, k, torch.zeros_like(v), cuts=CUTS[cuts])
    v[..., 0] = 0.0
    ranks.same_as_plain(attend, q, k, v, cuts=CUTS[cuts])


@pytest.mark.parametrize("cuts", ["alike", "whole queries"])
def test_large_scores(ranks: Ranks, cuts: str) -> None:
    q, k, v = operands()
    ranks.same_as_plain(attend, 100 * q, 100 * k, v, cuts=CUTS[cuts], gradients=False)
    ranks.same_as_plain(attend, 2 * q, 2 * k, v, cuts=CUTS[cuts])  # beyond, gradients are rounding errors


@pytest.mark.parametrize("causal", [False, True])
def test_cross_attention_to_another_length(ranks: Ranks, causal: bool) -> None:
    long, _, _ = operands()
    short = long[:, :, :7] + 1
    few = (2, (3, 4, 0))
    ranks.same_as_plain(attend, long, short, 2 * short, None, causal, cuts=[SEQ, few, few, None, None])
    ranks.same_as_plain(attend, short, long, 2 * long, None, causal, cuts=[few, SEQ, SEQ, None, None])


def grouped(q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False) -> torch.Tensor:
    return attend(q, k, v, mask, causal, enable_gqa=True)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads", [(2, 2), (1, 1), (2, 1)], ids=str)
def test_fewer_heads_of_keys_than_of_queries(ranks: Ranks, heads: tuple[int, int], causal: bool) -> None:
    q, k, v = operands()
    k, v = k[:, : heads[0]], v[:, : heads[1]]
    ranks.same_as_plain(grouped, q, k, v, None, causal, cuts=[SEQ, OTHER, OTHER, None, None])
    ranks.same_as_plain(grouped, q, k, v, hidden_rows(DTYPE), cuts=[SEQ, SEQ, SEQ, None])


@pytest.mark.parametrize("query", [(1, (2, 2)), (1, (1, 3)), (1, (4, 0)), None], ids=str)
def test_heads_cut_with_fewer_heads_of_keys(ranks: Ranks, query: Any) -> None:
    q, k, v = operands()
    ranks.same_as_plain(grouped, q, k[:, :2], v[:, :2], cuts=[query, (1, (1, 1)), (1, (1, 1))])


@pytest.mark.parametrize("shape", [(16, 8), (3, 16, 8), (2, 2, 3, 16, 8)], ids=str)
def test_any_number_of_dims(ranks: Ranks, shape: tuple[int, ...]) -> None:
    q, k, v = (torch.randn(shape, dtype=DTYPE) for _ in range(3))
    dim = len(shape) - 2
    cuts = [(dim, SEQ[1]), (dim, OTHER[1]), (dim, OTHER[1]), None]
    for mask in (None, torch.randn(16, 16, dtype=DTYPE), torch.randn(*shape[1:-2], 16, 16, dtype=DTYPE)):
        ranks.same_as_plain(attend, q, k, v, mask, cuts=cuts)


def test_leading_dims_that_are_broadcast(ranks: Ranks) -> None:
    q, k, v = operands()
    ranks.same_as_plain(attend, q, k[:, :1], v[:1, :1], cuts=CUTS["otherwise"])


@pytest.mark.parametrize("causal", [False, True])
def test_values_with_other_features_than_keys(ranks: Ranks, causal: bool) -> None:
    q, k, v = operands()
    ranks.same_as_plain(attend, q, k, v[..., :3], None, causal, cuts=[SEQ, OTHER, OTHER, None, None])


def scaled(q: Any, k: Any, v: Any) -> torch.Tensor:
    return attend(q, k, v, scale=0.3)


def test_scale(ranks: Ranks) -> None:
    ranks.same_as_plain(scaled, *operands(), cuts=CUTS["otherwise"])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "cuts",
    [
        [{0: HEADS, 1: (2, (10, 6))}] * 3,
        [{0: (2, (10, 6))}, *[{0: (2, (4, 12)), 1: HEADS}] * 2],
        [{0: (2, (10, 6))}, *[{1: (2, (4, 12))}] * 2],
        [{0: (2, (10, 6)), 1: (0, (1, 1))}, *[{0: (0, (1, 1)), 1: (2, (4, 12))}] * 2],
    ],
    ids=["heads x rows", "rows, heads of keys", "rows, rows of keys", "crossed"],
)
def test_meshes_of_two_axes(ranks: Ranks, cuts: Any, causal: bool) -> None:
    ranks.same_as_plain(attend, *operands(), None, causal, cuts=[*cuts, None, None], mesh=(2, 2))


def grid_attention(x: Any, mask: Any = None, causal: bool = False) -> torch.Tensor:
    """Every point of a grid [B, 6, H, W] attends to every other, two heads."""
    tokens = x.flatten(2).mT.unflatten(-1, (2, 3)).transpose(1, 2)
    out = attend(tokens, tokens, tokens, mask, causal)
    return out.transpose(1, 2).flatten(2).mT.unflatten(-1, x.shape[2:])


@pytest.mark.parametrize("how", ["free", "causal", "masked"])
def test_points_of_a_grid_cut_along_two_dims(ranks: Ranks, how: str) -> None:
    mask = torch.randn(63, 63, dtype=DTYPE) if how == "masked" else None
    x = torch.randn(2, 6, 7, 9, dtype=DTYPE)
    both = {0: (2, (3, 4)), 1: (3, (4, 5))}
    ranks.same_as_plain(grid_attention, x, mask, how == "causal", cuts=[both, None, None], mesh=(2, 2))
    ranks.same_as_plain(grid_attention, x, mask, how == "causal", cuts=[(3, (4, 3, 2)), None, None])


def in_autocast(q: Any, k: Any, v: Any, mask: Any) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return attend(q, k, v, mask)


def test_autocast(ranks: Ranks) -> None:
    q, k, v = operands(dtype=torch.float32)
    for mask in (None, torch.randn(16, 16)):
        ranks.same_as_plain(in_autocast, q, k, v, mask, cuts=[SEQ, OTHER, OTHER, None], rtol=2e-2)


def squared_gradients(q: Any, k: Any, v: Any, mask: Any, causal: bool) -> torch.Tensor:
    from torch.nn.attention import SDPBackend, sdpa_kernel  # not at the top: it does not travel to the ranks

    with sdpa_kernel(SDPBackend.MATH):  # in one process, only this backend can be differentiated twice
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)
    inputs = [q, k, v] if mask is None else [q, k, v, mask]
    return sum(grad.square().sum() for grad in torch.autograd.grad(out.square().sum(), inputs, create_graph=True))


@pytest.mark.parametrize("how", ["free", "causal", "masked"])
def test_second_derivatives(ranks: Ranks, how: str) -> None:
    mask = hidden_rows(DTYPE) if how == "masked" else None
    ranks.same_as_plain(squared_gradients, *operands(), mask, how == "causal", cuts=[SEQ, OTHER, OTHER, None, None])


# Dropout -------------------------------------------------------------------------------------------------------------


def weights_with_dropout(mesh: Any, q: torch.Tensor, k: torch.Tensor, cuts: Any) -> torch.Tensor:
    """The weights of attention with dropout, found with the unit matrix for values, and checks of what must repeat."""
    cuts = [None if cut is None else {0: cut} for cut in cuts]
    unit = torch.eye(16, dtype=DTYPE).expand(2, 4, 16, 16).contiguous()
    q, k, v = (shard(x, mesh, cut or {}, requires_grad=True) for x, cut in zip((q, k, unit), cuts, strict=True))
    weights = []
    for _ in range(2):
        torch.manual_seed(3)
        out = attend(q, k, v, dropout_p=0.4)
        weights.append(out.full_tensor().detach())
    assert torch.equal(*weights), "a seed must give the same weights again"
    cotangent = torch.randn(2, 4, 16, 16, dtype=DTYPE, generator=torch.Generator().manual_seed(1))
    (out * cotangent).sum().backward()
    assert v.grad is not None
    assert_close(v.grad.full_tensor(), weights[0].mT @ cotangent, "gradient of the values")
    return weights[0]


@pytest.mark.parametrize("cuts", ["alike", "otherwise", "whole queries", "whole keys", "heads"])
def test_dropout(ranks: Ranks, cuts: str) -> None:
    q, k, _ = operands()
    sizes = next(cut for cut in CUTS[cuts] if cut is not None)[1]
    found = ranks.run(weights_with_dropout, q, k, CUTS[cuts], mesh=(len(sizes),))
    assert all(torch.equal(found[0], other) for other in found), "replicas differ"
    plain = (q @ k.mT / math.sqrt(8)).softmax(-1) / 0.6
    kept = found[0] != 0
    assert_close(found[0], plain * kept, "weights that were kept")
    assert 0.5 < kept.double().mean() < 0.7
    blocks = kept[:, :, :4, :4], kept[:, :, 5:9, :4], kept[:, :, :4, 5:9], kept[:, :, 12:, 12:]
    for place, one in enumerate(blocks):
        assert not any(torch.equal(one, other) for other in blocks[place + 1 :]), "two blocks drop the same weights"


def second_derivative_with_dropout(mesh: Any, q: torch.Tensor) -> str:
    x = shard(q, mesh, {0: SEQ}, requires_grad=True)
    out = F.scaled_dot_product_attention(x, x, x, dropout_p=0.5)
    with pytest.raises(RuntimeError, match="no second derivative") as caught:
        torch.autograd.grad(out.sum(), x, create_graph=True)
    return str(caught.value)


def test_dropout_refuses_a_second_derivative(ranks: Ranks) -> None:
    assert all("dropout_p=0" in said for said in ranks.run(second_derivative_with_dropout, operands()[0], mesh=(3,)))


# Shapes that do not go together --------------------------------------------------------------------------------------


def complaint(mesh: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, gqa: bool) -> str:
    q = shard(q, mesh, {0: (2, (10, 6))})
    with pytest.raises(RuntimeError) as caught:
        F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=gqa)
    return f"{type(caught.value).__name__}: {caught.value}"


@pytest.mark.parametrize(
    ("keys", "values", "mask", "gqa", "said"),
    [
        ((2, 4, 16, 7), (2, 4, 16, 8), None, False, "same number of features"),
        ((2, 4, 15, 8), (2, 4, 16, 8), None, False, "same length"),
        ((2, 3, 16, 8), (2, 3, 16, 8), None, False, "leading dims"),
        ((2, 3, 16, 8), (2, 3, 16, 8), None, True, "heads of keys"),
        ((2, 4, 16, 8), (2, 4, 16, 8), (16, 15), False, "cannot be broadcast"),
    ],
)
def test_wrong_shapes(ranks: Ranks, keys: Any, values: Any, mask: Any, gqa: bool, said: str) -> None:
    q, bias = operands()[0], None if mask is None else torch.zeros(mask, dtype=DTYPE)
    k, v = torch.zeros(keys, dtype=DTYPE), torch.zeros(values, dtype=DTYPE)
    for answer in ranks.run(complaint, q, k, v, bias, gqa, mesh=(2,)):
        assert answer.startswith("OpError")
        assert said in answer


# What is sent --------------------------------------------------------------------------------------------------------


def sent(mesh: Any, q: torch.Tensor, cuts: Any) -> tuple[dict[str, int], int, dict[str, int]]:
    x = shard(q, mesh, {0: cuts}, requires_grad=True)
    with comm_trace() as forward:
        out = attend(x, x, x)
    with comm_trace() as backward:
        out.backward(torch.ones(out.shape, dtype=DTYPE))
    return forward.counts(), forward.total_bytes, backward.counts()


def test_only_blocks_of_keys_and_values_travel(ranks: Ranks) -> None:
    q = operands(1)[0]
    row = 2 * 4 * 8 * 8  # bytes of keys and values
    for rank, (forward, total, backward) in enumerate(ranks.run(sent, q, SEQ, mesh=(3,))):
        assert forward == {"ring_shift": 2}
        assert total == row * (SEQ[1][rank] + SEQ[1][rank - 1])
        assert backward == {"ring_shift": 5}  # two of keys and values, three of their gradients
    assert ranks.run(sent, q, HEADS, mesh=(2,)) == [({}, 0, {})] * 2


# Compiled ------------------------------------------------------------------------------------------------------------


def compiled(q: Any, k: Any, v: Any) -> torch.Tensor:
    def doubled(*inputs: Any) -> torch.Tensor:
        return F.scaled_dot_product_attention(*inputs, is_causal=True) * 2

    out: torch.Tensor = torch.compile(doubled, backend="aot_eager")(q, k, v)
    return out


def test_a_rank_that_sees_no_key_of_the_next_one_sends_its_own_when_compiled(ranks: Ranks) -> None:
    ranks.same_as_plain(compiled, *operands(), cuts=CUTS["alike"])


# Modules -------------------------------------------------------------------------------------------------------------


class Strictly(nn.Module):
    """A module in which no op may gather."""

    def __init__(self, module: nn.Module, *, grad: bool = True, **options: Any) -> None:
        super().__init__()
        self.module, self.grad, self.options = module, grad, options

    def forward(self, *inputs: torch.Tensor) -> Any:
        with strict(), torch.set_grad_enabled(self.grad):
            out = self.module(*inputs, **self.options)
        return tuple(part for part in out if part is not None) if isinstance(out, tuple) else out


TOKENS = [(4, 3), (3, 0, 4)]


@pytest.mark.parametrize("sizes", TOKENS, ids=str)
@pytest.mark.parametrize("need_weights", [False, True])
def test_multihead_attention(ranks: Ranks, need_weights: bool, sizes: tuple[int, ...]) -> None:
    x, cut = torch.randn(2, 7, 12, dtype=DTYPE), (1, sizes)
    padding = torch.zeros(2, 7, dtype=torch.bool)
    padding[1, 5:] = True
    for options in ({}, {"attn_mask": torch.rand(7, 7) > 0.7}, {"key_padding_mask": padding}):
        module = nn.MultiheadAttention(12, 3, batch_first=True, dtype=DTYPE)
        module = Strictly(module, need_weights=need_weights, **options)
        ranks.same_as_plain(module, x, x, x, cuts=[cut] * 3)
    module = Strictly(nn.MultiheadAttention(12, 3, dtype=DTYPE), need_weights=need_weights)
    ranks.same_as_plain(module, *[x.transpose(0, 1)] * 3, cuts=[(0, sizes)] * 3)
    ranks.same_as_plain(module, *[x[0]] * 3, cuts=[(0, sizes)] * 3)


@pytest.mark.parametrize("sizes", TOKENS, ids=str)
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("mode", ["train", "eval", "no_grad"])
def test_transformer_encoder_layer(ranks: Ranks, mode: str, norm_first: bool, sizes: tuple[int, ...]) -> None:
    layer = nn.TransformerEncoderLayer(12, 3, 24, 0.0, batch_first=True, norm_first=norm_first, dtype=DTYPE)
    module = Strictly(layer.train(mode == "train"), grad=mode != "no_grad")
    ranks.same_as_plain(module, torch.randn(2, 7, 12, dtype=DTYPE), dim=1, sizes=sizes, gradients=mode != "no_grad")


def test_transformer_decoder_layer(ranks: Ranks) -> None:
    layer = nn.TransformerDecoderLayer(12, 3, 24, 0.0, batch_first=True, dtype=DTYPE)
    x, memory = torch.randn(2, 7, 12, dtype=DTYPE), torch.randn(2, 5, 12, dtype=DTYPE)
    ranks.same_as_plain(Strictly(layer), x, memory, cuts=[(1, (3, 0, 4)), (1, (1, 3, 1))])


# The backends' own ops -----------------------------------------------------------------------------------------------


def by_backend(q: Any, k: Any, v: Any, bias: Any, name: str, causal: bool) -> torch.Tensor:
    """A CUDA backend's op on sharded tensors; in one process, on the CPU, the function."""
    if type(q) is torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, is_causal=causal)
    op = getattr(vars(torch)["ops"].aten, f"_scaled_dot_product_{name}")
    between = {"efficient_attention": (bias, True), "cudnn_attention": (bias, True)}.get(name, ())
    with strict():
        out: torch.Tensor = op(q, k, v, *between, 0.0, causal)[0]
    return out


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "name", ["flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention"]
)
def test_ops_of_backends(ranks: Ranks, name: str, causal: bool) -> None:
    q, k, v = operands()
    ranks.same_as_plain(by_backend, q, k, v, None, name, causal, cuts=[*CUTS["otherwise"], None, None, None])
    if name == "efficient_attention" and not causal:
        bias = torch.randn(16, 16, dtype=DTYPE)
        ranks.same_as_plain(by_backend, q, k, v, bias, name, causal, cuts=[*CUTS["otherwise"], None, None, None])


# Tiles ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
def test_tiles_cover_what_is_visible_once(causal: bool) -> None:
    for q_start in range(4):
        for k_start in range(4):
            for q_len in range(4):
                for k_len in range(4):
                    rows, columns = range(q_start, q_start + q_len), range(k_start, k_start + k_len)
                    seen = torch.zeros(q_len, k_len)
                    for tile in tiles(rows, columns, causal):
                        part = torch.ones_like(seen[tile.queries, tile.keys])
                        assert part.numel()
                        assert not tile.causal or part.shape[0] == part.shape[1]
                        seen[tile.queries, tile.keys] += part.tril() if tile.causal else part
                    visible = [[float(column <= row or not causal) for column in columns] for row in rows]
                    assert torch.equal(seen, torch.tensor(visible).reshape(q_len, k_len))


def test_a_block_that_all_queries_see_is_one_tile() -> None:
    assert tiles(range(5, 8), range(1, 6), True) == (Tile(slice(0, 3), slice(0, 5), False),)

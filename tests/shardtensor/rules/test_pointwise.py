"""The whole table of point-wise ops against the plain op, forward and backward, and how operands meet."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from shardtensor.comm import comm_trace
from shardtensor.errors import OpError
from shardtensor.registry import strict
from shardtensor.spec import Cut, Partial, Replicate
from shardtensor.tensor import ShardTensor
from shardtensor.testing import assert_close, assert_same_as_plain, shard

SIZES = [(5, 3), (4, 0, 4), (2, 5, 1)]
SHAPE = (2, 8, 3)
F64 = torch.float64


def values(*shape, seed=3):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def fitting(kind, place, shape):
    """A tensor of one kind for which many ops are defined: fractions, small counts, flags, complex numbers."""
    base = torch.rand(shape, generator=torch.Generator().manual_seed(11 + place), dtype=F64)
    return {
        "fraction": base * 0.8 + 0.1,
        "count": (base * 5 + 1).long(),
        "flag": base > 0.5,
        "complex": torch.complex(base, 1 - base),
        "flag first": base > 0.5 if place == 0 else base,
        "count first": (base * 5 + 1).long() if place == 0 else base,
        "count last": base + 1 if place == 0 else (base * 5 + 1).int(),
    }[kind]


KINDS = ("fraction", "count", "flag", "complex", "flag first", "count first", "count last")


def table(mutable):
    from shardtensor.registry import RULES  # not a global: functions travel to the ranks with their globals

    mine = [op for op, found in RULES.items() if found.__module__.endswith(".pointwise")]
    return sorted((op for op in mine if op._schema.is_mutable == mutable), key=str)


def arguments(op, kind, shapes):
    """Arguments by schema: tensors of the kind, numbers where there is no default. None where a type is unknown."""
    found, tensors = [], 0
    for argument in op._schema.arguments:
        if argument.kwarg_only:
            continue
        name = str(argument.type)
        if name == "Tensor" or (argument.name == "min" and name == "Optional[Tensor]"):
            shape = (
                () if argument.name == "value" and "fill" in op._schema.name else shapes[min(tensors, len(shapes) - 1)]
            )
            found.append(fitting(kind, tensors, shape))
            tensors += 1
        elif argument.name == "min":
            found.append(0.4)
        elif argument.has_default_value():
            found.append(argument.default_value)
        elif name in ("number", "float", "Optional[number]"):
            found.append(2 if "count" in kind or kind == "flag" else 0.4)
        elif name == "int":
            found.append(1)
        elif name == "bool":
            found.append(False)
        elif name == "List[int]":
            found.append([])
        else:
            return None
    return found


def keywords(op):
    found = {}
    for argument in op._schema.arguments:
        if argument.kwarg_only and not argument.has_default_value():
            found[argument.name] = "floor" if "mode" in argument.name else 1
    return found


def cases(op, shapes):
    """Every kind of arguments that the plain op takes, with its result."""
    for kind in KINDS:
        args = arguments(op, kind, shapes)
        if args is None:
            return
        try:
            result = op(*(arg.clone() if isinstance(arg, torch.Tensor) else arg for arg in args), **keywords(op))
        except (RuntimeError, NotImplementedError, TypeError):
            continue
        yield kind, args, result


def flat(result):
    return [result] if isinstance(result, torch.Tensor) else list(result)


# Ops whose arguments the generator above does not fit, or that belong to another test.
LEFT_OUT = {"aten.copy_.Tensor", "aten.copy_.int", "aten.copy_.float", "aten.where.default"}


def assert_same_block(found, right, what, cut):
    """The result is the plain one; where it lies as the operands, the blocks are compared and nothing is gathered."""
    if isinstance(found, ShardTensor) and found._spec.layout == (cut,):
        assert found.shape == right.shape, what
        rank = found._spec.coordinate[0]
        assert_close(found._local_tensor, right.split(cut.sizes, cut.dim)[rank], what)
    else:
        assert_close(found.full_tensor() if isinstance(found, ShardTensor) else found, right, what)


def run_table(mesh, sizes, shapes, mutable):
    """All ops of the table on sharded operands of the shapes; names of those that no kind of arguments fits."""
    missed, cut = [], {0: (1, sizes)}

    def sharded(arg):
        if not isinstance(arg, torch.Tensor):
            return arg
        if arg.dim() == 3 and arg.shape[1] == SHAPE[1]:
            return shard(arg, mesh, cut)
        return arg

    for op in table(mutable):
        if str(op) in LEFT_OUT:
            continue
        tried = 0
        for kind, args, expected in cases(op, shapes):
            tried += 1
            mine = [sharded(arg) for arg in args]
            with strict():
                found = op(*mine, **keywords(op))
            for mine_part, right in zip(flat(found), flat(expected), strict=True):
                assert_same_block(mine_part, right, f"{op} on {kind}", Cut(1, sizes))
            if mutable:
                assert found is mine[0], op
        if not tried:
            missed.append(str(op))
    return missed


@pytest.mark.parametrize("sizes", SIZES[:2])
def test_every_op(ranks, sizes):
    missed = ranks.run(run_table, sizes, [SHAPE], False, mesh=(len(sizes),))[0]
    assert not missed, f"no arguments found for {missed}"


@pytest.mark.parametrize("sizes", SIZES[1:])
def test_every_op_in_place(ranks, sizes):
    missed = ranks.run(run_table, sizes, [SHAPE], True, mesh=(len(sizes),))[0]
    assert not missed, f"no arguments found for {missed}"


@pytest.mark.parametrize("shapes", [[SHAPE, (8, 1)], [SHAPE, ()], [(2, 1, 3), SHAPE]])
def test_every_op_on_broadcast_operands(ranks, shapes):
    ranks.run(run_table, (5, 1, 2), shapes, False, mesh=(3,))


def test_every_gradient(ranks):
    """Backward of every op that has one, operands cut alike."""

    def check(mesh):
        count = 0
        for op in table(False):
            if str(op) in LEFT_OUT:
                continue
            args = arguments(op, "fraction", [SHAPE])
            leaves = [a.requires_grad_() if isinstance(a, torch.Tensor) else a for a in args or ()]
            try:
                expected = flat(op(*leaves, **keywords(op)))[0]
                weights = values(*expected.shape, seed=9)
                (expected * weights).sum().backward()
            except (RuntimeError, NotImplementedError, TypeError, IndexError):
                continue
            mine = [
                shard(a, mesh, {0: (1, (5, 1, 2))} if a.dim() else {}, requires_grad=True)
                if isinstance(a, torch.Tensor)
                else a
                for a in args
            ]
            with strict():
                found = flat(op(*mine, **keywords(op)))[0]
                (found * shard(weights, mesh, {0: (1, (5, 1, 2))})).sum().backward()
            for one, right in zip(mine, leaves, strict=True):
                if isinstance(one, ShardTensor) and right.grad is not None:
                    assert_close(one.grad.full_tensor(), right.grad, f"gradient of {op}", 1e-11)
                    assert one.grad._spec.layout == one._spec.layout, op
            count += 1
        return count

    assert min(ranks.run(check, mesh=(3,))) > 100


# Functions of x and y, both [2, 8, 3], cut alike, differently, or one plain.
MEETINGS = {
    "add": lambda x, y: x + 2 * y - 1,
    "power": lambda x, y: x.abs() ** y.sigmoid() / (1 + y * y),
    "rows": lambda x, y: x * y[:, :1] + y[:, 2:3],
    "columns": lambda x, y: x * y[..., 0].unsqueeze(-1),
    "outer": lambda x, y: x[:, :, None] - y[:, None, :4],
    "other axis": lambda x, y: x[0].t()[None] * y[0, :, 0],
    "where": lambda x, y: torch.where(x > y, x, y * 2),
    "where with numbers": lambda x, y: torch.where(x > 0, y, 0.5) + torch.where(y > 0, 1.0, x),
    "masked": lambda x, y: x.masked_fill(y > 0, 3.0),
    "clamp": lambda x, y: x.clamp(min=y) + y.clamp(-0.5, 0.5),
    "lerp": lambda x, y: torch.lerp(x, y, 0.3) + torch.addcmul(x, x, y, value=2),
    "max": lambda x, y: torch.maximum(x, y) + torch.minimum(x, y[:, :, :1]),
    "compare": lambda x, y: ((x > y) & (x <= 1)) | ~(y == x),
    "dtypes": lambda x, y: (x.float() + y.to(torch.bfloat16)).double() * (y > 0),
    "numbers": lambda x, y: 2**y + 1 / (x * x + 1) - y.detach() // 0.7 + x % 0.3,
    "activations": lambda x, y: F.gelu(x) * F.silu(y) + F.leaky_relu(x) * F.softplus(y) + F.elu(x) * F.logsigmoid(y),
    "prelu": lambda x, y: F.prelu(x.transpose(1, 2), torch.tensor([0.1, 0.2, 0.3], dtype=F64)).mT + y,
    "complex": lambda x, y: torch.complex(x, y).abs() + torch.polar(x.abs(), y).real + torch.complex(x, y).conj().imag,
    "0-dim": lambda x, y: x * y[0, 0, 0] + y.new_tensor(3.0),
    "in place": lambda x, y: (x * 1 + 0 * y).add_(y).mul_(y[:, :1]).clamp_(-1, 1).copy_(y * 2).sub_(1),
    "expanded": lambda x, y: x + y[:, :1].expand(2, 8, 3) * y[:1].expand(2, 8, 3),
    "slices keep their order": lambda x, y: (x[..., ::2] * y[..., :2]).permute(2, 0, 1).reshape(2, 16),
}

ALIKE = {0: (1, (5, 1, 2))}
DIFFERENT = {0: (1, (1, 3, 4))}
OTHER_DIM = {0: (2, (1, 0, 2))}


@pytest.mark.parametrize("one", [ALIKE, OTHER_DIM, None], ids=str)
@pytest.mark.parametrize("other", [ALIKE, DIFFERENT, {0: (0, (0, 1, 1))}, None], ids=str)
def test_meetings(ranks, one, other):
    if one is None and other is None:
        return
    compare(ranks, [one, other], (3,))


@pytest.mark.parametrize(
    "cuts",
    [
        [{0: (1, (5, 3)), 1: (2, (1, 2))}, {0: (1, (5, 3)), 1: (2, (1, 2))}],
        [{0: (1, (5, 3)), 1: (2, (1, 2))}, {0: (2, (2, 1)), 1: (1, (4, 4))}],
        [{0: (1, (5, 3))}, {1: (1, (2, 6))}],
        [{1: (0, (1, 1))}, None],
    ],
)
def test_meetings_on_two_axes(ranks, cuts):
    compare(ranks, cuts, (2, 2))


def compare(ranks, cuts, mesh):
    def check(mesh):
        for name, function in MEETINGS.items():
            try:
                with strict():
                    assert_same_as_plain(function, [values(2, 8, 3), values(2, 8, 3, seed=5)], mesh, cuts)
            except Exception as error:
                raise AssertionError(f"{name}, cuts {cuts}: {error}") from error

    ranks.run(check, mesh=mesh)


def test_equal_layouts_send_nothing(ranks):
    def check(mesh):
        x = shard(values(*SHAPE), mesh, {0: (1, (5, 3))}, requires_grad=True)
        with strict(), comm_trace() as trace:
            y = (x * x.exp() + 1).relu() * torch.ones(3, dtype=F64)
            y.backward(torch.ones_like(y))
        assert not trace.sent, str(trace)
        assert y._spec.layout == (Cut(1, (5, 3)),)

    ranks.run(check, mesh=(2,))


def test_a_block_of_one_row_does_not_broadcast(ranks):
    """T25: extents (1, 7) + (4, 4)."""
    ranks.same_as_plain(lambda x, y: x + y, values(2, 8, 3), values(2, 8, 3, seed=5), cuts=[(1, (1, 7)), (1, (4, 4))])
    ranks.same_as_plain(lambda x, y: x + y, values(2, 8, 3), values(2, 1, 3), cuts=[(1, (1, 7)), (1, (0, 1))])


def test_dtypes_on_uneven_layouts(ranks):
    """T27: conversions, autocast, comparisons."""

    def convert(x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            inside = x @ torch.ones(3, 4)
        assert inside.dtype == torch.bfloat16
        low = x.to(torch.bfloat16) * 2
        assert low.dtype == torch.bfloat16
        return x.half().float(), low.float(), (x > 0), torch.where(x > 0, x, -x), x.to(torch.int32), x != x.round()

    for sizes in SIZES:
        ranks.same_as_plain(convert, values(2, 8, 3).float(), dim=1, sizes=sizes, gradients=False)


def test_type_promotion(ranks):
    def check(mesh):
        dtypes = [torch.bool, torch.uint8, torch.int64, torch.float32, F64, torch.bfloat16, torch.complex64]
        for one in dtypes:
            for two in [*dtypes, 2, 2.5, True]:
                a = torch.ones(8, 3, dtype=one)
                b = torch.ones(8, 3, dtype=two) if isinstance(two, torch.dtype) else two
                mine = shard(b, mesh, {0: (0, (5, 3))}) if isinstance(b, torch.Tensor) else b
                found = shard(a, mesh, {0: (0, (5, 3))}) * mine
                assert found.dtype == found._local_tensor.dtype == found._spec.dtype == (a * b).dtype

    ranks.run(check, mesh=(2,))


def test_pending_sums(ranks):
    """Linear ops leave a sum pending; others do it first; a number is added once."""

    def check(mesh):
        x = values(2, 8, 3)
        pending = shard(x, mesh, {0: (1, (5, 3))}).sum(1)
        right = x.sum(1)
        assert pending._spec.layout == (Partial("sum"),)
        with strict(), comm_trace() as trace:
            linear = [(-pending, -right), (pending * 2, right * 2), (pending / 4, right / 4)]
            linear += [(pending + pending, right * 2), (pending - pending * 3, right * -2), (pending.clone(), right)]
            linear += [(pending * 2 + pending, right * 3)]
        assert not trace.sent, str(trace)
        other = [(pending + 1, right + 1), (pending.exp(), right.exp()), (pending * pending, right * right)]
        other += [(pending + right, right * 2), (pending.abs() > 1, right.abs() > 1), (1 / pending, 1 / right)]
        other += [(pending + pending[:1], right + right[:1]), (pending * right, right * right)]
        for found, expected in linear + other:
            assert_close(found.full_tensor(), expected, "pending", 1e-6)
        into = pending.clone()
        into += 1
        into.mul_(pending)
        assert_close(into.full_tensor(), (right + 1) * right, "in place")
        for op in ("max", "min"):
            held = ShardTensor.from_local(x[:, mesh.get_local_rank()], mesh, [Partial(op)])
            expected = getattr(x[:, :2], f"a{op}")(1)
            assert_close((held + 1).full_tensor(), expected + 1, op)
            assert_close((held * -2).full_tensor(), expected * -2, op)

    ranks.run(check, mesh=(2,))


def test_results_are_dense_and_writable(ranks):
    """A result of expanded operands is a tensor of its own: writing to a part of it changes that part."""

    def write(x):
        y = x[:, :1].expand(2, 8, 3) * 2
        y[0] = 7
        z = x.sum(1, keepdim=True).expand(2, 8, 3).clone()
        z[:, 2] = 1
        w = torch.zeros_like(x.sum(1, keepdim=True).expand(2, 8, 3))
        w[:, 1:3] += 1
        return y, z, w, (x[..., ::2] + 1).is_contiguous() * x

    ranks.same_as_plain(write, values(2, 8, 3), dim=1, sizes=(5, 3))


def test_strides_follow_the_plain_result(ranks):
    def check(mesh):
        x = values(2, 8, 3)
        mine = shard(x, mesh, {0: (1, (5, 3))})
        functions = {
            "transposed": lambda x: x.mT * 2,
            "permuted": lambda x: x.permute(2, 0, 1) + 1,
            "gaps": lambda x: x[..., ::2].exp(),
            "contiguous": lambda x: x.mT.contiguous(),
            "channels last": lambda x: x[None].to(memory_format=torch.channels_last) + 1,
            "clone": lambda x: x.mT[:, 1:].clone(),
            "like": lambda x: torch.zeros_like(x.mT),
            "like, gaps": lambda x: torch.empty_like(x.mT[..., ::2]),
            "expanded": lambda x: x[:, :1].expand(2, 5, 3) * 2,
        }
        for name, function in functions.items():
            assert function(mine).stride() == function(x).stride(), name

    ranks.run(check, mesh=(2,))


def test_errors_name_the_cause(ranks):
    """T17: Python must not turn what went wrong inside an op into "unsupported operand type(s)"."""

    def check(mesh):
        x = shard(values(2, 8, 3), mesh, {0: (1, (5, 3))})
        with pytest.raises(RuntimeError, match=r"(?i)size|broadcast"):
            x + torch.ones(2, 7, 3, dtype=F64)
        with pytest.raises((RuntimeError, OpError), match=r"(?i)result type|cast|dtype"):
            x.long().add_(x)
        with pytest.raises(OpError, match="waits for a sum"):
            x.sum(1)[0].add_(1)
        with pytest.raises(OpError, match="expanded"):
            x[..., :1].expand(2, 8, 3).mul_(2)
        with pytest.raises(OpError, match="had to move"):
            x[:, :1].expand(2, 8, 3).mul_(2)
        y = shard(values(2, 8, 3), mesh, {})
        assert (y * 2)._spec.layout == (Replicate(),)

    ranks.run(check, mesh=(2,))

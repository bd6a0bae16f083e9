"""What one op costs in eager mode above the plain op, in microseconds, ours and DTensor's, forward and with backward.

    python benchmarks/dispatch.py                        # one rank, all ops
    python benchmarks/dispatch.py add linear --repeats 2000
    python benchmarks/dispatch.py --ranks 2 --out runs/dispatch.json

Tensors are tiny, so that what is left is the cost of dispatch. Weights are plain tensors for ours, as users have them,
and replicated DTensors for DTensor, as it demands. Single calls of the three kinds alternate, so that what else the
machine does hits all alike; the first table shows medians of the differences to the plain call next to them, the second
the difference of the least times, which a busy machine disturbs less. The JSON file has quartiles too. With more than
one rank the numbers include waiting for the others.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Replicate, Shard

from shardtensor.ranks import RankPool
from shardtensor.testing import shard

KINDS = ("plain", "ours", "dtensor")


class Case(NamedTuple):
    """An op on ``x`` of ``shape``, cut along ``dim``, beside further tensors: floating ones are weights."""

    function: Callable[..., torch.Tensor]
    shape: tuple[int, ...]
    dim: int
    others: tuple[torch.Tensor, ...] = ()
    same: int = 0
    """How many further tensors are cut as ``x`` is."""


IMAGES, TOKENS, HEADS = (2, 8, 8, 8), (2, 8, 16), (1, 2, 8, 16)
INDEX = torch.tensor([2, 0, 1])

CASES = {
    "add": Case(torch.add, TOKENS, 1, same=1),
    "gelu": Case(F.gelu, TOKENS, 1),
    "linear": Case(F.linear, TOKENS, 1, (torch.randn(16, 16), torch.randn(16))),
    "layer_norm": Case(lambda x, w, b: F.layer_norm(x, (16,), w, b), TOKENS, 1, (torch.ones(16), torch.zeros(16))),
    "view": Case(lambda x: x.view(2, 8, 4, 4), TOKENS, 1),
    "permute": Case(lambda x: x.permute(0, 2, 1), TOKENS, 1),
    "sum": Case(lambda x: x.sum(-1), TOKENS, 1),
    "cat": Case(lambda x, y: torch.cat([x, y], -1), TOKENS, 1, same=1),
    "x[:, 1:3]": Case(lambda x: x[:, 1:3], IMAGES, 2),
    "index_select": Case(lambda x, i: x.index_select(1, i), IMAGES, 2, (INDEX,)),
    "softmax": Case(lambda x: x.softmax(-1), TOKENS, 1),
    "conv2d": Case(lambda x, w, b: F.conv2d(x, w, b, padding=1), IMAGES, 2, (torch.randn(8, 8, 3, 3), torch.randn(8))),
    "group_norm": Case(lambda x, w, b: F.group_norm(x, 2, w, b), IMAGES, 2, (torch.ones(8), torch.zeros(8))),
    "sdpa": Case(F.scaled_dot_product_attention, HEADS, 2, same=2),
}


def inputs(case: Case, kind: str, mesh: Any, gradients: bool) -> list[torch.Tensor]:
    """The arguments of one kind: ``x`` and its like cut evenly, the others whole."""
    torch.manual_seed(0)
    cut = [torch.randn(case.shape) for _ in range(1 + case.same)]
    whole = [other.clone() for other in case.others]
    if kind == "ours":
        part = case.shape[case.dim] // mesh.size()
        cut = [shard(x, mesh, {0: (case.dim, (part,) * mesh.size())}) for x in cut]
    if kind == "dtensor":
        blocks = [x.chunk(mesh.size(), case.dim)[mesh.get_local_rank()] for x in cut]
        cut = [DTensor.from_local(block, mesh, [Shard(case.dim)]) for block in blocks]
        whole = [DTensor.from_local(x, mesh, [Replicate()], run_check=False) for x in whole]
    return [x.detach().requires_grad_(gradients and x.is_floating_point()) for x in (*cut, *whole)]


def runner(case: Case, kind: str, mesh: Any, gradients: bool) -> Callable[[], float]:
    """A function that runs the case once and returns the seconds it took."""
    arguments = inputs(case, kind, mesh, gradients)
    leaves = [x for x in arguments if x.requires_grad]
    function = case.function
    cotangent = torch.ones_like(function(*arguments)).detach()

    def forward() -> float:
        start = time.perf_counter()
        with torch.no_grad():
            function(*arguments)
        return time.perf_counter() - start

    def both() -> float:
        for leaf in leaves:
            leaf.grad = None
        start = time.perf_counter()
        function(*arguments).backward(cotangent)
        return time.perf_counter() - start

    return both if gradients else forward


def alternating(runners: dict[str, Callable[[], float]], repeats: int) -> dict[str, list[float]]:
    """Times of single calls, in microseconds, by kind; the kinds take turns."""
    found: dict[str, list[float]] = {kind: [] for kind in runners}
    for repeat in range(repeats + 20):
        for kind, run in runners.items():
            run()  # the caches hold this kind's code again
            spent = run() * 1e6
            if repeat >= 20:
                found[kind].append(spent)
    return found


def measured(case: Case, mesh: Any, gradients: bool, repeats: int) -> dict[str, Any]:
    """Plain time, and by kind what it costs above; a kind that cannot run the op says why."""
    runners, row = {}, {}
    for kind in KINDS:
        try:
            runners[kind] = runner(case, kind, mesh, gradients)
            runners[kind]()
        except (RuntimeError, NotImplementedError, AttributeError) as error:
            runners.pop(kind, None)
            row[kind] = {"failed": f"{type(error).__name__}: {error}".partition("\n")[0][:200]}
    gc.collect()
    gc.disable()
    times = alternating(runners, repeats)
    gc.enable()
    row["plain"] = {**summary(times["plain"]), "least": min(times["plain"])}
    for kind in runners:
        if kind != "plain":
            row[kind] = summary([mine - base for mine, base in zip(times[kind], times["plain"], strict=True)])
            row[kind]["least"] = min(times[kind]) - min(times["plain"])
    return row


def summary(values: list[float]) -> dict[str, float]:
    """Median and quartiles."""
    low, middle, high = statistics.quantiles(values, n=4)
    return {"median": middle, "low": low, "high": high}


def on_rank(mesh: Any, names: list[str], repeats: int) -> dict[str, Any]:
    """All measurements, on one rank of the mesh."""
    return {
        name: {
            "forward": measured(CASES[name], mesh, False, repeats),
            "with backward": measured(CASES[name], mesh, True, repeats),
        }
        for name in names
    }


def lines(results: dict[str, Any], which: str) -> Iterator[str]:
    """The table: the plain call, and what the others cost above it."""
    yield f"{'':<14}{'forward':^35}{'with backward':^35}"
    yield f"{'us':<14}" + f"{'plain':>9}{'ours':>13}{'DTensor':>13}" * 2
    for name, row in results.items():
        cells = []
        for phase in row.values():
            cells.append(f"{phase['plain'][which]:9.1f}")
            for kind in KINDS[1:]:
                cells.append("        fails" if "failed" in phase[kind] else f"{phase[kind][which]:+13.1f}")
        yield f"{name:<14}" + "".join(cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ops", nargs="*", help=f"some of {', '.join(CASES)}; default: all")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=400)
    parser.add_argument("--out", type=Path, help="write the results as JSON")
    options = parser.parse_args()
    unknown = set(options.ops) - set(CASES)
    if unknown:
        parser.error(f"no op {', '.join(sorted(unknown))}: choose from {', '.join(CASES)}")
    pool = RankPool(world=options.ranks, timeout=600)
    try:
        results = pool.run(on_rank, options.ops or list(CASES), options.repeats, mesh=(options.ranks,))[0]
    finally:
        pool.close()
    for which in ("median", "least"):
        print(f"{which} of {options.repeats} calls, torch {torch.__version__}, {options.ranks} rank(s)")
        print("\n".join(lines(results, which)), end="\n\n")
    for name, row in results.items():
        for phase, found in row.items():
            for kind in KINDS[1:]:
                if "failed" in found[kind]:
                    print(f"{name}, {phase}, {kind}: {found[kind]['failed']}")
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        facts = {"torch": torch.__version__, "machine": platform.platform(), "ranks": options.ranks, "unit": "us"}
        options.out.write_text(json.dumps({**facts, "results": results}, indent=1))


if __name__ == "__main__":
    main()

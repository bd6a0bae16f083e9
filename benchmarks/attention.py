"""Ring attention, forward and backward: how much faster two ranks with one thread each are than one process with one.

    python benchmarks/attention.py                     # 8192 tokens, 4 heads of 64
    python benchmarks/attention.py --tokens 16384 --causal

Runs of both kinds alternate, so that what else the machine does hits both. Efficiency is t1 / (2 t2), of wall time, and
of processor time (t1 / the sum of both ranks), which a busy machine disturbs less but which leaves out waiting.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from shardtensor import comm, comm_trace
from shardtensor.testing import Ranks, shard


class Step(NamedTuple):
    """What one rank spent on one step: seconds of wall time, seconds of processor time, bytes sent."""

    wall: float
    cpu: float
    sent: int


def step(mesh: Any, shape: tuple[int, int, int, int], causal: bool) -> tuple[float, float, int]:
    """Forward and backward on this rank's half of the tokens, or on all of them."""
    generator = torch.Generator().manual_seed(0)
    half = shape[2] // 2
    cuts = {0: (2, (half, shape[2] - half))} if mesh.size() == 2 else {}
    wholes = [torch.randn(shape, generator=generator) for _ in range(4)]
    q, k, v = (shard(x, mesh, cuts, requires_grad=True) if cuts else x.requires_grad_() for x in wholes[:3])
    cotangent = shard(wholes[3], mesh, cuts) if cuts else wholes[3]
    comm.all_reduce(torch.zeros(1), "sum", comm.group_of(mesh, 0))  # start together
    with comm_trace() as trace:
        wall, cpu = time.perf_counter(), time.process_time()
        F.scaled_dot_product_attention(q, k, v, is_causal=causal).backward(cotangent)
        return time.perf_counter() - wall, time.process_time() - cpu, trace.total_bytes


def row(name: str, values: list[float], unit: str = "") -> str:
    """Median and range."""
    return f"  {name:<34}{statistics.median(values):7.3f} {unit:<2} from {min(values):.3f} to {max(values):.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--features", type=int, default=64, help="per head")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    shape = (options.batch, options.heads, options.tokens, options.features)
    ranks = Ranks(world=2, timeout=300)
    ones: list[Step] = []
    twos: list[list[Step]] = []
    try:
        for repeat in range(options.repeats + 1):
            one, two = (
                [Step(*spent) for spent in ranks.run(step, shape, options.causal, mesh=mesh)] for mesh in ((1,), (2,))
            )
            if repeat:  # the first run warms up
                ones.append(one[0])
                twos.append(two)
    finally:
        ranks.close()
    together = [max(rank.wall for rank in two) for two in twos]
    wall = [one.wall / (2 * two) for one, two in zip(ones, together, strict=True)]
    cpu = [one.cpu / sum(rank.cpu for rank in two) for one, two in zip(ones, twos, strict=True)]
    kind = "causal attention" if options.causal else "attention"
    print(f"{kind}, forward + backward, float32, [B, H, S, E] = {list(shape)}, median of {options.repeats}")
    print(row("one process, one thread", [one.wall for one in ones], "s"))
    print(row("two ranks, one thread each", together, "s"))
    print(row("efficiency, wall time", wall))
    print(row("efficiency, processor time", cpu))
    print(f"  {'sent by a rank':<34}{max(rank.sent for rank in twos[0]) / 2**20:7.1f} MiB a step")


if __name__ == "__main__":
    main()

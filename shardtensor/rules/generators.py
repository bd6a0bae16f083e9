"""Random generators for blocks: every block draws its own numbers, replicas draw the same, a seed repeats them.

The ranks' default generators stay in step: whatever a rank holds, one op advances them by the same amount. A block's
generator is seeded from a number that all ranks draw alike and the block's place in the mesh.
"""

from __future__ import annotations

from collections.abc import Collection
from zlib import crc32

import torch

from shardtensor.comm.agree import gather_facts
from shardtensor.errors import RankDisagreementError
from shardtensor.spec import Cut, DeviceMesh, ShardTensorSpec, mesh_sizes

__all__ = ["block_generator", "common_seed", "mixed_seed", "replicas_seed", "require_in_step"]

_BITS = 2**64 - 1

_in_step: set[DeviceMesh] = set()


def common_seed(generator: torch.Generator | None = None) -> int:
    """A fresh seed, the same on all ranks whose generators are in step; drawn on the CPU by default."""
    device = generator.device if generator is not None else torch.device("cpu")
    return int(torch.randint(2**62, (), generator=generator, device=device, dtype=torch.int64))


def replicas_seed(mesh: DeviceMesh, held: Collection[int]) -> int:
    """A fresh seed, the same on all ranks that compute the same: those along axes that are not ``held`` apart by data.

    Raises:
        RankDisagreementError: these ranks' generators are not in step.
    """
    if any(size > 1 and axis not in held for axis, size in enumerate(mesh_sizes(mesh))):
        require_in_step(mesh)
    return common_seed()


def mixed_seed(seed: int, *parts: int) -> int:
    """A seed of 64 well mixed bits (generators on the CPU use the low 32 only) from a seed and further integers."""
    state = seed & _BITS
    for part in parts:
        state = _scrambled((state ^ _scrambled(part & _BITS)) & _BITS)
    return state


def _scrambled(x: int) -> int:
    """One step of splitmix64: neighbouring integers become unrelated ones."""
    x = (x + 0x9E3779B97F4A7C15) & _BITS
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _BITS
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _BITS
    return x ^ (x >> 31)


def block_generator(
    spec: ShardTensorSpec, device: torch.device, generator: torch.Generator | None = None
) -> torch.Generator | None:
    """The generator from which this rank draws its block of a tensor laid out as ``spec``.

    Args:
        spec: without pending reductions.
        device: of the block.
        generator: the generator that the caller named, or None for the default one; it is advanced.

    Returns:
        ``generator`` itself where every rank holds the whole tensor: the numbers are then those of one process.

    Raises:
        RankDisagreementError: replicas would differ, since the ranks' default generators are not in step.
    """
    sizes = mesh_sizes(spec.mesh)
    place = [(axis, spec.coordinate[axis]) for axis, entry in enumerate(spec.layout) if isinstance(entry, Cut)]
    cutting = [(axis, rank) for axis, rank in place if sizes[axis] > 1]
    if generator is None and len(cutting) < sum(size > 1 for size in sizes):
        require_in_step(spec.mesh)
    if not cutting:
        return generator
    seed = common_seed(generator)
    return torch.Generator(device).manual_seed(mixed_seed(seed, *(part for pair in cutting for part in pair)))


def require_in_step(mesh: DeviceMesh) -> None:
    """Check, until it finds so once for a mesh, that the default generators of all its ranks are in the same state.

    Raises:
        RankDisagreementError: they are not.
    """
    if mesh in _in_step or mesh.size() == 1 or torch.compiler.is_compiling():
        return
    states = {"cpu": torch.random.get_rng_state()}
    if mesh.device_type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state()
    # Not hash(): it differs from process to process.
    facts = gather_facts({name: crc32(state.numpy().tobytes()) for name, state in states.items()}, mesh)
    first = next(iter(facts.values()))
    odd = [at for at, found in facts.items() if found != first]
    if odd:
        raise RankDisagreementError(
            f"random numbers on a tensor that several ranks hold must be the same on each, but the ranks' random "
            f"generators differ: those at mesh coordinates {odd} from the first rank's. Call torch.manual_seed with "
            f"one seed on all ranks that share a sample (seeds may differ along the data axis)"
        )
    _in_step.add(mesh)

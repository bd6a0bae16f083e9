"""Halo exchange: every rank asks for a window of a cut dim and gets it, however far it reaches; and its adjoint.

A window is an interval of global rows. It may reach over any number of neighbours, miss the rank's own block, be
empty, or leave the dim: rows outside are filled, or wrap around where the dim is periodic. Resizing shards, slicing,
strided windows and halos are all this one exchange.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import torch

from shardtensor.comm.library import defined_op, resolve, with_length
from shardtensor.comm.pairs import begin_pairs

__all__ = ["Piece", "halo_begin", "halo_exchange", "halo_reduce", "pieces"]


class Piece(NamedTuple):
    """``length`` rows that rank ``owner`` holds from ``start`` of its block, wanted at ``place`` of a window."""

    owner: int
    start: int
    length: int
    place: int


@lru_cache(maxsize=4096)
def pieces(sizes: tuple[int, ...], start: int, stop: int, periodic: bool) -> tuple[Piece, ...]:
    """Where the rows ``start <= row < stop`` of a dim cut into ``sizes`` lie; rows outside the dim have no piece."""
    edges = (0, *accumulate(sizes))
    total = edges[-1]
    found = []
    row = start
    while row < stop:
        if not periodic and (row < 0 or row >= total):
            row = 0 if row < 0 and stop > 0 else stop
            continue
        if total == 0:
            break
        base = row // total * total
        at = row - base
        owner = next(rank for rank, edge in enumerate(edges[1:]) if at < edge)
        length = min(edges[owner + 1] - at, stop - row)
        found.append(Piece(owner, at - edges[owner], length, row - start))
        row += length
    return tuple(found)


class _Route(NamedTuple):
    """What this rank copies, sends and receives for one exchange: pieces by peer."""

    kept: tuple[Piece, ...]
    sends: dict[int, tuple[Piece, ...]]
    receives: dict[int, tuple[Piece, ...]]


@lru_cache(maxsize=4096)
def _route(
    sizes: tuple[int, ...], starts: tuple[int, ...], stops: tuple[int, ...], periodic: bool, rank: int
) -> _Route:
    wanted = [pieces(sizes, start, stop, periodic) for start, stop in zip(starts, stops, strict=True)]
    kept = tuple(piece for piece in wanted[rank] if piece.owner == rank)
    sends, receives = {}, {}
    for peer in range(len(sizes)):
        if peer == rank:
            continue
        out = tuple(piece for piece in wanted[peer] if piece.owner == rank)
        back = tuple(piece for piece in wanted[rank] if piece.owner == peer)
        if out:
            sends[peer] = out
        if back:
            receives[peer] = back
    return _Route(kept, sends, receives)


def _join(x: torch.Tensor, dim: int, parts: Sequence[Piece]) -> torch.Tensor:
    blocks = [x.narrow(dim, piece.start, piece.length) for piece in parts]
    return blocks[0].contiguous() if len(blocks) == 1 else torch.cat(blocks, dim)


def halo_begin(
    x: torch.Tensor,
    dim: int,
    sizes: tuple[int, ...],
    starts: tuple[int, ...],
    stops: tuple[int, ...],
    periodic: bool,
    fill: float,
    group: str,
) -> Callable[[], torch.Tensor]:
    """Start a `halo_exchange`; the returned function waits and gives the window. Arguments as there."""
    process_group, rank, _ = resolve(group)
    route = _route(sizes, starts, stops, periodic, rank)
    length = stops[rank] - starts[rank]
    outgoing = {peer: _join(x, dim, parts) for peer, parts in route.sends.items()}
    incoming = {
        peer: x.new_empty(with_length(x, dim, sum(piece.length for piece in parts)))
        for peer, parts in route.receives.items()
    }
    wait = begin_pairs("halo_exchange", outgoing, incoming, process_group, x.device)
    covered = sum(piece.length for piece in (*route.kept, *(p for parts in route.receives.values() for p in parts)))
    shape = with_length(x, dim, length)
    window = x.new_empty(shape) if covered == length else x.new_full(shape, fill)
    for piece in route.kept:
        window.narrow(dim, piece.place, piece.length).copy_(x.narrow(dim, piece.start, piece.length))

    def end() -> torch.Tensor:
        wait()
        for peer, parts in route.receives.items():
            at = 0
            for piece in parts:
                window.narrow(dim, piece.place, piece.length).copy_(incoming[peer].narrow(dim, at, piece.length))
                at += piece.length
        return window

    return end


def _fake_exchange(
    x: torch.Tensor,
    dim: int,
    sizes: list[int],
    starts: list[int],
    stops: list[int],
    periodic: bool,
    fill: float,
    group: str,
) -> torch.Tensor:
    _, rank, _ = resolve(group)
    return x.new_empty(with_length(x, dim, stops[rank] - starts[rank]))


@defined_op(
    "halo_exchange(Tensor x, int dim, int[] sizes, int[] starts, int[] stops, bool periodic, float fill, str group)"
    " -> Tensor",
    _fake_exchange,
)
def _halo_exchange(
    x: torch.Tensor,
    dim: int,
    sizes: list[int],
    starts: list[int],
    stops: list[int],
    periodic: bool,
    fill: float,
    group: str,
) -> torch.Tensor:
    return halo_begin(x, dim, tuple(sizes), tuple(starts), tuple(stops), periodic, fill, group)()


def halo_exchange(
    x: torch.Tensor,
    dim: int,
    sizes: Sequence[int],
    windows: Sequence[tuple[int, int]],
    group: str,
    *,
    periodic: bool = False,
    fill: float = 0.0,
) -> torch.Tensor:
    """Give every rank its window of a cut dim.

    Args:
        x: this rank's block, ``sizes[rank]`` long along ``dim``.
        dim: the cut dim.
        sizes: rows that each rank holds; zeros allowed.
        windows: the global rows ``(start, stop)`` that each rank wants, the same list on every rank.
        group: name of the process group.
        periodic: rows outside the dim wrap around; otherwise they are ``fill``.

    Returns:
        A contiguous tensor, ``stop - start`` long along ``dim``.
    """
    starts, stops = [window[0] for window in windows], [window[1] for window in windows]
    return torch.ops.shardtensor.halo_exchange(  # type: ignore[no-any-return]
        x, dim, list(sizes), starts, stops, periodic, fill, group
    )


def _fake_reduce(
    window: torch.Tensor,
    dim: int,
    sizes: list[int],
    starts: list[int],
    stops: list[int],
    periodic: bool,
    group: str,
) -> torch.Tensor:
    _, rank, _ = resolve(group)
    return window.new_empty(with_length(window, dim, sizes[rank]))


@defined_op(
    "halo_reduce(Tensor window, int dim, int[] sizes, int[] starts, int[] stops, bool periodic, str group) -> Tensor",
    _fake_reduce,
)
def _halo_reduce(
    window: torch.Tensor,
    dim: int,
    sizes: list[int],
    starts: list[int],
    stops: list[int],
    periodic: bool,
    group: str,
) -> torch.Tensor:
    process_group, rank, _ = resolve(group)
    route = _route(tuple(sizes), tuple(starts), tuple(stops), periodic, rank)
    outgoing = {
        peer: torch.cat([window.narrow(dim, piece.place, piece.length) for piece in parts], dim)
        for peer, parts in route.receives.items()
    }
    incoming = {
        peer: window.new_empty(with_length(window, dim, sum(piece.length for piece in parts)))
        for peer, parts in route.sends.items()
    }
    wait = begin_pairs("halo_reduce", outgoing, incoming, process_group, window.device)
    total = window.new_zeros(with_length(window, dim, sizes[rank]))
    for piece in route.kept:
        total.narrow(dim, piece.start, piece.length).add_(window.narrow(dim, piece.place, piece.length))
    wait()
    # Peers in order of rank, so that the sum does not depend on which message came first.
    for peer, parts in route.sends.items():
        at = 0
        for piece in parts:
            total.narrow(dim, piece.start, piece.length).add_(incoming[peer].narrow(dim, at, piece.length))
            at += piece.length
    return total


def halo_reduce(
    window: torch.Tensor,
    dim: int,
    sizes: Sequence[int],
    windows: Sequence[tuple[int, int]],
    group: str,
    *,
    periodic: bool = False,
) -> torch.Tensor:
    """Send every row of the windows back to its owner and add there: the adjoint of `halo_exchange`.

    Args:
        window: ``stop - start`` long along ``dim``.
        sizes, windows, group, periodic: as in `halo_exchange`; rows that were filled are dropped.

    Returns:
        ``sizes[rank]`` long along ``dim``.
    """
    starts, stops = [item[0] for item in windows], [item[1] for item in windows]
    return torch.ops.shardtensor.halo_reduce(  # type: ignore[no-any-return]
        window, dim, list(sizes), starts, stops, periodic, group
    )

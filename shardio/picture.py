"""Draws a plan: the ranks' slabs and halos on the chunk grid, and the bytes that each rank decodes (extra `plot`)."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from shardio import extras
from shardio.box import Span
from shardio.errors import DimensionError
from shardio.plan import Plan, RankPlan
from shardio.runs import DimPlan

Array = np.ndarray[Any, np.dtype[Any]]

MOST_LINES = 200
"""Chunk boundaries along one dim that are drawn at most; more would be a grey area."""
MOST_MARKS = 150
"""Chunks in the picture up to which those that several ranks read are marked."""
Bytes = tuple[int, int, int]
"""Needed, decoded when reading for oneself, decoded when reading together."""
BOX = {"boxstyle": "round", "facecolor": "white", "edgecolor": "none", "alpha": 0.85}


def draw(
    planned: Plan,
    path: str | Path,
    *,
    spatial: Sequence[str],
    loads: Sequence[Bytes],
    title: str = "",
    coordinates: Mapping[str, Array] | None = None,
    units: Mapping[str, str] | None = None,
) -> None:
    """Draw a plan into a file of the kind that its ending names (png, svg, pdf).

    Args:
        planned: what each rank reads of one array.
        path: the file.
        spatial: the (y, x) dims.
        loads: bytes of a sample for each rank.
        title: heading.
        coordinates: dim -> values, written beside the row numbers.
        units: dim -> units of these values.

    Raises MissingExtraError without matplotlib, DimensionError if there is only one spatial dim.
    """
    if len(spatial) != 2:
        raise DimensionError(f"a picture shows two spatial dims, but the cells lie along {spatial[0]!r} alone")
    extras.load("matplotlib")
    from matplotlib import colormaps
    from matplotlib.figure import Figure  # drawn without pyplot, so no window system is asked for

    ranks = len(planned.ranks)
    colours = [
        colormaps["tab10"](rank) if ranks <= 10 else colormaps["turbo"]((rank + 0.5) / ranks) for rank in range(ranks)
    ]
    height, width = (planned.layout.shape[planned.layout.dims.index(dim)] for dim in spatial)
    tall = min(9.0, max(4.2, 6.0 * height / max(1, width) + 1.6, 0.42 * ranks + 1.6))
    zoom = _zoom(planned, spatial)
    figure = Figure(figsize=(15 if zoom else 12, tall), layout="constrained")
    panels = figure.subplots(1, 3 if zoom else 2, width_ratios=(2.4, 1, 1) if zoom else (2.4, 1))
    figure.suptitle(title, fontsize=12)
    for at, axes in enumerate(panels[:-1]):
        _draw_grid(axes, planned, spatial, colours, named=at == 0)
        _label(axes, spatial, coordinates or {}, units or {})
        axes.set_xlim(-0.5, width - 0.5)
        axes.set_ylim(height - 0.5, -0.5)
    panels[0].set_title(_legend(planned), fontsize=9)
    if zoom:
        dim, span = zoom
        (panels[1].set_ylim if dim == spatial[0] else panels[1].set_xlim)(
            *((span.stop, span.start) if dim == spatial[0] else span)
        )
        panels[1].set_title(f"the first cut of {dim}, enlarged", fontsize=9)
        panels[1].set_aspect("auto")
    _draw_bars(panels[-1], loads, colours)
    figure.savefig(path, dpi=120)


class Stretch(NamedTuple):
    """Rows that a rank reads, and whether they are its own or its halo."""

    span: Span
    own: bool


def _stretches(dim: DimPlan) -> list[Stretch]:
    """What a rank reads along one dim, cut where halo and own rows meet."""
    found = []
    own = Span(dim.halo[0], dim.extent - dim.halo[1])
    for source, dest, size in dim.runs:
        edges = [dest, *(edge for edge in own if dest < edge < dest + size), dest + size]
        for start, stop in itertools.pairwise(edges):
            span = Span(source + start - dest, source + stop - dest)
            found.append(Stretch(span, own.start <= start and stop <= own.stop))
    return found


def _spatial(plan: RankPlan, spatial: Sequence[str]) -> list[DimPlan]:
    return [plan.dims[plan.layout.dims.index(dim)] for dim in spatial]


def _zoom(planned: Plan, spatial: Sequence[str]) -> tuple[str, Span] | None:
    """The rows around the first cut, if its halo is too thin to be seen in the whole."""
    for cut in planned.partition.cuts:
        halo = max(max(dim.halo) for plan in planned.ranks for dim in plan.dims if dim.dim == cut.dim)
        if cut.dim in spatial and len(cut.sizes) > 1 and 0 < halo < 0.04 * cut.total:
            middle, reach = cut.span(0).stop, max(4 * halo, 6)
            return cut.dim, Span(middle - reach, middle + reach)
    return None


def _draw_grid(axes: Any, planned: Plan, spatial: Sequence[str], colours: Sequence[Any], named: bool) -> None:
    from matplotlib.patches import Rectangle

    layout = planned.layout
    for plan, colour in zip(planned.ranks, colours, strict=True):
        y, x = map(_stretches, _spatial(plan, spatial))
        for rows, columns in itertools.product(y, x):
            corner, size = (columns.span.start - 0.5, rows.span.start - 0.5), (columns.span.size, rows.span.size)
            if rows.own and columns.own:
                axes.add_patch(Rectangle(corner, *size, facecolor=colour, alpha=0.5, linewidth=0, zorder=1))
                where = (corner[0] + size[0] / 2, corner[1] + size[1] / 2)
                if named:
                    axes.text(*where, f"rank {plan.rank}", ha="center", va="center", fontsize=9, bbox=BOX, zorder=6)
            else:
                axes.add_patch(
                    Rectangle(corner, *size, fill=False, hatch="////", edgecolor=colour, linewidth=0.8, zorder=4)
                )
    for dim, line in zip(spatial, (axes.axhline, axes.axvline), strict=True):
        extent, chunk = (sizes[layout.dims.index(dim)] for sizes in (layout.shape, layout.chunks))
        if -(-extent // chunk) <= MOST_LINES:
            for edge in range(0, extent + chunk, chunk):
                line(min(edge, extent) - 0.5, color="0.2", linewidth=1.0, zorder=3)
    for (row, column), readers in _shared(planned, spatial).items() if named else ():
        tall, wide = (layout.chunks[layout.dims.index(dim)] for dim in spatial)
        right = min((column + 1) * wide, layout.shape[layout.dims.index(spatial[1])])
        corner = (right - 0.5, row * tall - 0.5)
        axes.annotate(
            f"{readers}x",
            corner,
            (-4, -4),
            textcoords="offset points",
            ha="right",
            va="top",
            fontsize=8,
            color="0.1",
            zorder=5,
            annotation_clip=False,
        )


def _shared(planned: Plan, spatial: Sequence[str]) -> dict[tuple[int, int], int]:
    """Chunk (row, column) -> how many ranks read it, where several do; nothing if the chunks are too many to mark."""
    if planned.layout.partial:
        return {}
    counts: Counter[tuple[int, int]] = Counter()
    for plan in planned.ranks:
        y, x = _spatial(plan, spatial)
        counts.update((low.chunk, high.chunk) for low, high in itertools.product(y.pieces, x.pieces))
    return {chunk: count for chunk, count in counts.items() if count > 1} if len(counts) <= MOST_MARKS else {}


def _legend(planned: Plan) -> str:
    layout = planned.layout
    chunks = ", ".join(f"{dim} {chunk}" for dim, chunk in zip(layout.dims, layout.chunks, strict=True))
    shared = "any rows are read alone" if layout.partial else "2x: a chunk that 2 ranks need"
    return f"colour: own rows; hatched: halo; lines: chunks of {chunks}; {shared}"


def _label(axes: Any, spatial: Sequence[str], coordinates: Mapping[str, Array], units: Mapping[str, str]) -> None:
    """Name the axes; ticks are row numbers, with the coordinate's value below them."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    for dim, axis in zip(spatial, (axes.yaxis, axes.xaxis), strict=True):
        values = coordinates.get(dim)

        def text(place: float, _: int, values: Array | None = values) -> str:
            row = round(place)
            known = values is not None and 0 <= row < len(values)
            return f"{row}\n({values[row]:.4g})" if known and values is not None else f"{row}"

        axis.set_major_locator(MaxNLocator(6, integer=True))
        axis.set_major_formatter(FuncFormatter(text))
        axis.set_label_text(f"{dim}: row" + ("" if values is None else f" (value, {units.get(dim, 'its units')})"))
        axis.set_tick_params(labelsize=8)


def _draw_bars(axes: Any, loads: Sequence[Bytes], colours: Sequence[Any]) -> None:
    """Three bars a rank: needed, decoded when reading for oneself, decoded when reading together."""
    kinds = (("needed", 1.0, ""), ("own: decoded", 0.55, ""), ("collective: decoded", 0.55, "...."))
    for at, (label, alpha, hatch) in enumerate(kinds):
        sizes = [load[at] / 1e6 for load in loads]
        places = [rank + 0.27 * (at - 1) for rank in range(len(loads))]
        bars = axes.barh(places, sizes, 0.25, color=colours, alpha=alpha, hatch=hatch, edgecolor="white", linewidth=0)
        if len(loads) <= 16:
            axes.bar_label(bars, [f" {label} {size:.4g}" for size in sizes], fontsize=7)
    axes.set_yticks(range(len(loads)), [f"rank {rank}" for rank in range(len(loads))], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.75 * max(max(load) for load in loads) / 1e6 or 1)
    axes.set_xlabel("MB of decoded values per sample")
    axes.set_title("bytes of each rank", fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)

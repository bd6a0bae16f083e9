"""Reads everything in a store, by dask, and tells what is wrong: absent and corrupt chunks, NaN and Inf, odd times."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shardio.box import Box, Span
from shardio.errors import DecodeError, MissingChunkError, ReadError, ShardIOError, TimeAxisError
from shardio.labels import labels
from shardio.roles import dim_roles
from shardio.source import Source, Store
from shardio.statistics import blocks
from shardio.times import decode_times
from shardio.work import Cluster, Done, run


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong.

    Attributes:
        array: name of the array.
        kind: "missing" or "corrupt" chunk, "unreadable" (the store refuses), "decode" (attributes that make no sense),
            "nan", "inf", or "time" (an axis that goes back, repeats or has gaps).
        message: what was found, and where.
    """

    array: str
    kind: str
    message: str


@dataclass
class Counts:
    """Values of one array or channel.

    Attributes:
        values: values read.
        nan: NaN among the stored floats.
        inf: infinities among them.
        absent: values that the attributes declare missing (_FillValue, valid_range), NaN left out.
    """

    values: int = 0
    nan: int = 0
    inf: int = 0
    absent: int = 0

    def add(self, other: Counts) -> None:
        """Count these, too."""
        self.values += other.values
        self.nan += other.nan
        self.inf += other.inf
        self.absent += other.absent


@dataclass
class Checked:
    """What was found in one array, or in a part of it.

    Attributes:
        chunks: chunks read.
        nbytes: bytes of the values read.
        missing, corrupt: chunks that are absent; that cannot be decoded or read.
        channels: level (None in an array without the level dim) -> its values.
        problems: the single chunks that failed.
    """

    chunks: int = 0
    nbytes: int = 0
    missing: int = 0
    corrupt: int = 0
    channels: dict[str | None, Counts] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    @property
    def total(self) -> Counts:
        """Values of all channels."""
        total = Counts()
        for counts in self.channels.values():
            total.add(counts)
        return total

    def add(self, other: Checked) -> None:
        """Take in what was found in another part; of its problems as many as MOST_PROBLEMS allows."""
        self.chunks += other.chunks
        self.nbytes += other.nbytes
        self.missing += other.missing
        self.corrupt += other.corrupt
        self.problems += other.problems[: max(0, MOST_PROBLEMS - len(self.problems))]
        for channel, counts in other.channels.items():
            self.channels.setdefault(channel, Counts()).add(counts)


MOST_PROBLEMS = 1000
"""Chunks of one array that are named; more are counted."""


@dataclass
class Report:
    """What was found in a store: by array, and all problems."""

    arrays: dict[str, Checked]
    problems: list[Problem]

    @property
    def sound(self) -> bool:
        """Nothing is wrong."""
        return not self.problems

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "sound": self.sound,
            "arrays": {
                name: {
                    **{key: getattr(found, key) for key in ("chunks", "nbytes", "missing", "corrupt")},
                    **vars(found.total),
                    "channels": {key: vars(counts) for key, counts in found.channels.items() if key is not None},
                }
                for name, found in self.arrays.items()
            },
            "problems": [vars(problem) for problem in self.problems],
        }


def verify(
    store: Store,
    *,
    variables: Sequence[str] | None = None,
    allow_nan: bool = False,
    threads: int | None = None,
    cluster: Cluster | None = None,
    done: Done | None = None,
) -> Report:
    """Read every chunk and go on after errors.

    NaN and infinities among stored floats are problems; values that attributes declare missing are only counted.

    Args:
        store: opened with missing="raise".
        variables: arrays to read; by default all of them, coordinates included.
        allow_nan: NaN is no problem (fields with holes, such as the sea under land); it is counted all the same.
        threads, cluster, done: see `shardio.work.run`.
    """
    names = tuple(store) if variables is None else tuple(variables)
    roles = dim_roles(store)
    problems: list[Problem] = []
    parts: list[Part] = []
    for name in names:
        try:
            store[name].decode  # noqa: B018  attributes that make no sense raise here
            parts += _parts(store, name, roles)
        except DecodeError as error:
            problems.append(Problem(name, "decode", str(error)))
    arrays = {name: Checked() for name in names}
    for part, found in zip(parts, run(_check, store, parts, threads=threads, cluster=cluster, done=done), strict=True):
        arrays[part.name].add(found)
    for name, checked in arrays.items():
        problems += [*checked.problems, *_more(name, checked), *_not_finite(name, checked, allow_nan)]
        problems += _times(store[name])
    return Report(arrays, problems)


@dataclass(frozen=True)
class Part:
    """A box of whole chunks of one array; its level dim and the names of all levels, if it has one."""

    name: str
    box: Box
    level: str | None
    levels: tuple[str, ...]


def _parts(store: Store, name: str, roles: Mapping[str, str]) -> list[Part]:
    source = store[name]
    level = next((dim for dim in source.dims if roles.get(dim) == "level" and dim != name), None)
    levels = _labels(store, level, source.shape[source.dims.index(level)]) if level is not None else ()
    return [Part(name, box, level, levels) for box in blocks(source, {})]


def _labels(store: Store, level: str, size: int) -> tuple[str, ...]:
    """Names of the levels, or their numbers where these cannot be had."""
    try:
        found = labels(store, level, size)
    except Exception:  # the coordinate is read, and reported, like every other array
        found = None
    return tuple(map(str, range(size)) if found is None else found)


def _check(store: Store, part: Part) -> Checked:
    """Read a part; where that fails, chunk by chunk."""
    source = store[part.name]
    chunks = list(_chunks(source, part.box))
    try:
        return _read(source, part, part.box, len(chunks))
    except Exception:  # codecs and file libraries raise errors of many kinds
        if len(chunks) == 1:
            return _failed(source, part, chunks[0])
    found = Checked()
    for number, box in chunks:
        try:
            found.add(_read(source, part, box, 1))
        except Exception:
            found.add(_failed(source, part, (number, box)))
    return found


def _chunks(source: Source, box: Box) -> Iterator[tuple[tuple[int, ...], Box]]:
    """The chunks of a box: number and part of the box; contiguous arrays have one."""
    numbers = (range(a // n, -(-b // n)) for (a, b), n in zip(box, source.chunks, strict=True))
    for number in itertools.product(*numbers):
        inside = zip(box, number, source.chunks, strict=True)
        yield number, tuple(Span(max(a, at * n), min(b, (at + 1) * n)) for (a, b), at, n in inside)


def _read(source: Source, part: Part, box: Box, chunks: int) -> Checked:
    stored = source.read(box)
    found = Checked(chunks, stored.nbytes)
    if part.level is None:
        found.channels[None] = _count(source, stored)
        return found
    at = source.dims.index(part.level)
    for number, layer in zip(range(*box[at]), np.moveaxis(stored, at, 0), strict=True):
        found.channels[part.levels[number]] = _count(source, layer)
    return found


def _count(source: Source, stored: np.ndarray[Any, Any]) -> Counts:
    """What a part of the stored values holds."""
    if stored.dtype.kind not in "iufb":
        return Counts(stored.size)
    floats = stored.dtype.kind == "f"
    nan = int(np.isnan(stored).sum()) if floats else 0
    inf = int(np.isinf(stored).sum()) if floats else 0
    decode = source.decode
    if not decode.missing and decode.low is None and decode.high is None:
        return Counts(stored.size, nan, inf)
    valid = np.empty(stored.shape, dtype=bool)
    decode.apply(np.ascontiguousarray(stored), np.empty(stored.shape), valid)
    return Counts(stored.size, nan, inf, stored.size - int(valid.sum()) - nan)


def _failed(source: Source, part: Part, chunk: tuple[tuple[int, ...], Box]) -> Checked:
    """Read a chunk once more and say what is wrong with it."""
    number, box = chunk
    what = f"chunk {number} (rows {[tuple(span) for span in box]})"
    try:
        return _read(source, part, box, 1)  # it was another one, or passed by itself
    except MissingChunkError as error:
        return Checked(1, missing=1, problems=[Problem(source.name, "missing", str(error))])
    except Exception as error:
        refused = isinstance(error, PermissionError) or isinstance(error.__cause__, PermissionError)
        kind = "unreadable" if refused or type(error) is ReadError else "corrupt"
        text = str(error) if isinstance(error, ShardIOError) else f"{type(error).__name__}: {error}"
        return Checked(1, corrupt=1, problems=[Problem(source.name, kind, f"{what}: {text}")])


def _more(name: str, found: Checked) -> list[Problem]:
    """What was counted beyond the chunks that are named."""
    more = found.missing + found.corrupt - len(found.problems)
    return [Problem(name, "corrupt", f"{more} more chunks are missing or corrupt")] if more else []


def _not_finite(name: str, found: Checked, allow_nan: bool) -> list[Problem]:
    kinds = ("inf",) if allow_nan else ("nan", "inf")
    problems = []
    for kind in kinds:
        where = {channel: count for channel, counts in found.channels.items() if (count := getattr(counts, kind))}
        if where:
            total, values = sum(where.values()), found.total.values
            named = [f"{channel} ({count})" for channel, count in where.items() if channel is not None][:8]
            at = f", at levels {', '.join(named)}" if named else ""
            share = 100 * total / values
            problems.append(Problem(name, kind, f"{total} of {values} values are {kind} ({share:.3g} %){at}"))
    return problems


def _times(source: Source) -> list[Problem]:
    """What is wrong with an array if it is a time coordinate."""
    if source.dims != (source.name.rsplit("/", 1)[-1],) or not math.prod(source.shape):
        return []
    try:
        axis = decode_times(source)
        if axis is not None:
            axis.check()
    except TimeAxisError as error:
        return [Problem(source.name, "time", str(error))]
    except Exception:  # it cannot be read, which is reported already
        return []
    return []

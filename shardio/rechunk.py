"""Copies a store into a Zarr store with other chunks, by dask: in parts, so that a killed copy goes on where it stood.

The copy is written beside the destination (DST.partial) and put in place once every part of it has been read back and
has the checksum of what was read from the source. Stored values are copied as they are, packing included.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import math
import os
import shutil
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import zarr
from zarr.codecs import BloscCodec, ZstdCodec
from zarr.errors import ZarrUserWarning

from shardio.box import Box, Span, slices
from shardio.decode import NETCDF_FILL
from shardio.errors import CorruptChunkError, DestinationError, UnknownFormatError
from shardio.location import is_url, local_path, visible
from shardio.slab_chunks import Chunking
from shardio.source import Source, Store, open_store
from shardio.work import Cluster, Done, run

PART_BYTES = 256 << 20
"""Stored bytes that one task holds at most, unless a single file of the destination is larger."""
ZarrFormat = Literal[2, 3]
WRITE_ALL: Any = {"write_empty_chunks": True}
"""Chunks of nothing but fill values are written, too: an absent chunk of the copy is a lost one."""


@dataclass(frozen=True)
class Piece:
    """A box of one array, made of whole files of the destination; one task copies it."""

    array: str
    box: Box

    @property
    def key(self) -> str:
        """Its name in the journal."""
        return f"{self.array} {' '.join(f'{span.start}:{span.stop}' for span in self.box)}"


def rechunk(
    store: Store,
    destination: str | os.PathLike[str],
    chunking: Mapping[str, Chunking],
    *,
    codec: str = "blosc-zstd",
    zarr_format: ZarrFormat = 3,
    threads: int | None = None,
    cluster: Cluster | None = None,
    copied: Done | None = None,
    checked: Done | None = None,
) -> int:
    """Copy the arrays named in `chunking`; run it again after an interruption and it goes on.

    Args:
        store: what is copied.
        destination: local path of the new Zarr store, which must not exist.
        chunking: array -> its new chunks.
        codec: see CODECS; for numbers. Texts keep zarr's own choice.
        zarr_format: 2 or 3; shards need 3.
        threads, cluster: see `shardio.work.run`; workers of a cluster need the same file system.
        copied, checked: called with (parts done, parts in all) while copying, and while reading back.

    Returns:
        Parts copied now; those copied by an earlier, interrupted call are not among them.

    Raises:
        DestinationError: it exists, is a URL, or an interrupted copy there was made with other settings.
        ReadError: a chunk of the source is absent or corrupt.
        CorruptChunkError: what was written does not read back as what was copied.
    """
    if is_url(destination):
        raise DestinationError(
            f"{visible(destination)} is a URL; write to a local path, then copy the finished store there"
        )
    target = local_path(destination)
    work = target.with_name(target.name + ".partial")
    if target.exists():
        raise DestinationError(f"{target} exists already; remove it, or name another destination")
    with _locked(work):
        arrays = [_Prepared.of(store[name], chunking[name]) for name in chunking]
        journal = Journal(work, _settings(store, arrays, codec, zarr_format))
        data = work / "data"
        if not journal.ready:
            _create(store, arrays, data, codec, zarr_format)
            journal.begin()
        pieces = [Piece(array.name, box) for array in arrays for box in array.boxes()]
        count = 0
        for attempt in (1, 2):  # what a crash of the machine left behind damaged is found by reading and copied anew
            count += _copy(store, pieces, data, journal, threads, cluster, copied)
            damaged = _damaged(pieces, data, journal, threads, cluster, checked)
            if not damaged:
                break
            journal.forget(damaged)
            if attempt == 2:
                raise CorruptChunkError(
                    f"{len(damaged)} parts of {target} do not read back as they were copied, among them "
                    f"{damaged[0].key}; check the disk, then run it again: only these are copied anew"
                )
        for leftover in data.rglob("*.partial"):  # of files that were being written when an earlier call was killed
            leftover.unlink()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ZarrUserWarning)
            zarr.consolidate_metadata(str(data))
        data.replace(target)
    shutil.rmtree(work)
    return count


def _copy(
    store: Store,
    pieces: Sequence[Piece],
    data: Path,
    journal: Journal,
    threads: int | None,
    cluster: Cluster | None,
    copied: Done | None,
) -> int:
    missing = [piece for piece in pieces if piece.key not in journal.done]
    before = len(pieces) - len(missing)

    def done(count: int, _: int) -> None:
        if copied is not None:
            copied(before + count, len(pieces))

    function = partial(_copy_piece, str(data), None if cluster else journal)
    results = run(function, store, missing, threads=threads, cluster=cluster, done=done)
    for piece, checksum in zip(missing, results, strict=True):
        if cluster is not None:
            journal.add(piece, checksum)
    return len(missing)


def _copy_piece(data: str, journal: Journal | None, store: Store, piece: Piece) -> str:
    """Copy one part and give its checksum; here it is entered in the journal at once."""
    values = _storable(store[piece.array], store[piece.array].read(piece.box))
    checksum = checksum_of(values)
    array = zarr.open_array(f"{data}/{piece.array}", mode="r+")
    array.with_config(WRITE_ALL)[slices(piece.box)] = values
    if journal is not None:
        journal.add(piece, checksum)
    return checksum


def _damaged(
    pieces: Sequence[Piece],
    data: Path,
    journal: Journal,
    threads: int | None,
    cluster: Cluster | None,
    checked: Done | None,
) -> list[Piece]:
    """The parts that do not read back with their checksum."""
    where = None if cluster is None else Cluster(cluster.scheduler, str(data))
    with open_store(data, missing="raise") as written:
        found = run(_checksum, written, pieces, threads=threads, cluster=where, done=checked)
        return [piece for piece, checksum in zip(pieces, found, strict=True) if journal.done[piece.key] != checksum]


def _checksum(store: Store, piece: Piece) -> str:
    try:
        return checksum_of(store[piece.array].read(piece.box))
    except Exception as error:  # codecs and file libraries raise errors of many kinds
        return f"{type(error).__name__}: {error}"


def checksum_of(values: np.ndarray[Any, Any]) -> str:
    """Of the values' bytes; of texts, their characters."""
    if values.dtype.kind in "OT":
        content: Any = json.dumps(values.tolist(), default=repr).encode()
    else:
        content = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def _storable(source: Source, values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The values as Zarr can hold them: dates as whole numbers (see _Prepared)."""
    return values.view(np.int64) if source.dtype.kind in "mM" else values


@dataclass(frozen=True)
class _Prepared:
    """How one array is written."""

    name: str
    dims: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    chunking: Chunking
    part: tuple[int, ...]
    attrs: dict[str, Any]

    @classmethod
    def of(cls, source: Source, chunking: Chunking) -> _Prepared:
        attrs, dtype = {key: _plain(value) for key, value in source.attrs.items()}, source.dtype
        if dtype.kind in "mM":
            unit = {"ns": "nanoseconds", "us": "microseconds", "ms": "milliseconds", "s": "seconds"}[
                np.datetime_data(dtype)[0]
            ]
            attrs["units"] = f"{unit} since 1970-01-01" if dtype.kind == "M" else unit
            if dtype.kind == "M":
                attrs["calendar"] = "proleptic_gregorian"
            dtype = np.dtype(np.int64)
        if dtype.kind == "f" and "_FillValue" not in attrs:  # NetCDF's own is in force without being written down
            default = dtype.type(NETCDF_FILL)
            if default in source.decode.missing:
                attrs["_FillValue"] = float(default)
        part = _part(source, chunking.unit)
        return cls(source.name, source.dims, source.shape, dtype, chunking, part, attrs)

    def boxes(self) -> Iterator[Box]:
        """The boxes that tasks copy."""
        steps = zip(self.shape, self.part, strict=True)
        spans = [[Span(at, min(at + step, size)) for at in range(0, size, step)] for size, step in steps]
        yield from itertools.product(*spans)


def _part(source: Source, unit: Sequence[int]) -> tuple[int, ...]:
    """What one task copies: whole files of the destination, and whole chunks of the source as far as memory allows.

    Where whole chunks of both would take more than PART_BYTES, source chunks are decoded more than once.
    """
    shape = [max(1, size) for size in source.shape]
    part = [min(a, n) for a, n in zip(unit, shape, strict=True)]
    if source.partial:
        return tuple(part)
    for exact in (True, False):
        for at in sorted(range(len(part)), key=lambda at: source.chunks[at]):
            chunk, step = source.chunks[at], unit[at]
            wanted = math.lcm(chunk, step) if exact else -(-chunk // step) * step
            larger = [*part[:at], max(part[at], min(wanted, shape[at])), *part[at + 1 :]]
            if math.prod(larger) * source.dtype.itemsize <= PART_BYTES:
                part = larger
    return tuple(part)


def _settings(store: Store, arrays: Sequence[_Prepared], codec: str, zarr_format: int) -> dict[str, Any]:
    """What must be the same for an interrupted copy to go on."""
    described = {
        array.name: {"shape": array.shape, "dtype": str(array.dtype), **asdict(array.chunking), "part": array.part}
        for array in arrays
    }
    plain: dict[str, Any] = json.loads(
        json.dumps({"source": visible(store.url), "codec": codec, "zarr_format": zarr_format, "arrays": described})
    )
    return plain


class Journal:
    """Which parts of a copy are done, with their checksums, in files beside the data.

    Attributes:
        done: key of a part -> checksum of the values that were copied.
        ready: the destination's arrays have been made.
    """

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        self._settings, self._lines = folder / "settings.json", folder / "done.jsonl"
        self._wanted = settings
        self.done: dict[str, str] = {}
        self.ready = self._settings.exists()
        if not self.ready:
            return
        found = json.loads(self._settings.read_text())
        if found != settings:
            differs = [key for key in settings if found.get(key) != settings[key]]
            raise DestinationError(
                f"{folder} holds an interrupted copy with other settings (they differ in: {', '.join(differs)}); "
                f"run it with those, or remove that folder to begin anew"
            )
        if self._lines.exists():
            for line in self._lines.read_text().splitlines():
                with contextlib.suppress(ValueError):  # a line that was being written when the copy was killed
                    key, checksum = json.loads(line)
                    self.done[key] = checksum
            self._write()

    def begin(self) -> None:
        """Note that the arrays have been made."""
        self._settings.write_text(json.dumps(self._wanted))
        self.ready = True

    def add(self, piece: Piece, checksum: str) -> None:
        """Note that a part is done; safe from several threads."""
        with self._lines.open("a") as file:
            file.write(json.dumps([piece.key, checksum]) + "\n")  # one short write, so lines do not mix
        self.done[piece.key] = checksum

    def forget(self, pieces: Sequence[Piece]) -> None:
        """Note that parts have to be copied again."""
        for piece in pieces:
            del self.done[piece.key]
        self._write()

    def _write(self) -> None:
        fresh = self._lines.with_suffix(".new")
        fresh.write_text("".join(json.dumps(item) + "\n" for item in self.done.items()))
        fresh.replace(self._lines)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keep a second copy to the same destination out, as long as this process lives."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        import fcntl
    except ImportError:  # not on Windows
        yield
        return
    with (folder / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DestinationError(f"another process is writing to {folder}; wait for it") from None
        yield


# Making the destination -----------------------------------------------------------------------------------------------

CODECS = ("blosc-zstd", "blosc-lz4", "zstd", "none")
"""blosc: bytes shuffled, in blocks that can be decoded alone; a reader of slabs gains most from it."""


def _create(store: Store, arrays: Sequence[_Prepared], data: Path, codec: str, zarr_format: ZarrFormat) -> None:
    """Make the arrays, empty; what an earlier call left before it had made all of them is removed."""
    if codec not in CODECS:
        raise DestinationError(f"codec {codec!r} is not known; known are: {', '.join(CODECS)}")
    if data.exists():
        shutil.rmtree(data)
    root = zarr.open_group(str(data), mode="w", zarr_format=zarr_format)
    root.attrs.update({key: _plain(value) for key, value in store.attrs.items()})
    described = {name for source in store.values() for name in str(source.attrs.get("coordinates", "")).split()}
    extra = sorted(name for name in store.coordinates - described if store[name].dims != (name,))
    if extra and "coordinates" not in root.attrs:  # coordinates that the source's format knows, not its attributes
        root.attrs["coordinates"] = " ".join(extra)
    for array in arrays:
        _create_array(root, store[array.name], array, codec, zarr_format)


def _create_array(root: zarr.Group, source: Source, array: _Prepared, codec: str, zarr_format: ZarrFormat) -> None:
    numbers = array.dtype.kind in "iufcb"
    attrs = dict(array.attrs)
    missing = attrs.get("_FillValue")
    options: dict[str, Any] = {"compressors": _compressors(codec, array.dtype, zarr_format)} if numbers else {}
    if zarr_format == 3:
        options["dimension_names"] = array.dims
        options["shards"] = array.chunking.shards
        if missing is not None and array.dtype.kind == "f":  # as xarray writes and expects it there
            attrs["_FillValue"] = _encoded(float(missing))
    else:
        attrs["_ARRAY_DIMENSIONS"] = list(array.dims)
        # In version 2, readers of the xarray convention take the array's fill value for the missing value.
        options["fill_value"] = missing if numbers else ("" if array.dtype.kind in "OTU" else None)
    dtype: Any = str if array.dtype.kind in "OT" else array.dtype
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # dtypes and codecs without a final specification, as the source has them
            root.create_array(
                array.name,
                shape=array.shape,
                dtype=dtype,
                chunks=array.chunking.chunks if array.shape else (),
                attributes=attrs,
                config=WRITE_ALL,
                **options,
            )
    except (TypeError, ValueError) as error:
        raise UnknownFormatError(
            f"{source.name!r} of dtype {source.dtype} cannot be written to Zarr {zarr_format}: {error}; "
            f"leave it out by naming the other variables"
        ) from error


def _compressors(codec: str, dtype: np.dtype[Any], zarr_format: ZarrFormat) -> Any:
    if codec == "none":
        return None
    if zarr_format == 2:
        from numcodecs import Blosc, Zstd

        return Zstd(3) if codec == "zstd" else Blosc(codec.removeprefix("blosc-"), clevel=5, shuffle=Blosc.SHUFFLE)
    if codec == "zstd":
        return ZstdCodec(level=3)
    name: Any = codec.removeprefix("blosc-")
    return BloscCodec(cname=name, clevel=5, shuffle="shuffle", typesize=dtype.itemsize)


def _encoded(value: float) -> str:
    """A float as xarray keeps it in JSON: base64 of its 8 bytes."""
    import base64
    import struct

    return base64.standard_b64encode(struct.pack("<d", value)).decode()


def _plain(value: Any) -> Any:
    """An attribute as JSON has it."""
    if isinstance(value, (np.ndarray, np.generic)):
        return _plain(value.tolist())
    if isinstance(value, bytes):
        return value.decode("utf-8", errors="replace")
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    return value if isinstance(value, (str, int, float, bool)) or value is None else str(value)

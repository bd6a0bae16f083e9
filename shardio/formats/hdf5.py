"""HDF5 and NetCDF-4: structure through h5py, values from the file's bytes where their storage is known, else h5py."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from shardio import extras
from shardio.box import Box, shape_of, slices
from shardio.bytes import LocalBytes
from shardio.chunked import missing_chunk
from shardio.decode import NETCDF_FILL, Decode
from shardio.errors import (
    CorruptChunkError,
    DecodeError,
    MissingChunkError,
    MissingFilterError,
    ShardIOError,
    VariableNotFoundError,
)
from shardio.formats.hdf5_chunks import ChunkTable, StoredSource, file_of, pipeline_of
from shardio.formats.hdf5_files import Stored, open_file, open_remote
from shardio.formats.hdf5_links import Links
from shardio.formats.hdf5_virtual import look_at_parts
from shardio.location import is_url, local_path, visible
from shardio.source import Format, Missing, Source, Store

HIDDEN = ("DIMENSION_LIST", "REFERENCE_LIST", "CLASS", "NAME", "DIMENSION_LABELS")
"""Attributes by which HDF5 and NetCDF-4 keep their own books (beside those that begin with "_Netcdf4" or "_NC")."""
NO_VARIABLE = "This is a netCDF dimension but not a netCDF variable"
NON_COORDINATE = "_nc4_non_coord_"
"""Put by NetCDF-4 before the name of a variable that is called like a dim without being its coordinate."""
MAX_CHUNK_CACHE = 64 << 20
"""Largest chunk cache, in bytes, that is opened for one dataset."""
CACHE_SLOTS = 12421
"""Entries of such a cache, far more than chunks, since two chunks for one entry drive each other out; a prime."""


class Hdf5Source(Source):
    """One HDF5 dataset read by HDF5, its handle held open; h5py lets one thread at a time into that library."""

    def __init__(
        self,
        name: str,
        dataset: h5py.Dataset,
        dims: tuple[str, ...],
        strict: bool,
        default_missing: float | None,
        table: ChunkTable | None = None,
    ) -> None:
        super().__init__(
            name,
            dims=dims,
            shape=dataset.shape,
            chunks=dataset.chunks or dataset.shape,
            dtype=dataset.dtype,
            attrs=attributes(dataset),
            block=int(dataset.chunks is None),
            default_missing=default_missing,
        )
        self._dataset = dataset
        self._table = ChunkTable(dataset) if table is None and dataset.chunks is not None else table
        self._strict = strict
        self._file = os.fsdecode(h5py.h5f.get_name(dataset.id))  # also for errors after the file was closed
        broken, self._mixed = look_at_parts(dataset, open_file) if dataset.is_virtual else ([], None)
        self._sources = broken if strict else []

    @cached_property
    def decode(self) -> Decode:
        """See Source.decode. Raises DecodeError, too, if parts of a virtual dataset are packed in another way."""
        if self._mixed is not None:
            raise DecodeError(
                f"{self.name!r} in {self._dataset.file.filename} joins files that are not packed alike: {self._mixed}; "
                f"its values would be wrong. Give it the attributes of its parts, or write parts anew that differ"
            )
        return super().decode

    def read_into(self, box: Box, out: np.ndarray[Any, Any]) -> None:
        """See Source.read_into."""
        if 0 in shape_of(box):
            return
        try:
            self._read(box, out)
        except ShardIOError:
            raise
        except Exception as error:  # HDF5 has errors of many kinds
            raise CorruptChunkError(
                f"{self.name!r} in {self._file} cannot be read by HDF5 at {[tuple(span) for span in box]}: "
                f"{type(error).__name__}: {error}; fetch or write the file again"
            ) from error

    def _read(self, box: Box, out: np.ndarray[Any, Any]) -> None:
        if self._strict:
            self._check_written(box)
        if self.shape and out.flags.c_contiguous and self.dtype.kind in "iufb":
            self._dataset.read_direct(out, source_sel=slices(box))
        else:
            out[...] = self._dataset[slices(box)]

    def _check_written(self, box: Box) -> None:
        """Raise MissingChunkError if anything under the box was never written, or its source file is gone."""
        for within, problem in self._sources:
            if all(a.start < b.stop and b.start < a.stop for a, b in zip(box, within, strict=True)):
                raise MissingChunkError(
                    f"{self.name!r} in {self._dataset.file.filename}: rows {[tuple(span) for span in within]}: "
                    f"{problem}; restore it, or open the store with open_store(..., missing='fill') to read the "
                    f"dataset's fill value there"
                )
        where = f"in {self._dataset.file.filename}"
        if self._table is not None:
            for number in self._table.missing(box):
                raise missing_chunk(f"{number} of {self.name!r} {where}")
        elif not (self._dataset.is_virtual or self._dataset.external or self._dataset.id.get_storage_size()):
            raise missing_chunk(f"{self.name!r}, all there is of it, {where}")


def open_hdf5(
    source: Any,
    *,
    missing: Missing = "raise",
    storage_options: dict[str, Any] | None = None,
    group: str = "/",
    allow: str | Sequence[str] | bool = False,
) -> Store:
    """Open an HDF5 or NetCDF-4 file, if need be without locking it (locks fail on many network file systems).

    Args:
        source: path, URL, or an open h5py.File or Group.
        missing: see open_store; covers chunks that were never written and absent files of virtual datasets.
        storage_options: for URLs; see RemoteBytes (chained ones, "a://b::c://d", go through fsspec).
        group: path of the group to open.
        allow: folders outside the file's own whose files it may lead to (external links and storage, virtual
            datasets), or True for any. Relative names of external storage start at the working directory.

    Raises:
        OutsideStoreError: it leads to a file elsewhere that is not allowed.
        CorruptChunkError: it is damaged.
        VariableNotFoundError: there is no such group.
        MissingFilterError: a dataset is stored through a filter that is not available.
    """
    closers: list[Callable[[], Any]] = []
    stored: Stored | None = None
    if isinstance(source, h5py.Group):
        root = source
    elif is_url(source):
        root, stored, closers = open_remote(os.fspath(source), storage_options)
    else:
        root = open_file(local_path(source))
        closers = [root.close]
    url = visible(source) if isinstance(source, (str, Path)) else str(root.file.filename)
    try:
        folder = None if root.file.driver == "fileobj" else Path(root.file.filename).absolute().parent
        return _opened(root, url, missing, group, closers, Links(folder, url, allow), stored)
    except BaseException as error:
        for closer in closers:
            with contextlib.suppress(Exception):
                closer()
        if isinstance(error, ShardIOError) or not isinstance(error, Exception):
            raise
        raise CorruptChunkError(  # HDF5 has errors of many kinds
            f"{url} cannot be opened as HDF5: {type(error).__name__}: {error}; fetch or write it again"
        ) from error


def _opened(
    root: Any,
    url: str,
    missing: Missing,
    group: str,
    closers: list[Callable[[], Any]],
    links: Links,
    stored: Stored | None,
) -> Store:
    """The arrays of an open file; `stored` is where its bytes are read from beside HDF5, if it is not a local file."""
    try:
        at = root[group.strip("/")] if group.strip("/") else root
    except KeyError as error:
        raise VariableNotFoundError(f"{url} has no group {group!r}: {error}; check group=") from error
    if at.file.filename != root.file.filename:
        links.check(Path(at.file.filename), f"the group {group!r}")
    path = file_of(root.file)
    if path is not None:
        stored = LocalBytes(path.parent), path.name
        closers.append(stored[0].close)
    sources: dict[str, Source] = {}
    datasets = dict(sorted(_datasets(at, "", frozenset(), links)))
    names: dict[Any, str] = {}  # a dataset that links give several names has the first of them as a dim
    addresses = {name: _address(dataset) for name, dataset in datasets.items()}
    for name in datasets:
        names.setdefault(addresses[name], name.rsplit("/", 1)[-1])
    own_file = h5py.h5o.get_info(at.id).fileno
    for name in list(datasets):
        dataset = datasets.pop(name)
        if dataset.shape is None or _no_variable(dataset):
            continue
        if dataset.is_virtual or dataset.external:
            links.check_dataset(dataset)
        # One element that equals the fill value cannot mislead (see formats/zarr.py).
        single = len(dataset.shape) <= 1 and math.prod(dataset.chunks or dataset.shape) == 1
        strict, dims = missing == "raise" and not single, _dims(dataset, names)
        default_missing = _default_missing(dataset)
        found = pipeline_of(dataset) if stored is not None and addresses[name][0] == own_file else None
        if found is None or stored is None:
            _check_filters(name, dataset, url)
            cache, file, inside = _cache_size(dataset), dataset.file.id, dataset.name.encode()
            if cache:
                del dataset  # a new size takes effect once no handle is left
                dataset = h5py.Dataset(h5py.h5d.open(file, inside, _access(cache)))
            sources[name] = Hdf5Source(name, dataset, dims, strict, default_missing)
        else:
            library = Hdf5Source(name, dataset, dims, strict, default_missing, found[1])
            sources[name] = StoredSource(library, dataset, *found, *stored, strict, default_missing)
    return Store(url, sources, attributes(at), "hdf5", tuple(closers))


def attributes(node: h5py.Dataset | h5py.Group) -> dict[str, Any]:
    """Attributes as text, numbers and arrays; those of HDF5's own book-keeping and odd types are left out."""
    found: dict[str, Any] = {}
    if not h5py.h5a.get_num_attrs(node.id):  # to look for them takes ten times as long
        return found
    for key in node.attrs:
        if key in HIDDEN or key.startswith(("_Netcdf4", "_NC")):
            continue
        try:
            value = node.attrs[key]
        except (OSError, TypeError, ValueError):  # a type that h5py cannot express
            continue
        if isinstance(value, h5py.Empty):
            value = ""
        elif isinstance(value, np.ndarray) and value.size == 1:
            value = value.reshape(())[()]
        found[key] = _text(value) if isinstance(value, (bytes, str)) else value
    return found


def _datasets(
    group: h5py.Group, prefix: str, above: frozenset[Any], links: Links
) -> Iterator[tuple[str, h5py.Dataset]]:
    """All datasets below a group, by path; links that lead nowhere or back up are left out."""
    for key in group:
        node = links.get(group, key)
        if isinstance(node, h5py.Dataset):
            yield prefix + key.removeprefix(NON_COORDINATE), node
        elif isinstance(node, h5py.Group) and node.id not in above:
            yield from _datasets(node, f"{prefix}{key}/", above | {group.id}, links)


def _no_variable(dataset: h5py.Dataset) -> bool:
    """Is it there only because NetCDF-4 has a dim of that name?"""
    return _has(dataset, "NAME") and _text(dataset.attrs["NAME"]).startswith(NO_VARIABLE)


def _has(dataset: h5py.Dataset, attribute: str) -> bool:
    return bool(h5py.h5a.exists(dataset.id, attribute.encode()))


def _cache_size(dataset: h5py.Dataset) -> int:
    """Bytes of a chunk cache for one step along the first dim, so that the next step finds it there; 0: HDF5's own.

    Where that is too much, it is one chunk, so that at least the rows of it are decoded together.
    """
    if dataset.chunks is None:
        return 0
    chunk = math.prod(dataset.chunks) * dataset.dtype.itemsize
    step = chunk * math.prod(-(-size // n) for size, n in zip(dataset.shape[1:], dataset.chunks[1:], strict=True))
    size = step if dataset.chunks[0] > 1 and step <= MAX_CHUNK_CACHE else chunk
    return size + 1 if dataset.id.get_access_plist().get_chunk_cache()[1] < size <= MAX_CHUNK_CACHE else 0


def _access(cache: int) -> Any:
    access = h5py.h5p.create(h5py.h5p.DATASET_ACCESS)
    access.set_chunk_cache(CACHE_SLOTS, cache, 1.0)
    return access


def _check_filters(name: str, dataset: h5py.Dataset, url: str) -> None:
    settings = dataset.id.get_create_plist()
    for at in range(settings.get_nfilters()):
        number, _, _, text = settings.get_filter(at)
        if h5py.h5z.filter_avail(number):
            continue
        label = f"filter {number} ({_text(text) or 'unnamed'})"
        try:
            extras.load("hdf5plugin")
        except ImportError as error:
            raise MissingFilterError(f"{name!r} in {url} is stored through {label}: {error}") from error
        if not h5py.h5z.filter_avail(number):
            raise MissingFilterError(
                f"{name!r} in {url} is stored through {label}, which neither HDF5 nor the library hdf5plugin provides; "
                f"rewrite it with another filter, or install that filter for HDF5"
            )


def _default_missing(dataset: h5py.Dataset) -> float | None:
    """The NetCDF library's own fill value, if the dataset was made with it."""
    if dataset.dtype.kind != "f" or dataset.is_virtual:
        return None
    if dataset.id.get_create_plist().fill_value_defined() != h5py.h5d.FILL_VALUE_USER_DEFINED:
        return None
    with np.errstate(over="ignore"):  # no float16 is as large
        return NETCDF_FILL if dataset.fillvalue == np.asarray(NETCDF_FILL).astype(dataset.dtype) else None


def _address(dataset: h5py.Dataset) -> tuple[int, int]:
    """What identifies a dataset, whatever name it was opened by."""
    info = h5py.h5o.get_info(dataset.id)
    return info.fileno, info.addr


def _dims(dataset: h5py.Dataset, scales: dict[Any, str]) -> tuple[str, ...]:
    """Names of the dims: by attached scales, NetCDF-4's own list, being a scale itself, labels, or dim_<number>."""
    if not dataset.shape:
        return ()
    if not h5py.h5a.get_num_attrs(dataset.id):
        return tuple(f"dim_{at}" for at in range(len(dataset.shape)))
    listed = _listed_dims(dataset) if len(dataset.shape) > 1 else None
    names = []
    for at, dim in enumerate(dataset.dims):
        if len(dim):
            names.append(_scale_name(dim[0], scales))
        elif listed is not None:
            names.append(listed[at])
        elif dataset.is_scale:
            names.append(_scale_name(dataset, scales))
        else:
            names.append(dim.label or f"dim_{at}")
    return tuple(names)


def _scale_name(scale: h5py.Dataset, scales: dict[Any, str]) -> str:
    return scales.get(_address(scale), str(scale.name).rsplit("/", 1)[-1])


def _listed_dims(dataset: h5py.Dataset) -> list[str] | None:
    """Dims of a coordinate variable with several dims, which NetCDF-4 keeps by number."""
    if not _has(dataset, "_Netcdf4Coordinates"):  # asking is cheaper than failing
        return None
    numbers = dataset.attrs["_Netcdf4Coordinates"]
    by_number = {
        int(scale.attrs["_Netcdf4Dimid"]): key
        for key, scale in dataset.parent.items()
        if isinstance(scale, h5py.Dataset) and "_Netcdf4Dimid" in scale.attrs and scale.is_scale
    }
    names = [by_number.get(int(number)) for number in numbers]
    return None if None in names else [str(name) for name in names]


def _text(value: Any) -> str:
    return value.decode("utf-8", errors="replace") if isinstance(value, bytes) else str(value)


def _looks_like_hdf5(source: Any) -> bool:
    if isinstance(source, h5py.Group):
        return True
    if not isinstance(source, (str, Path)) or is_url(source):
        return False
    path = local_path(source)
    return path.is_file() and bool(h5py.is_hdf5(path))


FORMAT = Format("hdf5", open_hdf5, (".h5", ".hdf5", ".hdf", ".nc", ".nc4", ".he5"), _looks_like_hdf5)

"""Source, one stored array; Store, an opened file or tree of arrays; and the table of formats that open them."""

from __future__ import annotations

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np

from shardio.aligned import empty
from shardio.blocks import decoded_bytes
from shardio.box import Box, shape_of, whole
from shardio.codecs.base import Counted, Share, in_turn
from shardio.decode import Decode
from shardio.errors import MissingExtraError, StoreNotFoundError, UnknownFormatError, VariableNotFoundError
from shardio.location import is_url, local_path, visible
from shardio.team import unpinned

Missing = Literal["raise", "fill"]
"""What a read does where a chunk was never written: raise MissingChunkError, or give the array's fill value."""


@dataclass(frozen=True)
class Layout:
    """How an array lies in its store; all that planning needs to know of it.

    Attributes:
        dims: name of each dimension.
        shape: extent of each dimension.
        chunks: extent of the unit that is decoded at once: the stored chunk, or the inner chunk of a shard.
        itemsize: bytes of one stored element.
        block: decoded bytes that can be decoded alone: 1 any (uncompressed), n the blocks of n bytes that the box
            touches (blosc), 0 only the whole chunk.
        order: the dims as a chunk is stored, slowest first; () is C order. Blocks lie along it.
    """

    dims: tuple[str, ...]
    shape: tuple[int, ...]
    chunks: tuple[int, ...]
    itemsize: int
    block: int = 0
    order: tuple[int, ...] = ()

    @property
    def partial(self) -> bool:
        """Any box of a chunk can be read alone, so nothing is rounded up to chunks."""
        return self.block == 1

    def decoded_bytes(self, box: Box) -> int:
        """Bytes that are decoded to read a box of one chunk, counted from the chunk's corner."""
        order = self.order or tuple(range(len(self.shape)))
        return decoded_bytes(box, self.chunks, order, self.itemsize, self.block)


class Source(ABC):
    """One stored array. Reads of different boxes from several threads at once are safe.

    Attributes:
        name: path inside the store, such as "t2m" or "group/t2m".
        dims, shape, chunks, block, order: see Layout.
        dtype: dtype that `read_into` delivers: the stored one in native byte order.
        attrs: the stored attributes.
    """

    def __init__(
        self,
        name: str,
        *,
        dims: tuple[str, ...],
        shape: tuple[int, ...],
        chunks: tuple[int, ...],
        dtype: np.dtype[Any],
        attrs: Mapping[str, Any],
        block: int = 0,
        order: tuple[int, ...] = (),
        decode: Decode | None = None,
        default_missing: float | None = None,
    ) -> None:
        self.name = name
        self.dims = dims
        self.shape = shape
        self.chunks = tuple(max(1, chunk) for chunk in chunks)
        self.dtype = dtype.newbyteorder("=") if dtype.kind in "iufcb" else dtype
        self.attrs = dict(attrs)
        self.order = order
        self._block = block
        self._decode = decode
        self._default_missing = default_missing

    @property
    def requests(self) -> int:
        """Reads worth having under way at once, if more than there are cores: where each waits for a server."""
        return 1

    @property
    def fetched_together(self) -> bool:
        """Whether chunks share stored objects behind a server, so that neighbours are better fetched by one read."""
        return False

    @cached_property
    def decode(self) -> Decode:
        """How stored values become physical ones. Raises DecodeError if the attributes make no sense."""
        if self._decode is not None:
            return self._decode
        return Decode.from_attrs(self.attrs, self.dtype, self._default_missing)

    @property
    def block(self) -> int:
        """See Layout.block."""
        return self._block

    @property
    def layout(self) -> Layout:
        """The facts that planning needs."""
        return Layout(self.dims, self.shape, self.chunks, self.dtype.itemsize, self.block, self.order)

    @property
    def partial(self) -> bool:
        """See Layout.partial."""
        return self.block == 1

    @property
    def nbytes(self) -> int:
        """Bytes of the whole array, decoded."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize

    @abstractmethod
    def read_into(self, box: Box, out: np.ndarray[Any, Any]) -> None:
        """Read the stored values of a box, undecoded, into `out` of the box's shape and this dtype.

        Raises MissingChunkError where a chunk is absent and the store was opened with missing="raise".
        """

    def read_counted(self, box: Box, out: np.ndarray[Any, Any], share: Share = in_turn) -> Counted:
        """As `read_into`, perhaps on the threads that `share` has; what was decoded and what came from the store."""
        with unpinned():  # libraries have threads of their own
            self.read_into(box, out)
        nbytes = math.prod(shape_of(box)) if self.partial else chunks_under(box, self.chunks) * math.prod(self.chunks)
        return Counted(nbytes * self.dtype.itemsize)

    def read(self, box: Box | None = None) -> np.ndarray[Any, Any]:
        """The stored values of a box (by default all of them), undecoded. For small arrays: coordinates, names."""
        box = whole(self.shape) if box is None else box
        out = empty(shape_of(box), self.dtype)
        self.read_into(box, out)
        return out

    def __repr__(self) -> str:
        dims = ", ".join(f"{dim}: {size}" for dim, size in zip(self.dims, self.shape, strict=True))
        return f"<{type(self).__name__} {self.name!r} ({dims}) {self.dtype} chunks {self.chunks}>"


def chunks_under(box: Box, chunks: tuple[int, ...]) -> int:
    """How many chunks a box touches."""
    return math.prod(-(-stop // size) - start // size for (start, stop), size in zip(box, chunks, strict=True))


@dataclass
class Store(Mapping[str, Source]):
    """An opened store: its arrays by name, held open until `close`.

    Attributes:
        url: where it was opened from, as shown in errors.
        sources: the arrays.
        attrs: attributes of the root.
        format: name of the format that opened it.
        coordinates: arrays that the format knows to be coordinates, beside those that attributes tell.
        consolidated: whether one read brings the metadata of all arrays; None if the format has no such choice, or it
            is not known.
    """

    url: str
    sources: Mapping[str, Source]
    attrs: Mapping[str, Any]
    format: str
    closers: tuple[Callable[[], None], ...] = field(default=(), repr=False)
    coordinates: frozenset[str] = frozenset()
    consolidated: bool | None = None

    def __getitem__(self, name: str) -> Source:
        try:
            return self.sources[name]
        except KeyError:
            raise VariableNotFoundError(
                f"{self.url} has no array {name!r}; it has: {', '.join(map(repr, self.sources)) or 'none'}"
            ) from None

    def __iter__(self) -> Iterator[str]:
        return iter(self.sources)

    def __len__(self) -> int:
        return len(self.sources)

    def close(self) -> None:
        """Close the files behind the arrays; reading them afterwards is an error."""
        for closer in self.closers:
            closer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


Opener = Callable[..., Store]
"""Called as opener(source, missing=..., **options)."""


@dataclass(frozen=True)
class Format:
    """A row of the format table.

    Attributes:
        name: what `open_store(format=...)` calls it.
        opener: makes a Store; called as opener(source, missing=..., **options).
        suffixes: file name endings that are surely this format.
        sniff: does this object, or this existing path's content, look like the format?
    """

    name: str
    opener: Opener
    suffixes: tuple[str, ...]
    sniff: Callable[[Any], bool]


FORMATS: dict[str, Format] = {}


def register_format(
    name: str, opener: Opener, *, suffixes: tuple[str, ...] = (), sniff: Callable[[Any], bool] = lambda source: False
) -> None:
    """Add a format. Content (`sniff`) decides before the suffix does; twice the same name is an error."""
    if name in FORMATS:
        raise ValueError(f"format {name!r} is already registered; choose another name")
    FORMATS[name] = Format(name, opener, suffixes, sniff)


def open_store(source: Any, *, format: str | None = None, missing: Missing = "raise", **options: Any) -> Store:
    """Open a store of arrays.

    Args:
        source: path or URL of a Zarr store, HDF5, NetCDF or GRIB file; an open zarr store, group, h5py.File or
            xarray.Dataset; an opened Store is given back as it is.
        format: name of a registered format; by default found from the content, then from the name's ending.
        missing: where a Zarr chunk was never written, "raise" MissingChunkError on reading it, or "fill" with the
            array's fill value (which decodes to NaN only if the attributes declare it missing).
        options: passed to the format (storage_options=... for remote URLs).

    Raises:
        StoreNotFoundError: there is nothing at this path.
        UnknownFormatError: no format opens it.
        MissingExtraError: an optional library is missing, or the one for this kind of URL.
    """
    if isinstance(source, Store):
        return source
    if isinstance(source, os.PathLike):
        source = Path(source)
    if missing not in ("raise", "fill"):
        raise ValueError(f"missing={missing!r} is not known; it is 'raise' or 'fill'")
    opener = _find_format(source, format).opener
    try:
        return opener(source, missing=missing, **options)
    except ImportError as error:
        if isinstance(error, MissingExtraError) or not is_url(source):
            raise
        raise MissingExtraError(f"{visible(source)} needs a library to open such URLs with: {error}") from error


def _find_format(source: Any, name: str | None) -> Format:
    from shardio.formats import load_all  # here, because every format imports this file

    load_all()
    if isinstance(source, (str, os.PathLike)) and not is_url(source) and not local_path(source).exists():
        raise StoreNotFoundError(f"there is nothing at {os.fspath(source)!r}; check the path")
    if name is not None:
        if name not in FORMATS:
            raise UnknownFormatError(f"format {name!r} is not known; known are: {', '.join(sorted(FORMATS))}")
        return FORMATS[name]
    for row in FORMATS.values():
        if row.sniff(source):
            return row
    if isinstance(source, (str, os.PathLike)):
        path = os.fspath(source).rstrip("/")
        for row in FORMATS.values():
            if path.lower().endswith(row.suffixes):
                return row
    raise UnknownFormatError(
        f"{visible(source)} is no store that a format recognises by its content or its ending; "
        f"say which with open_store(..., format=) or shardio --format: {', '.join(sorted(FORMATS))}"
    )

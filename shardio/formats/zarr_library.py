"""Zarr arrays through the zarr library, which knows all the codecs; an absent chunk is an error, not fill."""

from __future__ import annotations

import itertools
import math
import threading
from typing import Any, Self

import numpy as np
import zarr
from zarr.abc.store import ByteRequest, RangeByteRequest, SuffixByteRequest
from zarr.abc.store import Store as ZarrStore
from zarr.buffer.cpu import NDBuffer, buffer_prototype
from zarr.codecs import ShardingCodec
from zarr.core.buffer import Buffer, BufferPrototype
from zarr.core.sync import sync
from zarr.storage import WrapperStore

from shardio.box import Box, shape_of, slices
from shardio.chunked import missing_chunk
from shardio.errors import CorruptChunkError, NotAllowedError, ReadError, ShardIOError, UnknownFormatError
from shardio.formats.zarr_chunks import fill_value_of_xarray, missing_by_xarray
from shardio.limits import check_array
from shardio.source import Source

CACHED_INDEXES = 1024
"""Shard indexes kept by each opened store (16 bytes per inner chunk each)."""
EMPTY = np.uint64(2**64 - 1)
"""Offset and length that a shard's index gives for an inner chunk that was never written."""


class CheckedStore(WrapperStore[ZarrStore]):
    """A store that remembers which chunks were absent, and the indexes of shards it has read.

    It raises nothing itself: zarr would leave its other reads of the same call running behind the error.

    Attributes:
        absent: keys of chunks that were asked for and not found.
    """

    def __init__(self, store: ZarrStore) -> None:
        super().__init__(store)
        self.absent: set[str] = set()
        self._indexes: dict[tuple[str, int], Buffer] = {}
        self._lock = threading.Lock()

    def _with_store(self, store: ZarrStore) -> Self:
        return type(self)(store)

    async def get(self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None) -> Buffer | None:
        """As the wrapped store's."""
        index = (key, byte_range.suffix) if isinstance(byte_range, SuffixByteRequest) else None
        if index is not None and index in self._indexes:
            return self._indexes[index]
        found = await self._store.get(key, prototype, byte_range)
        with self._lock:
            if found is None:
                self.absent.add(key)
            else:
                self.absent.discard(key)
                if index is not None:
                    self._indexes[index] = found
            if len(self._indexes) > CACHED_INDEXES:
                self._indexes.pop(next(iter(self._indexes)))
        return found


class ZarrSource(Source):
    """One Zarr array."""

    def __init__(self, name: str, array: zarr.Array[Any], url: str, strict: bool) -> None:
        attrs = dict(array.attrs.asdict())
        named: Any = attrs.pop("_ARRAY_DIMENSIONS", None) or getattr(array.metadata, "dimension_names", None)
        names = list(named or [None] * array.ndim)
        if len(names) != array.ndim:
            raise UnknownFormatError(f"{name!r} in {url} has the shape {array.shape}, but the dims {names}; mend them")
        check_array(name, url, array.shape, array.chunks, np.dtype(array.dtype))
        if "_FillValue" in attrs:
            attrs["_FillValue"] = fill_value_of_xarray(attrs["_FillValue"])
        elif array.metadata.zarr_format == 2 and "_ARRAY_DIMENSIONS" in array.attrs:
            attrs |= missing_by_xarray(array.metadata.fill_value)
        super().__init__(
            name,
            dims=tuple(f"dim_{at}" if found is None else str(found) for at, found in enumerate(names)),
            shape=array.shape,
            chunks=array.chunks,
            dtype=np.dtype(array.dtype),
            attrs=attrs,
        )
        self._array = array
        self._url = url
        # One element that equals the fill value is ordinarily left unwritten (the time 0, a crs); it cannot mislead.
        self._strict = strict and not (array.ndim <= 1 and math.prod(array.chunks) == 1)

    def read_into(self, box: Box, out: np.ndarray[Any, Any]) -> None:
        """See Source.read_into."""
        if 0 in shape_of(box):
            return
        try:
            self._read(box, out)
        except ShardIOError:
            raise
        except Exception as error:  # zarr, numcodecs and plugins raise errors of many kinds
            if isinstance(error, OSError) and error.errno is not None:  # not the one of bz2 for invalid data
                kind = NotAllowedError if isinstance(error, PermissionError) else ReadError
                raise kind(f"{self.name!r} in {self._url} cannot be read: {error}") from error
            raise CorruptChunkError(
                f"a chunk of {self.name!r} in {self._url} cannot be decoded: {type(error).__name__}: {error}; "
                f"check or rewrite what lies under {[tuple(span) for span in box]}"
            ) from error

    def _read(self, box: Box, out: np.ndarray[Any, Any]) -> None:
        if self._strict and self._array.shards is not None:
            self._check_inner_chunks(box)
        if self.dtype.kind in "iufb" and self.shape:
            self._array.get_basic_selection(slices(box), out=NDBuffer.from_numpy_array(out))
        else:
            out[...] = self._array[slices(box)]
        if self._strict:
            self._check_chunks(box)

    def _check_chunks(self, box: Box) -> None:
        """Raise MissingChunkError if a chunk under the box, just read, was absent."""
        store = self._array.store
        if not (isinstance(store, CheckedStore) and store.absent):
            return
        stored = self._array.shards or self._array.chunks
        for number in itertools.product(*(range(a // n, -(-b // n)) for (a, b), n in zip(box, stored, strict=True))):
            if self._key(number) in store.absent:
                raise missing_chunk(f"{self._key(number)!r} in {self._url}")

    def _check_inner_chunks(self, box: Box) -> None:
        """Raise MissingChunkError if a shard's index says that an inner chunk under the box was never written."""
        shards = self._array.shards
        assert shards is not None
        per_shard = [shard // chunk for shard, chunk in zip(shards, self.chunks, strict=True)]
        inner = (range(a // n, -(-b // n)) for (a, b), n in zip(box, self.chunks, strict=True))
        for number in itertools.product(*inner):
            shard, within = zip(*map(divmod, number, per_shard), strict=True)
            if (self._shard_index(shard, per_shard)[within] == EMPTY).all():
                raise missing_chunk(f"{self._key(shard)!r}, inner chunk {within}, in {self._url}")

    def _shard_index(self, shard: tuple[int, ...], per_shard: list[int]) -> np.ndarray[Any, np.dtype[np.uint64]]:
        """Offset and length of every inner chunk of a shard, [*inner chunks per dim, 2]."""
        codec = self._array.metadata.codecs[0]  # type: ignore[union-attr]
        assert isinstance(codec, ShardingCodec)
        table = math.prod(per_shard) * 16
        length = table + sum(_overhead(index_codec) for index_codec in codec.index_codecs)
        at_end = codec.index_location.value == "end"
        key = self._key(shard)
        wanted: ByteRequest = SuffixByteRequest(length) if at_end else RangeByteRequest(0, length)
        found = sync(self._array.store.get(key, buffer_prototype, wanted))
        if found is None:
            raise missing_chunk(f"{key!r} in {self._url}")
        raw = np.frombuffer(found.to_bytes()[:table], dtype="<u8")
        return raw.reshape(*per_shard, 2)

    def _key(self, chunk: tuple[int, ...]) -> str:
        """Key of a stored chunk (shard) in the store."""
        key = self._array.metadata.encode_chunk_key(chunk)
        return f"{self._array.path}/{key}" if self._array.path else key


def _overhead(codec: Any) -> int:
    """Bytes that a codec adds to a shard's index."""
    return 4 if type(codec).__name__ == "Crc32cCodec" else 0

"""NetCDF-3 (classic, 64-bit offset and CDF-5): its header is read here, its values are mapped from the file."""

from __future__ import annotations

import math
import mmap
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from shardio.box import Box, slices
from shardio.decode import NETCDF_FILL
from shardio.errors import CorruptChunkError
from shardio.limits import check_sizes
from shardio.location import local_path, starts_with
from shardio.source import Format, Missing, Source, Store

MAGICS = (b"CDF\x01", b"CDF\x02", b"CDF\x05")
TYPES = {1: ">i1", 2: "S1", 3: ">i2", 4: ">i4", 5: ">f4", 6: ">f8", 7: ">u1", 8: ">u2", 9: ">u4", 10: ">i8", 11: ">u8"}
"""NetCDF type number -> numpy dtype as stored."""
DIMENSION, VARIABLE, ATTRIBUTE = 10, 11, 12
STREAMING = 0xFFFFFFFF
"""Number of records in a file whose writer did not finish."""


class NetCDF3Source(Source):
    """One variable; its stored values are a strided view of the mapped file."""

    def __init__(self, name: str, dims: tuple[str, ...], values: np.ndarray[Any, Any], attrs: dict[str, Any]) -> None:
        super().__init__(
            name,
            dims=dims,
            shape=values.shape,
            chunks=values.shape,
            dtype=values.dtype,
            attrs=attrs,
            block=1,
            default_missing=NETCDF_FILL,
        )
        self._values = values

    def read_into(self, box: Box, out: np.ndarray[Any, Any]) -> None:
        """See Source.read_into."""
        np.copyto(out, self._values[slices(box)])


@dataclass
class _Variable:
    name: str
    dims: list[int]
    attrs: dict[str, Any]
    dtype: np.dtype[Any]
    begin: int


@dataclass
class _Header:
    """Reads a header front to back; sizes are 32-bit, or 64-bit in CDF-5; offsets are 64-bit from CDF-2 on."""

    data: mmap.mmap
    at: int = 4
    dims: list[tuple[str, int]] = field(default_factory=list)
    attrs: dict[str, Any] = field(default_factory=dict)
    variables: list[_Variable] = field(default_factory=list)
    records: int = 0

    def __post_init__(self) -> None:
        version = self.data[3]
        self._size = ">i8" if version == 5 else ">i4"
        self._offset = ">i4" if version == 1 else ">i8"
        self.records = int(self._number(">u8" if version == 5 else ">u4"))
        self.dims = [(self._name(), self._length()) for _ in range(self._list(DIMENSION))]
        self.attrs = self._attributes()
        self.variables = [self._variable() for _ in range(self._list(VARIABLE))]

    def _take(self, count: int) -> bytes:
        if count < 0:
            raise ValueError(f"byte {self.at} holds a negative size")
        taken = self.data[self.at : self.at + count]
        if len(taken) < count:
            raise ValueError(f"the header ends at byte {self.at + len(taken)}, before it is complete")
        self.at += count
        return taken

    def _number(self, dtype: str) -> int:
        kind = np.dtype(dtype)
        return int(np.frombuffer(self._take(kind.itemsize), kind)[0])

    def _length(self) -> int:
        return self._number(self._size)

    def _padded(self, count: int) -> bytes:
        taken = self._take(count)
        self._take(-count % 4)
        return taken

    def _name(self) -> str:
        return self._padded(self._length()).decode("utf-8")

    def _list(self, tag: int) -> int:
        found, count = self._number(">i4"), self._length()
        if found not in (0, tag) or (found == 0 and count):
            raise ValueError(f"byte {self.at} holds the tag {found}, not {tag}")
        return count

    def _attributes(self) -> dict[str, Any]:
        return {self._name(): self._values() for _ in range(self._list(ATTRIBUTE))}

    def _values(self) -> Any:
        dtype = np.dtype(TYPES[self._number(">i4")])
        count = self._length()
        raw = self._padded(count * dtype.itemsize)
        if dtype.kind == "S":
            return raw.rstrip(b"\0").decode("utf-8", errors="replace")
        values = np.frombuffer(raw, dtype).astype(dtype.newbyteorder("="))
        return values[0] if count == 1 else values

    def _variable(self) -> _Variable:
        name = self._name()
        dims = [self._length() for _ in range(self._length())]
        attrs = self._attributes()
        dtype = np.dtype(TYPES[self._number(">i4")])
        self._length()  # the stored size, which overflows for large variables; shapes are trusted instead
        return _Variable(name, dims, attrs, dtype, self._number(self._offset))


def open_netcdf3(source: Any, *, missing: Missing = "raise") -> Store:
    """Open a NetCDF-3 file. It has no chunks that could be missing, so `missing` changes nothing.

    Raises CorruptChunkError if the header makes no sense or the file is shorter than it says.
    """
    path = local_path(source)
    with path.open("rb") as file:
        if path.stat().st_size == 0:
            raise CorruptChunkError(f"{path} is empty; fetch or write it again")
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    try:
        header = _Header(data)
        sources = {source.name: source for source in _sources(header)}
    except (ValueError, TypeError, LookupError, ArithmeticError, MemoryError) as error:
        raise CorruptChunkError(f"{path} is no complete NetCDF-3 file: {error}; fetch or write it again") from error
    return Store(str(path), sources, header.attrs, "netcdf3")


def _sources(header: _Header) -> list[NetCDF3Source]:
    """The variables, mapped. Those with the record dim (size 0 in the header) interleave, record by record."""
    in_records = [v for v in header.variables if v.dims and header.dims[v.dims[0]][1] == 0]
    sizes = {
        v.name: math.prod([n for _, n in (header.dims[d] for d in v.dims[1:])]) * v.dtype.itemsize for v in in_records
    }
    step = sum(size + -size % 4 for size in sizes.values()) if len(sizes) > 1 else sum(sizes.values())
    records = header.records
    if records == STREAMING:
        first = min(v.begin for v in in_records)
        records = (len(header.data) - first) // step
    found = []
    for v in header.variables:
        dims = tuple(header.dims[number][0] for number in v.dims)
        shape = check_sizes([header.dims[number][1] for number in v.dims], "shape", v.name, "its header")
        if v.name in sizes:
            shape = (records, *shape[1:])
        inner = np.array([math.prod(shape[at + 1 :]) * v.dtype.itemsize for at in range(len(shape))], dtype=np.int64)
        strides = tuple(int(stride) for stride in inner)
        if v.name in sizes:
            strides = (step, *strides[1:])
        if math.prod(shape):
            end = v.begin + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True)) + v.dtype.itemsize
            if end > len(header.data):
                raise ValueError(f"variable {v.name!r} ends at byte {end}, but the file has {len(header.data)} bytes")
            values = np.ndarray(shape, v.dtype, header.data, v.begin, strides)
        else:
            values = np.empty(shape, v.dtype)
        found.append(NetCDF3Source(v.name, dims, values, v.attrs))
    return found


def _looks_like_netcdf3(source: Any) -> bool:
    return isinstance(source, (str, Path)) and starts_with(source, *MAGICS)


FORMAT = Format("netcdf3", open_netcdf3, (".cdf", ".nc3"), _looks_like_netcdf3)

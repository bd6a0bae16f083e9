"""References: a JSON file or Parquet folder (kerchunk, VirtualiZarr) that says where the chunks of a Zarr store lie.

The chunks are ranges of other files, or written in the references themselves. A file outside the folder of the
references is read only where `allow` says so: references are data, and could name any file or host.
"""

from __future__ import annotations

import base64
import io
import itertools
import json
import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from shardio import extras
from shardio.bytes import ByteStore, LocalBytes, RemoteBytes
from shardio.errors import (
    CorruptChunkError,
    MissingChunkError,
    OutsideStoreError,
    StoreNotFoundError,
    UnknownFormatError,
)
from shardio.formats.zarr import open_zarr
from shardio.location import is_url, local_path, visible
from shardio.source import Format, Missing, Store

CACHED_TABLES = 32
"""Parquet files kept of a store, each of some thousand references."""


class Target(NamedTuple):
    """Where the bytes of a key lie: in a file from start, `size` of them (None: to its end)."""

    file: str
    start: int = 0
    size: int | None = None


class References(ABC):
    """Finds what a key refers to."""

    @abstractmethod
    def find(self, key: str) -> Target | bytes | None:
        """Where a key's bytes lie, or they themselves; None if there is no such key."""

    @abstractmethod
    def listed(self) -> Iterable[str]:
        """Keys of metadata, at least."""


class ReferenceBytes(ByteStore):
    """The bytes that references lead to.

    Args:
        references: key -> where its bytes lie.
        home: folder or URL that holds the references; files below it are read, and relative paths start there.
        url: of the references, for errors.
        allow: folders, URLs or schemes ("s3://") below which other files may be read, or True for all.
        options: storage_options for the files.
    """

    def __init__(
        self, references: References, home: str, url: str, allow: Sequence[str] | bool, options: dict[str, Any] | None
    ) -> None:
        self.url = url
        self._references = references
        self._home = home.rstrip("/")
        self._allow = allow
        self._options = options
        self._stores: dict[str, ByteStore] = {}
        self._checked: set[str] = set()
        self._lock = threading.Lock()
        home_store, _ = self._store(f"{self._home}/x")
        self.gap, self.requests = home_store.gap, home_store.requests

    def size(self, key: str) -> int | None:
        """See ByteStore.size."""
        found = self._references.find(key)
        if found is None or isinstance(found, bytes):
            return None if found is None else len(found)
        if found.size is not None:
            return found.size
        store, name = self._store(found.file)
        size: int = self._there(store.size(name), key, found)
        return size - found.start

    def read(self, key: str, start: int = 0, stop: int | None = None) -> bytes | memoryview | None:
        """See ByteStore.read."""
        found = self._references.find(key)
        if found is None or isinstance(found, bytes):
            return None if found is None else found[start:stop]
        store, name = self._store(found.file)
        if found.size is None and start < 0:
            start = max(0, self._there(self.size(key), key, found) + start)
        if found.size is not None:
            start = max(0, found.size + start) if start < 0 else start
            stop = found.size if stop is None else min(stop, found.size)
        data = store.read(name, found.start + start, None if stop is None else found.start + max(start, stop))
        there: memoryview = self._there(data, key, found)
        with self._lock:
            self.fetched += len(there)
            self.requests_made += 1
        return there

    def read_into(self, key: str, start: int, into: memoryview) -> bool:
        """See ByteStore.read_into."""
        return self.read_ranges(key, ((start, start + len(into)),), (into,))

    def read_ranges(self, key: str, ranges: Sequence[tuple[int, int]], into: Sequence[memoryview]) -> bool:
        """See ByteStore.read_ranges."""
        found = self._references.find(key)
        if found is None:
            return False
        end = max(stop for _, stop in ranges)
        length = len(found) if isinstance(found, bytes) else found.size
        if length is not None and end > length:
            raise CorruptChunkError(f"{key!r} in {self.url} has {length} bytes, but bytes to {end} are needed")
        if isinstance(found, bytes):
            for (start, stop), part in zip(ranges, into, strict=True):
                part[:] = found[start:stop]
            return True
        store, name = self._store(found.file)
        there = store.read_ranges(name, [(found.start + a, found.start + b) for a, b in ranges], into)
        self._there(there or None, key, found)
        with self._lock:
            self.fetched += sum(map(len, into))
            self.requests_made += 1
        return True

    def folders(self, prefix: str) -> list[str]:
        """See ByteStore.folders."""
        below = (key[len(prefix) :] for key in self._references.listed() if key.startswith(prefix))
        return sorted({key.partition("/")[0] for key in below if "/" in key})

    def close(self) -> None:
        """See ByteStore.close."""
        for store in self._stores.values():
            store.close()

    def _there(self, found: Any, key: str, target: Target) -> Any:
        if found is None:
            raise MissingChunkError(
                f"{key!r} in {self.url} refers to {visible(target.file)}, which is not there; restore that file, or "
                f"make the references again"
            )
        return found

    def _store(self, file: str) -> tuple[ByteStore, str]:
        """The store of a file, and its name in it."""
        file = file.removeprefix("file://") if file.startswith("file:///") else file
        if "://" not in file and not Path(file).is_absolute():
            file = f"{self._home}/{file}"
        folder, _, name = file.rpartition("/")
        with self._lock:
            store = self._stores.get(folder)
            if store is None:
                self._check(folder, file)
                store = RemoteBytes(folder, self._options) if is_url(folder) else LocalBytes(folder or "/")
                self._stores[folder] = store
                self.gap, self.requests = max(self.gap, store.gap), max(self.requests, store.requests)
            if not is_url(folder) and file not in self._checked:
                self._check(str(Path(file).resolve().parent), file)
                self._checked.add(file)
        return store, name

    def _check(self, folder: str, file: str) -> None:
        """Raise OutsideStoreError if a folder is neither below the references nor allowed."""
        if self._allow is True or _below(visible(folder), visible(self._home)):
            return
        allowed = [] if self._allow is False else [self._allow] if isinstance(self._allow, str) else list(self._allow)
        if not any(_below(folder, one) for one in allowed):
            raise OutsideStoreError(
                f"{self.url} refers to {visible(file)}, which lies outside its folder; if you trust it, open the store "
                f"with open_store(..., allow=[{visible(folder)!r}]), or allow=True for any file and host"
            )


def _below(folder: str, root: str) -> bool:
    """Whether a folder is a root or below it, links and ".." resolved. URLs may be a scheme only."""
    if is_url(root) != is_url(folder):
        return False
    if is_url(folder):
        segments = folder.split("/")
        return ".." not in segments and f"{folder}/".startswith(root if root.endswith("/") else f"{root}/")
    return Path(folder).resolve().is_relative_to(local_path(root).resolve())


class JsonReferences(References):
    """References of a JSON file (kerchunk's version 0 or 1), all in memory."""

    def __init__(self, content: Any, url: str) -> None:
        if not isinstance(content, dict) or "gen" in content:
            what = "generated references (gen)" if isinstance(content, dict) else "no table of references"
            raise UnknownFormatError(f"{url} holds {what}; write them out one by one")
        found = content["refs"] if isinstance(content.get("refs"), dict) else content
        self._templates = {f"{{{{{name}}}}}": str(value) for name, value in content.get("templates", {}).items()}
        self._found: dict[str, Any] = found
        self._url = url

    def find(self, key: str) -> Target | bytes | None:
        """See References.find."""
        found = self._found.get(key)
        if found is None:
            return None
        if isinstance(found, str):
            return _inline(found)
        if isinstance(found, dict):
            return json.dumps(found).encode()
        if not isinstance(found, list) or len(found) not in (1, 3) or not isinstance(found[0], str):
            raise CorruptChunkError(f"{key!r} in {self._url} is no reference; [file], or [file, offset, size] is")
        file = found[0]
        for name, value in self._templates.items():
            file = file.replace(name, value)
        if "{{" in file:
            raise UnknownFormatError(f"{self._url} names files by expressions ({file!r}); write them out")
        return _target(file, *found[1:], where=f"{key!r} in {self._url}")

    def listed(self) -> Iterable[str]:
        """See References.listed."""
        return self._found


class ParquetReferences(References):
    """References of a folder of Parquet files: for each array, tables of some thousand chunks; read as needed."""

    def __init__(self, store: ByteStore, content: Any) -> None:
        self._store = store
        self._meta: dict[str, Any] = content["metadata"]
        self._per_table = int(content["record_size"])
        self._parquet = extras.load("pyarrow.parquet")
        self._table = lru_cache(CACHED_TABLES)(self._read)

    def find(self, key: str) -> Target | bytes | None:
        """See References.find."""
        if key == ".zmetadata":
            return json.dumps({"zarr_consolidated_format": 1, "metadata": self._meta}).encode()
        if key in self._meta:
            return json.dumps(self._meta[key]).encode()
        field, _, chunk = key.rpartition("/")
        number = self._number(field, chunk)
        table = None if number is None else self._table(field, number // self._per_table)
        if number is None or table is None or number % self._per_table >= table.num_rows:
            return None
        row = {name: table.column(name)[number % self._per_table].as_py() for name in table.column_names}
        if row.get("raw") is not None:
            raw: bytes = row["raw"]
            return _inline(raw.decode("latin-1")) if raw.startswith(b"base64:") else raw
        if row.get("path") is None:
            return None
        size = row.get("size")
        where = f"{key!r} in {self._store.url}"
        return _target(row["path"], row.get("offset") or 0, size or None, where=where)

    def listed(self) -> Iterable[str]:
        """See References.listed."""
        return self._meta

    def _number(self, field: str, chunk: str) -> int | None:
        """Place of a chunk among those of its array, in C order; None if the key is none of a chunk."""
        meta = self._meta.get(f"{field}/.zarray" if field else ".zarray")
        if meta is None:
            return None
        grid = [max(1, math.ceil(size / part)) for size, part in zip(meta["shape"], meta["chunks"], strict=True)]
        parts = chunk.split(meta.get("dimension_separator", "."))
        if not all(part.isdigit() for part in parts):
            return None
        at = list(map(int, parts)) if grid else []
        if len(at) != len(grid) or any(one >= most for one, most in zip(at, grid, strict=True)):
            return None
        strides = list(itertools.accumulate(reversed([*grid[1:], 1]), lambda a, b: a * b))[::-1]
        number: int = sum(one * stride for one, stride in zip(at, strides, strict=False))
        return number

    def _read(self, field: str, number: int) -> Any:
        stored = self._store.read(f"{field}/refs.{number}.parq")
        return None if stored is None else self._parquet.read_table(io.BytesIO(stored))


def _inline(text: str) -> bytes:
    return base64.b64decode(text[7:]) if text.startswith("base64:") else text.encode()


def _target(file: str, start: Any = 0, size: Any = None, *, where: str) -> Target:
    if not isinstance(start, int) or start < 0 or not (size is None or (isinstance(size, int) and size >= 0)):
        raise CorruptChunkError(f"{where} refers to {size} bytes from {start} of {visible(file)}; that is no range")
    return Target(file, start, size)


def open_references(
    source: Any,
    *,
    missing: Missing = "raise",
    group: str = "",
    allow: str | Sequence[str] | bool = False,
    storage_options: dict[str, Any] | None = None,
    target_options: dict[str, Any] | None = None,
) -> Store:
    """Open what references describe as one store.

    Args:
        source: path or URL of a JSON file or a Parquet folder of references.
        missing: see open_store.
        group: path of the group to open, "" for the root.
        allow: folders or URLs outside the references' own folder whose files may be read, or True for any.
        storage_options: for the references, if they are behind a URL; see RemoteBytes.
        target_options: the same for the files that they refer to.

    Raises:
        OutsideStoreError: a file lies elsewhere, and is not allowed; on opening, or when its chunk is read.
    """
    place, url = str(source).rstrip("/"), visible(source)
    home, _, name = (place if is_url(place) else str(local_path(place).absolute())).rpartition("/")
    if is_url(place):
        home, _, name = place.partition("?")[0].rpartition("/")
    parquet = name.lower().endswith((".parq", ".parquet")) or (not is_url(place) and local_path(place).is_dir())
    folder = f"{home}/{name}" if parquet else home
    query = f"?{place.partition('?')[2]}" if is_url(place) and "?" in place else ""
    store = RemoteBytes(folder + query, storage_options) if is_url(place) else LocalBytes(folder)
    stored = store.read(".zmetadata" if parquet else name)
    if stored is None:
        raise StoreNotFoundError(f"there are no references at {url}; check the path or URL")
    try:
        content = json.loads(bytes(stored))
        references = ParquetReferences(store, content) if parquet else JsonReferences(content, url)
    except (ValueError, KeyError, TypeError) as error:
        raise UnknownFormatError(f"{url} holds no references: {error}; write them again") from error
    data = ReferenceBytes(references, home, url, allow, target_options)
    found = open_zarr(data, missing=missing, group=group)
    return replace(found, format="references", closers=(data.close, store.close), consolidated=None)


def _looks_like_references(source: Any) -> bool:
    if not isinstance(source, (str, Path)) or is_url(source):
        return False
    path = local_path(source)
    kept = path / ".zmetadata"
    if kept.is_file():  # Parquet, unlike Zarr, says after the metadata how many references are in a table
        with kept.open("rb") as file:
            file.seek(max(0, kept.stat().st_size - 64))
            return b'"record_size"' in file.read()
    if path.suffix.lower() != ".json" or not path.is_file():
        return False
    with path.open("rb") as file:
        start = file.read(4096)
    return b".zgroup" in start or b".zarray" in start or b'"refs"' in start


FORMAT = Format("references", open_references, (".json", ".parq", ".parquet"), _looks_like_references)

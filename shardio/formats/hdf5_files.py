"""How HDF5 files are opened: local ones, without a lock if need be, and those behind URLs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import fsspec
import h5py

from shardio.bytes import ByteStore, RemoteBytes
from shardio.bytes.file import ObjectFile
from shardio.errors import CorruptChunkError, StoreNotFoundError
from shardio.location import folder_and_name, visible

Stored = tuple[ByteStore, str]
"""Where the bytes of a file are read from beside HDF5: a store and the file's key in it."""


def open_file(path: Any, shown: str | None = None) -> h5py.File:
    """Open a file for reading; where it cannot be locked (network file systems, a writer elsewhere), without a lock."""
    try:
        return h5py.File(path, "r")
    except OSError as error:
        if "unable to lock" not in str(error) and "locking" not in str(error):
            raise CorruptChunkError(
                f"{shown or path} cannot be opened as HDF5: {error}; fetch or write it again"
            ) from error
        return h5py.File(path, "r", locking=False)


def open_remote(url: str, options: dict[str, Any] | None) -> tuple[h5py.File, Stored | None, list[Callable[[], Any]]]:
    """A file behind a URL: opened, where its bytes are read from beside HDF5, and what closes it."""
    if "::" in url:
        try:
            chained = fsspec.open(url, "rb", **(options or {})).open()
        except FileNotFoundError:
            raise StoreNotFoundError(f"there is nothing at {visible(url)!r}; check the URL") from None
        root = open_file(chained, visible(url))
        return root, None, [root.close, chained.close]
    folder, name = folder_and_name(url)
    store = RemoteBytes(folder, options)
    size = store.size(name)
    if size is None:
        store.read(name, 0, 1)  # an error where it may not be read: fsspec calls that absent, too
        raise StoreNotFoundError(f"there is nothing at {visible(url)!r}; check the URL")
    root = open_file(ObjectFile(store, name, size), visible(url))
    return root, None if root.userblock_size else (store, name), [root.close, store.close]

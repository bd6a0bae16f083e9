"""Zarr v2 and v3: chunks are read by ourselves where all codecs are known here, else through the zarr library."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import zarr
from zarr.abc.store import Store as ZarrStore
from zarr.errors import ZarrUserWarning
from zarr.storage import LocalStore, ZipStore

from shardio.bytes import ByteStore, LocalBytes, RemoteBytes
from shardio.errors import NotAllowedError, ShardIOError, StoreNotFoundError, UnknownFormatError
from shardio.formats.zarr_bytes import ZarrOfBytes
from shardio.formats.zarr_chunks import Alike, stored_alike, zarr_chunks
from shardio.formats.zarr_library import CheckedStore, ZarrSource
from shardio.limits import check_codecs, check_key
from shardio.location import is_url, local_path, visible
from shardio.source import Format, Missing, Source, Store

METADATA = ("zarr.json", ".zarray", ".zattrs", ".zgroup", ".zmetadata")
"""Names of the files that describe arrays and groups; every other key is a chunk."""
Nodes = dict[str, dict[str, Any]]
"""Path below the node that was opened ("" for itself) -> its metadata, with the attributes of version 2 put in."""


def open_zarr(
    source: Any,
    *,
    missing: Missing = "raise",
    storage_options: dict[str, Any] | None = None,
    group: str = "",
    url: str | None = None,
    allow_pickle: bool = False,
) -> Store:
    """Open a Zarr store.

    Args:
        source: path, URL, ByteStore, zarr store, zarr group or zarr array.
        missing: see open_store.
        storage_options: for URLs; see RemoteBytes.
        group: path of the group to open, "" for the root.
        url: what errors call it; by default the source.
        allow_pickle: read arrays whose codec unpickles, which runs whatever code the store holds.

    Raises:
        UnknownFormatError: metadata make no sense.
        LimitError: they ask for chunks that are too large, or for odd sizes.
        UnsafeCodecError: a codec unpickles, and that is not allowed.
        OutsideStoreError: a path in consolidated metadata leads out of the store.
    """
    if isinstance(source, (zarr.Group, zarr.Array)):
        base, own, inside = source.store, None, source.path
    else:
        (base, own), inside = _base(source, storage_options), ""
    path = "/".join(part for part in (inside, group.strip("/")) if part)
    url = url or (visible(source) if isinstance(source, (str, Path)) else str(base))
    strict = missing == "raise"
    found: dict[str, Source | None] = {}
    attrs: dict[str, Any] = {}
    consolidated: bool | None = None
    if own is not None:
        found, attrs, consolidated = _own(own, path, strict, allow_pickle)
    sources: dict[str, Source] = {name: array for name, array in found.items() if array is not None}
    if not found or len(sources) < len(found):
        library, attrs = _by_library(CheckedStore(base), path, url, strict, allow_pickle)
        sources = {**library, **sources}
    closers = (base.close,) if isinstance(source, (str, Path)) else ()
    closers = closers if own is None or own is source else (*closers, own.close)
    return Store(url, sources, attrs, "zarr", closers, consolidated=consolidated)


def _own(
    store: ByteStore, path: str, strict: bool, allow_pickle: bool
) -> tuple[dict[str, Source | None], dict[str, Any], bool | None]:
    """The arrays that are read here, None for one that cannot be, none if metadata are odd; the attributes;
    whether the metadata are consolidated.
    """
    consolidated = None
    try:
        nodes, consolidated = read_nodes(store, path)
        arrays = {name: meta for name, meta in sorted(nodes.items()) if "shape" in meta}
        if "" in arrays:
            arrays = {path.rpartition("/")[2] or "array": nodes[""]}
        checked = set[bytes]()
        below, alike = f"{path}/" if path else "", Alike()
        found: dict[str, Source | None] = {}
        for name, meta in arrays.items():
            check_key(name, store.url)
            key = stored_alike(meta)
            if not allow_pickle and key not in checked:
                check_codecs({**meta, "attributes": None}, name, store.url)
                checked.add(key)
            at = path if nodes[""] is meta else below + name
            found[name] = zarr_chunks(store, at, name, meta, strict, alike, key)
        attrs = {} if "shape" in nodes[""] else dict(nodes[""].get("attributes") or {})
    except ShardIOError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError):  # the zarr library says what is wrong
        return {}, {}, consolidated
    return found, attrs, consolidated


def read_nodes(store: ByteStore, path: str) -> tuple[Nodes, bool]:
    """The metadata of a group or array and all below it; whether they are consolidated, which takes one read.

    Raises KeyError if there is no node, ValueError if its metadata is no JSON.
    """
    prefix = f"{path}/" if path else ""
    refused: NotAllowedError | None = None
    for version in (_v3_tree, _v2_consolidated, _v2_tree):
        try:
            found = version(store, prefix)
        except NotAllowedError as error:  # S3 says so of what is absent, too, to those who may not list
            refused = refused or error
            continue
        if found is not None:
            return found
    raise KeyError(prefix) if refused is None else refused


def _v3_tree(store: ByteStore, prefix: str) -> tuple[Nodes, bool] | None:
    root = _json(store, f"{prefix}zarr.json")
    if root is None:
        return None
    kept = root.get("consolidated_metadata")
    if kept and kept.get("kind", "inline") == "inline":
        return {**kept["metadata"], "": root}, True
    return _tree(store, prefix, root, root["node_type"] == "group")


def _v2_consolidated(store: ByteStore, prefix: str) -> tuple[Nodes, bool] | None:
    kept = _json(store, f"{prefix}.zmetadata")
    return None if kept is None else (_v2_nodes(kept["metadata"]), True)


def _v2_tree(store: ByteStore, prefix: str) -> tuple[Nodes, bool] | None:
    try:
        root = _v2_node(store, prefix)
    except KeyError:
        return None
    return _tree(store, prefix, root, "shape" not in root)


def _tree(store: ByteStore, prefix: str, root: dict[str, Any], group: bool) -> tuple[Nodes, bool]:
    """A group with all below it, or an array, whose metadata are one read."""
    return (_walk(store, prefix, {"": root}), False) if group else ({"": root}, True)


def _walk(store: ByteStore, prefix: str, nodes: Nodes) -> Nodes:
    """Add all that lies below the groups among some nodes, level by level, several at once."""
    with ThreadPoolExecutor(max(2, store.requests)) as pool:
        groups = [""]
        while groups:
            paths = [f"{group}{name}" for group in groups for name in store.folders(prefix + group)]
            found = dict(zip(paths, pool.map(lambda path: _node(store, f"{prefix}{path}/"), paths), strict=True))
            nodes.update((path, node) for path, node in found.items() if node is not None)
            groups = [f"{path}/" for path, node in found.items() if node is not None and "shape" not in node]
    return nodes


def _node(store: ByteStore, prefix: str) -> dict[str, Any] | None:
    try:
        node: dict[str, Any] | None = _json(store, f"{prefix}zarr.json")
        return _v2_node(store, prefix) if node is None else node
    except KeyError:
        return None


def _v2_node(store: ByteStore, prefix: str) -> dict[str, Any]:
    node = _json(store, f"{prefix}.zarray")
    if node is None:
        node = _json(store, f"{prefix}.zgroup")
    if node is None:
        raise KeyError(prefix)
    return {**node, "attributes": _json(store, f"{prefix}.zattrs")}


def _v2_nodes(kept: Mapping[str, Any]) -> Nodes:
    nodes: Nodes = {}
    for key, meta in kept.items():
        path, _, name = key.rpartition("/")
        if name in (".zarray", ".zgroup"):
            nodes[path] = {**meta, "attributes": kept.get(f"{path}/.zattrs" if path else ".zattrs")}
    return nodes


def _json(store: ByteStore, key: str) -> Any:
    found = store.read(key)
    try:
        return None if found is None else json.loads(bytes(found))
    except (ValueError, RecursionError) as error:
        raise UnknownFormatError(f"{key!r} in {store.url} is no JSON: {error}; mend it, or write it again") from error


def _by_library(
    checked: CheckedStore, path: str, url: str, strict: bool, allow_pickle: bool
) -> tuple[dict[str, Source], dict[str, Any]]:
    """All arrays through the zarr library, and the attributes of the group."""
    try:
        node = zarr.open(store=checked, path=path, mode="r")
        members: list[tuple[str, Any]]
        if isinstance(node, zarr.Array):
            members, attrs = [(node.basename or "array", node)], {}
        else:
            with warnings.catch_warnings():  # a file of another kind beside the arrays (a README, a list) is no news
                warnings.filterwarnings("ignore", "Object at .* is not recognized as a component", ZarrUserWarning)
                members, attrs = list(node.members(max_depth=None)), dict(node.attrs.asdict())
        arrays = {name: member for name, member in sorted(members) if isinstance(member, zarr.Array)}
        for name, array in arrays.items():
            if not allow_pickle:
                check_codecs({**array.metadata.to_dict(), "attributes": None}, name, url)
        return {name: ZarrSource(name, array, url, strict) for name, array in arrays.items()}, attrs
    except ShardIOError:
        raise
    except FileNotFoundError as error:
        kind = StoreNotFoundError if is_url(url) else UnknownFormatError
        raise kind(f"{url} holds no Zarr group or array at {path!r}: {error}; check path and group=") from error
    except Exception as error:  # zarr, numcodecs and plugins raise errors of many kinds
        raise UnknownFormatError(
            f"{url} cannot be opened as Zarr: {type(error).__name__}: {error}; mend its metadata"
        ) from error


def _base(source: Any, storage_options: dict[str, Any] | None) -> tuple[ZarrStore, ByteStore | None]:
    """The zarr store behind a path or URL, and what its chunks are read from where the zarr library is not needed."""
    if isinstance(source, ZarrStore):
        return source, None
    if is_url(source):
        source = RemoteBytes(str(source), storage_options)
    if isinstance(source, ByteStore):
        return ZarrOfBytes(source), source
    path = local_path(source)
    if path.is_file():
        return ZipStore(path, mode="r", read_only=True), None
    return LocalStore(path, read_only=True), LocalBytes(path)


def _looks_like_zarr(source: Any) -> bool:
    if isinstance(source, (ByteStore, ZarrStore, zarr.Group, zarr.Array)):
        return True
    if not isinstance(source, (str, Path)) or is_url(source):
        return False
    return any((local_path(source) / name).is_file() for name in METADATA)


FORMAT = Format("zarr", open_zarr, (".zarr", ".zarr.zip", ".zarr-v2", ".zarr-v3"), _looks_like_zarr)

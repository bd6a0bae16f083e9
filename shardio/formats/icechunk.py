"""Icechunk repositories (extra `icechunk`): one version of a Zarr hierarchy, read through the zarr library."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from shardio import extras
from shardio.errors import NotAllowedError, ReadError, StoreNotFoundError, UnknownFormatError
from shardio.formats.zarr import open_zarr
from shardio.location import is_url, local_path, visible
from shardio.source import Format, Missing, Store


def open_icechunk(
    source: Any,
    *,
    missing: Missing = "raise",
    group: str = "",
    branch: str | None = None,
    tag: str | None = None,
    snapshot: str | None = None,
    storage_options: dict[str, Any] | None = None,
) -> Store:
    """Open one version of a repository for reading.

    Args:
        source: path or URL (s3, gs, az) of the repository, or an icechunk.Repository or readonly Session.
        missing: see open_store.
        group: path of the group to open, "" for the root.
        branch, tag, snapshot: the version, by one of them; the latest of branch "main" by default.
        storage_options: for URLs: those of icechunk's s3_storage, gcs_storage and azure_storage, or by fsspec's names.

    Chunks that lie in files outside the repository (virtual ones) are refused, unless a Repository that was opened
    with leave to read them is given.
    """
    library = extras.load("icechunk")
    where = visible(source)
    if sum(one is not None for one in (branch, tag, snapshot)) > 1:
        raise ValueError(f"branch={branch!r}, tag={tag!r} and snapshot={snapshot!r}: give one of them")
    version: dict[str, Any] = {"tag": tag} if tag else {"snapshot_id": snapshot} if snapshot else {}
    try:
        if isinstance(source, library.Session):
            session = source
        else:
            found = source if isinstance(source, library.Repository) else _repository(library, source, storage_options)
            session = found.readonly_session(**(version or {"branch": branch or "main"}))
    except library.IcechunkError as error:
        raise _explained(str(error), where, version or {"branch": branch or "main"}) from None
    return replace(open_zarr(session.store, missing=missing, group=group, url=where), format="icechunk")


def _repository(library: Any, source: Any, options: dict[str, Any] | None) -> Any:
    if not is_url(source):
        return library.Repository.open(library.local_filesystem_storage(str(local_path(source))))
    parts = urlsplit(str(source))
    given = dict(options or {})
    region = dict(given.pop("client_kwargs", None) or {})
    names = {"key": "access_key_id", "secret": "secret_access_key", "token": "session_token", "anon": "anonymous"}
    names |= {"endpoint": "endpoint_url", "region_name": "region", "skip_signature": "anonymous"}
    given = {names.get(name, name): value for name, value in {**region, **given}.items() if value is not None}
    prefix = parts.path.strip("/")
    if parts.scheme in ("s3", "s3a"):
        if "access_key_id" not in given and not given.get("anonymous"):
            given.setdefault("from_env", True)
        if str(given.get("endpoint_url", "")).startswith("http://"):
            given.setdefault("allow_http", True)
            given.setdefault("force_path_style", True)
        storage = library.s3_storage(bucket=parts.netloc.rpartition("@")[2], prefix=prefix, **given)
    elif parts.scheme in ("gs", "gcs"):
        storage = library.gcs_storage(bucket=parts.netloc, prefix=prefix, **given)
    elif parts.scheme in ("az", "abfs", "abfss", "azure"):
        container, _, host = parts.netloc.partition("@")
        account = given.pop("account_name", None) or host.partition(".")[0]
        storage = library.azure_storage(account=account, container=container, prefix=prefix, **given)
    else:
        raise UnknownFormatError(f"icechunk reads no {parts.scheme}:// URLs; it reads paths, s3://, gs:// and az://")
    return library.Repository.open(storage)


def _explained(text: str, where: str, version: dict[str, Any]) -> Exception:
    """An error of ours for one of icechunk's, whose text can hold more than should be shown."""
    lower = text.lower()
    if "doesn't exist" in lower or "does not exist" in lower or "not found" in lower:
        (kind, name), *_ = version.items()
        return StoreNotFoundError(
            f"{where} holds no Icechunk repository, or one without {kind} {name!r}; check the path, branch=, tag= and "
            f"snapshot="
        )
    if "accessdenied" in lower or "forbidden" in lower or "403" in lower:
        return NotAllowedError(f"{where} is not allowed to be read; check storage_options")
    return ReadError(f"{where} cannot be opened by icechunk; check storage_options and the snapshot's name")


def _looks_like_icechunk(source: Any) -> bool:
    if not isinstance(source, (str, Path)):
        return type(source).__module__.startswith("icechunk.")
    if is_url(source):
        return False
    path = local_path(source)
    return all((path / name).is_dir() for name in ("refs", "snapshots"))


FORMAT = Format("icechunk", open_icechunk, (".icechunk",), _looks_like_icechunk)

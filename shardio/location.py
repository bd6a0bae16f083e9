"""Where a source lies: local path or URL; and how a URL is shown without what it keeps secret."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any


def is_url(source: Any) -> bool:
    """Is this text with a scheme other than file:// ?"""
    return isinstance(source, str) and "://" in source and not source.startswith("file://")


CONTAINER = ("abfs", "abfss", "az", "azure", "adl", "wasb", "wasbs")
"""Schemes that name a container, not a user, before the "@"."""
_CHAIN = re.compile(r"::(?=[A-Za-z][\w+.-]*(?:::|://|$))")
_PARTS = re.compile(r"(?P<scheme>[A-Za-z][\w+.-]*)://(?P<host>[^/?#]*)(?P<path>[^?#]*)")


def visible(source: Any) -> str:
    """A path or URL as errors, logs and state may show it: without user, password, query and fragment.

    Whatever else is given (an opened store) is named by its type. Chained URLs ("simplecache::https://...") too.
    """
    if not isinstance(source, (str, os.PathLike)):
        return f"<{type(source).__name__}>"
    text = os.fspath(source)
    return "::".join(map(_visible, _CHAIN.split(text))) if "://" in text else text


def _visible(url: str) -> str:
    found = _PARTS.match(url)
    if found is None:
        return url
    scheme, host, path = found["scheme"], found["host"], found["path"]
    if scheme.lower() not in CONTAINER:
        host = host.rpartition("@")[2]
    if re.search(r":(?!\d*$)", re.sub(r"^\[[^]]*\]", "", host)):  # a password with "?", "#" or "/" ended the host early
        return f"{scheme}://..."
    return f"{scheme}://{host}{path}"


def folder_and_name(url: str) -> tuple[str, str]:
    """The URL of an object's folder, with the query, and the object's name in it."""
    path, mark, query = url.partition("?")
    folder, _, name = path.rpartition("/")
    return f"{folder}/{mark}{query}" if folder.endswith(":/") else f"{folder}{mark}{query}", name


def local_path(source: str | os.PathLike[str]) -> Path:
    """The local path of a path or file:// URL."""
    text = os.fspath(source)
    return Path(text.removeprefix("file://")).expanduser()


def starts_with(source: Any, *magics: bytes) -> bool:
    """Is this a local file that begins with one of these bytes?"""
    if is_url(source) or not isinstance(source, (str, os.PathLike)):
        return False
    path = local_path(source)
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(max(map(len, magics))).startswith(magics)

"""Where a source lies: local path or URL."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


def is_url(source: Any) -> bool:
    """Is this text with a scheme other than file:// ?"""
    return isinstance(source, str) and "://" in source and not source.startswith("file://")


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

"""Virtual datasets, pieced together from other files: which parts cannot be read, and whether all are packed alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from shardio.box import Box, Span
from shardio.errors import CorruptChunkError

PACKING = {"scale_factor": 1.0, "add_offset": 0.0, "_FillValue": None, "missing_value": None, "_Unsigned": None}
"""Attributes that decide what stored values mean, and what stands for none."""
Opener = Callable[[Path], h5py.File]


def look_at_parts(dataset: h5py.Dataset, opener: Opener) -> tuple[list[tuple[Box, str]], str | None]:
    """What is wrong with the parts of a virtual dataset.

    Returns:
        The parts that cannot be read, with the reason; and how the packing of a part differs from the whole's, None
        if it does not. Only the whole's attributes are used for decoding.
    """
    broken: list[tuple[Box, str]] = []
    differs: str | None = None
    own = _packing(dataset.attrs)
    for part in dataset.virtual_sources():
        first, last = part.vspace.get_select_bounds()
        box = tuple(Span(int(start), int(stop) + 1) for start, stop in zip(first, last, strict=True))
        problem, packing = _look_at(dataset, part.file_name, part.dset_name, opener)
        if problem:
            broken.append((box, problem))
        elif packing is not None and packing != own and differs is None:
            differs = f"{part.dset_name!r} in {part.file_name!r} has {_text(packing)}, the virtual dataset {_text(own)}"
    return broken, differs


def _look_at(
    dataset: h5py.Dataset, file_name: str, name: str, opener: Opener
) -> tuple[str | None, dict[str, Any] | None]:
    """Why a part cannot be read; and its packing, where it can."""
    if "%" in file_name or "%" in name:  # one name per block, resolved by HDF5
        return None, None
    if file_name == ".":
        if name not in dataset.file:
            return f"its source dataset {name!r} is missing", None
        return None, _packing(dataset.file[name].attrs)
    folder = Path(dataset.file.filename).parent
    path = next((path for path in (folder / file_name, Path(file_name)) if path.is_file()), None)
    if path is None:
        return f"its source file {file_name!r} is missing (looked in {folder})", None
    try:
        with opener(path) as file:
            if name not in file:
                return f"its source file {file_name!r} has no dataset {name!r}", None
            return None, _packing(file[name].attrs)
    except (OSError, CorruptChunkError) as error:
        return f"its source file {file_name!r} cannot be opened ({error})", None


def _packing(attrs: Mapping[str, Any]) -> dict[str, Any]:
    """The attributes of PACKING that change anything."""
    found: dict[str, Any] = {}
    for key, usual in PACKING.items():
        if key not in attrs:
            continue
        value = attrs[key]
        plain = value.decode() if isinstance(value, bytes) else np.asarray(value).reshape(-1).tolist()
        if plain != [usual] and "nan" not in str(plain).lower():  # NaN means "no value" by itself
            found[key] = plain[0] if isinstance(plain, list) and len(plain) == 1 else plain
    return found


def _text(packing: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in packing.items()) or "no packing and no fill value"

"""Virtual datasets whose files are packed in different ways would give wrong values, and are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from shardio import open_store
from shardio.errors import DecodeError

PACKED = {"scale_factor": 0.5, "add_offset": 3.0}


def joined(folder: Path, first: dict[str, Any], second: dict[str, Any], whole: dict[str, Any]) -> Path:
    """Two files of two rows each, and a file that joins them, with these attributes."""
    layout = h5py.VirtualLayout(shape=(4, 3), dtype="i2")
    for year, attrs in enumerate((first, second)):
        with h5py.File(folder / f"{year}.h5", "w") as file:
            file["x"] = np.full((2, 3), year, np.int16)
            file["x"].attrs.update(attrs)
        layout[2 * year : 2 * year + 2] = h5py.VirtualSource(folder / f"{year}.h5", "x", shape=(2, 3))
    with h5py.File(folder / "all.h5", "w") as file:
        file.create_virtual_dataset("x", layout).attrs.update(whole)
    return folder / "all.h5"


@pytest.mark.parametrize(("first", "second", "whole"), [
    (PACKED, {**PACKED, "scale_factor": 0.25}, PACKED),
    (PACKED, {}, PACKED),
    (PACKED, PACKED, {}),
    ({"_FillValue": np.int16(-9)}, {"_FillValue": np.int16(-8)}, {"_FillValue": np.int16(-9)}),
])  # fmt: skip
def test_mixed_packing_is_refused(tmp_path, first, second, whole):
    with open_store(joined(tmp_path, first, second, whole)) as store, pytest.raises(DecodeError, match="packed alike"):
        _ = store["x"].decode


@pytest.mark.parametrize("attrs", [{}, PACKED, {"_FillValue": np.int16(-9), "units": "K"}])
def test_the_same_packing_is_used(tmp_path, attrs):
    with open_store(joined(tmp_path, attrs, {**attrs, "note": "b"}, attrs)) as store:
        out = np.empty((4, 3), np.float32)
        store["x"].decode.apply(store["x"].read(), out)
        scale, offset = attrs.get("scale_factor", 1.0), attrs.get("add_offset", 0.0)
        assert out[:, 0].tolist() == [offset, offset, scale + offset, scale + offset]


def test_what_changes_nothing_is_no_difference(tmp_path):
    with open_store(joined(tmp_path, {"scale_factor": 1.0}, {"_FillValue": np.nan}, {"add_offset": 0.0})) as store:
        assert not store["x"].decode.packed

"""Stored values -> physical ones, as the CF conventions ask: missing values, packing, _Unsigned; in the asked dtype."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardio.errors import DecodeError

Array = np.ndarray[Any, np.dtype[Any]]


NETCDF_FILL = 9.969209968386869e36
"""What the NetCDF library gives floats where nothing was written and no other fill value was set; no real value."""


@dataclass(frozen=True)
class Decode:
    """How to decode one array; the default changes nothing.

    A Zarr array's own fill_value is not among these: it says what an unwritten chunk holds, not what is missing.

    Attributes:
        scale, offset: physical = stored * scale + offset (scale_factor, add_offset).
        missing: stored values that mean "no value" (_FillValue, missing_value); NaN among floats always does.
        low, high: stored values outside of low..high mean "no value" (valid_min, valid_max, valid_range).
        view: dtype to which the stored integers are reinterpreted first (_Unsigned), None for none.
    """

    scale: float = 1.0
    offset: float = 0.0
    missing: tuple[float | int, ...] = ()
    low: float | None = None
    high: float | None = None
    view: str | None = None

    @classmethod
    def from_attrs(cls, attrs: Mapping[str, Any], dtype: np.dtype[Any], default: float | None = None) -> Decode:
        """The policy that an array's attributes state, for values stored as `dtype`.

        `default` is what floats without the attribute _FillValue have where no value was written (NETCDF_FILL).

        Raises DecodeError if an attribute that must be a number is none.
        """
        if dtype.kind not in "iuf":
            return cls()
        view = _unsigned_view(attrs, dtype)
        stored = np.dtype(view) if view else dtype
        missing = [value for key in ("_FillValue", "missing_value") for value in _numbers(attrs, key)]
        if default is not None and dtype.kind == "f" and "_FillValue" not in attrs:
            missing.append(default)
        held = (_as_stored(value, dtype, stored) for value in missing if not np.isnan(value))
        low, high = _valid_range(attrs, dtype, stored)
        return cls(
            scale=_number(attrs, "scale_factor", 1.0),
            offset=_number(attrs, "add_offset", 0.0),
            missing=tuple(dict.fromkeys(value for value in held if value is not None)),
            low=low,
            high=high,
            view=view,
        )

    @property
    def packed(self) -> bool:
        """Values are scaled or shifted."""
        return self.scale != 1.0 or self.offset != 0.0

    def apply(self, stored: Array, out: Array, mask: Array | None = None) -> None:
        """Decode `stored` into `out` (same shape, native byte order), without an array of a third dtype.

        Args:
            stored: values as read.
            out: floats get NaN where a value is missing; integers and bools need `mask` for that.
            mask: bool, set True where there is a value and False where it is missing.

        Raises:
            DecodeError: values are missing or packed and `out` holds no floats.
        """
        if stored.dtype.kind not in "iufb":
            raise DecodeError(f"values of dtype {stored.dtype} are no real numbers; read them with Source.read")
        if self.packed and out.dtype.kind != "f":
            raise DecodeError(
                f"values are packed (scale {self.scale:g}, offset {self.offset:g}), so they cannot be delivered "
                f"as {out.dtype}; ask for a float dtype"
            )
        if self.view is not None:
            stored = stored.view(self.view)
        floats = out.dtype.kind == "f"
        absent = self._absent(stored, nan=mask is not None or not floats)
        self._scale(stored, out)
        if mask is not None:
            if absent is None:
                mask.fill(True)
            else:
                np.logical_not(absent, out=mask)
        if absent is None:
            return
        if floats:
            np.copyto(out, np.nan, where=absent)
        elif mask is None and absent.any():
            raise DecodeError(
                f"{int(absent.sum())} values are missing, which {out.dtype} cannot express; "
                f"ask for a float dtype, or for the mask (mask=True)"
            )
        else:
            np.copyto(out, 0, where=absent)

    def _scale(self, stored: Array, out: Array) -> None:
        if not self.packed:
            np.copyto(out, stored, casting="unsafe")
            return
        # Narrow integers are exact in out's dtype; others would lose digits, so numpy computes those products in
        # float64 inside its own small buffer, never as an array.
        exact = np.can_cast(stored.dtype, out.dtype, "safe")
        compute: Any = out.dtype if exact else np.float64
        np.multiply(stored, self.scale, out=out, dtype=compute, casting="unsafe")
        if self.offset != 0.0:
            np.add(out, self.offset, out=out, dtype=compute, casting="unsafe")

    def _absent(self, stored: Array, nan: bool) -> Array | None:
        """True where there is no value, among them NaN if asked; None if nothing can be missing."""
        tests = [stored == stored.dtype.type(value) for value in self.missing]
        if nan and stored.dtype.kind == "f":
            tests.append(np.isnan(stored))
        if self.low is not None:
            tests.append(stored < stored.dtype.type(self.low))
        if self.high is not None:
            tests.append(stored > stored.dtype.type(self.high))
        absent: Array | None = None
        for test in map(np.asarray, tests):  # of no dims, a comparison gives a scalar
            absent = test if absent is None else np.logical_or(absent, test, out=absent)
        return absent


def _unsigned_view(attrs: Mapping[str, Any], dtype: np.dtype[Any]) -> str | None:
    said = str(attrs.get("_Unsigned", "")).lower()
    if dtype.kind == "i" and said == "true":
        return f"u{dtype.itemsize}"
    if dtype.kind == "u" and said == "false":
        return f"i{dtype.itemsize}"
    return None


def _numbers(attrs: Mapping[str, Any], key: str) -> list[Any]:
    """An attribute's values as Python numbers; texts such as 'NaN' and '-999' count as numbers."""
    if attrs.get(key) is None:
        return []
    values = np.ravel(np.asarray(attrs[key]))
    if values.dtype.kind in "iufb":
        return [value.item() for value in values]
    try:
        return [float(value) for value in values]
    except (TypeError, ValueError):
        raise DecodeError(f"attribute {key} = {attrs[key]!r} is no number; correct it in the store") from None


def _number(attrs: Mapping[str, Any], key: str, default: float) -> float:
    values = _numbers(attrs, key)
    if len(values) > 1:
        raise DecodeError(f"attribute {key} = {attrs[key]!r} holds {len(values)} numbers; one is expected")
    return float(values[0]) if values else default


def _valid_range(
    attrs: Mapping[str, Any], dtype: np.dtype[Any], stored: np.dtype[Any]
) -> tuple[float | None, float | None]:
    """The stored values between which all valid ones lie; None for no bound.

    Bounds count as stored values. For integers, bounds that are no integers were meant for unpacked values (a common
    mistake), so they are left out rather than misread.
    """
    both = _numbers(attrs, "valid_range")
    if len(both) != 2:
        both = [next(iter(_numbers(attrs, key)), None) for key in ("valid_min", "valid_max")]
    low, high = (None if bound is None or np.isnan(bound) else bound for bound in both)
    if dtype.kind == "f":
        return low, high
    if any(isinstance(bound, float) for bound in (low, high)):
        return None, None
    return (
        None if low is None else _as_stored(low, dtype, stored),
        None if high is None else _as_stored(high, dtype, stored),
    )


def _as_stored(value: float | int, dtype: np.dtype[Any], stored: np.dtype[Any]) -> float | int | None:
    """A missing value as the stored dtype holds it, or None if it cannot hold it (then it never occurs)."""
    if dtype.kind == "f":
        number: float = np.asarray(value).astype(dtype).item()
        return number
    if not np.isfinite(value) or value != int(value):
        return None
    info, view = np.iinfo(dtype), np.iinfo(stored)
    value = int(value)
    if info.min <= value <= info.max:
        return int(np.asarray(value, dtype=dtype).view(stored).item())
    return value if view.min <= value <= view.max else None

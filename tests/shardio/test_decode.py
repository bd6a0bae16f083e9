"""Decoding against xarray's, in value and without arrays of a wider dtype."""

import tracemalloc
from typing import Any

import numpy as np
import pytest
import xarray as xr

from shardio.decode import Decode
from shardio.errors import DecodeError

NAN = float("nan")
ATTRS: dict[str, tuple[str, dict[str, Any]]] = {
    "nothing": ("f4", {}),
    "float fill": ("f4", {"_FillValue": np.float32(5)}),
    "nan fill": ("f8", {"_FillValue": NAN}),
    "packed int16": ("i2", {"scale_factor": 0.01, "add_offset": 273.15, "_FillValue": np.int16(-32767)}),
    "packed, scale only": ("i2", {"scale_factor": np.float32(0.1)}),
    "packed, offset only": ("u1", {"add_offset": -7.5}),
    "packed int32": ("i4", {"scale_factor": 1e-6, "add_offset": -273.15, "_FillValue": 7}),
    "packed uint16": ("u2", {"scale_factor": 0.1, "add_offset": 220.0, "_FillValue": 65535}),
    "packed float64": ("f8", {"scale_factor": 1e-3, "add_offset": 1e5}),
    "several missing values": ("i2", {"_FillValue": np.int16(5), "missing_value": np.array([7, 5], np.int16)}),
    "missing value as float": ("i2", {"missing_value": 7.0}),
    "unsigned": ("i1", {"_Unsigned": "true", "_FillValue": np.int8(-1), "scale_factor": 0.5}),
    "signed": ("u1", {"_Unsigned": "false", "_FillValue": np.uint8(255)}),
    "plain int": ("i4", {}),
}


def stored_values(dtype: str) -> np.ndarray:
    random = np.random.default_rng(0)
    if dtype.startswith("f"):
        values = random.normal(size=(7, 9)).astype(dtype) * 100
        values[0, :4] = [5, 0.1, NAN, np.inf]
        return values
    info = np.iinfo(dtype)
    values = random.integers(info.min, info.max, size=(7, 9), dtype=dtype, endpoint=True)
    values[0, :4] = [5, 7, info.max, info.min]
    values[0, 4] = max(-32767, info.min)
    return values


@pytest.mark.filterwarnings("ignore:variable .* has multiple fill values")
@pytest.mark.parametrize("case", ATTRS)
@pytest.mark.parametrize("dtype", ["f4", "f8"])
@pytest.mark.parametrize("order", ["<", ">"])
def test_against_xarray(case: str, dtype: str, order: str) -> None:
    kind, attrs = ATTRS[case]
    stored = stored_values(kind)
    raw = xr.Dataset({"x": (("y", "z"), stored.astype(stored.dtype.newbyteorder(order)), attrs)})
    truth = xr.decode_cf(raw)["x"].values.astype(np.float64)
    decode = Decode.from_attrs(attrs, stored.dtype)
    out = np.empty(stored.shape, dtype)
    mask = np.empty(stored.shape, bool)
    decode.apply(stored, out, mask)
    np.testing.assert_array_equal(mask, ~np.isnan(truth))
    np.testing.assert_array_equal(np.isnan(out), np.isnan(truth))
    terms = np.abs(truth[np.isfinite(truth)]).max() + 2 * abs(decode.offset)
    accuracy = np.finfo(dtype).eps if decode.scale in (1.0, 0.01, 0.1, 1e-3, 1e-6, 0.5) else 1e-7
    np.testing.assert_allclose(out, truth, rtol=2 * accuracy, atol=2 * accuracy * terms if decode.packed else 0)


def test_packed_int32_keeps_its_digits() -> None:
    """2e9 stored in int32 does not fit float32's 24 bits; the small difference left after the offset must survive."""
    stored = np.array([2_000_000_001, 2_000_000_003], np.int32)
    out = np.empty(2, np.float32)
    Decode(scale=1e-3).apply(stored, out)
    np.testing.assert_array_equal(out, (stored * 1e-3).astype(np.float32))


@pytest.mark.parametrize("kind", ["i2", "i4", "f8"])
def test_no_wider_array_is_made(kind: str) -> None:
    stored = np.zeros((1000, 1000), kind)
    out = np.empty(stored.shape, np.float32)
    decode = Decode.from_attrs({"scale_factor": 0.01, "add_offset": 273.15, "_FillValue": -1}, stored.dtype)
    tracemalloc.start()
    decode.apply(stored, out)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1.2 * stored.size  # the mask of one byte per value, and no more


def test_a_single_value() -> None:
    out, mask = np.empty((), np.float32), np.empty((), bool)
    Decode(missing=(5, 7), low=0).apply(np.array(7, np.int16), out, mask)
    assert np.isnan(out[()])
    assert not mask[()]


def test_valid_range_hides_what_lies_outside() -> None:
    stored = np.array([-5, 0, 7, 100, 101], np.int16)
    mask = np.empty(5, bool)
    out = np.empty(5, np.float32)
    for attrs in ({"valid_range": [0, 100]}, {"valid_min": 0, "valid_max": np.int16(100)}):
        Decode.from_attrs({**attrs, "scale_factor": 0.5}, stored.dtype).apply(stored, out, mask)
        np.testing.assert_array_equal(out, [NAN, 0, 3.5, 50, NAN])
        assert mask.tolist() == [False, True, True, True, False]


def test_valid_range_meant_for_unpacked_values_is_left_out() -> None:
    decode = Decode.from_attrs({"valid_range": [200.0, 330.0], "scale_factor": 0.01}, np.dtype("i2"))
    assert (decode.low, decode.high) == (None, None)


def test_unsigned_valid_range() -> None:
    decode = Decode.from_attrs({"_Unsigned": "true", "valid_range": np.array([0, -2], np.int8)}, np.dtype("i1"))
    assert (decode.low, decode.high) == (0, 254)


def test_missing_value_is_compared_as_it_is_stored() -> None:
    """0.1 in an attribute is a float64, and no float32 equals it (xarray then masks nothing)."""
    out = np.empty(2, np.float32)
    Decode.from_attrs({"_FillValue": 0.1}, np.dtype("f4")).apply(np.array([0.1, 0.2], np.float32), out)
    assert np.isnan(out).tolist() == [True, False]


def test_missing_value_that_the_dtype_cannot_hold() -> None:
    assert Decode.from_attrs({"_FillValue": -999, "missing_value": 1.5}, np.dtype("u1")).missing == ()


def test_integers_need_a_mask_where_values_are_missing() -> None:
    decode = Decode.from_attrs({"_FillValue": 9}, np.dtype("i2"))
    out = np.empty(3, np.int64)
    decode.apply(np.array([1, 2, 3], np.int16), out)
    assert out.tolist() == [1, 2, 3]
    with pytest.raises(DecodeError, match="1 values are missing, which int64 cannot express; ask for a float dtype"):
        decode.apply(np.array([1, 9, 3], np.int16), out)
    mask = np.empty(3, bool)
    decode.apply(np.array([1, 9, 3], np.int16), out, mask)
    assert out.tolist() == [1, 0, 3]
    assert mask.tolist() == [True, False, True]
    with pytest.raises(DecodeError, match="1 values are missing"):
        Decode().apply(np.array([NAN, 2, 3]), out)


def test_what_cannot_be_decoded() -> None:
    with pytest.raises(DecodeError, match=r"packed .* ask for a float dtype"):
        Decode(scale=0.5).apply(np.zeros(3, np.int16), np.zeros(3, np.int64))
    with pytest.raises(DecodeError, match="no real numbers"):
        Decode().apply(np.zeros(3, "S4"), np.zeros(3, np.float32))
    with pytest.raises(DecodeError, match="no real numbers"):
        Decode().apply(np.zeros(3, np.complex64), np.zeros(3, np.float32))
    with pytest.raises(DecodeError, match="scale_factor = 'big' is no number"):
        Decode.from_attrs({"scale_factor": "big"}, np.dtype("i2"))
    with pytest.raises(DecodeError, match="holds 2 numbers"):
        Decode.from_attrs({"add_offset": [1, 2]}, np.dtype("i2"))

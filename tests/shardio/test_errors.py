"""Errors: also built-ins, safe to send between ranks; the format table; the table of optional libraries."""

import copy
import inspect
import pickle
import tomllib
from pathlib import Path

import pytest

from shardio import errors, extras, open_store
from shardio.errors import (
    MissingExtraError,
    ShardIOError,
    StoreNotFoundError,
    UnknownFormatError,
    VariableNotFoundError,
)
from shardio.source import FORMATS, Store, register_format

ALL = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, ShardIOError)]


@pytest.mark.parametrize("kind", ALL)
def test_errors_survive_the_way_to_another_rank(kind: type[ShardIOError]) -> None:
    error = kind("chunk 'x' is not there")
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(again) is kind
        assert str(again) == str(error) == "chunk 'x' is not there"


@pytest.mark.parametrize("kind", [kind for kind in ALL if kind is not ShardIOError])
def test_errors_are_built_ins_too(kind: type[ShardIOError]) -> None:
    assert issubclass(kind, (OSError, ValueError, KeyError, ImportError, RuntimeError))
    assert kind.__name__ in (errors.__doc__ or "")


def test_nothing_there(tmp_path: Path) -> None:
    for place in (tmp_path / "no.zarr", str(tmp_path / "no.nc"), f"file://{tmp_path}/no.h5"):
        with pytest.raises(StoreNotFoundError, match="nothing at"):
            open_store(place)
    with pytest.raises(FileNotFoundError):
        open_store(tmp_path / "no.zarr")


def test_no_format_fits(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(UnknownFormatError, match="shardio --format: grib, hdf5, icechunk, netcdf3, references, "):
        open_store(tmp_path / "notes.txt")
    with pytest.raises(UnknownFormatError, match="format 'tiff' is not known"):
        open_store(tmp_path / "notes.txt", format="tiff")
    with pytest.raises(UnknownFormatError, match="no store"):
        open_store(42)
    with pytest.raises(ValueError, match="missing='maybe' is not known"):
        open_store(tmp_path / "notes.txt", missing="maybe")  # type: ignore[arg-type]


def test_formats_can_be_added(tmp_path: Path) -> None:
    def opener(source: object, *, missing: str, color: str) -> Store:
        return Store(str(source), {}, {"color": color, "missing": missing}, "ours")

    (tmp_path / "a.ours").write_text("hello")
    register_format("ours", opener, suffixes=(".ours",))
    try:
        store = open_store(tmp_path / "a.ours", color="red")
        assert (store.format, store.attrs) == ("ours", {"color": "red", "missing": "raise"})
        assert open_store(store) is store
        with pytest.raises(ValueError, match="'ours' is already registered"):
            register_format("ours", opener)
    finally:
        del FORMATS["ours"]
    with pytest.raises(VariableNotFoundError, match=r"^/?.*a\.ours has no array 'x'; it has: none$"):
        store["x"]


def test_every_extra_is_one_of_the_projects() -> None:
    project = Path(__file__).resolve().parents[2] / "pyproject.toml"
    known = tomllib.loads(project.read_text())["project"]["optional-dependencies"]
    for library, (distribution, extra, _) in extras.EXTRAS.items():
        assert any(line.startswith(distribution) for line in known[extra]), library


def test_missing_library_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(extras.EXTRAS, "no_such_library", ("no-such", "grib", "rare files"))
    with pytest.raises(MissingExtraError, match=r"rare files need the library 'no-such'.*'shardtensor\[grib\]'"):
        extras.load("no_such_library")

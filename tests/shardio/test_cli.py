"""The commands that look: inspect, plan, stats; and how all commands fail."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import xarray as xr
from typer.testing import CliRunner

import shardio
from shardio import open_store
from shardio.cli import app
from shardio.cli.mesh import parse_mesh
from shardio.cli.plan import loads
from shardio.cli.shell import without_secrets
from shardio.errors import PartitionError
from shardio.partition import make_partition
from shardio.plan import plan
from shardio.source import Layout
from shardio.statistics import Statistics

DIMS = ("time", "level", "lat", "lon")


def run(*arguments: object) -> tuple[int, str]:
    result = CliRunner(env={"COLUMNS": "250"}).invoke(app, list(map(str, arguments)))
    return result.exit_code, result.output


@pytest.fixture
def values() -> np.ndarray:
    return np.random.default_rng(0).normal(3000, 1, size=(9, 3, 14, 11)).astype(np.float32)


@pytest.fixture
def store(tmp_path: Path, values: np.ndarray) -> Path:
    """Three variables, the whole grid in a chunk; longitude goes around."""
    coords = {
        "time": np.arange(9).astype("datetime64[D]").astype("datetime64[ns]"),
        "level": ("level", [500.0, 850, 1000], {"units": "hPa"}),
        "lat": ("lat", np.linspace(60, 47, 14), {"units": "degrees_north"}),
        "lon": ("lon", np.arange(11) * 360 / 11, {"units": "degrees_east"}),
    }
    dataset = xr.Dataset({"z": (DIMS, values), "t": (DIMS, values), "ts": (DIMS[::2] + DIMS[3:], values[:, 0])}, coords)
    chunks = {"z": {"chunks": (1, 3, 14, 11)}, "t": {"chunks": (1, 3, 14, 11)}, "ts": {"chunks": (3, 5, 11)}}
    dataset.to_zarr(tmp_path / "a.zarr", encoding=chunks)
    return tmp_path / "a.zarr"


def cells(output: str) -> list[list[str]]:
    """The rows of all tables."""
    rows = [line.split("│")[1:-1] for line in output.splitlines() if line.startswith("│")]
    return [[cell.strip() for cell in row] for row in rows]


def test_inspect(shared_data: Path) -> None:
    code, output = run("inspect", shared_data / "grid-netcdf/test4.nc")
    assert code == 0
    assert "variables: t, z" in output
    assert "descending: latitude" in output
    assert "times: 1, 2007-01-01T12:00:00" in output


@pytest.mark.parametrize(
    "name", ["zarr/cube_l2.zarr", "zarr/test_zarr", "zarr/cities_v2.zarr", "hdf5/vlen_string_s390x.h5"]
)
def test_inspect_of_real_stores(shared_data: Path, name: str) -> None:
    code, output = run("inspect", shared_data / name)
    assert code == 0, output
    with open_store(shared_data / name) as store:
        assert {row[0] for row in cells(output)} == set(store)


def test_plan(store: Path) -> None:
    code, output = run("plan", store, "--mesh", "2x2", "--halo", 1)
    assert code == 0, output
    assert "lat over domain (2), halo 1" in output
    upper, surface, both = [cells(output)[at : at + 2] for at in (0, 2, 4)]
    # rank, lat, needed, own chunks, MB, x
    assert [row[:2] for row in both] == [["0, 2", "0:7 +0/1"], ["1, 3", "7:14 +1/0"]]
    assert [row[3] for row in surface] == ["2", "2"]  # rows 0..8 and 6..14 of chunks of 5
    assert [row[5] for row in upper] == ["1.75", "1.75"]  # 14 rows decoded for 8 needed
    assert sum(int(row[7]) for row in upper) == 2  # each chunk once
    assert sum(int(row[7]) for row in surface) == 3
    assert "t, z (2 arrays)" in output


def test_plan_of_two_dims(store: Path) -> None:
    code, output = run("plan", store, "--mesh", "data=2,lat=2,lon=2", "--halo", 1, "-v", "ts")
    assert code == 0, output
    rows = cells(output)
    assert [row[0] for row in rows] == ["0, 4", "1, 5", "2, 6", "3, 7"]
    assert [row[2] for row in rows] == ["0:6 +1/1", "6:11 +1/1"] * 2  # around
    _, output = run("plan", store, "-m", "4", "--shard", "lon=domain", "--halo", 1, "--not-periodic", "-v", "ts")
    assert [row[1] for row in cells(output)] == ["0:3 +0/1", "3:6 +1/1", "6:9 +1/1", "9:11 +1/0"]
    code, output = run("plan", store, "-m", "2", "--partition", "aligned", "-v", "ts")
    assert [row[1] for row in cells(output)] == ["0:5", "5:14"], output


def test_plan_counts_what_several_steps_share(store: Path) -> None:
    _, one = run("plan", store, "-v", "ts")
    _, three = run("plan", store, "-v", "ts", "--steps", 3)
    assert [row[3] for row in cells(one)] == [row[3] for row in cells(three)] == ["2", "2"]
    assert float(cells(three)[0][2]) == pytest.approx(3 * float(cells(one)[0][2]), abs=0.002)


@pytest.mark.parametrize("block", [0, 1, 64])
@pytest.mark.parametrize("chunks", [(1, 14, 11), (1, 5, 4), (2, 3, 11)])
def test_collective_reads_each_chunk_once(chunks: tuple[int, ...], block: int) -> None:
    layout = Layout(("time", "lat", "lon"), (4, 14, 11), chunks, 4, block)
    partition = make_partition({"lat": "domain"}, sizes={"lat": 14}, ranks={"domain": 3})
    planned = plan(partition, layout, halo=2, index={"time": [1]})
    (found,) = loads([(planned, 1)])
    total = sum(found[1:], found[0])
    assert total.own == planned.bytes_fetched
    assert total.needed == planned.bytes_needed
    if block == 0:
        assert total.collective == len(planned.readers()) * np.prod(chunks) * 4
        assert total.chunks == len(planned.readers())
    else:
        assert total.collective <= len(planned.readers()) * np.prod(chunks) * 4
    assert 0 < total.received < total.needed


def test_picture(store: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for number, options in enumerate((["-m", "2", "--halo", 2], ["-m", "1"], ["-m", "1x2x2", "--halo", 1])):
        code, output = run("plan", store, *options, "--png", tmp_path / f"{number}.png")
        assert code == 0, output
        assert (tmp_path / f"{number}.png").read_bytes().startswith(b"\x89PNG")


def test_stats(store: Path, values: np.ndarray, tmp_path: Path) -> None:
    code, output = run("stats", store, "-o", tmp_path / "out.json", "--stop", 5)
    assert code == 0, output
    found = Statistics.from_json(tmp_path / "out.json").variables["z"]
    np.testing.assert_allclose(found.mean, values[:5].astype(float).mean(), rtol=1e-12)
    np.testing.assert_allclose(found.levels[1].std, values[:5, 1].astype(float).std(), rtol=1e-9)
    assert [row[0] for row in cells(output) if row[0].startswith("z")] == ["z", "z_500", "z_850", "z_1000"]


def test_stats_of_a_real_store(shared_data: Path, tmp_path: Path) -> None:
    """Packed int16, against xarray."""
    code, output = run("stats", shared_data / "zarr/test_zarr", "-o", tmp_path / "out.json")
    assert code == 0, output
    truth = xr.open_zarr(shared_data / "zarr/test_zarr")["t"].astype(float)
    found = Statistics.from_json(tmp_path / "out.json").variables["t"]
    assert found.count == truth.size
    np.testing.assert_allclose(found.mean, truth.mean(), rtol=1e-6)
    np.testing.assert_allclose(found.std, truth.std(), rtol=1e-5)


def fails(*arguments: object) -> str:
    """Run a command that fails with code 1, and give the one line that it says."""
    result = CliRunner(env={"COLUMNS": "250"}).invoke(app, list(map(str, arguments)))
    assert result.exit_code == 1, result.output
    assert result.stderr.count("\n") == 1, result.stderr
    assert "Traceback" not in result.output
    return result.stderr


def test_errors_are_one_line(store: Path, tmp_path: Path) -> None:
    assert "StoreNotFoundError: there is nothing at" in fails("inspect", tmp_path / "no.zarr")
    assert "14 rows cannot be cut over 99 ranks" in fails("plan", store, "--mesh", 99)
    assert "mesh '2y2' is not understood" in fails("plan", store, "--mesh", "2y2")
    assert "ValueError: missing='fil' is not known; it is 'raise' or 'fill'" in fails(
        "stats", store, "--missing", "fil"
    )
    assert "VariableNotFoundError" in fails("stats", store, "-v", "no")
    assert "--read 'all' is not known" in fails("bench", store, "--read", "all")
    assert "ClusterError: no dask scheduler answers" in fails("verify", store, "--scheduler", "tcp:/x")


def test_stats_refuses_before_it_reads(store: Path, tmp_path: Path) -> None:
    code, output = run("stats", store, "-o", tmp_path / "nowhere" / "out.json")
    assert code == 2
    assert "there is no folder" in output
    assert "minimum" not in output


@pytest.mark.parametrize("command", ["inspect", "plan", "stats", "verify"])
def test_commands_take_a_format(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    field = xr.Dataset({"a": (("lat", "lon"), np.ones((4, 5)))})
    field.to_netcdf(tmp_path / "a.data", engine="h5netcdf")
    code, output = run(command, tmp_path / "a.data", "--format", "hdf5")
    assert code == 0, output
    assert "UnknownFormatError" in fails(command, tmp_path / "a.data", "--format", "zarr")


def test_time_steps_of_a_store_without_time(tmp_path: Path) -> None:
    xr.Dataset({"a": (("lat", "lon"), np.zeros((4, 5)))}).to_zarr(tmp_path / "a.zarr")
    assert "the store has no time dim" in fails("stats", tmp_path / "a.zarr", "--start", 0)
    code, _ = run("stats", tmp_path / "a.zarr", "-o", tmp_path / "a.json")
    assert code == 0


def test_missing_chunks_stop_stats_unless_filled(store: Path, tmp_path: Path) -> None:
    (store / "ts/c/0/0/0").unlink()
    assert "MissingChunkError" in fails("stats", store, "-o", tmp_path / "a.json")
    assert not (tmp_path / "a.json").exists()
    code, _ = run("stats", store, "-o", tmp_path / "a.json", "--missing", "fill")
    assert code == 0
    assert json.loads((tmp_path / "a.json").read_text())["variables"]["ts"]["missing"] == 3 * 5 * 11  # fill is NaN


def test_credentials_are_not_shown() -> None:
    text = without_secrets(
        "cannot get https://me:secret@host:99/a.zarr?X-Signature=secret#secret and 's3://k:secret@b/c'"
    )
    assert "secret" not in text
    assert "https://host:99/a.zarr" in text
    line = fails("inspect", "http://me:hush@127.0.0.1:9/a.zarr?token=hush")
    assert "hush" not in line


def test_meshes() -> None:
    assert parse_mesh("4", ("y", "x")).axes == {"domain": 4}
    assert parse_mesh("2x3", ("y", "x")).axes == {"data": 2, "domain": 3}
    assert parse_mesh("2x3x4", ("y", "x")).axes == {"data": 2, "y": 3, "x": 4}
    assert parse_mesh("ddp=2,y=3", ("y", "x")).groups == 2
    for text in ("", "0", "2x", "a=b", "2x2x2x2", "a=1,a=2", "-1"):
        with pytest.raises(PartitionError, match="mesh"):
            parse_mesh(text, ("y", "x"))


def test_the_installed_command(store: Path) -> None:
    command = Path(sys.executable).with_name("shardio")
    if not command.exists():
        pytest.skip("the command is not installed")
    found = subprocess.run([command, "inspect", store], capture_output=True, text=True, check=True, timeout=110)
    assert "ts" in found.stdout


def test_version() -> None:
    assert run("--version") == (0, f"{shardio.__version__}\n")

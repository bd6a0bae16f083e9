"""Processes forked from one that has read: they read right values through what was opened before, or are told."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

KINDS = ("blosc.zarr", "bz2.zarr", "gzip.h5", "filter.h5")
PROGRAM = """
import os, signal, sys
import h5py, numcodecs, numpy as np, zarr
from shardio import OwnReader, Partition, open_store, plan
from shardio.errors import ReadError

ROWS = np.arange(1, 33, dtype="i4")[:, None].repeat(16, axis=1)  # every row holds its number
"""
EACH = """
path = f"{sys.argv[1]}/{kind}"
if kind.endswith(".h5"):
    with h5py.File(path, "w") as file:
        how = {"scaleoffset": 0} if kind == "filter.h5" else {"compression": "gzip"}
        file.create_dataset("x", data=ROWS, chunks=(1, 16), **how)
else:
    how = {"filters": [numcodecs.BZ2()]} if kind == "bz2.zarr" else {"compressors": numcodecs.Blosc()}
    group = zarr.open_group(path, mode="w", zarr_format=2)
    group.create_array("x", shape=ROWS.shape, dtype="i4", chunks=(1, 16), **how)[...] = ROWS
source = open_store(path)["x"]
planned = plan(Partition(()), source.layout)
reader = OwnReader(threads=3)
assert (reader.read(source, planned).numpy() == ROWS).all()

def child(me):
    mine = range(me, 32, 4)
    for opened in (source, open_store(path)["x"]):
        with OwnReader(threads=3) as own:
            for _ in range(3):
                assert (own.read(opened, planned, index={"dim_0": list(mine)}).numpy() == ROWS[mine]).all()
    try:
        reader.read(source, planned)
    except ReadError as error:
        assert "was forked from it" in str(error), error
    else:
        raise AssertionError("threads of another process have answered")

children = []
for me in range(4):
    pid = os.fork()
    if not pid:
        signal.alarm(10)
        code = 1
        try:
            child(me)
            code = 0
        except BaseException as error:
            print(f"child {me}: {type(error).__name__}: {error}", flush=True)
        finally:
            os._exit(code)
    children.append(pid)
codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
assert codes == [0] * 4, codes
assert (reader.read(source, planned).numpy() == ROWS).all()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_forked_processes_read_right_values_or_are_told(tmp_path: Path) -> None:
    """Case R6, Case R7, Case R8: by codecs of shardio's, of the zarr library (an event loop) and of HDF5 (a handle)."""
    program = f"{PROGRAM}for kind in {KINDS}:\n{textwrap.indent(EACH, '    ')}\nprint('done')"
    command = [sys.executable, "-W", "ignore", "-c", program, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.stdout.endswith("done\n"), done.stdout + done.stderr

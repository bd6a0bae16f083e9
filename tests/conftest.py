"""What all tests share: one thread a process, and the folder of real files where there is one."""

import contextlib
import os
from pathlib import Path

import pytest
import torch

# Before netCDF4: after it, the blosc filter finds the HDF5 that netCDF4 brings, and cannot write.
with contextlib.suppress(ImportError):
    import hdf5plugin as hdf5plugin

os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the ranks that tests spawn
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder `../shared/data` beside the repository; a test that needs it is skipped where it is missing."""
    folder = Path(__file__).resolve().parents[2] / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"no real files: {folder} is not there")
    return folder

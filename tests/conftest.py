"""What all tests share: one thread a process, and the folder of real files where there is one."""

import os
from pathlib import Path

import pytest
import torch

os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the ranks that tests spawn
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder `../shared/data` beside the repository; a test that needs it is skipped where it is missing."""
    folder = Path(__file__).resolve().parents[2] / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"no real files: {folder} is not there")
    return folder

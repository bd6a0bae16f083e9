"""What the runtime's tests share: inputs that do not depend on which tests ran before."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)

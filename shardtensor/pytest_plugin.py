"""pytest plugin: the fixture ``ranks``, processes that stay up for the whole test session."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from shardtensor.testing import Ranks

__all__ = ["ranks"]


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Four ranks on CPU (gloo); see `shardtensor.testing.Ranks`."""
    from shardtensor.testing import Ranks  # here, so that tests which need no ranks do not wait for torch

    pool = Ranks()
    yield pool
    pool.close()

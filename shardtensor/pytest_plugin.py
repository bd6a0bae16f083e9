"""pytest plugin: the fixture ``ranks``, processes that stay up for the whole test session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from shardtensor.testing import Ranks

__all__ = ["ranks"]


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Four ranks on CPU (gloo); see `shardtensor.testing.Ranks`."""
    pool = Ranks()
    yield pool
    pool.close()

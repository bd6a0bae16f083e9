"""A rank that is killed ends in an error on the others, never in a hang."""

from __future__ import annotations

import os
import re
import signal
import threading

import pytest

import shardtensor.ranks
from shardio.errors import RankLostError, RankTimeoutError, ReadCancelledError
from shardsets import BatchError, DomainDataLoader
from shardtensor import CollectiveError
from shardtensor.testing import RankError, Ranks

ERRORS = (CollectiveError, BatchError, RankLostError, RankTimeoutError, ReadCancelledError)


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _until_it_ends(mesh, store, read, moment):
    """Read for ever; the second rank dies."""
    loader = DomainDataLoader(store, mesh, read=read, timeout=15, on_bad="skip")
    victim = mesh.get_rank() == 1
    if victim and moment == "reading":
        reads = []
        read_one = loader._reader.read

        def fatal(indices, **how):
            reads.append(indices)
            return _die() if len(reads) == 10 else read_one(indices, **how)

        loader._reader.read = fatal
    if victim and moment == "any":
        threading.Timer(0.5, _die).start()
    fatal_step = 3 if victim and moment == "between" else -1
    with pytest.raises(ERRORS) as caught:
        _for_ever(loader, fatal_step)
    assert re.search(r"\brank 1 has ended \(killed", str(caught.value)), str(caught.value)
    (note,) = caught.value.__notes__
    step = r"in the step of samples \[(\d+)\] in epoch \d+, rank [02]"
    found = re.fullmatch(rf"{step}: sample \1 of {re.escape(store)} \(times .*\)", note)
    assert found, note
    assert moment != "reading" or 6 <= int(found[1]) <= 9, "two items are read ahead of the step"


def _for_ever(loader, fatal_step) -> None:
    while True:
        for step, _ in enumerate(loader):
            if step == fatal_step:
                _die()


@pytest.mark.parametrize(("read", "moment"), [("own", "between"), ("collective", "reading"), ("collective", "any")])
def test_others_get_an_error(store, read, moment, monkeypatch):
    """Case R30: killed at the tenth item it reads, between steps, or at any time; the others name step and file."""
    monkeypatch.setattr(shardtensor.ranks, "PATIENCE_S", 30.0)  # who does not wait for the dead rank hears by timeout
    pool = Ranks(world=3, timeout=20)
    try:
        with pytest.raises(RankError) as caught:
            pool.run(_until_it_ends, str(store), read, moment, mesh=(3,))
    finally:
        pool.close()
    text = str(caught.value)
    assert "--- rank 1:\nthe process died" in text
    assert "rank 0:" not in text
    assert "rank 2:" not in text

"""Jobs shared by threads: results in order, work within work, errors once nothing runs any more."""

import os
import signal
import threading
import time

import numpy as np
import pytest

from shardio.box import Box, whole
from shardio.source import Source
from shardio.team import Team, unpinned, usable_cores

PINNED = pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity") or usable_cores() < 2, reason="threads are not pinned here"
)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_work_within_work_ends_with_all_results_in_order(threads: int) -> None:
    team = Team(threads)

    def outer(at: int) -> int:
        return sum(team([lambda n=n: at * n for n in range(10)]))  # type: ignore[misc]

    assert team([lambda at=at: outer(at) for at in range(20)]) == [45 * at for at in range(20)]  # type: ignore[misc]
    team.close()


def test_an_idle_thread_helps() -> None:
    team, both = Team(2), threading.Barrier(2, timeout=10)
    assert team([both.wait, both.wait]) in ([0, 1], [1, 0])  # ends only if two threads are in it
    team.close()


def test_the_first_error_comes_when_nothing_runs_any_more() -> None:
    team, running = Team(2), threading.Event()
    ended: list[str] = []

    def slow() -> None:
        running.set()
        time.sleep(0.1)
        ended.append("slow")

    def bad() -> None:
        running.wait(10)
        raise OSError("bad")

    with pytest.raises(OSError, match="bad"):
        team([slow, bad, *[lambda: ended.append("later")] * 8])
    assert ended == ["slow"]
    assert team([lambda: 1, lambda: 2]) == [1, 2]
    team.close()


@pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="signals go to no thread here")
def test_after_ctrl_c_no_job_is_begun_any_more() -> None:
    team, begun, ended = Team(2), list[int](), list[int]()

    def job() -> None:
        begun.append(1)
        if len(begun) == 3:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        time.sleep(0.1)
        ended.append(1)

    handled = signal.signal(signal.SIGINT, signal.default_int_handler)  # test runners have others
    try:
        with pytest.raises(KeyboardInterrupt):
            team([job] * 40)
    finally:
        signal.signal(signal.SIGINT, handled)
    assert len(begun) == len(ended) < 40
    team.close()
    assert len(begun) == len(ended)


def cores() -> set[int]:
    return os.sched_getaffinity(0)


def inherited() -> set[int]:
    """The cores of a thread that is started here."""
    found: list[set[int]] = []
    thread = threading.Thread(target=lambda: found.append(cores()))
    thread.start()
    thread.join()
    return found[0]


@PINNED
def test_threads_keep_apart_and_the_callers_stays_as_it_was() -> None:
    before, team, both = cores(), Team(2), threading.Barrier(2, timeout=10)
    one, other = team([lambda: (both.wait(), cores())[1]] * 2)
    assert one | other == before == cores()
    assert not one & other
    team.close()


@PINNED
def test_threads_started_within_unpinned_may_use_all_cores() -> None:
    def job() -> tuple[set[int], ...]:
        own = cores()
        with unpinned():
            with unpinned():
                started = inherited()
            within = cores()
        assert own == cores()
        return own, within, started

    every, team = cores(), Team(2)
    for own, within, started in team([job] * 4):
        assert own < every == within == started
    team.close()


class Threaded(Source):
    """Starts a thread to read, as libraries do."""

    def read_into(self, box: Box, out: np.ndarray) -> None:
        out[...] = len(inherited())


@PINNED
def test_what_libraries_start_is_not_pinned() -> None:
    source, team = Threaded("x", shape=(4,), dims=("x",), chunks=(2,), dtype=np.dtype("i4"), attrs={}), Team(2)
    outs = [np.zeros(4, "i4") for _ in range(4)]
    team([lambda out=out: source.read_counted(whole((4,)), out) for out in outs])  # type: ignore[misc]
    assert all((out == usable_cores()).all() for out in outs)
    team.close()

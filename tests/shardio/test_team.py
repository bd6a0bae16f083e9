"""Jobs shared by threads: results in order, work within work, errors once nothing runs any more."""

import threading
import time

import pytest

from shardio.team import Team


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

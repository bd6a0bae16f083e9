"""How a plan is cut into reads: every chunk once, neighbours together, as many reads as wanted."""

import itertools
import math

from hypothesis import given, settings
from hypothesis import strategies as st

from shardio.partition import Cut, Partition
from shardio.plan import plan
from shardio.source import Layout
from shardio.tasks import MAX_BYTES, cut


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_every_chunk_is_in_one_read_that_touches_no_other(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.integers(1, 12)) for _ in range(2))
    layout = Layout(("y", "x"), shape, tuple(data.draw(st.integers(1, 6)) for _ in range(2)), 4)
    size = data.draw(st.integers(1, shape[0]))
    partition = Partition((Cut("y", "domain", (size,), start=data.draw(st.integers(0, shape[0] - 1))),))
    halo = data.draw(st.integers(0, shape[0]))
    index = data.draw(st.lists(st.integers(0, shape[1] - 1), max_size=6))
    mine = plan(partition, layout, halo=halo, periodic=("y",), index={"x": index})[0]
    tasks = cut(mine, data.draw(st.integers(1, 5)))
    chunks = [tuple(piece.chunk for piece in pieces) for task in tasks for pieces in itertools.product(*task.pieces)]
    assert sorted(chunks) == sorted(mine.chunks)
    assert sum(task.elements for task in tasks) == math.prod(mine.shape)
    for task in tasks:
        touched = itertools.product(
            *(range(s.start // c, -(-s.stop // c)) for s, c in zip(task.box, layout.chunks, strict=True))
        )
        assert len(list(touched)) == task.chunks == len(list(task.single_chunks()))


def test_as_many_reads_as_wanted() -> None:
    layout = Layout(("channel", "lat", "lon"), (20, 721, 1440), (1, 721, 1440), 4)
    mine = plan(Partition(()), layout)[0]
    assert [task.chunks for task in cut(mine, 1)] == [7, 7, 6]  # 20 fields of 4 MB, at most 32 MiB in one read
    assert [task.chunks for task in cut(mine, 10)] == [2] * 10
    assert [task.chunks for task in cut(mine, 99)] == [1] * 20
    assert all(math.prod(span.size for span in task.box) * 4 <= MAX_BYTES for task in cut(mine, 1))


def test_wrapped_chunk_is_read_once() -> None:
    layout = Layout(("lon",), (12,), (12,), 4)
    (task,) = cut(plan(Partition(()), layout, halo={"lon": (2, 3)}, periodic=("lon",))[0], 4)
    assert task.elements == 17
    assert [tuple(span) for span in task.box] == [(0, 12)]
    assert str(task) == "chunk (0,)"


def test_contiguous_runs_are_read_one_by_one() -> None:
    layout = Layout(("time", "lon"), (9, 12), (9, 12), 4, block=1)
    tasks = cut(plan(Partition(()), layout, halo={"lon": (2, 0)}, periodic=("lon",), index={"time": [1, 7]})[0], 1)
    boxes = [[tuple(span) for span in task.box] for task in tasks]
    assert boxes == [[(1, 2), (10, 12)], [(1, 2), (0, 12)], [(7, 8), (10, 12)], [(7, 8), (0, 12)]]

"""Partitions: balanced, aligned to chunks, explicit; and the layouts that they give to tensors."""

import itertools
import pickle

import pytest

from shardio.box import Span
from shardio.errors import PartitionError
from shardio.partition import Cut, Partition, aligned, even, explicit, make_partition


def test_721_rows_over_2_4_and_8_ranks() -> None:
    assert even(721, 4) == (181, 180, 180, 180)
    assert even(721, 2) == (361, 360)
    assert even(721, 8) == (91, 90, 90, 90, 90, 90, 90, 90)


@pytest.mark.parametrize(("size", "parts"), [(1, 1), (5, 5), (7, 3), (100, 7)])
def test_even_is_balanced(size: int, parts: int) -> None:
    sizes = even(size, parts)
    assert sum(sizes) == size
    assert max(sizes) - min(sizes) <= 1
    assert sorted(sizes, reverse=True) == list(sizes)


def test_more_ranks_than_rows() -> None:
    with pytest.raises(PartitionError, match="3 rows cannot be cut over 4 ranks"):
        even(3, 4)
    with pytest.raises(PartitionError, match="dim 'lat' over mesh axis 'domain': 3 rows"):
        make_partition({"lat": "domain"}, sizes={"lat": 3}, ranks={"domain": 4})


@pytest.mark.parametrize("size", range(1, 26))
@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 30])
@pytest.mark.parametrize("parts", [1, 2, 3, 4])
def test_aligned_against_all_ways(size: int, chunk: int, parts: int) -> None:
    chunks = -(-size // chunk)
    if chunks < parts:
        with pytest.raises(PartitionError, match="chunk boundaries"):
            aligned(size, parts, chunk)
        return
    sizes = aligned(size, parts, chunk)
    bounds = list(itertools.accumulate(sizes))
    assert bounds[-1] == size
    assert all(bound % chunk == 0 for bound in bounds[:-1])
    assert min(sizes) > 0
    best = min(
        max(stop - start for start, stop in itertools.pairwise([0, *(at * chunk for at in inner), size]))
        for inner in itertools.combinations(range(1, chunks), parts - 1)
    )
    assert max(sizes) == best


def test_explicit_sizes_are_checked() -> None:
    assert explicit(7, [4, 0, 3]) == (4, 0, 3)
    with pytest.raises(PartitionError, match="hold 8 rows, but the dimension has 7"):
        explicit(7, [4, 4])
    with pytest.raises(PartitionError, match=r"2 sizes .* 3 ranks"):
        explicit(7, [4, 3], parts=3)
    with pytest.raises(PartitionError, match="negative"):
        explicit(7, [8, -1])


def test_partition_of_two_dims() -> None:
    partition = make_partition(
        {"lat": "domain_y", "lon": "domain_x"},
        sizes={"lat": 7, "lon": 8},
        ranks={"domain_y": 2, "domain_x": 3, "data": 5},
        how="even",
    )
    assert partition.mesh_shape == (2, 3)
    assert [partition.coordinate(rank) for rank in range(6)] == [(y, x) for y in range(2) for x in range(3)]
    assert partition.spans(5) == {"lat": Span(4, 7), "lon": Span(6, 8)}
    assert partition.offsets(5) == {"lat": 4, "lon": 6}
    dims, shape = ("batch", "channel", "lat", "lon"), (1, 4, 7, 8)
    assert partition.local_shape(4, dims, shape) == (1, 4, 3, 3)
    assert partition.global_shape(dims, (1, 4, 3, 3)) == shape
    shapes = partition.sharding_shapes(4, dims, shape, axes=("data", "domain_y", "domain_x"))
    assert shapes == {1: ((1, 4, 4, 3), (1, 4, 3, 3)), 2: ((1, 4, 3, 3), (1, 4, 3, 3), (1, 4, 3, 2))}
    owned = [
        (y, x)
        for rank in range(6)
        for y in range(*partition.spans(rank)["lat"])
        for x in range(*partition.spans(rank)["lon"])
    ]
    assert sorted(owned) == list(itertools.product(range(7), range(8)))


def test_window_starts_where_it_says() -> None:
    partition = Partition((Cut("lon", "domain", (3, 2), start=10),))
    assert partition.spans(1) == {"lon": Span(13, 15)}
    assert partition.offsets(1) == {"lon": 3}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"how": "spiral"}, "'spiral' is not known"),
        ({"how": "aligned"}, "needs the chunk size"),
        ({"how": {"lon": (1, 2)}}, "only; give them"),
        ({"shard": {"level": "domain"}}, "dim 'level' is to be cut"),
        ({"shard": {"lat": "data"}}, "mesh axis 'data'"),
    ],
)
def test_bad_arguments_name_the_way_out(arguments: dict[str, object], message: str) -> None:
    good = {"shard": {"lat": "domain"}, "sizes": {"lat": 7, "lon": 8}, "ranks": {"domain": 2}}
    with pytest.raises(PartitionError, match=message):
        make_partition(**{**good, **arguments})  # type: ignore[arg-type]


def test_structure_is_checked() -> None:
    with pytest.raises(PartitionError, match="used twice"):
        Partition((Cut("lat", "a", (1,)), Cut("lat", "b", (1,))))
    with pytest.raises(PartitionError, match="rank 2 is not one"):
        Partition((Cut("lat", "a", (1, 1)),)).coordinate(2)
    with pytest.raises(PartitionError, match="name both"):
        Partition((Cut("lat", "a", (1, 1)),)).sharding_shapes(0, ("x", "y"), (1, 2))


def test_is_a_value() -> None:
    partition = Partition((Cut("lat", "domain", (4, 3)),))
    assert pickle.loads(pickle.dumps(partition)) == partition
    assert hash(partition) == hash(Partition((Cut("lat", "domain", (4, 3)),)))

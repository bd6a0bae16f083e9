"""Own or collective: the model, and what is chosen for layouts where the answer is known."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import zarr

from shardio import Cut, Partition, open_store, plan
from shardio.collective import CollectiveReader, Group
from shardio.cost import Rates, Work, choose
from shardio.partition import even
from shardio.read import Request

RATES = Rates(copy=1e-10, link=1e-9, step=1e-4)


@pytest.mark.parametrize(
    ("work", "read"),
    [
        (Work(own=80_000_000, together=20_000_000, copied=80_000_000, sent=0, rounds=2), "collective"),
        (Work(own=21_000_000, together=20_000_000, copied=80_000_000, sent=0, rounds=2), "own"),  # copying costs more
        (Work(own=30_000_000, together=20_000_000, copied=0, sent=40_000_000, rounds=2), "own"),  # sending costs more
        (Work(own=4_000, together=1_000, copied=0, sent=0, rounds=1), "own"),  # steps cost more
        (Work(own=1_000_000, together=1_000_000, copied=0, sent=0, rounds=0), "own"),  # nothing to share
        # One chunk for two ranks: as long, but one of them can do something else.
        (
            Work(own=80_000_000, together=80_000_000, copied=40_000_000, sent=0, rounds=1, saved=80_000_000),
            "collective",
        ),
        (Work(own=80_000_000, together=80_000_000, copied=40_000_000, sent=0, rounds=1, saved=70_000_000), "own"),
    ],
)
def test_the_model_takes_the_faster(work: Work, read: str) -> None:
    choice = choose(work, decode=1e-9, rates=RATES)
    assert choice.read == read
    assert "ms together" in choice.why
    assert "ms own" in choice.why


def test_ranks_choose_alike_and_log_why(ranks, tmp_path):
    """Case R66: one gzip chunk for the whole grid is worth sharing; rows that only one rank needs are not."""
    group = zarr.open_group(tmp_path / "a.zarr", mode="w", zarr_format=3)
    values = np.random.default_rng(0).normal(size=(4, 512, 512)).astype("f4")
    for name, chunks in (("whole", (1, 512, 512)), ("rows", (1, 256, 512))):
        array = group.create_array(
            name,
            shape=values.shape,
            dtype="f4",
            chunks=chunks,
            compressors=zarr.codecs.GzipCodec(level=9),
            dimension_names=("time", "lat", "lon"),
        )
        array[...] = values

    def chosen(mesh):
        import torch

        records = []

        class Keep(logging.Handler):
            def emit(self, record):
                records.append(record.getMessage())

        logging.getLogger("shardio").addHandler(Keep())
        logging.getLogger("shardio").setLevel(logging.INFO)
        partition = Partition((Cut("lat", "domain", even(512, 2)),))
        joined = Group.join(mesh, mesh.get_rank())
        with open_store(tmp_path / "a.zarr") as store, CollectiveReader(joined, auto=True, threads=1) as reader:
            requests = []
            for name in ("whole", "rows"):
                plans = plan(partition, store[name].layout)
                mine = plans[mesh.get_rank()].at({"time": [0, 1]})
                out = torch.zeros(mine.result_shape)
                requests.append(Request(store[name], mine, out, None, plans, {"time": [0, 1]}))
            reader.choose(requests)
            modes = {name: choice.read for name, choice in reader.modes.items()}
            reader.read_all(requests)
            rows = slice(256 * mesh.get_rank(), 256 * mesh.get_rank() + 256)
            assert all(np.array_equal(request.out.numpy(), values[:2, rows]) for request in requests)
            decoded = reader.stats.bytes_fetched
        joined.close()
        return modes, decoded, records

    found = ranks.run(chosen, mesh=(2,))
    assert found[0][0] == found[1][0] == {"whole": "collective", "rows": "own"}
    assert [decoded for _, decoded, _ in found] == [2 << 20, 2 << 20]  # a chunk of one, two half chunks of the other
    assert found[1][2] == []
    assert len(found[0][2]) == 2
    assert "whole is read collective" in found[0][2][0]

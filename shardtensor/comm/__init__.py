"""Exchanges between the ranks of one process group, each with its adjoint; nothing here knows sharded tensors."""

from shardtensor.comm.agree import gather_facts, largest, totals
from shardtensor.comm.all_to_all import all_to_all
from shardtensor.comm.gather import all_gather, reduce_scatter
from shardtensor.comm.halo import halo_begin, halo_exchange, halo_reduce
from shardtensor.comm.library import finished, group_of
from shardtensor.comm.reduce import all_reduce
from shardtensor.comm.ring import ring_shift, ring_shift_begin
from shardtensor.comm.rows import add_rows, take_rows
from shardtensor.comm.scatter import broadcast_values
from shardtensor.comm.trace import CommTrace, comm_trace

__all__ = [
    "CommTrace",
    "add_rows",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "broadcast_values",
    "comm_trace",
    "finished",
    "gather_facts",
    "group_of",
    "halo_begin",
    "halo_exchange",
    "halo_reduce",
    "largest",
    "reduce_scatter",
    "ring_shift",
    "ring_shift_begin",
    "take_rows",
    "totals",
]

"""Who owns which rows of an array: a frozen Partition, and the table of ways to make one."""

from shardio.partition.aligned import aligned
from shardio.partition.even import even
from shardio.partition.explicit import explicit
from shardio.partition.partition import PARTITIONERS, Cut, Partition, make_partition

__all__ = ["PARTITIONERS", "Cut", "Partition", "aligned", "even", "explicit", "make_partition"]

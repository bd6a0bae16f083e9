"""Samples from stores, and the loader that gives every rank its slab of them."""

from shardsets.errors import BatchError, NotANumberError, SampleError
from shardsets.grid import GridSamples
from shardsets.loader import DomainDataLoader
from shardsets.samples import SampleSet, Slab, SlabReader
from shardsets.statistics import ChannelStatistics

__all__ = [
    "BatchError",
    "ChannelStatistics",
    "DomainDataLoader",
    "GridSamples",
    "NotANumberError",
    "SampleError",
    "SampleSet",
    "Slab",
    "SlabReader",
]

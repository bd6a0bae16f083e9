"""Samples from stores, and the loader that gives every rank its slab of them."""

from shardsets.bad import BadData, Skipped
from shardsets.errors import BatchError, NotANumberError, NotFiniteError, SampleError
from shardsets.grid import GridSamples
from shardsets.loader import DomainDataLoader
from shardsets.report import Report
from shardsets.samples import SampleSet, Slab, SlabReader
from shardsets.statistics import ChannelStatistics

__all__ = [
    "BadData",
    "BatchError",
    "ChannelStatistics",
    "DomainDataLoader",
    "GridSamples",
    "NotANumberError",
    "NotFiniteError",
    "Report",
    "SampleError",
    "SampleSet",
    "Skipped",
    "Slab",
    "SlabReader",
]

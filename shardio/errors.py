"""All errors of shardio: one tree, each also the built-in that a user would catch, all safe to send between ranks.

ShardIOError
  StoreNotFoundError    (FileNotFoundError)    no such store
  UnknownFormatError    (ValueError)           nothing can open this
  MissingExtraError     (ImportError)          an optional library is not installed
  MissingFilterError    (OSError)              an HDF5 filter is not available
  VariableNotFoundError (KeyError)             the store has no such array
  NoVariableError       (ValueError)           the store has no array that can be sharded
  DimensionError        (ValueError)           dims that cannot be recognised or do not fit
  TimeAxisError         (ValueError)           a time axis that goes back or changes its step
  PartitionError        (ValueError)           sizes that do not fit the array or the ranks
  HaloError             (ValueError)           a halo that the array cannot give
  DecodeError           (ValueError)           values that do not fit the asked dtype
  DestinationError      (FileExistsError)      a store cannot be written there
  ClusterError          (ConnectionError)      a dask cluster does not answer
  ReadError             (OSError)              reading failed
    MissingChunkError   (FileNotFoundError)    a stored chunk is absent
    CorruptChunkError   (OSError)              a stored chunk cannot be decoded
    NotAllowedError     (PermissionError)      the server or system does not allow it to be read
  OutsideStoreError     (PermissionError)      a reference leads out of the store
  UnsafeCodecError      (PermissionError)      a codec would run code from the store
  LimitError            (ValueError)           sizes in metadata that make no sense, or take too much memory
  RankLostError         (ConnectionError)      a rank that shares the reading has ended
  RankTimeoutError      (TimeoutError)         a rank that shares the reading is too slow
  ReadCancelledError    (RuntimeError)         a rank has ended its iteration while others read on
"""

from __future__ import annotations


class ShardIOError(Exception):
    """Base of every error that shardio raises on purpose."""


class StoreNotFoundError(ShardIOError, FileNotFoundError):
    """There is no store at this path or URL."""


class UnknownFormatError(ShardIOError, ValueError):
    """No registered format opens this source."""


class MissingExtraError(ShardIOError, ImportError):
    """An optional library is needed and not installed."""


class MissingFilterError(ShardIOError, OSError):
    """An HDF5 dataset is stored through a filter that is not available."""


class VariableNotFoundError(ShardIOError, KeyError):
    """The store holds no array of this name."""

    def __str__(self) -> str:
        return str(self.args[0])  # KeyError would print the message quoted and escaped


class NoVariableError(ShardIOError, ValueError):
    """The store holds no array that can be cut over ranks."""


class DimensionError(ShardIOError, ValueError):
    """A dimension cannot be recognised, or a selection does not fit it."""


class TimeAxisError(ShardIOError, ValueError):
    """A time axis goes backwards, repeats or changes its step."""


class PartitionError(ShardIOError, ValueError):
    """Sizes do not fit the array or the ranks."""


class HaloError(ShardIOError, ValueError):
    """A halo is negative, or wider than the whole dimension."""


class DecodeError(ShardIOError, ValueError):
    """Stored values do not fit the dtype that was asked for."""


class DestinationError(ShardIOError, FileExistsError):
    """A store cannot be written at this path."""


class ClusterError(ShardIOError, ConnectionError):
    """A dask cluster does not answer."""


class ReadError(ShardIOError, OSError):
    """Reading stored data failed."""


class MissingChunkError(ReadError, FileNotFoundError):
    """A chunk that the slab needs is not in the store."""


class CorruptChunkError(ReadError):
    """A chunk is in the store but cannot be decoded."""


class NotAllowedError(ReadError, PermissionError):
    """A stored object may not be read; whether it is there is not told."""


class OutsideStoreError(ShardIOError, PermissionError):
    """What a store refers to lies outside it, and was not allowed."""


class UnsafeCodecError(ShardIOError, PermissionError):
    """Decoding would run code from the store, and was not allowed."""


class LimitError(ShardIOError, ValueError):
    """Sizes in a store's metadata make no sense, or ask for more memory than is given."""


class RankLostError(ShardIOError, ConnectionError):
    """A rank that shares the reading has ended; the message says which."""


class RankTimeoutError(ShardIOError, TimeoutError):
    """A rank that shares the reading did not come along in time; the message says which."""


class ReadCancelledError(ShardIOError, RuntimeError):
    """A rank has ended its iteration while others still read."""

"""Where stored bytes come from: local files, object stores."""

from shardio.bytes.base import ByteStore
from shardio.bytes.local import LocalBytes
from shardio.bytes.remote import RemoteBytes

__all__ = ["ByteStore", "LocalBytes", "RemoteBytes"]

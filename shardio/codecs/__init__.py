"""Codecs that decode into given memory: raw, blosc by blocks, whole chunks, shards."""

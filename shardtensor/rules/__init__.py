"""The rules, one file per family of ops; importing this package fills the op table."""

from shardtensor.rules import autograd, pointwise, scalars

__all__ = ["autograd", "pointwise", "scalars"]

"""The error tree of the runtime; every error also is the built-in that a user would catch.

ShardTensorError
|-- LayoutError            (ValueError)    shards that do not fit the tensor, the mesh or each other
|-- RankDisagreementError  (ValueError)    ranks passed different facts to one collective call
|-- OpError                (RuntimeError)  an op failed inside dispatch, or its arguments cannot be honoured
|   `-- MissingRuleError                   an op has no rule and strict() is on
`-- CollectiveError        (RuntimeError)  an exchange between ranks failed
"""

from __future__ import annotations

__all__ = [
    "CollectiveError",
    "LayoutError",
    "MissingRuleError",
    "OpError",
    "RankDisagreementError",
    "ShardTensorError",
]


class ShardTensorError(Exception):
    """Base of every error that shardtensor raises on purpose."""


class LayoutError(ShardTensorError, ValueError):
    """Shards do not fit the tensor, the mesh or each other."""


class RankDisagreementError(ShardTensorError, ValueError):
    """Ranks passed different facts (shapes, dtypes, sizes) to one collective call."""


class OpError(ShardTensorError, RuntimeError):
    """An op failed inside dispatch, or a rule cannot honour its arguments.

    Never a TypeError: Python's operators turn that one into "unsupported operand type(s)" and lose the cause.
    """


class MissingRuleError(OpError):
    """An op has no rule and strict() forbids running it on gathered inputs."""


class CollectiveError(ShardTensorError, RuntimeError):
    """An exchange between ranks failed; the message names the rank, the peers and the exchange."""

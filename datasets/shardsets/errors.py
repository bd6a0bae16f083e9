"""The loader's errors; each also is the built-in that a user would catch, and all can be sent between ranks.

SampleError               (ValueError)    arguments that do not fit the data
|-- NotANumberError                       NaN in a sample that the model must not see
BatchError                (RuntimeError)  a batch that could not be made on some rank
"""

from __future__ import annotations

__all__ = ["BatchError", "NotANumberError", "SampleError"]


class SampleError(ValueError):
    """Arguments do not fit the data."""


class NotANumberError(SampleError):
    """A sample holds NaN where the model must not see it."""


class BatchError(RuntimeError):
    """A batch could not be made on some rank; the message names the ranks and their errors. Raised on all ranks."""

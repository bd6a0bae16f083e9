"""The loader's errors; each also is the built-in that a user would catch, and all can be sent between ranks.

SampleError               (ValueError)    arguments that do not fit the data
|-- NotFiniteError                        NaN or infinite values in a sample that the model must not see
|   `-- NotANumberError                   NaN
BatchError                (RuntimeError)  a batch that could not be made on some rank
"""

from __future__ import annotations

__all__ = ["BatchError", "NotANumberError", "NotFiniteError", "SampleError"]


class SampleError(ValueError):
    """Arguments do not fit the data."""


class NotFiniteError(SampleError):
    """A sample holds NaN or infinite values where the model must not see them."""


class NotANumberError(NotFiniteError):
    """A sample holds NaN where the model must not see it."""


class BatchError(RuntimeError):
    """A batch could not be made on some rank; the message names the ranks and their errors. Raised on all ranks."""

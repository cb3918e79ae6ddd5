"""Turns whatever an engine raises into an error that can be sent, and knows which are the last.

A request that ran out of memory fails alone. After a fault of the device every later call fails,
too, so the process says so and ends; its parent starts another.
"""

from __future__ import annotations

import gc
import logging
from typing import TYPE_CHECKING, Final

from tinkex.errors import RequestFailedError, TinkerError

if TYPE_CHECKING:
    from collections.abc import Iterator

_log = logging.getLogger(__name__)

# What CUDA and its libraries say in front of an error that stays with the process.
_FATAL: Final = (
    "CUDA error",
    "CUDA driver error",
    "cuDNN error",
    "device-side assert",
    "NCCL error",
)
# Said with the same words, but over with the request.
_MEMORY: Final = ("out of memory", "allocate memory", "ALLOC_FAILED")


def sendable(error: BaseException) -> TinkerError:
    """The error the caller gets: its own kind where it is one of ours, else a failed request."""
    if isinstance(error, TinkerError):
        return error
    if out_of_memory(error):
        return RequestFailedError(f"the engine ran out of memory: {error}", None, "server")
    _log.error("failed in the engine", exc_info=error)
    return RequestFailedError(f"{type(error).__name__}: {error}", None, "server")


def fatal(error: BaseException) -> bool:
    """Whether the device cannot be used any more after this error."""
    return any(
        any(word in str(cause) for word in _FATAL) and not out_of_memory(cause)
        for cause in _causes(error)
        if isinstance(cause, RuntimeError | RequestFailedError)
        and not (isinstance(cause, RequestFailedError) and cause.category == "user")
    )


def out_of_memory(error: BaseException) -> bool:
    """Whether a request asked for more memory than there is."""
    return isinstance(error, MemoryError) or any(word in str(error) for word in _MEMORY)


def free_memory(error: BaseException) -> None:
    """Let go of what a failed request held: its tensors hang on the frames of its traceback."""
    for cause in _causes(error):
        cause.__traceback__ = None
    gc.collect()


def _causes(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        yield cause
        cause = cause.__cause__ or cause.__context__

"""Converts exceptions into the failure of one request."""

from __future__ import annotations

import logging
from traceback import format_exception

import torch

from tinkex.errors import InputError, RequestFailedError

# In the messages of torch, of the C library (ENOMEM) and of the dynamic linker.
_MEMORY = ("allocate", "out of memory", "failed to map segment")

_log = logging.getLogger(__name__)


def user_error(message: str, request_id: str | None = None) -> RequestFailedError:
    """A failure that the caller can correct."""
    return RequestFailedError(message, request_id, "user")


def failure(error: BaseException, doing: str, request_id: str | None) -> RequestFailedError:
    """The failure of a request because of `error`, which stays its cause.

    `doing` completes "the device failed ...", such as "on a sequence of 9 tokens".
    """
    if isinstance(error, InputError):
        found = user_error(str(error), request_id)
    elif isinstance(error, RequestFailedError):
        found = RequestFailedError(error.message, request_id, error.category)
    else:
        _log.warning("failed %s: %s", doing, "".join(format_exception(error)))
        reason = "ran out of memory" if is_memory(error) else "failed"
        found = RequestFailedError(f"the device {reason} {doing}: {error}", request_id, "server")
    found.__cause__ = forget_frames(error)
    return found


def is_memory(error: BaseException) -> bool:
    """Whether the device or the process ran out of memory.

    Also if that was the cause: an import that gets no memory fails with another error.
    """
    link: BaseException | None = error
    while link is not None:
        if isinstance(link, MemoryError | torch.OutOfMemoryError):
            return True
        if any(word in str(link) for word in _MEMORY):
            return True
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
    return False


def forget_frames(error: BaseException) -> BaseException:
    """Drop the tracebacks: their frames keep tensors alive."""
    link: BaseException | None = error
    while link is not None:
        link.__traceback__ = None
        link = link.__cause__ or link.__context__
    return error

"""What a failed command prints: a heading, the details and the next step; and its log lines."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING

from tinkex.cli.commands import FAILED, MISUSED
from tinkex.errors import (
    APIConnectionError,
    APIError,
    APIResponseValidationError,
    APIStatusError,
    APITimeoutError,
    AuthenticationError,
    BadRequestError,
    BillingError,
    ChatTemplateError,
    ClosedError,
    ConflictError,
    CredentialError,
    DataError,
    InputError,
    InternalServerError,
    NotFoundError,
    PermissionDeniedError,
    ProxyError,
    RateLimitError,
    RequestFailedError,
    ResultError,
    ServerSilentError,
    TinkerError,
    UnprocessableEntityError,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

_SIGN_IN = "Sign in with `tinkex auth login`, or set TINKER_API_KEY."
_REACH = "Check TINKER_BASE_URL, your network, and that the server runs."

# The first row whose type matches counts; subclasses come before their bases.
_TABLE: tuple[tuple[type[Exception], str, str], ...] = (
    (CredentialError, "No usable API key", _SIGN_IN),
    (AuthenticationError, "Authentication failed", f"The server refused the key. {_SIGN_IN}"),
    (BillingError, "Billing issue", "Check the account's billing page."),
    (PermissionDeniedError, "Permission denied", "Check with `tinkex auth whoami` who you are."),
    (NotFoundError, "Resource not found", "Check the id, and that it belongs to this key."),
    (ConflictError, "Conflict", "It may be done already, or something else changes it now."),
    (BadRequestError, "Invalid request", "Correct the arguments and try again."),
    (UnprocessableEntityError, "Invalid data provided", "Correct the arguments and try again."),
    (RateLimitError, "Rate limit exceeded", "Wait a little and try again."),
    (InternalServerError, "Internal server error", "Try again later."),
    (APITimeoutError, "Request timeout", _REACH),
    (APIConnectionError, "Connection failed", ""),  # the message says what to check
    (APIResponseValidationError, "Unexpected answer", "Is TINKER_BASE_URL a Tinker server?"),
    (ProxyError, "The proxy refused the connection", ""),  # the message says what to do
    (APIError, "API error occurred", ""),
    (ServerSilentError, "No answer", "Try again later."),
    (ClosedError, "Connection closed", "Try again."),
    (DataError, "The data cannot be used", "Correct the file, or name another one."),
    (ChatTemplateError, "The chat template cannot be used", ""),
    (InputError, "Invalid argument", ""),
    (RequestFailedError, "Request failed", ""),
    (ResultError, "No result", ""),
    (TinkerError, "Failed", ""),
)


class CommandError(Exception):
    """A command cannot be carried out; `hint` is the next step."""

    def __init__(self, message: str, hint: str = "", *, status: int = FAILED) -> None:
        super().__init__(message)
        self.hint = hint
        self.status = status


def misuse(message: str, hint: str = "") -> CommandError:
    """An error about the way a command was called."""
    return CommandError(message, hint, status=MISUSED)


def unknown_checkpoint(path: str) -> CommandError:
    """The error for a checkpoint that the server does not have."""
    return CommandError(
        f"There is no checkpoint {path}", "`tinkex checkpoint list` shows those there are."
    )


def report(error: Exception) -> int:
    """Print on standard error why a command failed; returns the exit status."""
    for line in _lines(error):
        print(line, file=sys.stderr)
    if isinstance(error, CommandError):
        return error.status
    return MISUSED if isinstance(error, InputError) else FAILED


def _lines(error: Exception) -> Iterator[str]:
    if isinstance(error, CommandError):
        yield f"Error: {error}"
        yield from _indented(error.hint)
        return
    if isinstance(error, OSError) and not isinstance(error, TinkerError):
        yield f"Error: {error.strerror or 'Input or output failed'}"
        yield from _indented(str(error.filename or ""))
        return
    row = next((row for row in _TABLE if isinstance(error, row[0])), None)
    if row is None:
        yield from _unexpected(error)
        return
    heading = row[1]
    if isinstance(error, APIStatusError) and type(error) is APIStatusError:
        heading = f"API error (status {error.status_code})"
    yield f"Error: {heading}"
    if isinstance(error, APIConnectionError) and was_shown(describe(error)):
        yield "  The command has stopped trying. The warning above says what to check."
        return
    yield from _indented(describe(error))
    yield from _indented(next_step(error))


def next_step(error: Exception) -> str:
    """The next step after an error; empty where its message has it."""
    if isinstance(error, DataError) and error.problems[0].line > 0:
        what = "this line" if len(error.problems) == 1 else "these lines"
        return f"Correct {what} and run the command again."
    if isinstance(error, DataError) and isinstance(error.__cause__, FileNotFoundError):
        return "Check the path of the file."
    return next((row[2] for row in _TABLE if isinstance(error, row[0])), "")


def describe(error: Exception) -> str:
    """The error in one line: the server's own message where there is one."""
    body = error.body if isinstance(error, APIStatusError) else None
    if isinstance(body, dict):
        detail: object = body.get("detail") or body.get("message") or body.get("error")  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType] - a server's free-form JSON
        if isinstance(detail, str):
            return detail
    return str(error) or type(error).__name__


def _indented(text: str) -> Iterator[str]:
    for line in text.splitlines():
        yield f"  {line}"


def _unexpected(error: Exception) -> Iterator[str]:
    import traceback

    yield f"Error: Unexpected error occurred: {type(error).__name__}: {error}"
    if sys.stderr.isatty():
        yield "".join(traceback.format_exception(error)).rstrip()


# -- log lines -----------------------------------------------------------------------------------


class _Shown(logging.Handler):
    """Prints records on standard error and keeps their messages."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
        # Mutable state: the printed messages.
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        try:
            print(self.format(record), file=sys.stderr, flush=True)
        except (OSError, ValueError):  # standard error is closed
            return
        self.messages.append(record.getMessage())


def show_log(level: int) -> None:
    """Print log lines of this level and above; a second call only changes the level."""
    root = logging.getLogger()
    root.setLevel(level)
    if not any(isinstance(handler, _Shown) for handler in root.handlers):
        root.addHandler(_Shown())


def was_shown(text: str) -> bool:
    """Whether a printed log line contains this text."""
    shown = (handler for handler in logging.getLogger().handlers if isinstance(handler, _Shown))
    return any(text in message for handler in shown for message in handler.messages)

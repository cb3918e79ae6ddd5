"""What telemetry may say about an error, or about anything else. Pure.

Text is never sent, not even cleaned: a server's message may quote a prompt, and an exception, its
notes, its traceback's values and source lines may hold anything. Only what is known to be harmless
is sent: types of errors; codes, categories and statuses of `tinkex.errors`; ids that look like ids;
and lines of tinkex's own code.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

from tinkex import errors
from tinkex.errors import (
    APIResponseValidationError,
    APIStatusError,
    CredentialError,
    ErrorCategory,
    InputError,
    RequestFailedError,
    TinkerError,
    code_of,
)
from tinkex.wire.results import QueueState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

EventName = Literal["queue_state_changed", "user_error", "other"]
"""The events with a name; their number is fixed."""

# Keys of the hosted service; JSON web tokens, which all begin with an encoded `{"`.
_CREDENTIALS = re.compile(r"tml-|eyJ")
_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)
_TYPE = re.compile(r"[\w.<>]{1,200}")
_CATEGORIES = frozenset(get_args(ErrorCategory))
_QUEUE_STATES = frozenset(get_args(QueueState))
_PACKAGE = os.path.dirname(os.path.abspath(errors.__file__)) + os.sep
_ELSEWHERE = "  (code outside of tinkex)"
_MAX_LINKS = 20
_MAX_LINES = 50


class Redactor:
    """Selects what may leave the process; `secrets` gives the credentials in use now."""

    def __init__(self, secrets: Callable[[], Iterable[str]] = tuple) -> None:
        self._secrets = secrets

    def members(self, data: Mapping[str, Any]) -> dict[str, Any]:
        """Those members of an event that may be sent, where their values are valid."""
        taken = {name: self.identifier(data.get(name)) for name in ("queue_state", "request_id")}
        if taken["queue_state"] not in _QUEUE_STATES:
            del taken["queue_state"]
        return {name: value for name, value in taken.items() if value is not None}

    def facts(self, error: BaseException) -> dict[str, Any]:
        """What is known of an error without reading its text."""
        facts: dict[str, Any] = {"error_type": self._type(type(error).__name__)}
        if isinstance(error, TinkerError):
            facts["code"] = code_of(error)
            facts["request_id"] = self.identifier(error.request_id)
        if isinstance(error, APIStatusError | APIResponseValidationError):
            facts["status_code"] = error.status_code if type(error.status_code) is int else None
        if isinstance(error, RequestFailedError):
            facts["category"] = error.category if error.category in _CATEGORIES else None
        return {name: value for name, value in facts.items() if value is not None}

    def message(self, error: BaseException) -> str:
        """The same as one line, without the type."""
        facts = {k: v for k, v in self.facts(error).items() if k != "error_type"}
        return ", ".join(f"{name} {value}" for name, value in facts.items())

    def frames(self, error: BaseException) -> str | None:
        """The lines of tinkex that an error, its causes and the members of its group came from."""
        lines = [line for link in chain(error) for line in self._frames_of(link)]
        return "\n".join(lines[:_MAX_LINES]) or None

    def _frames_of(self, error: BaseException) -> Iterator[str]:
        trace = error.__traceback__
        if trace is None:
            return
        kind = type(error)
        builtin = kind.__module__ == "builtins"
        yield self._type(kind.__name__ if builtin else f"{kind.__module__}.{kind.__qualname__}")
        last = ""
        while trace is not None:
            line = _place(trace.tb_frame.f_code.co_filename, trace.tb_lineno)
            if line != last or line != _ELSEWHERE:
                yield line
            last, trace = line, trace.tb_next

    def identifier(self, value: object) -> str | None:
        """`value` if it looks like an id and holds no credential, else None."""
        return value if isinstance(value, str) and self._harmless(_ID, value) else None

    def _type(self, name: str) -> str:
        return name if self._harmless(_TYPE, name) else "Exception"

    def _harmless(self, shape: re.Pattern[str], text: str) -> bool:
        if not shape.fullmatch(text) or _CREDENTIALS.search(text):
            return False
        return not any(secret and secret in text for secret in self._secrets())


def is_user_error(error: BaseException) -> bool:
    """Whether the caller has to change something, and not the software."""
    return any(_is_users_fault(link) for link in chain(error))


def _is_users_fault(error: BaseException) -> bool:
    if isinstance(error, APIStatusError):
        return 400 <= error.status_code < 500 and error.status_code != 408
    if isinstance(error, RequestFailedError):
        return error.category == "user"
    return isinstance(error, InputError | CredentialError)


def chain(error: BaseException) -> Iterator[BaseException]:
    """An error, its causes and the members of its groups, outermost first; at most `_MAX_LINKS`."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting and len(seen) < _MAX_LINKS:
        link = waiting.pop()
        if link is None or id(link) in seen:
            continue
        seen.add(id(link))
        yield link
        waiting.append(link.__cause__ or (None if link.__suppress_context__ else link.__context__))
        if isinstance(link, BaseExceptionGroup):
            group = cast("BaseExceptionGroup[BaseException]", link)
            waiting.extend(reversed(group.exceptions[:_MAX_LINKS]))


def _place(path: str, line: int) -> str:
    """A line of tinkex. Names of other files and functions are not sent."""
    if not path.startswith(_PACKAGE):
        return _ELSEWHERE
    return f"  tinkex/{path.removeprefix(_PACKAGE).replace(os.sep, '/')}:{line}"

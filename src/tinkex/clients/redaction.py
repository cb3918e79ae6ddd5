"""What may be said about an error, or about anything else, outside this process.

Pure. The rule is to let through what we know to be harmless rather than to hunt for what is not:
numbers, short texts without secrets, the types of errors, and where in the code they came from.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any, cast

from tinkex.errors import (
    APIStatusError,
    CredentialError,
    InputError,
    RequestFailedError,
    TinkerError,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

_MARK = "[redacted]"
# Keys of the hosted service; JSON web tokens, which all begin with an encoded `{"`; what follows
# "Bearer"; and the user part of a URL.
_CREDENTIALS = re.compile(
    r"\btml-[\w-]+|\beyJ[\w-]+(?:\.[\w-]*){0,4}|(?i:\bbearer\s+\S+)|(?<=://)[^/\s@]+(?=@)"
)
# Members that hold a request's credentials or its content, wherever they appear.
_DROPPED = frozenset(
    {
        *("headers", "request_headers", "response_headers", "authorization", "cookie"),
        *("api_key", "x_api_key", "key", "secret", "password", "token", "jwt"),
        *("prompt", "prompts", "tokens", "target_tokens", "model_input", "chunks", "text"),
        *("body", "content", "data", "messages"),
    }
)
_MAX_TEXT = 500
_MAX_ITEMS = 50
_MAX_DEPTH = 4
_MAX_FRAMES = 50


class Redactor:
    """Removes what must not leave the process; `secrets` gives the credentials in use now."""

    def __init__(self, secrets: Callable[[], Iterable[str]] = tuple) -> None:
        self._secrets = secrets

    def text(self, text: str, limit: int = _MAX_TEXT) -> str:
        """`text` without credentials, cut to `limit` characters."""
        for secret in self._secrets():
            if secret:
                text = text.replace(secret, _MARK)
        text = _CREDENTIALS.sub(_MARK, text)
        return text if len(text) <= limit else text[:limit] + "…"

    def members(self, data: Mapping[str, Any], depth: int = 0) -> dict[str, Any]:
        """`data` as plain JSON values, without credentials and without what requests contain."""
        kept = [(name, value) for name, value in data.items() if not _is_dropped(name)]
        return {
            self.text(str(name)): self._value(value, depth) for name, value in kept[:_MAX_ITEMS]
        }

    def _value(self, value: Any, depth: int) -> Any:
        if value is None or isinstance(value, bool | int):
            return value
        if isinstance(value, float):
            return value if math.isfinite(value) else str(value)
        if isinstance(value, str):
            return self.text(value)
        if depth < _MAX_DEPTH and isinstance(value, dict):
            return self.members(cast("dict[str, Any]", value), depth + 1)
        if depth < _MAX_DEPTH and isinstance(value, list | tuple):
            items = cast("list[Any]", value)
            return [self._value(item, depth + 1) for item in items[:_MAX_ITEMS]]
        # Never its repr: that may hold anything.
        return type(value).__name__

    def message(self, error: BaseException) -> str:
        """What an error says, as far as its author is known.

        A server's reply may quote the request, a bad argument is quoted in its error, and what
        is in somebody else's exception nobody knows.
        """
        if isinstance(error, APIStatusError):
            return f"HTTP status {error.status_code}"
        if isinstance(error, InputError):
            return self.text(f"bad value of {error.path}" if error.path else "bad value")
        return self.text(str(error)) if isinstance(error, TinkerError) else ""

    def frames(self, error: BaseException) -> str | None:
        """Where an error and its causes came from: files, lines and functions.

        Neither values nor source lines, which may hold a literal key or prompt.
        """
        parts = [part for link in chain(error) for part in self._frames_of(link)]
        return "\n".join(parts[:_MAX_FRAMES]) or None

    def _frames_of(self, error: BaseException) -> Iterator[str]:
        if error.__traceback__ is None:
            return
        yield _type_name(error)
        trace = error.__traceback__
        while trace is not None:
            code = trace.tb_frame.f_code
            yield self.text(f"  {_short(code.co_filename)}:{trace.tb_lineno} in {code.co_name}")
            trace = trace.tb_next


def is_user_error(error: BaseException) -> bool:
    """Whether the caller, and not the software, has to change something."""
    return any(_is_users_fault(link) for link in chain(error))


def _is_users_fault(error: BaseException) -> bool:
    if isinstance(error, APIStatusError):
        return 400 <= error.status_code < 500 and error.status_code != 408
    if isinstance(error, RequestFailedError):
        return error.category == "user"
    return isinstance(error, InputError | CredentialError)


def chain(error: BaseException) -> Iterator[BaseException]:
    """An error and what it came from, outermost first."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)


def _is_dropped(name: object) -> bool:
    return str(name).lower().replace("-", "_") in _DROPPED


def _short(path: str) -> str:
    """The end of a path: enough to find the file, without the name of somebody's home."""
    return "/".join(path.replace("\\", "/").split("/")[-3:])


def _type_name(error: BaseException) -> str:
    kind = type(error)
    return (
        kind.__qualname__
        if kind.__module__ == "builtins"
        else f"{kind.__module__}.{kind.__qualname__}"
    )

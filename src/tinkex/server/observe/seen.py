"""What is known about the request being answered; the log line, span and metrics say it.

Middleware makes one per request and the handler fills in what it learns. The request id is
also found by whatever logs while the request is answered.
"""

from __future__ import annotations

import re
import uuid
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from collections.abc import MutableMapping

_KEY = "tinkex.seen"
_SANE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:\-]{0,127}")
_UNKNOWN = "unknown"


@dataclass(slots=True)
class Seen:
    """One request, without anything secret: no headers, no key, no body."""

    request_id: str
    route: str = _UNKNOWN
    owner: str | None = None
    model_id: str | None = None
    storage_error: str | None = None
    # The session, and the operation or sampler in it, that a poll waited for.
    polled: tuple[str, str] | None = None


def request_id_from(header: str | None) -> str:
    """The caller's own id where it is short and plain, else a new one."""
    if header is not None and _SANE.fullmatch(header):
        return header
    return uuid.uuid4().hex


def seen_by(scope: MutableMapping[str, Any]) -> Seen:
    """What is known about the request of an ASGI scope."""
    found = cast("Seen | None", scope.get(_KEY))
    if found is None:
        # An app that was called without its middleware; nobody will read this.
        found = scope[_KEY] = Seen(uuid.uuid4().hex)
    return found


def remember(scope: MutableMapping[str, Any], seen: Seen) -> None:
    """Let `seen_by` find it."""
    scope[_KEY] = seen


current_request_id: ContextVar[str | None] = ContextVar("tinkex_request_id", default=None)
"""The id of the request being answered, for log lines."""

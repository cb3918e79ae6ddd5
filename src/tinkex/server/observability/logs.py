"""Log lines for machines: JSON or key=value, with the id of the request they belong to.

The server writes with the standard `logging` and installs no handler; the process that hosts
it calls `install` once. Fields travel in a record's `fields` and what they are about in its
`title`, so every other formatter shows the plain message, which has both.
"""

from __future__ import annotations

import logging
import re
import time
from functools import lru_cache
from typing import IO, TYPE_CHECKING, Any, Literal, cast

import msgspec

from tinkex.server.observability.requests import current_request_id

if TYPE_CHECKING:
    from collections.abc import Mapping

LogFormat = Literal["text", "json"]

# Letters, digits and signs without a space, a quote or an equals sign: nothing to be quoted.
_SIMPLE = re.compile(r"[!#-<>-~]+")


class LineFormatter(logging.Formatter):
    """One line per record; a traceback goes into a field, so a line stays a line."""

    def __init__(self, form: LogFormat) -> None:
        super().__init__()
        self._form = form

    def format(self, record: logging.LogRecord) -> str:
        fields = _fields(record)
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        if self._form == "json":
            return msgspec.json.encode(fields, enc_hook=str).decode()
        return " ".join([f"{name}={_plain(value)}" for name, value in fields.items()])


def install(form: LogFormat, stream: IO[str] | None = None, level: int = logging.INFO) -> None:
    """Send this process's log lines to a stream (standard error); for the host process only."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(LineFormatter(form))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "time": f"{_second(int(record.created))}.{int(record.created % 1 * 1000):03d}Z",
        "level": record.levelname.lower(),
        "logger": record.name,
        "message": getattr(record, "title", None) or record.getMessage(),
    }
    request_id = current_request_id.get()
    if request_id is not None:
        fields["request_id"] = request_id
    fields.update(cast("Mapping[str, Any]", getattr(record, "fields", {})))
    return fields


@lru_cache(maxsize=4)
def _second(at: int) -> str:
    """A time without its fraction; a busy server writes many lines in one second."""
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(at))


def _plain(value: object) -> str:
    """A simple value as it is; any other as a JSON string."""
    text = str(value)
    if _SIMPLE.fullmatch(text):
        return text
    return msgspec.json.encode(text).decode()

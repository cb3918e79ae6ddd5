"""A copy of the audit log in a file, one JSON object per line, for programs that collect logs."""

from __future__ import annotations

import logging
import os
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import anyio.to_thread
import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from tinkex.server.store.records import AuditEntry

_log = logging.getLogger(__name__)


class AuditFile:
    """Appends lines; it is opened for each, so that it may be moved away at any time."""

    def __init__(self, path: Path) -> None:
        self._path = path

    async def write(self, entries: Iterable[AuditEntry]) -> None:
        """Append entries. The table has them too, so a failure is only logged."""
        lines = b"".join(map(line, entries))
        try:
            await anyio.to_thread.run_sync(self._append, lines)
        except OSError as error:
            _log.error("the audit log could not be copied to %s: %s", self._path, error.strerror)

    def _append(self, lines: bytes) -> None:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        file = os.open(self._path, flags, 0o600)
        try:
            os.fchmod(file, 0o600)
            os.write(file, lines)
        finally:
            os.close(file)


def line(entry: AuditEntry) -> bytes:
    """An entry as a line of JSON."""
    at = datetime.fromtimestamp(entry.at, UTC).isoformat()
    return msgspec.json.encode({**asdict(entry), "at": at}) + b"\n"

"""Writes that are collected for a second or more: heartbeats, usage of samples, last use of keys.

They are many and small, and a crash may lose the last of them: after a restart every session counts
as seen, and a lost sample is sent again. Refused attempts are collected for a minute: who sends
many of them cannot fill the audit log.
"""

from __future__ import annotations

import logging
from collections import Counter
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import anyio
from sqlalchemy import bindparam, or_, update

from tinkex.errors import StorageError
from tinkex.server.store.records import HOUR_S, AuditEntry, Refusal
from tinkex.server.store.sql.operations import add_hourly
from tinkex.server.store.sql.records import AUDIT
from tinkex.server.store.sql.schema import api_keys, audit, sessions
from tinkex.server.supervision import keep_running, no_stray_cancellation

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Generator, Iterable

    from sqlalchemy import Connection

    from tinkex.clock import Clock
    from tinkex.server.store.audit_file import AuditFile
    from tinkex.server.store.records import UsageEntry
    from tinkex.server.store.sql.database import Database

_log = logging.getLogger(__name__)

USAGE_EVERY_S = 1.0
MINUTE_S = 60.0
MOST_REFUSALS = 256
"""Different refused attempts that are told apart within a minute."""
SEEN_EVERY_S = 5.0
# So often in a row entries may fail for unknown reasons; then they are dropped.
_MOST_FAILURES = 5


class WriteBehind:
    """Collects entries, and writes them from one task while it is `running`."""

    def __init__(
        self, database: Database, clock: Clock, audit_file: AuditFile | None = None
    ) -> None:
        self._database = database
        self.clock = clock
        self.audit_file = audit_file
        self._bell = anyio.Event()
        # Mutable state: what is not written yet, when sessions were written last, and how often
        # in a row each kind of entry could not be written for unknown reasons.
        self.seen: dict[str, float] = {}
        self._usage: dict[tuple[Any, ...], UsageEntry] = {}
        self._keys: dict[int, float] = {}
        self._refusals: dict[tuple[int, Refusal], int] = {}
        self._seen_at = clock.now()
        self._failures: Counter[str] = Counter()

    def see(self, session_id: str, at: float) -> None:
        """Note a heartbeat."""
        self.seen[session_id] = at
        self._bell.set()

    def use(self, entry: UsageEntry) -> None:
        """Add to the hour of its session."""
        key = _hour_of(entry)
        known = self._usage.get(key)
        self._usage[key] = (
            entry if known is None else replace(known, usage=known.usage + entry.usage)
        )
        self._bell.set()

    def use_key(self, key_id: int, at: float) -> None:
        """Note that a key was used."""
        self._keys[key_id] = at
        self._bell.set()

    def refuse(self, refusal: Refusal, at: float) -> None:
        """Count an attempt that was refused."""
        name = (int(at // MINUTE_S), refusal)
        if name not in self._refusals and len(self._refusals) >= MOST_REFUSALS:
            name = (name[0], replace(refusal, key_id=None, address="other addresses"))
        self._refusals[name] = self._refusals.get(name, 0) + 1
        self._bell.set()

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        """Write periodically, and what is left at the end."""
        failure: Exception | None = None
        async with anyio.create_task_group() as group:
            group.start_soon(keep_running, "usage and heartbeats", self._run, self.clock)
            try:
                yield
            except Exception as error:  # noqa: BLE001 - raised below, outside the group
                failure = error
            finally:
                with anyio.CancelScope(shield=True):
                    await self._finish()
            group.cancel_scope.cancel()
        if failure is not None:
            raise failure

    async def flush(self) -> None:
        """Write everything now."""
        await self.write_usage()
        await self.write_seen()
        await self.write_keys()
        await self.write_refusals(self._refusals)

    async def _finish(self) -> None:
        try:
            await self.flush()
        except StorageError as error:
            _log.error("the last usage and heartbeats could not be written: %s", error)

    async def _run(self) -> None:
        # What there was when this task was started again has no other event.
        self._bell.set()
        while True:
            await self._bell.wait()
            self._bell = anyio.Event()
            await self.clock.sleep(USAGE_EVERY_S)
            try:
                with no_stray_cancellation():
                    await self._round()
            except StorageError as error:
                # It is all kept for the next round.
                _log.warning("usage and heartbeats are not written yet: %s", error)
                self._bell.set()
            except Exception:  # noqa: BLE001 - one round ends here; the next may succeed
                _log.exception("usage and heartbeats could not be written")
                self._bell.set()

    @contextmanager
    def _restoring(self, kind: str, restore: Callable[[], None]) -> Generator[None]:
        """Call `restore` if what is written within the block has to be tried again.

        A database that fails is waited for. Another error may be of a value that no database
        takes, which would hold up the others for ever.
        """
        try:
            # Shielded: a caller that is cancelled in between would leave entries counted twice, or
            # lost.
            with anyio.CancelScope(shield=True):
                yield
        except BaseException as error:
            if not isinstance(error, StorageError):
                self._failures[kind] += 1
            if self._failures[kind] < _MOST_FAILURES:
                restore()
            else:
                del self._failures[kind]
            raise
        self._failures.pop(kind, None)

    async def _round(self) -> None:
        await self.write_usage()
        minute = int(self.clock.wall() // MINUTE_S)
        await self.write_refusals([name for name in self._refusals if name[0] != minute])
        if self.clock.now() - self._seen_at >= SEEN_EVERY_S:
            await self.write_seen()
            await self.write_keys()
        if self.seen or self._keys or self._refusals:
            self._bell.set()

    async def write_keys(self) -> None:
        """Write when keys were last used."""
        used, self._keys = self._keys, {}
        if not used:
            return
        # In one order everywhere, so that two nodes never wait for each other.
        rows = [{"id": key_id, "at": at} for key_id, at in sorted(used.items())]

        def restore() -> None:
            self._keys = {**used, **self._keys}

        with self._restoring("keys", restore):
            await self._database.write_lightly(lambda c: _write_keys(c, rows))

    async def write_refusals(self, names: Iterable[tuple[int, Refusal]]) -> None:
        """Write how often each of these was refused in its minute."""
        counts = {name: self._refusals.pop(name) for name in list(names)}
        if not counts:
            return
        lines = [_line(*name, count) for name, count in counts.items()]
        rows = [AUDIT.values(line) for line in lines]

        def restore() -> None:
            self._refusals = {**counts, **self._refusals}

        with self._restoring("refusals", restore):
            await self._database.write_lightly(lambda c: c.execute(audit.insert(), rows) and None)
        if self.audit_file is not None:
            await self.audit_file.write(lines)

    async def write_usage(self) -> None:
        """Write what samples used."""
        entries, self._usage = self._usage, {}
        if not entries:
            return

        def restore() -> None:
            for entry in entries.values():
                self.use(entry)

        with self._restoring("usage", restore):
            # In one order everywhere, so that two nodes never wait for each other.
            ordered = [entries[key] for key in sorted(entries, key=str)]
            await self._database.write_lightly(lambda c: add_hourly(c, ordered))

    async def write_seen(self) -> None:
        """Write when sessions were last seen."""
        self._seen_at = self.clock.now()
        seen, self.seen = self.seen, {}
        if not seen:
            return
        rows = [{"id": session_id, "at": at} for session_id, at in sorted(seen.items())]

        def restore() -> None:
            self.seen = {**seen, **self.seen}

        with self._restoring("sessions", restore):
            await self._database.write_lightly(lambda c: _write_seen(c, rows))


def _line(minute: int, refusal: Refusal, count: int) -> AuditEntry:
    return AuditEntry(
        at=minute * MINUTE_S,
        owner=refusal.owner,
        topic="refused",
        event=refusal.event,
        details={"count": count, "within_s": MINUTE_S},
        key_id=refusal.key_id,
        address=refusal.address,
    )


def _write_keys(connection: Connection, rows: list[dict[str, Any]]) -> None:
    # Another node may have noted a later use.
    used_before = or_(api_keys.c.last_used_at.is_(None), api_keys.c.last_used_at < bindparam("at"))
    query = update(api_keys).where(api_keys.c.key_id == bindparam("id"), used_before)
    connection.execute(query.values(last_used_at=bindparam("at")), rows)


def _hour_of(entry: UsageEntry) -> tuple[Any, ...]:
    hour = entry.at // HOUR_S
    return hour, entry.owner, entry.session_id, entry.base_model, entry.project_id, entry.kind


def _write_seen(connection: Connection, rows: list[dict[str, Any]]) -> None:
    seen_before = sessions.c.last_seen_at < bindparam("at")
    query = update(sessions).where(sessions.c.session_id == bindparam("id"), seen_before)
    connection.execute(query.values(last_seen_at=bindparam("at")), rows)

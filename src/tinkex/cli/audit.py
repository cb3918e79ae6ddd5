"""`tinkex audit`: what changed on a server, by whom and from where, read from its database."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

from tinkex.cli.commands import Argument, whole_number
from tinkex.cli.output import show
from tinkex.cli.server_store import SERVER, duration_s, server_store, wait_for
from tinkex.clock import SystemClock

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from tinkex.server.store.records import AuditEntry


def audit(args: argparse.Namespace) -> None:
    """Show the audit log of your own server. The oldest line is first."""
    entries = wait_for(_entries(args))
    show(
        args,
        [_plain(entry) for entry in entries],
        ("Time", "Owner", "Key", "From", "Event", "What"),
        [
            (
                f"{_time(entry.at):%Y-%m-%d %H:%M:%S}",
                entry.owner or "(server)",
                "-" if entry.key_id is None else entry.key_id,
                entry.address or "-",
                entry.event,
                _what(entry),
            )
            for entry in entries
        ],
        empty="Nothing was changed.",
    )


async def _entries(args: argparse.Namespace) -> Sequence[AuditEntry]:
    start = None if args.since is None else SystemClock().wall() - duration_s(args.since)
    async with server_store(args) as store:
        return await store.audit_log(args.owner, start=start, limit=args.limit)


def _what(entry: AuditEntry) -> str:
    return ", ".join(f"{name}={value}" for name, value in entry.details.items())


def _plain(entry: AuditEntry) -> dict[str, object]:
    return {
        "at": _time(entry.at).isoformat(),
        "owner": entry.owner,
        "topic": entry.topic,
        "event": entry.event,
        "details": dict(entry.details),
        "key_id": entry.key_id,
        "address": entry.address,
        "request_id": entry.request_id,
    }


def _time(at: float) -> datetime:
    return datetime.fromtimestamp(at, UTC)


ARGUMENTS = (
    Argument("--since TIME", "only what happened within this time, such as 7d or 12h"),
    Argument("--owner NAME", "only what concerns this tenant"),
    Argument("--limit N", "at most so many lines, the newest", type=whole_number(1), default=1000),
    *SERVER,
)

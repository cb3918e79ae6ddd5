"""The line of the audit log that says how a server was started."""

from __future__ import annotations

from dataclasses import fields

from tinkex import __version__
from tinkex.server.store.records import AuditEntry
from tinkex.serving.host_settings import HostSettings, server_kinds

# A database's address may have a password in it.
_NOT_SHOWN = frozenset({"server", "database"})


def started(settings: HostSettings, at: float) -> AuditEntry:
    """All settings that are not the default."""
    default = HostSettings()
    own = {each.name: getattr(settings, each.name) for each in fields(HostSettings)}
    limits = {name: getattr(settings.server, name) for name in server_kinds()}
    changed = {
        name: str(value)
        for values, usual in ((own, default), (limits, default.server))
        for name, value in values.items()
        if name not in _NOT_SHOWN and value != getattr(usual, name)
    }
    details = {"version": __version__, "settings": dict(sorted(changed.items()))}
    return AuditEntry(at=at, owner="", topic="settings", event="server_started", details=details)

"""The audit log as handlers write it: what was changed, by whom, from where."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from tinkex.server.observability.requests import request_record
from tinkex.server.store.records import AuditEntry

if TYPE_CHECKING:
    from tinkex.server.api.call import Call
    from tinkex.server.store.records import AuditTopic

CHANGES: Final = frozenset(
    {
        "set_session_project",
        "publish_checkpoint",
        "unpublish_checkpoint",
        "set_checkpoint_ttl",
        "delete_checkpoint",
        "copy_weights",
        "import_weights",
        "get_external_weights_urls",
        "get_checkpoint_archive",
    }
)
"""The routes that write a line and may be called without end, so they have a rate."""


def who(call: Call) -> dict[str, Any]:
    """Who calls, as an entry of the audit log has it."""
    return {
        "key_id": call.access.key_id,
        "address": call.address,
        "request_id": request_record(call.request.scope).request_id,
    }


async def note(call: Call, topic: AuditTopic, event: str, **details: object) -> None:
    """Write a line about something of the caller's."""
    await call.store.audit(
        AuditEntry(
            at=call.now(),
            owner=call.owner,
            topic=topic,
            event=event,
            details=details,
            **who(call),
        )
    )

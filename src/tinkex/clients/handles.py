"""Sampler handles: text that makes a copy of a sampling client in another process.

A handle is URL-safe base64 of a small JSON object. It names the session, the sampler, the server
and the caller's extra headers; it never holds a credential. In the process that made the session
a copy shares its connections; elsewhere it resolves credentials like `ServiceClient()` does.
"""

from __future__ import annotations

import base64
import binascii
import re
import threading
import weakref

import msgspec

from tinkex.clients.connection import Lease
from tinkex.clients.session import Session
from tinkex.config import Config
from tinkex.errors import InputError

# Extra headers travel with a handle, but none that could be a credential.
_SECRET = re.compile("auth|key|token|secret|cookie|cf-access", re.IGNORECASE)


class Handle(msgspec.Struct, frozen=True):
    """The content of a handle."""

    session_id: str
    sampling_session_id: str
    base_url: str
    headers: dict[str, str]
    record_stability_info: bool = False
    version: int = 1


def write_handle(
    lease: Lease[Session], sampling_session_id: str, *, record_stability_info: bool
) -> str:
    """The handle of a sampling client; in this process its copies share the lease."""
    session = lease.connection
    if session.session_id is None:
        raise InputError("the client has no session yet; create it through a ServiceClient")
    handle = Handle(
        session_id=session.session_id,
        sampling_session_id=sampling_session_id,
        base_url=session.config.base_url,
        headers={k: v for k, v in session.config.headers.items() if not _SECRET.search(k)},
        record_stability_info=record_stability_info,
    )
    _keep(handle, lease)
    return base64.urlsafe_b64encode(msgspec.json.encode(handle)).decode()


def read_handle(text: str, api_key: str | None) -> tuple[Handle, Lease[Session]]:
    """What a handle says, and a lease on its session; makes no request."""
    try:
        handle = msgspec.json.decode(base64.urlsafe_b64decode(text), type=Handle)
    except (binascii.Error, ValueError, TypeError) as error:
        raise InputError(
            "is not a sampler handle; pass what get_sampler_handle() returned", "handle"
        ) from error
    lease = _find(handle) if api_key is None else None
    if lease is None:
        config = Config.load(base_url=handle.base_url, api_key=api_key, headers=handle.headers)
        lease = Lease(Session(config, session_id=handle.session_id))
        if api_key is None:
            # A key given for this copy alone must not serve the next one.
            _keep(handle, lease)
    return handle, lease


def _keep(handle: Handle, lease: Lease[Session]) -> None:
    with _lock:
        _leases[handle.base_url, handle.session_id] = lease


def _find(handle: Handle) -> Lease[Session] | None:
    with _lock:
        lease = _leases.get((handle.base_url, handle.session_id))
    return lease if lease is not None and lease.connection.usable() else None


# Leases of this process by server and session; held weakly, guarded by the lock.
_lock = threading.Lock()
_leases: weakref.WeakValueDictionary[tuple[str, str], Lease[Session]] = (
    weakref.WeakValueDictionary()
)

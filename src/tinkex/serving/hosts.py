"""Which names a server answers to.

A web page can make its own name point to 127.0.0.1 (DNS rebinding) and then read whatever a server
on this machine answers without a key. The browser still sends the page's name as `Host`, and as
`Origin` from a page of another name, so requests with foreign ones are refused.
"""

from __future__ import annotations

from functools import lru_cache
from ipaddress import ip_address
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from starlette.types import ASGIApp, Receive, Scope, Send

_QUOTED: Final = 100
_LONGEST: Final = 300  # of a DNS name with a port; longer values would fill the cache


class HostCheck:
    """An ASGI app around another that only gets requests for the server's names."""

    def __init__(self, app: ASGIApp, names: Sequence[str], *, loopback: bool) -> None:
        self._app = app
        self._names = frozenset(_bare(name) for name in names)
        self._loopback = loopback
        self._allowed = lru_cache(maxsize=1024)(self._is_allowed)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it with what to do."""
        if scope["type"] == "http":
            for name, value in scope["headers"]:
                if name == b"host" and not self._answers_to(value):
                    await _refuse(send, 421, self._reason("Host", value))
                    return
                if name == b"origin" and not self._answers_to(_host_of(value)):
                    await _refuse(send, 403, self._reason("Origin", value))
                    return
        await self._app(scope, receive, send)

    def _answers_to(self, value: bytes) -> bool:
        return len(value) <= _LONGEST and self._allowed(value)

    def _is_allowed(self, value: bytes) -> bool:
        name = _bare(value.decode("latin-1"))
        return name in self._names or (self._loopback and _is_loopback(name))

    def _reason(self, header: str, value: bytes) -> str:
        shown = value[:_QUOTED].decode("latin-1")
        names = [*sorted(self._names), *(["localhost", "127.0.0.1"] if self._loopback else [])]
        return (
            f"This server does not answer to {header} {shown!r}, only to {', '.join(names)}; its "
            "operator can add names with the setting allowed_hosts."
        )


def _bare(value: str) -> str:
    """A host without its port, as it is compared."""
    text = value.strip().lower()
    if text.startswith("["):
        return text[1:].partition("]")[0]
    return text if text.count(":") > 1 else text.partition(":")[0].rstrip(".")


def _is_loopback(name: str) -> bool:
    if name == "localhost":
        return True
    try:
        return ip_address(name).is_loopback
    except ValueError:
        return False


def _host_of(origin: bytes) -> bytes:
    """The host of an origin; the origin `null` of sandboxed pages has none."""
    try:
        return urlsplit(origin.decode("latin-1")).netloc.encode("latin-1")
    except ValueError:
        return b""


async def _refuse(send: Send, status: int, detail: str) -> None:
    body = msgspec.json.encode({"detail": detail, "error": detail})
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})

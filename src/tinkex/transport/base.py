"""The seam to the network: one request in, one reply out.

A transport knows nothing of training, retries or credentials. It raises
`APIConnectionError`, `APITimeoutError` or `ProxyError`, `InputError` for a request that cannot be
written down, and nothing else; any status of the server is a `Reply`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from tinkex.wire.routes import Pool as Pool  # noqa: TC001 - for users of this module

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping
    from contextlib import AbstractAsyncContextManager


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """One HTTP request. `path` starts with `/api/v1/` and is appended to the base URL."""

    method: str
    path: str
    pool: Pool
    timeout_s: float
    query: str = ""
    # Not in the repr: one of them is the credential.
    headers: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)
    body: bytes | None = None
    follow_redirects: bool = False


@dataclass(frozen=True, slots=True)
class Reply:
    """One HTTP reply, body read and decompressed; header names are lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes


@dataclass(frozen=True, slots=True)
class StreamedReply:
    """A reply whose body arrives in pieces; `chunks` can be iterated once."""

    status: int
    headers: Mapping[str, str]
    chunks: AsyncIterator[bytes]


class Transport(Protocol):
    """Sockets, an in-process ASGI app, or a fake."""

    async def send(self, request: HttpRequest) -> Reply: ...

    def stream(self, request: HttpRequest) -> AbstractAsyncContextManager[StreamedReply]: ...

    async def aclose(self) -> None: ...

"""The headers every request carries, put together once per connection set."""

from __future__ import annotations

import itertools
import os
import sys
from typing import TYPE_CHECKING

from tinkex._version import PROTOCOL_VERSION, __version__
from tinkex.spans import current_traceparent
from tinkex.wire.routes import MEDIA_JSON, MEDIA_PROTOBUF, MEDIA_TAR, Pool

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tinkex.wire.routes import Route

API_KEY = "X-API-Key"
IDEMPOTENCY_KEY = "X-Idempotency-Key"
RETRY_COUNT = "x-stainless-retry-count"
TRACEPARENT = "traceparent"
_MEDIA = {"json": MEDIA_JSON, "protobuf": MEDIA_PROTOBUF, "tar": MEDIA_TAR}


def user_agent() -> str:
    """Who is asking."""
    return f"tinkex/{__version__} Python/{sys.version_info.major}.{sys.version_info.minor}"


class StandardHeaders:
    """Headers that depend on the route only, and keys that are never used twice."""

    def __init__(self, extra: Mapping[str, str]) -> None:
        # Mutable state: headers per route name, filled as routes are used, and the key counter.
        self._extra = dict(extra)
        self._own_trace = any(name.lower() == TRACEPARENT for name in extra)
        self._by_route: dict[str, dict[str, str]] = {}
        self._prefix = f"tinkex-{os.urandom(12).hex()}"
        self._numbers = itertools.count()

    def of(self, route: Route[object, object]) -> dict[str, str]:
        """The headers of a route; the caller copies before adding to them."""
        headers = self._by_route.get(route.name)
        if headers is None:
            headers = self._by_route[route.name] = self._make(route)
        return headers

    def of_call(self, route: Route[object, object]) -> dict[str, str]:
        """The headers of one call, which the caller may add to: the route's, and its trace."""
        headers = dict(self.of(route))
        traceparent = current_traceparent()
        if traceparent is not None and not self._own_trace:
            headers[TRACEPARENT] = traceparent
        return headers

    def _make(self, route: Route[object, object]) -> dict[str, str]:
        headers = {
            "Accept": "application/json",
            "Accept-Encoding": "gzip, deflate, zstd",
            "User-Agent": user_agent(),
        }
        if route.method != "GET":
            headers["Content-Type"] = _MEDIA.get(route.request_encoding, "application/json")
        if route.pool is Pool.REST:
            headers["x-sdk-version"] = PROTOCOL_VERSION
        # The caller's own win, whatever their case.
        taken = {name.lower() for name in self._extra}
        kept = {name: value for name, value in headers.items() if name.lower() not in taken}
        return {**kept, **self._extra}

    def idempotency_key(self) -> str:
        """One per logical call, the same for its retries; unique across forks."""
        return f"{self._prefix}-{os.getpid()}-{next(self._numbers)}"

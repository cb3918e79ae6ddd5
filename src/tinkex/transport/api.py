"""Calls: a route and a value in, a value out.

`Api` adds credentials and headers, encodes, decodes, and turns error statuses into errors.
`Api.call` is the only retry loop of calls that are answered directly; `Api.prepared` and `Api.send`
make one attempt, for `futures.lifecycle`, which owns the loop of calls that have a future.
"""

from __future__ import annotations

import itertools
import os
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar, cast

import msgspec

from tinkex import urls
from tinkex._version import PROTOCOL_VERSION, user_agent
from tinkex.errors import (
    APIConnectionError,
    APIError,
    APIResponseValidationError,
    InputError,
    InputTypeError,
    RequestInfo,
    ResponseInfo,
    status_error,
)
from tinkex.metrics import meter
from tinkex.spans import current_traceparent
from tinkex.transport.auth import Credentials
from tinkex.transport.base import HttpRequest, Reply
from tinkex.transport.notices import Notices
from tinkex.transport.retry import (
    Decision,
    RetryLimits,
    RetryProgress,
    decide,
    outcome_of,
    random_share,
)
from tinkex.types import ClientConfigResponse, ClientDynamicConfigResponse
from tinkex.wire import json_codec, routes
from tinkex.wire.bodies import AuthTokenRequest
from tinkex.wire.routes import MEDIA_JSON, MEDIA_PROTOBUF, MEDIA_TAR, Pool

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping

    from tinkex.clock import Clock
    from tinkex.config import Config
    from tinkex.transport.base import StreamedReply, Transport
    from tinkex.wire.routes import Route

ReqT = TypeVar("ReqT")
RepT = TypeVar("RepT")

_API_KEY = "X-API-Key"
_IDEMPOTENCY_KEY = "X-Idempotency-Key"
_RETRY_COUNT = "x-stainless-retry-count"
_TRACEPARENT = "traceparent"
_MEDIA = {"json": MEDIA_JSON, "protobuf": MEDIA_PROTOBUF, "tar": MEDIA_TAR}
# Asked with the credential itself: these come before there can be a token.
_RAW = frozenset({routes.CLIENT_CONFIG.name, routes.AUTH_TOKEN.name})
# The classes whose retry loop is `Api.call`.
_RETRIED = frozenset({"full", "submit"})
# What a reply says about itself; nothing else of its headers is kept in an error.
_KEPT_HEADERS = (
    "content-type", "content-length", "date", "retry-after", "retry-after-ms", "x-request-id",
    "x-should-retry",
)  # fmt: skip
_MAX_ERROR_TEXT = 8192


def connect(config: Config, transport: Transport, clock: Clock) -> Api:
    """An `Api` with the credentials the settings name; does no I/O."""
    return Api(config, transport, clock, Credentials(config, clock))


class Api:
    """The server, as far as one connection set can see it."""

    def __init__(
        self,
        config: Config,
        transport: Transport,
        clock: Clock,
        auth: Credentials,
        *,
        jitter: Callable[[], float] = random_share,
    ) -> None:
        # Mutable state: the server's flags (`follow` sets them), headers by the name of a route,
        # the number of the next idempotency key, and what was logged when.
        self.config = config
        self.transport = transport
        self.clock = clock
        self.auth = auth
        self.client_config = ClientConfigResponse()
        self.dynamic_config = ClientDynamicConfigResponse()
        self.notices = Notices(clock)
        self._jitter = jitter
        self._headers: dict[str, dict[str, str]] = {}
        self._own_trace = any(name.lower() == _TRACEPARENT for name in config.headers)
        self._key_prefix = f"tinkex-{os.urandom(12).hex()}"
        self._key_numbers = itertools.count()

    def follow(self, flags: ClientConfigResponse) -> None:
        """Obey the server's flags from now on, with the credentials that they ask for."""
        self.client_config = flags
        self.auth.follow(
            self._exchange,
            exchanging=flags.pjwt_auth_enabled,
            enforce_command=flags.pjwt_auth_enabled
            and flags.credential_default_source == "credential_cmd",
        )

    async def aclose(self) -> None:
        """Close the connections."""
        await self.transport.aclose()

    # -- one call -----------------------------------------------------------------------------

    async def call(
        self,
        route: Route[ReqT, RepT],
        request: ReqT | None = None,
        *,
        params: Mapping[str, str] | None = None,
        query: Mapping[str, object] | None = None,
        headers: Mapping[str, str] | None = None,
        body: bytes | None = None,
        deadline_s: float | None = None,
    ) -> RepT:
        """The answer of one endpoint, after as many attempts as the route's class allows.

        `body` replaces the encoding of `request`. `deadline_s` bounds attempts and waits together;
        0 means one attempt. Raises what the last attempt raised.
        """
        if body is None and route.request_encoding != "none":
            if route.request_encoding != "json":
                raise InputTypeError(f"{route.name} needs an encoded `body`", "body")
            if request is None:
                raise InputTypeError(f"{route.name} needs a request", "request")
            body = json_codec.encode(request)
        prepared = self._prepare(route, body, params, query, headers)
        own_key = _API_KEY in prepared.headers
        began = self.clock.now()
        # Made when it is needed: most calls have no deadline and do not fail.
        patience = None if deadline_s is None else _Patience(self, deadline_s, began)
        while True:
            try:
                fitted = prepared if patience is None else patience.fit(prepared)
                reply = await self._send(route, fitted, own_key)
                if not 200 <= reply.status < 300:
                    self.raise_for(reply, route, prepared)
                return self._decode(route, prepared, reply)
            except APIError as error:
                patience = patience or _Patience(self, deadline_s, began)
                decision = patience.judge(error, route, self._jitter)
                if decision.wait_s is None:
                    if patience.retries:
                        count = patience.retries + 1
                        error.add_note(f"gave up after {count} attempts: {decision.reason}")
                    raise
            # Outside the handler: an error of the next attempt must not drag this one along.
            self.notices.waiting(route.name, decision)
            await patience.wait(decision)

    def prepared(
        self, route: Route[Any, RepT], body: bytes, headers: Mapping[str, str] | None = None
    ) -> Callable[[int], Coroutine[Any, Any, RepT]]:
        """One request for several attempts, each called with the number of those before it.

        All of them carry the same idempotency key.
        """
        request = self._prepare(route, body, None, None, headers)

        async def attempt(retries: int) -> RepT:
            if retries:
                cast("dict[str, str]", request.headers)[_RETRY_COUNT] = str(retries)
            reply = await self._send(route, request, own_key=False)
            if not 200 <= reply.status < 300:
                self.raise_for(reply, route, request)
            return self._decode(route, request, reply)

        return attempt

    async def send(
        self,
        route: Route[Any, Any],
        body: bytes | None,
        *,
        params: Mapping[str, str] | None = None,
        query: Mapping[str, object] | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> Reply:
        """One attempt; any status is a reply. Raises connection and credential errors only."""
        prepared = self._prepare(route, body, params, query, headers, timeout_s)
        return await self._send(route, prepared, _API_KEY in prepared.headers)

    @asynccontextmanager
    async def stream(
        self,
        route: Route[Any, Any],
        body: bytes | None = None,
        *,
        params: Mapping[str, str] | None = None,
        query: Mapping[str, object] | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> AsyncGenerator[StreamedReply]:
        """One attempt whose body is read as it comes; any status is a reply."""
        prepared = self._prepare(route, body, params, query, headers, timeout_s)
        headers = cast("dict[str, str]", prepared.headers)
        headers[_API_KEY] = await self.auth.header_value(raw=route.name in _RAW)
        async with self.transport.stream(prepared) as reply:
            if meter.on:
                meter.request(route.name, reply.status)
            yield reply

    def raise_for(
        self, reply: Reply, route: Route[Any, Any], request: HttpRequest | None = None
    ) -> None:
        """Nothing for a 2xx; otherwise the error of the tree that the status stands for."""
        status = reply.status
        if 200 <= status < 300:
            return
        path = request.path if request is not None else route.path
        info = RequestInfo(route.method, urls.join(self.config.base_url, path))
        if status == 400 and _from_the_edge(reply):
            raise APIConnectionError(
                info, f"Something in front of {self.config.base_url} refused the connection (400)."
            )
        text = self.scrub(reply.body[:_MAX_ERROR_TEXT].decode("utf-8", "replace"))
        kept = {name: reply.headers[name] for name in _KEPT_HEADERS if name in reply.headers}
        error = status_error(ResponseInfo(status, kept, text, info), _error_body(text))
        error.request_id = reply.headers.get("x-request-id")
        if status == 401:
            error.add_note("Check TINKER_API_KEY (or api_key=): the server refused the credential.")
        raise error

    # -- the parts of a call ------------------------------------------------------------------

    def _prepare(
        self,
        route: Route[Any, Any],
        body: bytes | None,
        params: Mapping[str, str] | None,
        query: Mapping[str, object] | None,
        headers: Mapping[str, str] | None,
        timeout_s: float | None = None,
    ) -> HttpRequest:
        """What stays the same over all attempts of one call."""
        merged = dict(self._headers.get(route.name) or self._route_headers(route))
        traceparent = current_traceparent()
        if traceparent is not None and not self._own_trace:
            merged[_TRACEPARENT] = traceparent
        if route.method != "GET" and route.retry != "poll":
            # One for a call and its retries; the process id keeps it unique across forks.
            key = f"{self._key_prefix}-{os.getpid()}-{next(self._key_numbers)}"
            merged[_IDEMPOTENCY_KEY] = key
        if headers:
            merged.update(headers)
        return HttpRequest(
            method=route.method,
            path=route.url(**(params or {})) if params or "{" in route.path else route.path,
            pool=route.pool,
            timeout_s=route.timeout_s if timeout_s is None else timeout_s,
            query=urls.encode_query(query) if query else "",
            headers=merged,
            body=body,
            follow_redirects=route.follow_redirects,
        )

    def _route_headers(self, route: Route[Any, Any]) -> dict[str, str]:
        """The headers of every call of a route, put together once."""
        headers = {
            "Accept": MEDIA_JSON,
            "Accept-Encoding": "gzip, deflate, zstd",
            "User-Agent": user_agent(),
        }
        if route.method != "GET":
            headers["Content-Type"] = _MEDIA.get(route.request_encoding, MEDIA_JSON)
        if route.pool is Pool.REST:
            headers["x-sdk-version"] = PROTOCOL_VERSION
        # The caller's own win, whatever their case.
        extra = self.config.headers
        taken = {name.lower() for name in extra}
        kept = {name: value for name, value in headers.items() if name.lower() not in taken}
        made = self._headers[route.name] = {**kept, **extra}
        return made

    async def _send(self, route: Route[Any, Any], request: HttpRequest, own_key: bool) -> Reply:
        """One attempt. The request was prepared for this call alone, so its headers may change."""
        headers = cast("dict[str, str]", request.headers)
        # A call that reads another account's weights brings that account's credential along.
        if not own_key:
            constant = self.auth.constant
            headers[_API_KEY] = constant or await self.auth.header_value(raw=route.name in _RAW)
        try:
            reply = await self.transport.send(request)
        except APIConnectionError as error:
            self.notices.unreachable(route.name, error)
            raise
        if meter.on:
            meter.request(route.name, reply.status)
        note = reply.headers.get("x-deprecation-note")
        if note is not None:
            self.notices.deprecated(note, reply.headers.get("x-deprecation-level", ""))
        return reply

    def _decode(self, route: Route[Any, RepT], request: HttpRequest, reply: Reply) -> RepT:
        if route.reply is None:
            return None  # pyright: ignore[reportReturnType] - RepT is None for these routes
        try:
            return json_codec.decode(route.reply, reply.body)
        except InputError as error:
            text = self.scrub(reply.body[:_MAX_ERROR_TEXT].decode("utf-8", "replace"))
            info = RequestInfo(route.method, urls.join(self.config.base_url, request.path))
            response = ResponseInfo(reply.status, {}, text, info)
            raise APIResponseValidationError(
                response, text, f"The answer to {route.name} breaks the protocol: {error}"
            ) from error

    async def _exchange(self) -> str:
        return (await self.call(routes.AUTH_TOKEN, AuthTokenRequest())).jwt

    def scrub(self, text: str) -> str:
        """A server may quote the credential it refuses; errors must not."""
        for secret in self.auth.secrets():
            text = text.replace(secret, "***")
        return text


class _Patience:
    """The time that one call has left: a budget for everything, and another one for 402 pauses."""

    def __init__(self, api: Api, deadline_s: float | None, began: float) -> None:
        # Mutable state: retries made, and seconds spent in 402 pauses.
        self._clock = api.clock
        self._deadline_s = deadline_s
        self._limits = RetryLimits(
            api.config.submit_deadline_s,
            api.client_config.billing_exception_max_pause_duration_sec,
        )
        self._started = began
        self._billing_s = 0.0
        self.retries = 0

    def fit(self, request: HttpRequest) -> HttpRequest:
        """The request of the next attempt, which may take no longer than what is left."""
        if not self.retries and not self._deadline_s:
            return request
        headers, timeout_s = dict(request.headers), request.timeout_s
        if self.retries:
            headers[_RETRY_COUNT] = str(self.retries)
        if self._deadline_s:
            left_s = self._deadline_s - (self._clock.now() - self._started)
            timeout_s = min(timeout_s, max(left_s, 1.0))
        return replace(request, headers=headers, timeout_s=timeout_s)

    def judge(
        self, error: APIError, route: Route[Any, Any], jitter: Callable[[], float]
    ) -> Decision:
        if route.retry not in _RETRIED:
            return Decision(None, "the caller decides")
        elapsed_s = self._clock.now() - self._started
        limits, progress = self._limits, RetryProgress(self.retries, elapsed_s, self._billing_s)
        if self._deadline_s is not None:
            # A deadline of the caller also ends a 402 pause.
            limits = RetryLimits(self._deadline_s, self._deadline_s - elapsed_s)
            progress = RetryProgress(self.retries, elapsed_s)
        return decide(
            outcome_of(error),
            route.retry,
            progress,
            limits,
            jitter=jitter(),
            wall=self._clock.wall(),
        )

    async def wait(self, decision: Decision) -> None:
        wait_s = decision.wait_s or 0.0
        await self._clock.sleep(wait_s)
        if decision.billing:
            self._billing_s += wait_s
        self.retries += 1


def _from_the_edge(reply: Reply) -> bool:
    """Whether a 400 comes from a proxy: the API always sends a body and says how long it is."""
    if not reply.body:
        return True
    if reply.headers.get("content-length", "0") != "0":
        return False
    return not isinstance(_error_body(reply.body.decode("utf-8", "replace")), dict)


def _error_body(text: str) -> object:
    try:
        return msgspec.json.decode(text)
    except msgspec.MsgspecError:
        return text

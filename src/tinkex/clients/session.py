"""A session: the server-side life of one `ServiceClient`.

Owns the session id, the heartbeat, the counters whose numbers must never repeat, the cancel
queue, and the order in which all of it ends. User-facing clients hold a `Lease`; when the last
one is dropped without `close()`, the session closes its connections by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import weakref
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from tinkex._version import PROTOCOL_VERSION
from tinkex.clients.connection import Connection, Once
from tinkex.clients.dispatch import Dispatcher
from tinkex.clients.notices import QueueNotices
from tinkex.clients.operations import Operations
from tinkex.clock import SystemClock, time_limit
from tinkex.errors import APIError, ClosedError, PromiseLostError, TinkerError
from tinkex.futures.budget import ByteBudget
from tinkex.futures.future import Promise
from tinkex.futures.lifecycle import Lifecycle, Wire
from tinkex.metrics import meter
from tinkex.transport.sampling_pause import Pauses, process_pauses
from tinkex.types import (
    ClientSessionFinishErrored,
    ClientSessionFinishInterrupted,
    ClientSessionFinishSuccess,
    CreateSessionRequest,
    SessionHeartbeatRequest,
    Usage,
)
from tinkex.wire import bodies, json_codec, routes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tinkex.clients.portal import Portal
    from tinkex.clock import Clock
    from tinkex.config import Config
    from tinkex.transport.api import Api
    from tinkex.transport.base import Transport
    from tinkex.wire.routes import RequestType, Route

_log = logging.getLogger(__name__)
_REASONS = {
    "success": ClientSessionFinishSuccess(),
    "errored": ClientSessionFinishErrored(),
    "interrupted": ClientSessionFinishInterrupted(),
}
_CONSOLE = "https://tinker.thinkingmachines.ai"
_HEARTBEAT_S = 10.0
_HEARTBEAT_WARNING_S = 120.0
_WARNING_EVERY_S = 60.0
# Saying goodbye must not keep anybody waiting: the server notices missing heartbeats anyway.
_FINISH_S = 10.0


class Session(Connection):
    """A connection set with a session on it; created lazily by the first call that needs it."""

    def __init__(
        self,
        config: Config,
        *,
        user_metadata: Mapping[str, Any] | None = None,
        display_name: str | None = None,
        project_id: str | None = None,
        session_id: str | None = None,
        clock: Clock | None = None,
        portal: Portal | None = None,
        transport: Callable[[Config, Clock], Transport] | None = None,
    ) -> None:
        super().__init__(config, clock=clock, portal=portal, transport=transport)
        # Mutable state: the id once the server gave it, counters, totals, the custom losses made
        # so far, and requests whose callers have gone away. A given `session_id` is shared with
        # another process, which created it and will finish it.
        self.user_metadata = dict(user_metadata or {})
        self.display_name = display_name
        self.project_id = project_id
        self.session_id = session_id
        self.shared = session_id is not None
        self.finished = False
        self.usage = Usage()
        self.training_bytes = ByteBudget(0)
        self.sampling_bytes = ByteBudget(0)
        # A server counts requests by key, so samplers of other clients share the pause.
        pauses = process_pauses() if isinstance(self.clock, SystemClock) else Pauses(self.clock)
        key = config.api_key or config.stored_key or config.credential_cmd
        self.pause = pauses.get(config.base_url, key)
        self._dispatcher: Dispatcher | None = None
        self._wire: Wire | None = None
        self._opened = Once(self.portal, self._open)
        self._model_seq_ids = itertools.count()
        self._sampling_session_seq_ids = itertools.count()
        self._custom_loss_seq_ids = itertools.count()
        self.custom_losses: set[str] = set()
        self._abandoned: set[str] = set()
        self._cancelling = False

    def usable(self) -> bool:
        """False once it was closed, or after a fork."""
        return not self.closed and self.portal.alive()

    def lease(self) -> Lease:
        """What a user-facing client holds."""
        return Lease(self)

    @property
    def is_open(self) -> bool:
        """Whether `opened()` would return at once."""
        return self._dispatcher is not None and not self.closed

    async def opened(self) -> Api:
        """A session exists and its heartbeat runs."""
        if self.closed:
            raise ClosedError("ServiceClient is closed")
        await self._opened.get()
        return self.api

    @property
    def dispatcher(self) -> Dispatcher:
        """The way out for samples; only after `opened()`."""
        if self._dispatcher is None:
            raise ClosedError("the client is not connected yet")
        return self._dispatcher

    @property
    def wire(self) -> Wire:
        """What the lifecycles of all calls share; only after `opened()`."""
        if self._wire is None:
            raise ClosedError("the client is not connected yet")
        return self._wire

    async def request(
        self, route: Route[Any, Any], request: Any, subject: str, kind: RequestType
    ) -> Any:
        """Send a request outside any run's order and wait for its result."""
        notices = QueueNotices(subject, self.clock, telemetry=self.telemetry)
        standing: Promise[None] = Promise(now=self.clock.now)
        life = Lifecycle(self.wire, route, kind, standing, notices)
        post = self.api.prepared(route, json_codec.encode(request))
        try:
            async with self.wire.limit(subject, self.clock.now()):
                ticket = await life.submit(post)
                return (await life.finish(ticket, lambda: life.submit(post))).value
        finally:
            standing.finish(None)

    async def _open(self) -> None:
        api = await self.connected()
        flags = api.client_config
        self.training_bytes = ByteBudget(flags.fwdbwd_dispatch_bytes_semaphore_size)
        self.sampling_bytes = ByteBudget(flags.sample_dispatch_bytes_semaphore_size)
        if self.session_id is None:
            await self._create(api)
        self._wire = Wire(
            api,
            self.clock,
            ByteBudget(flags.inflight_response_bytes_semaphore_size),
            self.cancel_on_server,
            silence_s=self.config.silence_deadline_s,
            submit_s=self.config.submit_deadline_s,
            total_s=self.config.total_deadline_s,
        )
        if self.telemetry is not None:
            self.telemetry.session_id = self.session_id
            self.telemetry.session_start()
        self._dispatcher = Dispatcher(self)
        self.spawn_loop(self._heartbeat())
        self.spawn_loop(self.refresh_flags())

    async def _create(self, api: Api) -> None:
        created = await api.call(
            routes.CREATE_SESSION,
            CreateSessionRequest(
                tags=list(self.config.tags),
                user_metadata=self.user_metadata,
                sdk_version=PROTOCOL_VERSION,
                project_id=self.project_id,
                display_name=self.display_name,
            ),
            deadline_s=self.config.bootstrap_deadline_s,
        )
        self.session_id = created.session_id
        for level, message in (
            (logging.INFO, created.info_message),
            (logging.WARNING, created.warning_message),
            (logging.ERROR, created.error_message),
        ):
            if message:
                _log.log(level, "%s", message)
        _log.info("session %s created", self.session_id)

    async def _heartbeat(self) -> None:
        """Beat until the session is over; a lost beat is no reason to stop."""
        assert self.session_id is not None
        request = SessionHeartbeatRequest(session_id=self.session_id)
        last_success = due = self.clock.now()
        last_warning = float("-inf")
        while True:
            # Counted from when a beat was due, not from when it ended: beats do not drift.
            due = max(due + _HEARTBEAT_S, self.clock.now())
            await self.clock.sleep(due - self.clock.now())
            try:
                await self.api.call(routes.SESSION_HEARTBEAT, request)
                last_success = self.clock.now()
            except PromiseLostError:
                self.finished = True
                _log.info("session %s is over on the server", self.session_id)
                return
            except TinkerError as error:
                now = self.clock.now()
                missed_s = now - last_success
                if missed_s > _HEARTBEAT_WARNING_S and now - last_warning >= _WARNING_EVERY_S:
                    last_warning = now
                    _log.warning(
                        "session %s: no heartbeat got through for %.0f s (%s); the server may "
                        "end the session",
                        self.session_id,
                        missed_s,
                        error,
                    )

    # -- numbers ------------------------------------------------------------------------------

    def next_model_seq_id(self) -> int:
        """Names one training run of this session, for ever."""
        return next(self._model_seq_ids)

    def next_sampling_session_seq_id(self) -> int:
        """Names one sampler of this session, for ever."""
        return next(self._sampling_session_seq_ids)

    def next_custom_loss_seq_id(self) -> int:
        """Names one uploaded loss of this session, for ever."""
        return next(self._custom_loss_seq_ids)

    def add_usage(self, usage: Usage) -> None:
        """Count a result into the session's totals."""
        self.usage = self.usage + usage
        if meter.on:
            meter.usage(usage)

    # -- abandoned samples --------------------------------------------------------------------

    def cancel_on_server(self, request_id: str) -> None:
        """On the loop: tell the server, soon and in batches, that nobody waits any more."""
        if self.closed or not self.api.dynamic_config.sample_cancel_enabled:
            return
        self._abandoned.add(request_id)
        if not self._cancelling:
            self._cancelling = True
            self.portal.spawn(self._cancel_all())

    async def _cancel_all(self) -> None:
        try:
            while self._abandoned:
                size = max(self.api.dynamic_config.sample_cancel_max_batch_size, 1)
                batch = [self._abandoned.pop() for _ in range(min(size, len(self._abandoned)))]
                await asyncio.gather(*(self._cancel_one(request_id) for request_id in batch))
        finally:
            self._cancelling = False

    async def _cancel_one(self, request_id: str) -> None:
        try:
            await self.api.call(
                routes.CANCEL_FUTURE, bodies.CancelFutureRequest(request_id=request_id)
            )
        except APIError as error:
            _log.debug("%s could not be cancelled on the server: %s", request_id, error)

    # -- the end ------------------------------------------------------------------------------

    async def close(self, promise: Promise[None], reason: str, detail: str | None) -> None:
        """End everything: pending calls, then the session, the sockets, and the loop."""
        self.closed = True
        await self.portal.end_work(ClosedError("Internal client holder is closed"), keep=promise)
        if self._api is not None:
            async with time_limit(self.clock, _FINISH_S):
                await self._finish(reason, detail)
            if self.telemetry is not None and self.session_id is not None:
                self.telemetry.session_end()
            await self.disconnect()
        promise.finish(None)
        self.portal.stop()

    async def _finish(self, reason: str, detail: str | None) -> None:
        if self.session_id is None or self.shared or self.finished:
            return
        try:
            await self.api.call(
                routes.FINISH_SESSION,
                bodies.FinishSessionRequest(reason=_REASONS[reason], detail=detail),
                params={"session": self.session_id},
                deadline_s=min(_FINISH_S, self.config.submit_deadline_s),
            )
        except TinkerError as error:
            _log.warning("session %s was not finished on the server: %s", self.session_id, error)

    def abandon(self) -> None:
        """Nobody can use this session any more: let go of its connections, from any thread."""
        if self.closed or not self.portal.started():
            return
        with contextlib.suppress(ClosedError):
            self.portal.post(self._let_go)

    def _let_go(self) -> None:
        if not self.closed:
            promise: Promise[None] = self.operations.promise()
            self.finished = True  # dropped, not closed: the server sees the heartbeat end
            self.portal.spawn(self.close(promise, "interrupted", None))


class Lease:
    """Keeps a session alive; held by clients and by their pending futures."""

    def __init__(self, session: Session) -> None:
        self.session = session
        # Not at interpreter exit: the loop thread is gone by then, and so are its sockets.
        weakref.finalize(self, session.abandon).atexit = False

    def operations(self) -> Operations:
        """For one client: its promises keep the session alive."""
        session = self.session
        return Operations(session.portal, session.clock, keep_alive=self, on_error=session.report)


# -- links into the vendor's web console; built, never fetched --------------------------------


def session_url(session_id: str | None) -> str:
    """The page of a session, or the list of sessions before there is one."""
    return f"{_CONSOLE}/sessions/{session_id}" if session_id else f"{_CONSOLE}/sessions"


def training_run_url(training_run_id: str) -> str:
    """The page of a training run."""
    return f"{_CONSOLE}/training_runs/{quote(training_run_id, safe=':')}"

"""A session: what the server keeps for one `ServiceClient`.

Owns the session id, the heartbeat, the counters whose numbers must never repeat, and the queue of
requests to cancel on the server.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from tinkex._version import PROTOCOL_VERSION
from tinkex.clients.connection import Connection, Once
from tinkex.clock import SystemClock, time_limit
from tinkex.errors import APIError, ClosedError, PromiseLostError, TinkerError
from tinkex.futures.admission import ByteBudget, Pauses, SampleAdmission, process_pauses
from tinkex.futures.future import Promise
from tinkex.futures.lifecycle import CallContext, Lifecycle
from tinkex.futures.queue_notices import QueueNotices
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
# Finishing the session must not delay `close()`: the server notices missing heartbeats anyway.
_FINISH_S = 10.0


class Session(Connection):
    """A connection set with a session on it; created lazily by the first call that needs it."""

    _closed_message = "Internal client holder is closed"

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
        # so far, and requests whose callers were cancelled. A given `session_id` is shared with
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
        # What calls share; set by `opened()`.
        self.context: CallContext | None = None
        self.admission: SampleAdmission | None = None
        self._opened = Once(self.portal, self._open)
        # Each names a training run, a sampler or a custom loss of this session; none is used twice.
        self.model_seq_ids = itertools.count()
        self.sampling_session_seq_ids = itertools.count()
        self.custom_loss_seq_ids = itertools.count()
        self.custom_losses: set[str] = set()
        self._abandoned: set[str] = set()
        self._cancelling = False

    def usable(self) -> bool:
        """False once it was closed, or after a fork."""
        return not self.closed and self.portal.alive()

    async def opened(self) -> Api:
        """A session exists and its heartbeat runs."""
        if self.closed:
            raise ClosedError("ServiceClient is closed")
        await self._opened.get()
        return self.api

    async def request(
        self, route: Route[Any, Any], request: Any, subject: str, kind: RequestType
    ) -> Any:
        """Send a request outside any run's order and wait for its result."""
        context = self.context
        assert context is not None  # `opened()` comes first
        notices = QueueNotices(subject, self.clock, telemetry=self.telemetry)
        # No caller holds its future; the lifecycle writes the state of the call to it.
        promise: Promise[None] = Promise(now=self.clock.now)
        life = Lifecycle(context, route, kind, promise, notices.observe)
        post = context.api.prepared(route, json_codec.encode(request))
        try:
            async with context.limit(subject, self.clock.now()):
                ticket = await life.submit(post)
                return (await life.finish(ticket, lambda: life.submit(post))).value
        finally:
            promise.finish(None)

    async def _open(self) -> None:
        api = await self.connected()
        flags = api.client_config
        self.training_bytes = ByteBudget(flags.fwdbwd_dispatch_bytes_semaphore_size)
        self.sampling_bytes = ByteBudget(flags.sample_dispatch_bytes_semaphore_size)
        if self.session_id is None:
            await self._create(api)
        self.context = CallContext(
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
        self.admission = SampleAdmission(self.clock, self.pause, self.sampling_bytes)
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
        """Send heartbeats until the session is over; a lost one does not stop them."""
        assert self.session_id is not None
        request = SessionHeartbeatRequest(session_id=self.session_id)
        last_success = due = self.clock.now()
        last_warning = float("-inf")
        while True:
            # Counted from when the last one was due, not from when it ended: they do not drift.
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

    # -- abandoned samples --------------------------------------------------------------------

    def cancel_on_server(self, request_id: str) -> None:
        """On the loop: cancel a request of a cancelled caller on the server, soon, in batches."""
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

    async def _finish_session(self, reason: str | None, detail: str | None) -> None:
        # A dropped session is not finished: the server sees its heartbeat end.
        if reason is not None:
            async with time_limit(self.clock, _FINISH_S):
                await self._finish(reason, detail)
        if self.telemetry is not None and self.session_id is not None:
            self.telemetry.session_end()

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


# -- links into the vendor's web console; built, never fetched --------------------------------


def session_url(session_id: str | None) -> str:
    """The page of a session, or the list of sessions before there is one."""
    return f"{_CONSOLE}/sessions/{session_id}" if session_id else f"{_CONSOLE}/sessions"


def training_run_url(training_run_id: str) -> str:
    """The page of a training run."""
    return f"{_CONSOLE}/training_runs/{quote(training_run_id, safe=':')}"

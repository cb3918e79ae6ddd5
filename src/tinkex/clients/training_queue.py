"""The order of one training client's calls.

Calls are sent strictly in the order in which they were made, from whatever thread; results are
waited for concurrently. A call takes its `seq_id`s when it is sent, not when it is made, so a call
that is cancelled while it waits leaves no gap. A number that the server has definitely not accepted
is used again; one whose fate is unknown is released on servers that can do that. A call that
fails does not stop the next one.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import heapq
import logging
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tinkex.errors import APIError, ClosedError
from tinkex.futures.lifecycle import Lifecycle
from tinkex.spans import span
from tinkex.wire import bodies, compression, routes

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from tinkex.clients.portal import Operations
    from tinkex.clients.session import Session
    from tinkex.futures.call_results import Ticket, TimedResult
    from tinkex.futures.future import APIFuture, Promise
    from tinkex.futures.lifecycle import Post
    from tinkex.futures.queue_notices import QueueNotices

_log = logging.getLogger(__name__)
# Above this a body is compressed off the loop, where heartbeats must not wait for it.
_COMPRESS_ASIDE_BYTES = 1 << 20
# Chunks of one call that are sent in parallel; their bytes have a budget of their own.
_CHUNKS_AT_ONCE = 16

# The place that the custom loss which runs now has reserved for its backward pass.
inside: contextvars.ContextVar[QueuedCall | None] = contextvars.ContextVar("place", default=None)


@dataclass(frozen=True, slots=True)
class Outgoing:
    """One request of a call. `encode(seq_id=...)` gives its body."""

    route: routes.Route[Any, Any]
    request_type: routes.RequestType
    encode: Callable[..., bytes]
    size_bytes: int = 0


@dataclass(slots=True)
class _Sent:
    """One request on its way: its number, its lifecycle, and its ticket once accepted."""

    request: Outgoing
    seq_id: int
    life: Lifecycle
    post: Post | None = None
    ticket: Ticket | None = None


@dataclass(slots=True, eq=False)
class QueuedCall:
    """A call: its requests (None while only its place is reserved), and how results are folded."""

    promise: Promise[Any]
    context: contextvars.Context
    made_at: float
    requests: Sequence[Outgoing] | None = None
    fold: Callable[[list[TimedResult]], Any] | None = None
    sent: list[_Sent] = field(default_factory=list[_Sent])


class TrainingQueue:
    """The queue of one training client."""

    def __init__(
        self,
        session: Session,
        operations: Operations,
        notices: QueueNotices,
        model_id: str,
        attached_at: int | None = None,
    ) -> None:
        # Mutable state, touched on the loop only: calls that wait, whether a task sends them, how
        # many were queued and sent so far; the next number, smaller ones that are free again, and
        # those whose fate is unknown; whether the server can release those. Number 0 is the
        # creation of the model; a client that attached to one begins where the server says, and
        # names its session, so that the server can tell it from the program before it.
        assert session.context is not None  # a training client is made on an open session
        self._session = session
        self._context = session.context
        self._operations = operations
        self._notices = notices
        self._model_id = model_id
        self._waiting: deque[QueuedCall] = deque()
        self._sending = False
        self._queued = 0
        self._sent = 0
        self._next_seq_id = 1 if attached_at is None else attached_at
        self._headers = (
            {} if attached_at is None else {routes.SESSION_HEADER: str(session.session_id)}
        )
        self._free: list[int] = []
        self._unresolved: set[int] = set()
        self._releases = True

    # -- from any thread ------------------------------------------------------------------------

    @property
    def next_seq_id(self) -> int:
        """The number of the next request that is sent."""
        return self._free[0] if self._free else self._next_seq_id

    @property
    def expected_seq_id(self) -> int:
        """The number that a call made now gets if none before it fails; read without a lock."""
        return self._next_seq_id + self._queued - self._sent

    def take(
        self, requests: Sequence[Outgoing], fold: Callable[[list[TimedResult]], Any]
    ) -> APIFuture[Any]:
        """Queue a call behind all earlier ones; returns at once.

        Calls made by a custom loss are sent before its backward pass, which waits for them.
        """
        promise = self._operations.promise(parts=len(requests))
        call = QueuedCall(promise, contextvars.copy_context(), promise.operation.since)
        call.requests, call.fold = requests, fold
        self._operations.portal.post(functools.partial(self._queue, call, inside.get()), promise)
        return promise.future

    def reserve(self) -> QueuedCall:
        """Keep a place in the order for a call whose requests are not known yet."""
        promise = self._operations.promise()
        call = QueuedCall(promise, contextvars.copy_context(), promise.operation.since)
        self._operations.portal.post(functools.partial(self._queue, call, None), promise)
        return call

    def fill(
        self,
        call: QueuedCall,
        requests: Sequence[Outgoing],
        fold: Callable[[list[TimedResult]], Any],
    ) -> APIFuture[Any]:
        """Send these requests in the place that was reserved."""

        def filled() -> None:
            call.requests, call.fold = requests, fold
            self._wake()

        if len(requests) > 1:
            call.promise.split(len(requests))
        self._operations.portal.post(filled, call.promise)
        return call.promise.future

    def give_up(self, call: QueuedCall) -> None:
        """Free the place that was reserved, unless it was filled."""

        def free() -> None:
            if call.requests is None:
                call.promise.future.cancel()
                self._wake()

        with contextlib.suppress(ClosedError):  # a closed client sends nothing
            self._operations.portal.post(free)

    # -- on the loop ----------------------------------------------------------------------------

    def _queue(self, call: QueuedCall, before: QueuedCall | None) -> None:
        place = self._queued
        self._queued += 1
        if before is not None and before in self._waiting:
            self._waiting.insert(self._waiting.index(before), call)
        else:
            self._waiting.append(call)
        call.promise.operation.ahead = lambda: max(place - self._sent, 0)
        self._wake()

    def _wake(self) -> None:
        if not self._sending:
            self._sending = True
            self._operations.portal.spawn(self._send_all())

    async def _send_all(self) -> None:
        try:
            while self._waiting:
                call = self._waiting[0]
                if not call.promise.future.done():
                    if call.requests is None:
                        return  # `fill` or `give_up` wakes the queue again
                    self._waiting.popleft()
                    if self._unresolved:
                        await self._release_unresolved()
                    await self._send(call)
                else:
                    self._waiting.popleft()
                self._sent += 1
        finally:
            self._sending = False

    async def _send(self, call: QueuedCall) -> None:
        """Submit a call in a task of its own; returns when its numbers are settled."""
        settled = asyncio.Event()
        task = self._operations.carry(
            call.promise, functools.partial(self._run, call, settled), call.context
        )
        # A task that is cancelled before it runs must not stop the queue.
        task.add_done_callback(lambda _: settled.set())
        await settled.wait()

    async def _run(self, call: QueuedCall, settled: asyncio.Event, promise: Promise[Any]) -> Any:
        assert call.requests is not None
        assert call.fold is not None
        name = call.requests[0].route.name
        with span(f"training.{name}", model_id=self._model_id) as step:
            async with self._context.limit(name, call.made_at):
                try:
                    with span("training.submit", requests=len(call.requests)):
                        await self._submit(call, call.requests)
                finally:
                    settled.set()
                first = call.sent[0]
                assert first.ticket is not None
                step.note(seq_id=first.seq_id, request_id=first.ticket.request_id)
                promise.note(state="running", request_id=first.ticket.request_id)
                with span("training.wait"):
                    if len(call.sent) == 1:
                        return call.fold([await self._result(call, 0)])
                    results = [self._result(call, index) for index in range(len(call.sent))]
                    return call.fold(await bounded(results))

    async def _submit(self, call: QueuedCall, requests: Sequence[Outgoing]) -> None:
        context = self._context
        call.sent = []
        for request in requests:
            if self._free:
                seq_id = heapq.heappop(self._free)
            else:
                seq_id = self._next_seq_id
                self._next_seq_id += 1
            life = Lifecycle(
                context, request.route, request.request_type, call.promise, self._notices.observe
            )
            call.sent.append(_Sent(request, seq_id, life))
        try:
            if len(requests) > 1 and context.api.client_config.parallel_fwdbwd_chunks:
                # The server starts on the whole range when its first number arrives, so that one
                # is sent last.
                await bounded([self._post(one) for one in call.sent[1:]], _CHUNKS_AT_ONCE)
                await self._post(call.sent[0])
            else:
                for one in call.sent:
                    await self._post(one)
        except BaseException:
            self._give_back(call.sent)
            raise

    async def _post(self, one: _Sent) -> Ticket:
        """Submit one request, or submit it again with the same bytes."""
        room = functools.partial(self._session.training_bytes.reserve, one.request.size_bytes)
        one.ticket = await one.life.submit(functools.partial(self._attempt, one), room)
        return one.ticket

    async def _attempt(self, one: _Sent, retries: int) -> Any:
        if one.post is None:
            # Inside the byte budget, and only once: what is sent again is what was sent.
            api, route = self._context.api, one.request.route
            body, headers = one.request.encode(seq_id=one.seq_id), self._headers
            if route.request_encoding == "protobuf" and api.client_config.proto_compress_fwdbwd:
                body, headers = await _compress(body), {**headers, "Content-Encoding": "zstd"}
            one.post = api.prepared(route, body, headers)
        return await one.post(retries)

    async def _result(self, call: QueuedCall, index: int) -> TimedResult:
        one = call.sent[index]
        assert one.ticket is not None
        result = await one.life.finish(one.ticket, functools.partial(self._post, one))
        one.post = None  # the body is not needed any more
        if call.promise.operation.parts:
            call.promise.finish_part(index, result.value)
        return result

    # -- numbers --------------------------------------------------------------------------------

    def _give_back(self, sent: list[_Sent]) -> None:
        """Free the numbers of a call that failed half-way: the server must not wait for any."""
        for one in sent:
            if one.life.fate == "accepted":
                if one.ticket is not None:
                    self._context.cancel(one.ticket.request_id)
            elif one.life.fate == "unknown":
                self._unresolved.add(one.seq_id)
            else:
                heapq.heappush(self._free, one.seq_id)

    async def _release_unresolved(self) -> None:
        """Release numbers whose fate is unknown, on servers that can do that."""
        numbers = sorted(self._unresolved)
        if self._releases:
            request = bodies.ReleaseNumbersRequest(model_id=self._model_id, seq_ids=numbers)
            try:
                await self._context.api.call(
                    routes.RELEASE_NUMBERS, request, headers=self._headers, deadline_s=0.0
                )
            except APIError as error:
                _log.debug("numbers %s were not released: %s", numbers, error)
                if getattr(error, "status_code", 0) not in (404, 405, 501):
                    return  # the server may be unreachable: the next call tries again
                self._releases = False
        self._unresolved.difference_update(numbers)


async def _compress(body: bytes) -> bytes:
    if len(body) < _COMPRESS_ASIDE_BYTES:
        return compression.compress(body)
    return await asyncio.to_thread(compression.compress, body)


async def bounded(
    work: Sequence[Coroutine[Any, Any, Any]], at_once: int | None = None
) -> list[Any]:
    """Results in order, so many at a time; the first error cancels the rest and is raised."""
    if len(work) == 1:
        return [await work[0]]
    places = asyncio.Semaphore(at_once or len(work))

    async def run(one: Coroutine[Any, Any, Any]) -> Any:
        async with places:
            return await one

    tasks = [asyncio.ensure_future(run(one)) for one in work]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for one in work:
            one.close()  # those that never started
        raise

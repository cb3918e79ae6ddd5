"""Turn order of one training client.

Calls are sent strictly in the order in which they were made, from whatever thread; results are
waited for concurrently. A turn takes its `seq_id`s when it is sent, not when it is called, so a
call that is cancelled while it waits leaves no gap, and whatever happens to a turn, the next one
goes ahead.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tinkex.errors import PromiseLostError
from tinkex.futures.poller import Ticket
from tinkex.spans import span
from tinkex.wire import compression, routes

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from tinkex.clients.operations import Operations
    from tinkex.clients.session import Session
    from tinkex.futures.future import APIFuture, Promise
    from tinkex.futures.poller import Result
    from tinkex.wire.results import Pending

# A promise can be lost to a restart, so the request is sent again; not for ever.
_RESENDS = 3
# Above this a body is compressed off the loop, where heartbeats must not wait for it.
_COMPRESS_ASIDE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Outgoing:
    """One request of a turn. `encode` gives the same bytes for the same `seq_id` every time."""

    route: routes.Route[Any, Any]
    request_type: routes.RequestType
    encode: Callable[[int], bytes]
    size_bytes: int = 0


@dataclass(slots=True)
class Turn:
    """A call: its requests, and how their results become its own."""

    requests: Sequence[Outgoing]
    fold: Callable[[list[Result]], Any]
    promise: Promise[Any]
    context: contextvars.Context
    first_seq_id: int = 0
    tickets: list[Ticket] = field(default_factory=list[Ticket])


class Turns:
    """The queue of one training client."""

    def __init__(
        self,
        session: Session,
        operations: Operations,
        observe: Callable[[Pending, Promise[Any]], None],
        model_id: str,
    ) -> None:
        # Mutable state, touched on the loop only: calls that wait, whether somebody is sending
        # them, how many were queued and sent so far, and the next number. Slot 0 is the creation
        # of the model.
        self._session = session
        self._operations = operations
        self._observe = observe
        self._model_id = model_id
        self._waiting: deque[Turn] = deque()
        self._sending = False
        self._queued = 0
        self._sent = 0
        self._next_seq_id = 1

    def take(
        self, requests: Sequence[Outgoing], fold: Callable[[list[Result]], Any]
    ) -> APIFuture[Any]:
        """Queue a call behind all earlier ones; returns at once."""
        promise = self._operations.promise(parts=len(requests))
        turn = Turn(requests, fold, promise, contextvars.copy_context())
        self._operations.post(promise, lambda: self._queue(turn))
        return promise.future

    def _queue(self, turn: Turn) -> None:
        place = self._queued
        self._queued += 1
        self._waiting.append(turn)
        turn.promise.standing.ahead = lambda: max(place - self._sent, 0)
        if not self._sending:
            self._sending = True
            self._operations.portal.spawn(self._send_all())

    async def _send_all(self) -> None:
        try:
            while self._waiting:
                turn = self._waiting.popleft()
                if not turn.promise.future.done():
                    await self._send(turn)
                self._sent += 1
        finally:
            self._sending = False

    async def _send(self, turn: Turn) -> None:
        """Submit one turn in a task of its own, so that cancelling it frees the queue."""
        turn.first_seq_id = self._next_seq_id
        self._next_seq_id += len(turn.requests)
        done = asyncio.Event()

        async def work(promise: Promise[Any]) -> Any:
            ids = {"model_id": self._model_id, "seq_id": turn.first_seq_id}
            with span(f"training.{turn.requests[0].route.name}", **ids) as step:
                try:
                    with span("training.submit", requests=len(turn.requests)):
                        await self._submit(turn)
                finally:
                    done.set()
                request_id = turn.tickets[0].request_id
                step.note(request_id=request_id)
                promise.note(state="running", request_id=request_id)
                try:
                    with span("training.wait"):
                        return await self._collect(turn)
                except asyncio.CancelledError:
                    # Withdrawn if it has not started; what runs already runs to its end.
                    for ticket in turn.tickets:
                        self._session.cancel_on_server(ticket.request_id)
                    raise

        task = self._operations.carry(turn.promise, work, turn.context)
        task.add_done_callback(lambda _: done.set())
        await done.wait()

    async def _submit(self, turn: Turn) -> None:
        numbered = [(turn.first_seq_id + i, request) for i, request in enumerate(turn.requests)]
        flags = self._session.api.client_config
        if len(numbered) > 1 and flags.parallel_fwdbwd_chunks:
            # The server starts on the whole range when its first number arrives, so that one
            # goes out last.
            rest = await all_or_first_error([self._post(*item) for item in numbered[1:]])
            turn.tickets = [await self._post(*numbered[0]), *rest]
        else:
            turn.tickets = [await self._post(*item) for item in numbered]

    async def _post(self, seq_id: int, request: Outgoing) -> Ticket:
        session = self._session
        asked = session.clock.now()
        async with session.training_bytes.reserve(request.size_bytes):
            body, headers = request.encode(seq_id), {}
            if (
                request.route.request_encoding == "protobuf"
                and session.api.client_config.proto_compress_fwdbwd
            ):
                body, headers = await _compress(body), {"Content-Encoding": "zstd"}
            accepted = await session.api.call(request.route, body=body, headers=headers)
        return Ticket(
            accepted.request_id, request.request_type, round_trip_s=session.clock.now() - asked
        )

    async def _collect(self, turn: Turn) -> Any:
        async def one(index: int) -> Result:
            result = await self._result(turn, index)
            turn.promise.finish_part(index, result.value)
            return result

        return turn.fold(await all_or_first_error([one(i) for i in range(len(turn.tickets))]))

    async def _result(self, turn: Turn, index: int) -> Result:
        """The result of one request, sent again when the server has lost it."""
        for attempt in range(_RESENDS + 1):
            turn.promise.note(attempts=attempt + 1)
            try:
                return await self._session.poller.wait(
                    turn.tickets[index], lambda pending: self._observe(pending, turn.promise)
                )
            except PromiseLostError:
                if attempt == _RESENDS:
                    raise
                await self._session.clock.sleep(min(0.5 * 2.0**attempt, 10.0))
                turn.tickets[index] = await self._post(
                    turn.first_seq_id + index, turn.requests[index]
                )
        raise AssertionError("unreachable")


async def _compress(body: bytes) -> bytes:
    if len(body) < _COMPRESS_ASIDE_BYTES:
        return compression.compress(body)
    return await asyncio.to_thread(compression.compress, body)


async def all_or_first_error(work: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
    """Results in order; the first error cancels the rest and is raised as it is."""
    if len(work) == 1:
        return [await work[0]]
    tasks = [asyncio.ensure_future(item) for item in work]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise

"""`APIFuture`: what every operation returns, in blocking and in async code.

It is a `concurrent.futures.Future`, so everything the standard library does with one works
(`as_completed`, `wait`, `asyncio.wrap_future`, done callbacks), and it can be awaited from any
event loop. Callers hold the future; the client's loop holds its `Promise`, the side that writes.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

from tinkex.errors import ClosedError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Generator

    from tinkex.types.usage import Usage

T = TypeVar("T")
R = TypeVar("R")

State = Literal["queued", "running", "done", "failed", "cancelled"]


@dataclass(frozen=True, slots=True)
class FutureStatus:
    """Where an operation stands.

    `queued`: not yet accepted by the server (`position` calls of this client are ahead of it).
    `running`: accepted; `queue_state` is what the server last said of its queue.
    `since` is the client clock's time of the last change of state.
    """

    state: State = "queued"
    since: float = 0.0
    position: int | None = None
    request_id: str | None = None
    queue_state: str | None = None
    queue_state_reason: str | None = None
    attempts: int = 0


class APIFuture(concurrent.futures.Future[T], Generic[T]):
    """The result of an operation that has been handed to the client.

    `await` it, or call `.result(timeout)`. Cancelling a call that has not been sent withdraws
    it. A sample that was sent is also cancelled on the server, where the server allows it. A
    training operation that was sent still runs there; cancelling only stops waiting for it.
    """

    def __init__(self, promise: Promise[T] | None = None) -> None:
        super().__init__()
        self._promise: Promise[T] = promise or Promise(future=self)

    def result(self, timeout: float | None = None) -> T:
        """Wait for the result; `TimeoutError` after `timeout` seconds, the operation goes on."""
        self._refuse_deadlock()
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the end and return its error, or None."""
        self._refuse_deadlock()
        return super().exception(timeout)

    async def result_async(self, timeout: float | None = None) -> T:
        """Await the result. A timeout, or cancelling the awaiting task, cancels the operation."""
        if self.done():
            return super().result(0)
        wrapped = asyncio.wrap_future(self)
        if timeout is None:
            return await wrapped
        return await asyncio.wait_for(wrapped, timeout)

    def __await__(self) -> Generator[Any, None, T]:
        return self.result_async().__await__()

    def status(self) -> FutureStatus:
        """Where the operation stands now; never waits."""
        if self.cancelled():
            return replace(self._promise.status, state="cancelled")
        if self.done():
            return replace(self._promise.status, state="failed" if super().exception(0) else "done")
        status, ahead = self._promise.status, self._promise.ahead
        if ahead is None or status.state != "queued":
            return status
        return replace(status, position=ahead())

    @property
    def usage(self) -> Usage | None:
        """Tokens, queue time and device seconds, once the result is there."""
        if not self.done() or self.cancelled() or super().exception(0) is not None:
            return None
        return getattr(super().result(0), "usage", None)

    def future(self) -> concurrent.futures.Future[T]:
        """This future itself; the official client's wrapper has this method."""
        return self

    @property
    def _future(self) -> concurrent.futures.Future[T]:
        # Read by programs that look for the standard-library future inside the official wrapper.
        return self

    async def __aiter__(self) -> AsyncIterator[Any]:
        """The parts of a chunked call in the order of the data, each as soon as it is there."""
        if len(self._promise.parts) <= 1:
            yield await self
            return
        for part in self._promise.parts:
            # A part has no operation of its own to cancel, so the wait is shielded.
            yield await asyncio.shield(asyncio.wrap_future(part))

    def then(self, convert: Callable[[T], R]) -> APIFuture[R]:
        """A future of `convert(result)`, computed once; cancelling it cancels this one."""
        promise: Promise[R] = Promise(loop_thread=self._promise.loop_thread)
        self.add_done_callback(lambda done: promise.follow(done, convert))
        promise.future.add_done_callback(lambda new: self.cancel() if new.cancelled() else None)
        return promise.future

    def _refuse_deadlock(self) -> None:
        if self._promise.loop_thread == threading.get_ident() and not self.done():
            raise ClosedError(
                "result() was called on the client's own loop thread, where it would wait for "
                "itself; await the future, or call result() from another thread"
            )


class Promise(Generic[T]):
    """The writing side of an `APIFuture`; held by the client's loop, never by callers."""

    def __init__(
        self,
        *,
        parts: int = 0,
        now: Callable[[], float] | None = None,
        loop_thread: int | None = None,
        keep_alive: object = None,
        future: APIFuture[T] | None = None,
    ) -> None:
        # Mutable state: the status (replaced, never edited) and the futures it finishes.
        # `keep_alive` is whatever must outlive the operation, such as the client's connections.
        self.parts = [concurrent.futures.Future[Any]() for _ in range(parts)]
        self.status = FutureStatus(since=now() if now else 0.0)
        self.loop_thread = loop_thread
        self.keep_alive = keep_alive
        # How many calls go first; asked when somebody looks, since it changes with each of them.
        self.ahead: Callable[[], int] | None = None
        self._now = now
        self.future: APIFuture[T] = future if future is not None else APIFuture(self)

    def note(self, **changes: Any) -> None:
        """Replace parts of the status; a new state restarts `since`."""
        if self._now and changes.get("state", self.status.state) != self.status.state:
            changes["since"] = self._now()
        self.status = replace(self.status, **changes)

    def finish(self, value: T) -> None:
        """Deliver the result, unless the future has ended already."""
        with contextlib.suppress(concurrent.futures.InvalidStateError):
            self.future.set_result(value)

    def finish_part(self, index: int, value: Any) -> None:
        """Deliver one part of a chunked call."""
        if self.parts:
            with contextlib.suppress(concurrent.futures.InvalidStateError):
                self.parts[index].set_result(value)

    def fail(self, error: BaseException) -> None:
        """End the future, and every part that has not arrived, with `error`."""
        for future in (self.future, *self.parts):
            with contextlib.suppress(concurrent.futures.InvalidStateError):
                future.set_exception(error)

    def fail_after_fork(self, error: BaseException) -> None:
        """As `fail`, in a forked child, where a vanished thread may hold the futures' locks."""
        for future in (self.future, *self.parts):
            vars(future)["_condition"] = threading.Condition()
        self.fail(error)

    def follow(self, done: concurrent.futures.Future[R], convert: Callable[[R], T]) -> None:
        """End as `done` ended, with its result converted."""
        if done.cancelled():
            self.future.cancel()
            return
        error = done.exception()
        if error is not None:
            self.fail(error)
            return
        try:
            self.finish(convert(done.result()))
        except BaseException as problem:  # noqa: BLE001 - the future is where it ends
            self.fail(problem)


# The official package has two names for what is one class here.
AwaitableConcurrentFuture = APIFuture

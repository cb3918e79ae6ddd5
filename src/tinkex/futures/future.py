"""`APIFuture`: what every operation returns, in blocking and in async code.

It is a `concurrent.futures.Future`, so everything the standard library does with one works
(`as_completed`, `wait`, `asyncio.wrap_future`, done callbacks), and it can be awaited from any
event loop. Callers hold the future; the client's loop holds its `Promise`, the side that writes.
A thousand of them are in flight at once, so neither leaves a reference cycle behind.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import threading
import weakref
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Literal, Protocol, Self, TypeVar

from tinkex.errors import ClosedError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Generator

    from tinkex.types import Usage

T = TypeVar("T")
R = TypeVar("R")

_CANCELLED = "CANCELLED"  # the standard library's name for "and nobody was notified yet"

State = Literal["queued", "running", "done", "failed", "cancelled"]


@dataclass(frozen=True, slots=True)
class FutureStatus:
    """Where an operation stands.

    `queued`: not yet accepted by the server (`position` calls of this client are ahead of it).
    `running`: accepted; `queue_state` and `position` are what the server last said of its queue,
    where it says so.
    `since` is the client clock's time of the last change of state.
    """

    state: State = "queued"
    since: float = 0.0
    position: int | None = None
    request_id: str | None = None
    queue_state: str | None = None
    queue_state_reason: str | None = None
    attempts: int = 0


class Standing:
    """What a future and its promise share: the operation's state, and who must hear its end."""

    __slots__ = (
        "ahead",
        "attempts",
        "loop_thread",
        "parts",
        "position",
        "promise",
        "queue_state",
        "queue_state_reason",
        "request_id",
        "since",
        "state",
    )

    def __init__(self, parts: int, since: float) -> None:
        self.state: State = "queued"
        self.since = since
        self.request_id: str | None = None
        self.queue_state: str | None = None
        self.queue_state_reason: str | None = None
        self.attempts = 0
        # How many calls go first. Of this client's, asked when somebody looks, since it changes
        # with each of them; later of the server's, as it last said.
        self.ahead: Callable[[], int] | None = None
        self.position: int | None = None
        # One inner future for each part of a chunked call.
        self.parts = [concurrent.futures.Future[Any]() for _ in range(parts)]
        # The thread on which waiting would wait for itself.
        self.loop_thread: int | None = None
        # Cut when the operation ends, or every future would be a cycle.
        self.promise: Promise[Any] | None = None

    def end(self, *, cancelled: bool) -> None:
        """Tell whoever looks after the operation, once."""
        promise, self.promise = self.promise, None
        self.ahead = None
        if cancelled:
            # Whoever reads a chunked call part by part must hear of it, too.
            for part in self.parts:
                part.cancel()
        if promise is not None and promise.keeper is not None:
            promise.keeper.release(promise, cancelled=cancelled)


class Keeper(Protocol):
    """Notified once when the operation has ended, on the thread that ended it."""

    def release(self, promise: Promise[Any], *, cancelled: bool) -> None: ...


class Shield:
    """Cancels the task behind a promise, but never while a request of it is on the wire."""

    __slots__ = ("_on_wire", "asked", "task")

    def __init__(self) -> None:
        # Mutable state, touched on the loop only: the task, whether its end is wanted, and how
        # many of its requests wait for their answers.
        self.task: asyncio.Task[None] | None = None
        self.asked = False
        self._on_wire = 0

    def cancel(self) -> None:
        """Cancel the task now, or when the answers that it waits for are there."""
        self.asked = True
        self._cancel()

    def __enter__(self) -> Self:
        self._on_wire += 1
        return self

    def __exit__(self, *_: object) -> None:
        self._on_wire -= 1
        if self.asked:
            self._cancel()

    def _cancel(self) -> None:
        if not self._on_wire and self.task is not None:
            self.task.cancel()


class APIFuture(concurrent.futures.Future[T], Generic[T]):
    """The result of an operation that has been handed to the client.

    `await` it, or call `.result(timeout)`. Cancelling a call that has not been sent withdraws
    it. A sample that was sent is also cancelled on the server, and a training operation that has
    not started there is withdrawn, where the server can. A training operation that has started
    cannot be cancelled: it runs to its end, and cancelling only stops waiting for it.
    """

    def __init__(self, standing: Standing | None = None, *, whole: bool = False) -> None:
        super().__init__()
        self._standing = standing or Standing(0, 0.0)
        # Whether there is only the joined result, even of a call that was split.
        self._whole = whole

    def result(self, timeout: float | None = None) -> T:
        """Wait for the result; `TimeoutError` after `timeout` seconds, the operation goes on."""
        self._refuse_deadlock()
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the end and return its error, or None."""
        self._refuse_deadlock()
        return super().exception(timeout)

    def cancel(self) -> bool:
        """Give up waiting; False when the operation has ended already."""
        cancelled = super().cancel()
        if cancelled:
            self._notify_waiters()
            self._standing.end(cancelled=True)
        return cancelled

    def _notify_waiters(self) -> None:
        """Wake `concurrent.futures.wait` and `as_completed`, which cancelling alone does not."""
        with self._condition:  # of the standard library; re-entrant, so two threads may cancel
            if self._state == _CANCELLED:
                self.set_running_or_notify_cancel()

    async def result_async(self, timeout: float | None = None) -> T:
        """Await the result. A timeout, or cancelling the awaiting task, cancels the operation."""
        if not self.done():
            if timeout is None:
                await self._ended()
            else:
                try:
                    await asyncio.wait_for(self._ended(), timeout)
                except TimeoutError:
                    self.cancel()
                    raise
        if self.cancelled():
            raise asyncio.CancelledError
        return super().result(0)

    async def _ended(self) -> None:
        loop = asyncio.get_running_loop()
        waiter = loop.create_future()
        self.add_done_callback(functools.partial(_doorbell(loop).ring, waiter))
        try:
            await waiter
        except asyncio.CancelledError:
            self.cancel()
            raise

    def __await__(self) -> Generator[Any, None, T]:
        return self.result_async().__await__()

    def status(self) -> FutureStatus:
        """Where the operation stands now; never waits."""
        now, ahead = self._standing, self._standing.ahead
        state = now.state
        if self.done():
            state = (
                "cancelled" if self.cancelled() else "failed" if super().exception(0) else "done"
            )
        return FutureStatus(
            state=state,
            since=now.since,
            position=ahead() if ahead is not None and state == "queued" else now.position,
            request_id=now.request_id,
            queue_state=now.queue_state,
            queue_state_reason=now.queue_state_reason,
            attempts=now.attempts,
        )

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
        if self._whole or len(self._standing.parts) <= 1:
            yield await self
            return
        for part in self._standing.parts:
            # A part has no operation of its own to cancel, so the wait is shielded.
            yield await asyncio.shield(asyncio.wrap_future(part))

    def then(self, convert: Callable[[T], R]) -> APIFuture[R]:
        """A future of `convert(result)`, computed once; cancelling it cancels this one."""
        promise: Promise[R] = Promise(standing=self._standing)
        self.add_done_callback(lambda done: promise.follow(done, convert))
        promise.future.add_done_callback(lambda new: self.cancel() if new.cancelled() else None)
        return promise.future

    def _refuse_deadlock(self) -> None:
        if self._standing.loop_thread == threading.get_ident() and not self.done():
            raise ClosedError(
                "result() was called on the client's own loop thread, where it would wait for "
                "itself; await the future, or call result() from another thread"
            )


def requests_in(future: APIFuture[Any]) -> int:
    """How many requests an operation was split into."""
    return max(len(future._standing.parts), 1)  # pyright: ignore[reportPrivateUsage] - of this module


class Promise(Generic[T]):
    """The writing side of an `APIFuture`; held by the client's loop, never by callers."""

    __slots__ = ("_now", "future", "keep_alive", "keeper", "shield", "standing")

    def __init__(
        self,
        *,
        parts: int = 0,
        now: Callable[[], float] | None = None,
        keep_alive: object = None,
        standing: Standing | None = None,
    ) -> None:
        # `keep_alive` is whatever must outlive the operation, such as the client's connections;
        # `keeper` hears when it has ended; `shield` has the work, to be cancelled with it. A
        # given `standing` belongs to another promise, whose future this one follows.
        self._now = now
        self.keep_alive = keep_alive
        self.keeper: Keeper | None = None
        self.shield = Shield()
        self.standing = standing or Standing(parts, now() if now else 0.0)
        if standing is None:
            self.standing.promise = self
        # Parts are those of the original, not of what it is converted to.
        self.future: APIFuture[T] = APIFuture(self.standing, whole=standing is not None)

    def note(self, *, state: State | None = None, **changes: Any) -> None:
        """Change parts of the status; a new state restarts `since`."""
        standing = self.standing
        if state is not None and state != standing.state:
            standing.state = state
            if self._now is not None:
                standing.since = self._now()
        for name, value in changes.items():
            setattr(standing, name, value)

    def finish(self, value: T) -> None:
        """Deliver the result, unless the future has ended already."""
        with contextlib.suppress(concurrent.futures.InvalidStateError):
            self.future.set_result(value)
            self._end()

    def finish_part(self, index: int, value: Any) -> None:
        """Deliver one part of a chunked call."""
        if self.standing.parts:
            with contextlib.suppress(concurrent.futures.InvalidStateError):
                self.standing.parts[index].set_result(value)

    def fail(self, error: BaseException) -> None:
        """End the future, and every part that has not arrived, with `error`."""
        for future in (self.future, *self.standing.parts):
            with contextlib.suppress(concurrent.futures.InvalidStateError):
                future.set_exception(error)
        self._end()

    def _end(self) -> None:
        if self.standing.promise is self:
            self.standing.end(cancelled=False)

    def fail_after_fork(self, error: BaseException) -> None:
        """As `fail`, in a forked child, where a vanished thread may hold the futures' locks."""
        for future in (self.future, *self.standing.parts):
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


class _Doorbell:
    """Wakes what waits in one event loop: one ring for however many futures ended meanwhile."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        # Mutable state: waiters whose future has ended, and whether the loop knows. The loop is
        # held weakly because the table of doorbells is keyed by it.
        self._loop = weakref.ref(loop)
        self._ended: deque[asyncio.Future[None]] = deque()
        self._rung = False

    def ring(self, waiter: asyncio.Future[None], _: object) -> None:
        """From any thread: `waiter` may go on."""
        self._ended.append(waiter)
        loop = self._loop()
        if not self._rung and loop is not None:
            # Cleared before the waiters are looked at, so none is ever left behind.
            self._rung = True
            with contextlib.suppress(RuntimeError):  # the loop has closed, and so nobody waits
                loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        self._rung = False
        while self._ended:
            waiter = self._ended.popleft()
            if not waiter.done():
                waiter.set_result(None)


# One doorbell for each event loop that awaits our futures, for as long as the loop lives.
_doorbells: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Doorbell] = (
    weakref.WeakKeyDictionary()
)


def _doorbell(loop: asyncio.AbstractEventLoop) -> _Doorbell:
    bell = _doorbells.get(loop)
    if bell is None:
        bell = _doorbells[loop] = _Doorbell(loop)
    return bell


# The official package has two names for what is one class here.
AwaitableConcurrentFuture = APIFuture

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
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Generic, Literal, Protocol, TypeVar

from tinkex.errors import ClosedError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Generator, Sequence

    from tinkex.types import Usage

T = TypeVar("T")
R = TypeVar("R")

_CANCELLED = "CANCELLED"  # the standard library's name for "cancelled, waiters not notified yet"

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


class OperationState:
    """What a future and its promise share; written by the promise, read by `status()`.

    Plain class attributes are the defaults, so that making one runs no code.
    """

    state: State = "queued"
    since: float = 0.0
    request_id: str | None = None
    queue_state: str | None = None
    queue_state_reason: str | None = None
    attempts: int = 0
    # How many calls are sent first: of this client while the call is queued, computed when
    # `status()` is called because it changes with each of them; later the server's last answer.
    ahead: Callable[[], int] | None = None
    position: int | None = None
    # One inner future for each part of a chunked call; empty for a call of one request.
    parts: Sequence[concurrent.futures.Future[Any]] = ()
    # The thread on which waiting would wait for itself.
    loop_thread: int | None = None
    # Cleared when the operation ends: the cycle through the promise would keep the future alive.
    promise: Promise[Any] | None = None


class Keeper(Protocol):
    """The portal: it ends the promises in `unfinished` if its loop ends before they do."""

    unfinished: set[Promise[Any]]
    loop_thread: int | None

    def post(self, action: Callable[[], object]) -> None: ...


class _Condition(threading.Condition):
    """A condition whose lock is not lost when Ctrl-C interrupts a thread that takes it.

    Entering and leaving the standard one are calls of Python code, in which a signal handler may
    run while the lock is held and no block is there to release it. The client's loop would then
    wait for that lock for ever. Here they are the lock's own methods.
    """

    # Both are made in C, so that no signal handler runs in them either.
    __enter__: Any = property(attrgetter("_lock.__enter__"))
    __exit__: Any = property(attrgetter("_lock.__exit__"))


class APIFuture(concurrent.futures.Future[T], Generic[T]):
    """The result of an operation that has been handed to the client.

    `await` it, or call `.result(timeout)`. Cancelling a call that has not been sent withdraws
    it. A sample that was sent is also cancelled on the server, and a training operation that has
    not started there is withdrawn, where the server can. A training operation that has started
    cannot be cancelled: it runs to its end, and cancelling only stops waiting for it.
    """

    # Set by the promise. A future made without one stays queued.
    _operation: OperationState = OperationState()
    # Whether there is only the joined result, even of a call that was split.
    _whole: bool = False

    def __init__(self) -> None:
        super().__init__()
        self._condition = _Condition()

    def result(self, timeout: float | None = None) -> T:
        """Wait for the result; `TimeoutError` after `timeout` seconds, the operation continues."""
        if self._operation.loop_thread == threading.get_ident():
            self._refuse_deadlock()
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the end and return its error, or None."""
        if self._operation.loop_thread == threading.get_ident():
            self._refuse_deadlock()
        return super().exception(timeout)

    def cancel(self) -> bool:
        """Give up waiting; False when the operation has ended already."""
        cancelled = super().cancel()
        if cancelled:
            self._notify_waiters()
            if (promise := self._operation.promise) is not None:
                promise.end(cancelled=True)
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
        now, ahead = self._operation, self._operation.ahead
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
        if self._whole or not self._operation.parts:
            yield await self
            return
        for part in self._operation.parts:
            # A part has no operation of its own to cancel, so the wait is shielded.
            yield await asyncio.shield(asyncio.wrap_future(part))

    def then(self, convert: Callable[[T], R]) -> APIFuture[R]:
        """A future of `convert(result)`, computed once; cancelling it cancels this one."""
        promise: Promise[R] = Promise(follows=self._operation)
        self.add_done_callback(lambda done: promise.follow(done, convert))
        promise.future.add_done_callback(lambda new: self.cancel() if new.cancelled() else None)
        return promise.future

    def _refuse_deadlock(self) -> None:
        if not self.done():
            raise ClosedError(
                "result() was called on the client's own loop thread, where it would wait for "
                "itself; await the future, or call result() from another thread"
            )


def requests_in(future: APIFuture[Any]) -> int:
    """How many requests an operation was split into."""
    return max(len(future._operation.parts), 1)  # pyright: ignore[reportPrivateUsage] - of this module


class Promise(Generic[T]):
    """The writing side of an `APIFuture`; held by the client's loop, never by callers.

    It also cancels the task behind the operation, but never while one of its requests is on the
    wire: the server may accept the request, and the client must then know of it.
    """

    __slots__ = (
        "_keep_alive",
        "_now",
        "cancelling",
        "future",
        "keeper",
        "on_wire",
        "operation",
        "task",
    )

    def __init__(
        self,
        *,
        parts: int = 0,
        now: Callable[[], float] | None = None,
        keep_alive: object = None,
        keeper: Keeper | None = None,
        follows: OperationState | None = None,
    ) -> None:
        # `keep_alive` must outlive the operation, such as the client's connections. `follows`
        # belongs to another promise, whose future this one is derived from. Touched on the loop
        # only: the task, whether it is to be cancelled, and how many of its requests are on the
        # wire.
        self._now = now
        self._keep_alive = keep_alive
        self.keeper = keeper
        self.task: asyncio.Task[None] | None = None
        self.cancelling = False
        self.on_wire = 0
        self.future: APIFuture[T] = APIFuture()
        if follows is not None:
            self.operation = follows
            # Parts are those of the original, not of what it is converted to.
            self.future._whole = True  # pyright: ignore[reportPrivateUsage] - of this module
        else:
            operation = self.operation = OperationState()
            operation.promise = self
            if now is not None:
                operation.since = now()
            if parts > 1:
                self.split(parts)
            if keeper is not None:
                operation.loop_thread = keeper.loop_thread
                keeper.unfinished.add(self)
        self.future._operation = self.operation  # pyright: ignore[reportPrivateUsage] - of this module

    def split(self, parts: int) -> None:
        """The call is sent in so many requests."""
        self.operation.parts = [concurrent.futures.Future[Any]() for _ in range(parts)]

    def note(self, *, state: State | None = None, **changes: Any) -> None:
        """Change parts of the status; a new state restarts `since`."""
        operation = self.operation
        if state is not None and state != operation.state:
            operation.state = state
            if self._now is not None:
                operation.since = self._now()
        for name, value in changes.items():
            setattr(operation, name, value)

    def finish(self, value: T) -> None:
        """Deliver the result, unless the future has ended already."""
        try:
            self.future.set_result(value)
        except concurrent.futures.InvalidStateError:
            return
        self.end()

    def finish_part(self, index: int, value: Any) -> None:
        """Deliver one part of a chunked call."""
        with contextlib.suppress(concurrent.futures.InvalidStateError):
            self.operation.parts[index].set_result(value)

    def fail(self, error: BaseException) -> None:
        """End the future, and every part that has not arrived, with `error`."""
        for future in (self.future, *self.operation.parts):
            with contextlib.suppress(concurrent.futures.InvalidStateError):
                future.set_exception(error)
        self.end()

    def end(self, *, cancelled: bool = False) -> None:
        """Release the operation, once, on the thread that ended it; a cancelled one ends its task.

        Does nothing for a promise that follows another one's operation.
        """
        operation = self.operation
        if operation.promise is not self:
            return
        operation.promise = operation.ahead = None
        if cancelled:
            # A caller that reads a chunked call part by part must see it end, too.
            for part in operation.parts:
                part.cancel()
        if self.keeper is not None:
            self.keeper.unfinished.discard(self)
            if cancelled and self.task is not None:
                # Posted, because tasks may only be cancelled on their own loop.
                with contextlib.suppress(ClosedError):
                    self.keeper.post(self.cancel_task)

    def cancel_task(self) -> None:
        """On the loop: cancel the task now, or when its requests on the wire are answered."""
        self.cancelling = True
        if not self.on_wire and self.task is not None:
            self.task.cancel()

    def fail_after_fork(self, error: BaseException) -> None:
        """As `fail`, in a forked child, where a vanished thread may hold the futures' locks."""
        for future in (self.future, *self.operation.parts):
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
    """Wakes the coroutines that wait in one event loop: one call for all futures that have ended.

    Crossing threads costs a system call, so a burst of results makes one of them.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        # Mutable state: waiters whose future has ended, and whether the loop was notified. The
        # loop is held weakly because the table of doorbells is keyed by it.
        self._loop = weakref.ref(loop)
        self._ended: deque[asyncio.Future[None]] = deque()
        self._rung = False

    def ring(self, waiter: asyncio.Future[None], _: object) -> None:
        """From any thread: the future of `waiter` has ended."""
        self._ended.append(waiter)
        loop = self._loop()
        if not self._rung and loop is not None:
            # `_wake` clears it before it reads the waiters, so none is ever left behind.
            self._rung = True
            with contextlib.suppress(RuntimeError):  # the loop has closed: no coroutine waits
                loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        self._rung = False
        while self._ended:
            waiter = self._ended.popleft()
            if not waiter.done():
                waiter.set_result(None)


# One doorbell for each event loop that awaits these futures, for as long as the loop lives.
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

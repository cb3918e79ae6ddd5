"""Runs a client's operations on an event loop, from any thread.

An operation is a coroutine that runs on the loop and ends one promise. A `Portal` is the loop:
`LoopThread` owns one in a daemon thread, `CurrentLoop` uses the caller's own (virtual-clock tests,
and users who want no thread). Both own the tasks they start and the promises made for them: when
the loop ends, for whatever reason, every unfinished promise ends with a typed error.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import logging
import os
import threading
import weakref
from abc import ABC, abstractmethod
from collections import deque
from typing import TYPE_CHECKING, Any, TypeVar

from tinkex.errors import ClosedError, ForkedError
from tinkex.futures.future import Promise

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from tinkex.clock import Clock
    from tinkex.futures.future import APIFuture

T = TypeVar("T")
_log = logging.getLogger(__name__)


class Portal(ABC):
    """An event loop that runs a client's work."""

    def __init__(self) -> None:
        # Mutable state: running tasks, unfinished promises, actions posted from other threads and
        # not yet run, each with the promise that it works for, whether the loop was woken for
        # them, and the error of a loop that has ended. Raw asyncio tasks, not a task group:
        # starting one costs a third of the time, and a thousand samples start a thousand of them.
        self.unfinished: set[Promise[Any]] = set()
        self.loop_thread: int | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._mail: deque[tuple[Callable[[], object], Promise[Any] | None]] = deque()
        self._woken = False
        self.gone: ClosedError | None = None

    @abstractmethod
    def post(self, action: Callable[[], object], promise: Promise[Any] | None = None) -> None:
        """Run `action` on the loop, in the order of the posts, from any thread.

        With a `promise` it runs unless the promise has ended by then, and an error of the action
        or of a loop that is gone fails the promise. Without one, a loop that is gone raises
        `ClosedError` (or `ForkedError`) here.
        """

    @abstractmethod
    def started(self) -> bool:
        """True once anything was posted."""

    @abstractmethod
    def stop(self) -> None:
        """End the loop, from the loop itself: nothing runs here afterwards."""

    def on_loop(self) -> bool:
        """True when the caller is running on this loop."""
        return self.loop_thread == threading.get_ident()

    def alive(self) -> bool:
        """False once the loop has ended, or after a fork."""
        return self.gone is None

    def spawn(
        self, work: Coroutine[Any, Any, None], context: contextvars.Context | None = None
    ) -> asyncio.Task[None]:
        """Start a task on the loop; only from the loop itself."""
        task = asyncio.get_running_loop().create_task(work, context=context)
        self._tasks.add(task)  # asyncio keeps only weak references to tasks
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("background task failed", exc_info=error)

    def _read_mail(self) -> None:
        # Cleared before the mail is read: an action that is posted meanwhile wakes the loop again.
        self._woken = False
        while self._mail:
            action, promise = self._mail.popleft()
            if promise is not None and promise.future.done():
                continue
            try:
                action()
            except Exception as error:  # noqa: BLE001
                if promise is not None:
                    promise.fail(error)
                else:
                    # A bug in the client; it must not end the loop of the other calls.
                    _log.exception("posted action failed")

    def settle(self) -> None:
        """End every unfinished promise of a loop that is gone."""
        assert self.gone is not None
        for promise in list(self.unfinished):
            promise.fail(self.gone)  # which takes it out of the set

    async def end_work(self, error: ClosedError, *, keep: Promise[Any]) -> None:
        """On the loop: refuse new work, end every promise but `keep` and every other task."""
        # Promises first: a task that is cancelled afterwards finds its caller answered already.
        self.unfinished.discard(keep)
        self.gone = error
        self.settle()
        self._mail.clear()
        self.unfinished.add(keep)
        await self._end_tasks()

    async def _end_tasks(self) -> None:
        current = asyncio.current_task()
        others = [task for task in self._tasks if task is not current]
        for task in others:
            task.cancel()
        if others:
            await asyncio.wait(others)


class LoopThread(Portal):
    """One event loop in a daemon thread, started by the first post."""

    def __init__(self, name: str = "tinkex") -> None:
        super().__init__()
        self._name = name
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        _live.add(self)

    def post(self, action: Callable[[], object], promise: Promise[Any] | None = None) -> None:
        gone = self.gone
        if gone is None:
            loop = self._start() if self._loop is None else self._loop
            self._mail.append((action, promise))
            if self._woken:
                return
            # One wake-up for a burst: `_read_mail` clears the flag before it reads.
            self._woken = True
            try:
                loop.call_soon_threadsafe(self._read_mail)
                return
            except RuntimeError:  # the loop was closed after the check
                gone = self.gone or ClosedError("the client's loop has ended")
        _refuse(gone, promise)

    def started(self) -> bool:
        return self._loop is not None

    def stop(self) -> None:
        loop = asyncio.get_running_loop()
        loop.call_soon(loop.stop)

    def _start(self) -> asyncio.AbstractEventLoop:
        # Locked: of two threads that post first, one starts the loop.
        with self._lock:
            if self._loop is None:
                loop = asyncio.new_event_loop()
                thread = threading.Thread(
                    target=self._run, args=(loop,), name=self._name, daemon=True
                )
                thread.start()
                self.loop_thread = thread.ident
                self._loop = loop
            return self._loop

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(loop)
        try:
            loop.run_forever()
        finally:
            # The flag comes before the promises: what is posted from now on is refused.
            self.gone = self.gone or ClosedError("the client's loop thread has ended")
            self.settle()
            self._mail.clear()
            loop.run_until_complete(self._end_tasks())
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.close()

    def after_fork(self) -> None:
        """In a forked child, where the thread does not exist: end every unfinished promise."""
        self.gone = ForkedError(
            "this client was made before os.fork(); create the client in the child process, or "
            "start children with the 'spawn' method"
        )
        self._lock = threading.Lock()  # a thread that no longer exists may have held it
        for promise in list(self.unfinished):
            promise.fail_after_fork(self.gone)


class CurrentLoop(Portal):
    """Runs a client's work on the loop that is running when it is made; async calls only."""

    def __init__(self) -> None:
        super().__init__()
        self._loop = asyncio.get_running_loop()
        self.loop_thread = threading.get_ident()

    def post(self, action: Callable[[], object], promise: Promise[Any] | None = None) -> None:
        gone = self.gone
        if gone is None:
            self._mail.append((action, promise))
            wake = self._loop.call_soon if self.on_loop() else self._loop.call_soon_threadsafe
            try:
                wake(self._read_mail)
                return
            except RuntimeError:
                gone = ClosedError("the event loop this client was made on is closed")
        _refuse(gone, promise)

    def started(self) -> bool:
        return True

    def stop(self) -> None:
        """Nothing to do: the loop belongs to the caller."""


class Operations:
    """One client's work on a portal; every promise it makes ends.

    Promises hold `keep_alive` until they end. `on_error` is called with every error that ends an
    operation before its caller sees the error, because the caller may then end the process.
    """

    def __init__(
        self,
        portal: Portal,
        clock: Clock,
        keep_alive: object = None,
        on_error: Callable[[BaseException], None] | None = None,
    ) -> None:
        self.portal = portal
        self.clock = clock
        self.keep_alive = keep_alive
        self.on_error = on_error

    def promise(self, *, parts: int = 0) -> Promise[Any]:
        """A promise that ends even when the loop does first."""
        portal = self.portal
        promise: Promise[Any] = Promise(
            parts=parts, now=self.clock.now, keep_alive=self.keep_alive, keeper=portal
        )
        if portal.gone is not None:
            # Checked after the portal knows the promise, so that one of the two sees the other.
            portal.settle()
        return promise

    def refuse(self, error: Exception) -> APIFuture[Any]:
        """A future that has failed already: errors of a call always come out of its future."""
        promise = self.promise()
        promise.fail(error)
        return promise.future

    def start(self, work: Callable[[Promise[T]], Coroutine[Any, Any, T]]) -> APIFuture[T]:
        """Run `work` on the loop; its result or error comes out of the future."""
        promise: Promise[T] = self.promise()
        context = contextvars.copy_context()
        self.portal.post(functools.partial(self.carry, promise, work, context), promise)
        return promise.future

    def carry(
        self,
        promise: Promise[T],
        work: Callable[[Promise[T]], Coroutine[Any, Any, T]],
        context: contextvars.Context | None = None,
    ) -> asyncio.Task[None]:
        """On the loop: run `work` as a task that ends `promise`, and is cancelled with it."""
        task = promise.task = self.portal.spawn(self._run(promise, work), context)
        if promise.future.done():  # cancelled by another thread before the task was known
            task.cancel()
        return task

    async def _run(
        self, promise: Promise[T], work: Callable[[Promise[T]], Coroutine[Any, Any, T]]
    ) -> None:
        try:
            promise.finish(await work(promise))
        except asyncio.CancelledError:
            promise.fail(ClosedError("the client was closed while this operation was under way"))
            raise
        except BaseException as error:  # noqa: BLE001 - the future is where it ends
            try:
                if self.on_error is not None:
                    self.on_error(error)
            finally:
                promise.fail(error)

    async def run(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Await `work` from any loop; on the client's own loop it just runs."""
        if self.portal.on_loop():
            return await work()
        return await self.start(lambda _: work())

    def block(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run `work` and wait for it, as blocking code does."""
        return wait_for(self.start(lambda _: work()))


def _refuse(gone: ClosedError, promise: Promise[Any] | None) -> None:
    if promise is None:
        raise gone
    promise.fail(gone)


def wait_for(future: APIFuture[T]) -> T:
    """The result, in blocking code; an interrupted caller cancels its operation."""
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise


_live: weakref.WeakSet[LoopThread] = weakref.WeakSet()


def _forked() -> None:
    for portal in list(_live):
        portal.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)

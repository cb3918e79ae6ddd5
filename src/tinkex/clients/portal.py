"""The bridge between callers and the client's event loop.

`LoopThread` owns one event loop in a daemon thread; `CurrentLoop` runs the same work on the
caller's own loop (virtual-clock tests, and users who want no thread). Both own the tasks they
start and the futures they were given: when the loop ends, for whatever reason, every unfinished
future ends with a typed error.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
import weakref
from abc import ABC, abstractmethod
from collections import deque
from typing import TYPE_CHECKING, Any, Protocol

from tinkex.errors import ClosedError, ForkedError

if TYPE_CHECKING:
    import contextvars
    from collections.abc import Callable, Coroutine

    from tinkex.futures.future import Promise

_log = logging.getLogger(__name__)


class Portal(Protocol):
    """Where a client's work runs."""

    def post(self, action: Callable[[], object]) -> None:
        """Run `action` on the loop, first come first served, from any thread.

        Raises `ClosedError` (or `ForkedError`) at once when the loop is gone.
        """
        ...

    def spawn(
        self, work: Coroutine[Any, Any, None], context: contextvars.Context | None = None
    ) -> asyncio.Task[None]:
        """Start a task on the loop; only from the loop itself."""
        ...

    def adopt(self, promise: Promise[Any]) -> None:
        """See to it that `promise` ends, even if the loop does first."""
        ...

    def release(self, promise: Promise[Any], *, cancelled: bool) -> None:
        """Told by the promise when it has ended; a cancelled one takes its task along."""
        ...

    def on_loop(self) -> bool:
        """True when the caller is running on this loop."""
        ...

    def alive(self) -> bool:
        """False once the loop has ended, or after a fork."""
        ...

    def started(self) -> bool:
        """True once anything was posted."""
        ...

    async def end_work(self, error: ClosedError, *, keep: Promise[Any]) -> None:
        """End every other task and every promise but `keep`, and take no more; on the loop."""
        ...

    def stop(self) -> None:
        """The last act, on the loop: nothing runs here afterwards."""
        ...


class _Duties:
    """What both portals keep: tasks that run, futures that are owed an end, and mail."""

    def __init__(self) -> None:
        # Mutable state: tasks of this loop, unfinished futures, and actions posted from other
        # threads and not yet run. Raw asyncio tasks, not a task group: starting one costs a
        # third, and a thousand samples start a thousand of them.
        self.tasks: set[asyncio.Task[Any]] = set()
        self.owed: set[Promise[Any]] = set()
        self.mail: deque[Callable[[], object]] = deque()
        self.gone: ClosedError | None = None

    def spawn(
        self, work: Coroutine[Any, Any, None], context: contextvars.Context | None = None
    ) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work, context=context)
        self.tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self.tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("background task failed", exc_info=error)

    def release(self, promise: Promise[Any]) -> None:
        """Forget an ended promise."""
        self.owed.discard(promise)

    def run_mail(self) -> None:
        while self.mail:
            action = self.mail.popleft()
            try:
                action()
            except Exception:  # noqa: BLE001
                # An action finishes its own future; what arrives here is a bug of ours, and
                # it must not take the loop down with it.
                _log.exception("posted action failed")

    def settle(self, error: ClosedError) -> None:
        """Refuse new work and end every future that is still owed."""
        self.gone = error
        for promise in list(self.owed):
            promise.fail(error)
        self.owed.clear()
        self.mail.clear()

    async def end_work(self, error: ClosedError, keep: Promise[Any]) -> None:
        # Promises first: a task that is cancelled afterwards finds its caller answered already.
        self.owed.discard(keep)
        self.settle(error)
        self.owed.add(keep)
        await self.end_tasks()

    async def end_tasks(self) -> None:
        current = asyncio.current_task()
        others = [task for task in self.tasks if task is not current]
        for task in others:
            task.cancel()
        if others:
            await asyncio.wait(others)


class _Dutiful(ABC):
    """What both portals do alike."""

    def __init__(self) -> None:
        self._duties = _Duties()

    @abstractmethod
    def post(self, action: Callable[[], object]) -> None: ...

    def spawn(
        self, work: Coroutine[Any, Any, None], context: contextvars.Context | None = None
    ) -> asyncio.Task[None]:
        return self._duties.spawn(work, context)

    def release(self, promise: Promise[Any], *, cancelled: bool) -> None:
        self._duties.release(promise)
        if cancelled and promise.shield.task is not None:
            with contextlib.suppress(ClosedError):
                self.post(promise.shield.cancel)

    def alive(self) -> bool:
        return self._duties.gone is None

    async def end_work(self, error: ClosedError, *, keep: Promise[Any]) -> None:
        await self._duties.end_work(error, keep)


class LoopThread(_Dutiful):
    """One event loop in a daemon thread, started by the first post."""

    def __init__(self, name: str = "tinkex") -> None:
        super().__init__()
        self._name = name
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._woken = False
        _live.add(self)

    def post(self, action: Callable[[], object]) -> None:
        if self._duties.gone is not None:
            raise self._duties.gone
        self._start()
        assert self._loop is not None
        self._duties.mail.append(action)
        if not self._woken:
            # One wake-up for a burst: the flag is cleared before the mail is read.
            self._woken = True
            try:
                self._loop.call_soon_threadsafe(self._read_mail)
            except RuntimeError:
                raise self._duties.gone or ClosedError("the client's loop has ended") from None

    def adopt(self, promise: Promise[Any]) -> None:
        promise.standing.loop_thread = self._thread.ident if self._thread else None
        promise.keeper = self
        self._duties.owed.add(promise)
        if self._duties.gone is not None:
            self._duties.settle(self._duties.gone)

    def on_loop(self) -> bool:
        return self._thread is not None and self._thread.ident == threading.get_ident()

    def started(self) -> bool:
        return self._thread is not None

    def stop(self) -> None:
        loop = asyncio.get_running_loop()
        loop.call_soon(loop.stop)

    def _start(self) -> None:
        if self._thread is not None:
            return
        with self._lock:
            if self._thread is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()

    def _run(self) -> None:
        assert self._loop is not None
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._duties.settle(
                self._duties.gone or ClosedError("the client's loop thread has ended")
            )
            self._loop.run_until_complete(self._duties.end_tasks())
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()

    def _read_mail(self) -> None:
        self._woken = False
        self._duties.run_mail()

    def after_fork(self) -> None:
        """In a forked child the thread does not exist: everything owed ends now."""
        error = ForkedError(
            "this client was made before os.fork(); create the client in the child process, or "
            "start children with the 'spawn' method"
        )
        self._lock = threading.Lock()
        self._duties.gone = error
        for promise in list(self._duties.owed):
            promise.fail_after_fork(error)
        self._duties.owed.clear()


class CurrentLoop(_Dutiful):
    """Runs a client's work on the loop that is running when it is made; async calls only."""

    def __init__(self) -> None:
        super().__init__()
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()

    def post(self, action: Callable[[], object]) -> None:
        if self._duties.gone is not None:
            raise self._duties.gone
        if self._loop.is_closed():
            raise ClosedError("the event loop this client was made on is closed")
        self._duties.mail.append(action)
        on_loop = threading.get_ident() == self._thread
        wake = self._loop.call_soon if on_loop else self._loop.call_soon_threadsafe
        try:
            wake(self._duties.run_mail)
        except RuntimeError:
            raise ClosedError("the client's loop has ended") from None

    def adopt(self, promise: Promise[Any]) -> None:
        promise.standing.loop_thread = self._thread
        promise.keeper = self
        self._duties.owed.add(promise)

    def on_loop(self) -> bool:
        return threading.get_ident() == self._thread

    def started(self) -> bool:
        return True

    def stop(self) -> None:
        """Nothing to do: the loop belongs to the caller."""


_live: weakref.WeakSet[LoopThread] = weakref.WeakSet()


def _forked() -> None:
    for portal in list(_live):
        portal.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)

"""A virtual clock: time moves only when every task of the loop is waiting.

`FakeClock` owns virtual time and the list of sleepers. Hours of backoff, long-polls and
heartbeats take milliseconds, in the same order every run.
"""

from __future__ import annotations

import asyncio
import heapq
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import anyio
import anyio.lowlevel
import anyio.to_thread

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sized


# A task that looks blocked may be woken by a callback that is already scheduled, and that by
# another one; a few rounds of the loop without any task running rule this out.
_QUIET_ROUNDS = 4


class FakeClock:
    """A `Clock` for tests; use it inside `async with clock.running():`.

    Tasks that wait for a socket, or for a thread that is not one of anyio's, count as waiting too,
    so give a test on this clock in-process transports only. Without `running()`, move time with
    `advance()`.
    """

    def __init__(self, start: float = 0.0, wall: float = 1_750_000_000.0) -> None:
        # Mutable state: the time, a heap of (due, order, event), and who waits for a sleeper.
        self._now = start
        self._wall_offset = wall - start
        self._order = 0
        self._sleepers: list[tuple[float, int, anyio.Event]] = []
        self._gone: set[int] = set()
        self._new_sleeper: anyio.Event | None = None
        self._jumping = anyio.Lock()

    def now(self) -> float:
        """Virtual seconds."""
        return self._now

    def wall(self) -> float:
        """Virtual seconds since the epoch."""
        return self._now + self._wall_offset

    def set_date(self, by: float) -> None:
        """Set the date forward by some seconds, or back; nothing else notices."""
        self._wall_offset += by

    async def sleep(self, seconds: float) -> None:
        """Wait until virtual time has moved by `seconds`; zero or less yields once."""
        if seconds <= 0:
            await anyio.lowlevel.checkpoint()
            return
        self._order += 1
        order, woken = self._order, anyio.Event()
        heapq.heappush(self._sleepers, (self._now + seconds, order, woken))
        if self._new_sleeper is not None:
            self._new_sleeper.set()
        try:
            await woken.wait()
        finally:
            if not woken.is_set():
                self._gone.add(order)

    @property
    def sleepers(self) -> int:
        """How many tasks wait on this clock now."""
        return len(self._sleepers) - len(self._gone)

    def next_due(self) -> float | None:
        """When the next sleeper wakes, or None when there is none."""
        while self._sleepers and self._sleepers[0][1] in self._gone:
            self._gone.discard(heapq.heappop(self._sleepers)[1])
        return self._sleepers[0][0] if self._sleepers else None

    async def advance(self, seconds: float) -> None:
        """Move time by `seconds` and wake the sleepers that become due, in order."""
        target = self._now + seconds
        await all_tasks_blocked()
        while (due := self.next_due()) is not None and due <= target:
            self._wake_next()
            await all_tasks_blocked()
        self._now = target

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[FakeClock]:
        """Jump to the next sleeper whenever every task of this loop is blocked.

        May be entered more than once; one of the jumpers works at a time.
        """
        failure: BaseException | None = None
        async with anyio.create_task_group() as group:
            group.start_soon(self._jump)
            try:
                yield self
            except BaseException as error:  # noqa: BLE001 - raised below, as it is
                failure = error
            group.cancel_scope.cancel()
        # Outside the group, which would wrap it.
        if failure is not None:
            raise failure

    async def _jump(self) -> None:
        async with self._jumping:
            while True:
                await all_tasks_blocked()
                if self.next_due() is not None:
                    self._wake_next()
                    continue
                self._new_sleeper = anyio.Event()
                await self._new_sleeper.wait()

    def _wake_next(self) -> None:
        due, _, event = heapq.heappop(self._sleepers)
        self._now = max(self._now, due)
        event.set()


async def all_tasks_blocked() -> None:
    """Return when every other task of this loop waits for something.

    anyio's own function sleeps for a tenth of a real second when a task is ready to run; yielding
    instead keeps virtual time fast on asyncio.
    """
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        await anyio.wait_all_tasks_blocked()
        return
    await anyio.lowlevel.checkpoint()
    # On asyncio's own loops a task that is not blocked has a step scheduled, and so has
    # everything else that could wake one.
    scheduled: Sized | None = getattr(loop, "_ready", None)
    # Large bodies are unpacked in threads, which virtual time waits for.
    threads = anyio.to_thread.current_default_thread_limiter()
    while scheduled or (scheduled is not None and threads.borrowed_tokens):
        await anyio.lowlevel.checkpoint()
    if scheduled is None:
        await _no_task_runs(loop)


async def _no_task_runs(loop: asyncio.AbstractEventLoop) -> None:
    """The same for loops that do not show what they have scheduled."""
    this = asyncio.current_task()
    quiet = 0
    while quiet < _QUIET_ROUNDS:
        await anyio.lowlevel.checkpoint()
        blocked = all(_is_blocked(t) for t in asyncio.all_tasks(loop) if t is not this)
        quiet = quiet + 1 if blocked else 0


def _is_blocked(task: asyncio.Task[object]) -> bool:
    waiter: asyncio.Future[object] | None = getattr(task, "_fut_waiter", None)
    return waiter is not None and not waiter.done()

"""How long the event loop is busy with one thing: with a step of a request, or with other work.

All requests share one loop, so a step that computes for long delays every other request. Steps of
requests are measured each; what else runs on the loop, the scheduler for instance, is noticed by a
timer that comes late. Wall time also grows when the machine is busy; CPU time is the step's own.
The timer leaves out the time in which the loop's thread waited for a core, where that is known.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Generator

    from tinkex.server.observability.meters import Meters

BACKGROUND = "background"
BLOCK_S = 0.1
_TICK_S = 0.1
_FRESH_S = 0.002
_LOGGED_EVERY_S = 60.0
# Of Linux: nanoseconds that a thread has computed, and has waited for a core; and how often.
_SCHEDULED = "/proc/thread-self/schedstat"

_log = logging.getLogger(__name__)


class LoopTime:
    """What one request took of the loop so far: CPU in all, and its longest step."""

    __slots__ = ("cpu_s", "longest_cpu_s", "longest_s")

    def __init__(self) -> None:
        self.cpu_s = 0.0
        self.longest_cpu_s = 0.0
        self.longest_s = 0.0


class CpuReading:
    """The CPU time of the loop's thread, read at most every two milliseconds: it is a system call.

    So a step's CPU time may be too large by as much, and is never more than its wall time.
    """

    __slots__ = ("at", "cpu")

    def __init__(self) -> None:
        self.at = 0.0
        self.cpu = 0.0

    def begin(self) -> float:
        """Now, at the beginning of a step."""
        now = time.perf_counter()
        if now - self.at > _FRESH_S:
            self.at, self.cpu = now, time.thread_time()
        return now

    def end(self, began: float, spent: LoopTime) -> None:
        """Add a step that ends now."""
        now = time.perf_counter()
        took = used = now - began
        if took > _FRESH_S:
            before, self.cpu, self.at = self.cpu, time.thread_time(), now
            used = min(took, self.cpu - before)
        spent.cpu_s += used
        if used > spent.longest_cpu_s:
            spent.longest_cpu_s = used
        if took > spent.longest_s:
            spent.longest_s = took


class Watched:
    """Runs a coroutine and measures each of its steps; await it once."""

    __slots__ = ("_coroutine", "_reading", "_spent")

    def __init__(
        self, coroutine: Coroutine[Any, Any, None], spent: LoopTime, reading: CpuReading
    ) -> None:
        self._coroutine = coroutine
        self._spent = spent
        self._reading = reading

    def __await__(self) -> Generator[Any, Any, None]:
        coroutine, spent, reading = self._coroutine, self._spent, self._reading
        step: Callable[[Any], Any] = coroutine.send
        value: Any = None
        try:
            while True:
                began = reading.begin()
                try:
                    awaited = step(value)
                except StopIteration:
                    return
                finally:
                    reading.end(began, spent)
                try:
                    value = yield awaited
                    step = coroutine.send
                except GeneratorExit:
                    raise
                except BaseException as error:  # noqa: BLE001 - thrown into the coroutine
                    step, value = coroutine.throw, error
        finally:
            coroutine.close()


class CoreWaits:
    """How long the thread that opened this has waited for a core; 0 where that is unknown."""

    def __init__(self) -> None:
        self._file: int | None = None
        with suppress(OSError):
            self._file = os.open(_SCHEDULED, os.O_RDONLY | os.O_CLOEXEC)

    def seconds(self) -> float:
        """So far."""
        if self._file is None:
            return 0.0
        try:
            return int(os.pread(self._file, 100, 0).split()[1]) / 1e9
        except (OSError, ValueError, IndexError):
            return 0.0

    def close(self) -> None:
        """Give the file back."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


class LoopWatch:
    """Counts and logs what holds the loop for long."""

    def __init__(self, meters: Meters) -> None:
        self._meters = meters
        self.reading = CpuReading()
        # Mutable state: when a block of each route was last logged; CPU of requests and the end of
        # their latest block, since the timer last came; when it is due again, and how much CPU and
        # waiting for a core there had been.
        self._logged: dict[str, float] = {}
        self._request_cpu_s = 0.0
        self._blocked_until = 0.0
        self._ticked: tuple[float, float, float] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def add(self, route: str, spent: LoopTime) -> None:
        """Take what a request spent, at its end."""
        self._request_cpu_s += spent.cpu_s
        if spent.longest_s > BLOCK_S:
            self._blocked_until = time.perf_counter()
        self._note(route, spent.longest_s, spent.longest_cpu_s)

    @contextmanager
    def running(self) -> Generator[None]:
        """Watch the running loop for everything that is no request."""
        waits = CoreWaits()
        self._tick(waits)
        try:
            yield
        finally:
            waits.close()
            if self._timer is not None:
                self._timer.cancel()

    def _tick(self, waits: CoreWaits) -> None:
        now, cpu, waited = time.perf_counter(), time.thread_time(), waits.seconds()
        if self._ticked is not None:
            due, cpu_before, waited_before = self._ticked
            late = now - due - (waited - waited_before)
            if late > BLOCK_S and self._blocked_until < due - _TICK_S:
                used = max(cpu - cpu_before - self._request_cpu_s, 0.0)
                self._note(BACKGROUND, late, min(used, late))
        self._request_cpu_s = 0.0
        self._ticked = now + _TICK_S, cpu, waited
        self._timer = asyncio.get_running_loop().call_later(_TICK_S, self._tick, waits)

    def _note(self, route: str, longest_s: float, longest_cpu_s: float) -> None:
        self._meters.loop_step(route, longest_cpu_s, blocked=longest_s > BLOCK_S)
        if longest_s <= BLOCK_S:
            return
        now = time.perf_counter()
        if now - self._logged.get(route, -_LOGGED_EVERY_S) >= _LOGGED_EVERY_S:
            self._logged[route] = now
            _log.warning(
                "%s held the event loop for %.0f ms (%.0f ms of CPU)",
                route,
                longest_s * 1000,
                longest_cpu_s * 1000,
            )

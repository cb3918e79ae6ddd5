"""The one thread that touches tensors, and whose turn it is.

A round is: a few short commands, one training pass, then sampler steps. So a stream waits for
one training pass at most. Sampler steps go on until they took as long as the training pass
did, and there is a bound on their number: neither side can starve the other, and under load
each has about half of the device.
"""

from __future__ import annotations

import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final, Protocol

from tinkex.clock import SystemClock
from tinkex.engine.failures import failure
from tinkex.engine.local.tasks import TaskQueue
from tinkex.errors import ClosedError, RequestFailedError, StorageError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tinkex.clock import Clock
    from tinkex.engine.local.tasks import Task

COMMANDS: Final = 16
"""Most commands between two passes."""
SAMPLER_STEPS: Final = 64
"""Most sampler steps between two training passes."""
_FILE_THREADS: Final = 2

_log = logging.getLogger(__name__)


class Sampling(Protocol):
    """Something that samples, a pass at a time; it tells its callers itself."""

    @property
    def idle(self) -> bool:
        """Whether a step would do nothing."""
        ...

    def step(self) -> None:
        """Run one pass."""
        ...


class EngineThread:
    """Runs tasks and sampler steps until closed; `on_end` is called once, as its last act."""

    def __init__(
        self,
        samplers: Sequence[Sampling],
        on_end: Callable[[], None],
        clock: Clock | None = None,
    ) -> None:
        self._samplers = samplers
        self._on_end = on_end
        self._clock = clock or SystemClock()
        # Mutable state, guarded by the condition: what waits, and whether it is over.
        self._bell = threading.Condition()
        self._queue = TaskQueue()
        self._closed = False
        self._files = ThreadPoolExecutor(_FILE_THREADS, thread_name_prefix="tinkex-files")
        self._thread = threading.Thread(target=self._run, name="tinkex-engine", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    @property
    def sampling(self) -> bool:
        """Whether a sampler has something to do."""
        return any(not sampler.idle for sampler in self._samplers)

    def post(self, task: Task) -> None:
        """Have a task run; raises `ClosedError` when it never will."""
        with self._bell:
            if self._closed:
                raise ClosedError("the engine is closed")
            self._queue.add(task)
            self._bell.notify()

    def close(self) -> None:
        """End after the step that runs now; tasks that wait never run."""
        with self._bell:
            self._closed = True
            self._bell.notify()
        if self._thread.ident is not None:
            self._thread.join()
        self._files.shutdown(cancel_futures=True)

    def _run(self) -> None:
        try:
            while self._wait():
                self._round()
        except Exception:  # noqa: BLE001 - the thread ends here, and so does all that waits
            _log.critical("the engine's thread ended by a mistake of its own", exc_info=True)
        finally:
            with self._bell:
                self._closed = True
            self._on_end()

    def _wait(self) -> bool:
        """Wait until there is something to do; False when closed."""
        with self._bell:
            while not self._closed and not self._ready():
                self._bell.wait()
            return not self._closed

    def _ready(self) -> bool:
        return (
            self.sampling
            or self._queue.next(training=False) is not None
            or self._queue.next(training=True) is not None
        )

    def _round(self) -> None:
        self._commands()
        left_s = self._timed(self._training_pass)
        for _ in range(SAMPLER_STEPS):
            if self._closed or not self.sampling:
                return
            left_s -= self._timed(self._sampler_steps)
            if left_s <= 0:
                return
            self._commands()

    def _timed(self, action: Callable[[], None]) -> float:
        before = self._clock.now()
        action()
        return self._clock.now() - before

    def _commands(self) -> None:
        for _ in range(COMMANDS):
            task = self._next(training=False)
            if task is None:
                return
            self._advance(task)

    def _training_pass(self) -> None:
        task = self._next(training=True)
        if task is not None:
            self._advance(task)

    def _sampler_steps(self) -> None:
        for sampler in self._samplers:
            if not sampler.idle:
                sampler.step()

    def _next(self, *, training: bool) -> Task | None:
        with self._bell:
            return self._queue.next(training=training)

    def _advance(self, task: Task) -> None:
        if not task.wanted():
            task.steps.close()
            self._end(task, ClosedError("nobody waits for it any more"))
            return
        try:
            aside = task.advance()
        except StopIteration as end:
            self._end(task, end.value)
        except (RequestFailedError, StorageError) as error:
            self._end(task, error)
        except Exception as error:  # noqa: BLE001 - handed to whoever asked
            self._end(task, failure(error, "while it ran a command", None))
        else:
            if aside is not None:
                task.away = True
                self._files.submit(self._aside, task, aside)

    def _aside(self, task: Task, action: Callable[[], Any]) -> None:
        try:
            reply = action()
        except BaseException as error:  # noqa: BLE001 - raised again where the task goes on
            reply = error
        with self._bell:
            task.reply, task.away = reply, False
            self._bell.notify()

    def _end(self, task: Task, outcome: object) -> None:
        with self._bell:
            self._queue.remove(task)
        task.settle(outcome)

"""The engine's thread, which is the only one that uses tensors, and the order of its work.

A task is a generator. It yields None where other work may run, such as after a training pass, or a
function that runs on a file thread; it then continues with what that returned. Tasks that share a
key run one at a time, in the order of submission.

A round is: a few short commands, one training pass, then sampler steps. So a stream waits for one
training pass at most. Sampler steps continue until they have taken as long as the training pass,
and their number is bounded: neither side can starve the other, and under load each gets about half
of the device.
"""

from __future__ import annotations

import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Protocol

from tinkex.clock import SystemClock
from tinkex.engine.failures import failure
from tinkex.errors import ClosedError, RequestFailedError, StorageError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from tinkex.clock import Clock

    Steps = Generator["Callable[[], Any] | None", Any, Any]

COMMANDS: Final = 16
"""Most commands between two passes."""
SAMPLER_STEPS: Final = 64
"""Most sampler steps between two training passes."""
_FILE_THREADS: Final = 2

_log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True, kw_only=True)
class EngineTask:
    """Work for the engine's thread; `settle` is called with its result or exception."""

    steps: Steps
    settle: Callable[[object], None]
    keys: frozenset[str] = frozenset()
    training: bool = False
    """Whether a step is a whole training pass."""
    wanted: Callable[[], bool] = field(default=lambda: True)
    """Checked before every step; a task whose caller has gone ends there."""
    on_file_thread: bool = False
    """Whether it waits for a function on a file thread."""
    reply: object = None
    """What that function returned, or its exception."""

    def advance(self) -> Callable[[], Any] | None:
        """Run to the next yield; raises `StopIteration` at the end."""
        reply, self.reply = self.reply, None
        if isinstance(reply, BaseException):
            return self.steps.throw(reply)
        return self.steps.send(reply)


class TaskQueue:
    """Tasks in the order of submission; not thread-safe, `EngineThread` guards it."""

    def __init__(self) -> None:
        self._tasks: list[EngineTask] = []

    def __len__(self) -> int:
        return len(self._tasks)

    def add(self, task: EngineTask) -> None:
        """Append a task."""
        self._tasks.append(task)

    def remove(self, task: EngineTask) -> None:
        """Remove a task; tasks that share its keys may run now."""
        self._tasks.remove(task)

    def next(self, *, training: bool) -> EngineTask | None:
        """The first task of one kind that may run now."""
        taken: set[str] = set()
        for task in self._tasks:
            free = not task.on_file_thread and taken.isdisjoint(task.keys)
            if free and task.training == training:
                return task
            taken |= task.keys
        return None


class Sampling(Protocol):
    """A sampler that runs one pass at a time and notifies its callers itself."""

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
        # Mutable state. Callers' loops and the file threads add to the queue and change tasks while
        # this thread reads them, so both the queue and `_closed` are guarded by the condition; it
        # is notified after every change that may make a task ready.
        self._condition = threading.Condition()
        self._queue = TaskQueue()
        self._closed = False
        self._files = ThreadPoolExecutor(_FILE_THREADS, thread_name_prefix="tinkex-files")
        self._thread = threading.Thread(target=self._run, name="tinkex-engine", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    @property
    def sampling(self) -> bool:
        """Whether a sampler has something to do."""
        return any(not sampler.idle for sampler in self._samplers)

    def post(self, task: EngineTask) -> None:
        """Submit a task; raises `ClosedError` after `close`."""
        with self._condition:
            if self._closed:
                raise ClosedError("the engine is closed")
            self._queue.add(task)
            self._condition.notify()

    def close(self) -> None:
        """End after the current step; waiting tasks never run."""
        with self._condition:
            self._closed = True
            self._condition.notify()
        if self._thread.ident is not None:  # it was started
            self._thread.join()
        # After the join: until then the thread may still submit file work.
        self._files.shutdown(cancel_futures=True)

    def _run(self) -> None:
        try:
            while self._wait():
                self._round()
        except Exception:  # noqa: BLE001 - the thread ends, and `on_end` fails all callers
            _log.critical("the engine's thread ended because of an internal error", exc_info=True)
        finally:
            # Closed before `on_end` fails the waiting callers, so that no task is posted after it.
            with self._condition:
                self._closed = True
            self._on_end()

    def _wait(self) -> bool:
        """Wait for work; False when closed."""
        with self._condition:
            while not self._closed and not self._ready():
                self._condition.wait()
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

    def _next(self, *, training: bool) -> EngineTask | None:
        with self._condition:
            return self._queue.next(training=training)

    def _advance(self, task: EngineTask) -> None:
        if not task.wanted():
            task.steps.close()
            self._end(task, ClosedError("its caller has gone"))
            return
        try:
            file_work = task.advance()
        except StopIteration as end:
            self._end(task, end.value)
        except (RequestFailedError, StorageError) as error:
            self._end(task, error)
        except Exception as error:  # noqa: BLE001 - becomes the error of the task
            self._end(task, failure(error, "while it ran a command", None))
        else:
            if file_work is not None:
                # Set before the submission: the file thread resets it when it is done.
                task.on_file_thread = True
                self._files.submit(self._run_file_work, task, file_work)

    def _run_file_work(self, task: EngineTask, action: Callable[[], Any]) -> None:
        try:
            reply = action()
        except BaseException as error:  # noqa: BLE001 - raised where the task continues
            reply = error
        with self._condition:
            task.reply, task.on_file_thread = reply, False
            self._condition.notify()

    def _end(self, task: EngineTask, outcome: object) -> None:
        with self._condition:
            self._queue.remove(task)
        # Outside the lock: `settle` runs the caller's code.
        task.settle(outcome)

"""What waits for the engine's thread, and what of it may run now: no threads, no tensors.

A task is a generator. It yields None where something else may run, such as after a training
pass, or a function that is to run apart from the thread (files); it then goes on with what
that returned. Tasks that share a key run in the order they came, one at a time.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    Steps = Generator["Callable[[], Any] | None", Any, Any]


@dataclass(eq=False, slots=True, kw_only=True)
class Task:
    """Some work and whom to tell; `settle` gets what it returned or an exception."""

    steps: Steps
    settle: Callable[[object], None]
    keys: frozenset[str] = frozenset()
    training: bool = False
    """Whether a step is a whole training pass."""
    wanted: Callable[[], bool] = field(default=lambda: True)
    """Asked before every step; one that nobody wants any more ends there."""
    away: bool = False
    """A function of it runs elsewhere."""
    reply: object = None
    """What that function returned, or its exception."""

    def advance(self) -> Callable[[], Any] | None:
        """Run to the next yield; raises `StopIteration` at the end."""
        reply, self.reply = self.reply, None
        if isinstance(reply, BaseException):
            return self.steps.throw(reply)
        return self.steps.send(reply)


class TaskQueue:
    """Tasks in the order they came; whoever shares it between threads guards it."""

    def __init__(self) -> None:
        self._tasks: list[Task] = []

    def __len__(self) -> int:
        return len(self._tasks)

    def add(self, task: Task) -> None:
        """Put a task at the end."""
        self._tasks.append(task)

    def remove(self, task: Task) -> None:
        """Take a task out; those with its keys may run now."""
        self._tasks.remove(task)

    def next(self, *, training: bool) -> Task | None:
        """The first task of one kind that may run now."""
        taken: set[str] = set()
        for task in self._tasks:
            free = not task.away and taken.isdisjoint(task.keys)
            if free and task.training == training:
                return task
            taken |= task.keys
        return None

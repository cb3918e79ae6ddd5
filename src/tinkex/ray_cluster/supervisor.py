"""Keeps one node running: starts it, starts it again, gives up, stops it.

Knows processes only through `NodeProcess`, and Ray not at all.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final, Literal, Protocol

import anyio

from tinkex.clock import SystemClock, time_limit
from tinkex.ray_cluster.restarts import NodeExit, RestartPolicy, after_exit

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tinkex.clock import Clock

NodeState = Literal["starting", "ready", "waiting", "failed", "stopping", "stopped"]

_CANNOT_START: Final = 127
SETTLED: Final = frozenset({"ready", "failed", "stopped"})
"""States that last until something happens to the node."""


class NodeProcess(Protocol):
    """A running node."""

    pid: int

    @property
    def ready(self) -> Awaitable[str]: ...
    @property
    def lines(self) -> tuple[str, ...]: ...
    async def wait(self) -> int: ...
    def terminate(self) -> None: ...
    def kill(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReport:
    """How a node is. `version` grows with every change."""

    name: str
    state: NodeState = "starting"
    url: str | None = None
    pid: int | None = None
    machine: str | None = None
    starts: int = 0
    failures: int = 0
    """Quick ones in a row."""
    exit_status: int | None = None
    """Of the run before this one."""
    lines: tuple[str, ...] = field(default=(), repr=False)
    """The last lines of the log of a node that failed, or waits for its next start."""
    version: int = 0


class Supervisor:
    """One node. `run` belongs to one event loop; `report` and `wait_change` to any thread."""

    def __init__(
        self,
        name: str,
        start: Callable[[], Awaitable[NodeProcess]],
        *,
        policy: RestartPolicy | None = None,
        clock: Clock | None = None,
        machine: str | None = None,
    ) -> None:
        self._start = start
        self._policy = policy or RestartPolicy()
        self._clock = clock or SystemClock()
        self._changed = threading.Condition()
        self._stop = anyio.Event()
        # Mutable state: the report (under `_changed`), the running child, how long it may drain.
        self._report = NodeReport(name=name, machine=machine)
        self._child: NodeProcess | None = None
        self._limit_s = 0.0

    @property
    def report(self) -> NodeReport:
        """How the node is now."""
        return self._report

    def wait_change(self, version: int, timeout_s: float) -> NodeReport:
        """Block until the report is newer than `version`, for `timeout_s` at most."""
        with self._changed:
            self._changed.wait_for(lambda: self._report.version > version, timeout_s)
            return self._report

    def stop(self, limit_s: float) -> None:
        """Let the node drain and exit, and kill it after `limit_s`; a second call may shorten it.

        Must be called on the loop of `run`.
        """
        again = self._stop.is_set()
        self._limit_s = limit_s
        self._stop.set()
        if again and limit_s <= 0 and self._child is not None:
            self._child.kill()

    async def run(self) -> None:
        """Keep the node running until it is stopped."""
        while not self._stop.is_set():
            ended = await self._run_once()
            if self._stop.is_set():
                break
            then = after_exit(self._policy, self._report.failures, ended)
            self._note(
                state="failed" if then.delay_s is None else "waiting",
                failures=then.failures,
                exit_status=ended.status,
                url=None,
                pid=None,
            )
            async with time_limit(self._clock, then.delay_s):
                await self._stop.wait()
        self._note(state="stopped", url=None, pid=None)

    async def _run_once(self) -> NodeExit:
        began = self._clock.now()
        self._note(state="starting", starts=self._report.starts + 1)
        try:
            child = self._child = await self._start()
        except OSError as error:
            self._note(lines=(f"cannot start: {error}",))
            return NodeExit(status=_CANNOT_START, was_ready=False, lasted_s=0.0)
        self._note(pid=child.pid)
        was_ready = anyio.Event()
        status = _CANNOT_START
        async with anyio.create_task_group() as group:
            group.start_soon(self._note_ready, child, was_ready)
            group.start_soon(self._end_when_stopped, child)
            status = await child.wait()
            group.cancel_scope.cancel()
        self._child = None
        self._note(lines=child.lines)
        return NodeExit(
            status=status, was_ready=was_ready.is_set(), lasted_s=self._clock.now() - began
        )

    async def _note_ready(self, child: NodeProcess, was_ready: anyio.Event) -> None:
        url = await child.ready
        was_ready.set()
        if not self._stop.is_set():
            self._note(state="ready", url=url, lines=())

    async def _end_when_stopped(self, child: NodeProcess) -> None:
        await self._stop.wait()
        self._note(state="stopping")
        if self._limit_s > 0:
            child.terminate()
            await self._clock.sleep(self._limit_s)
        child.kill()

    def _note(self, **changes: object) -> None:
        with self._changed:
            changed = replace(self._report, **changes)  # pyright: ignore[reportArgumentType] - fields of the report
            self._report = replace(changed, version=self._report.version + 1)
            self._changed.notify_all()

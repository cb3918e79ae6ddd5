"""`Engine` that survives the death of its process: it starts another child.

Calls made while there is no child wait for the next one; calls under way when it dies raise
`EngineDiedError`, because only the server knows what to run again. Tenants see the first line of
that error; the child's last lines are in the log.
"""

from __future__ import annotations

import logging
import re
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol

import anyio

from tinkex.engine.process.calls import ForwardingEngine
from tinkex.errors import ClosedError, EngineDiedError, TinkerError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from tinkex.clock import Clock
    from tinkex.engine.protocol import Engine, ModelSpec

    class Child(Engine, Protocol):
        """An engine that can die."""

        @property
        def pid(self) -> int: ...
        async def wait_dead(self) -> EngineDiedError | None: ...
        async def close(self) -> None: ...

    Start = Callable[[Callable[[str], None]], Awaitable["Child"]]

State = Literal["starting", "ready", "restarting", "failed", "closed"]

_FIRST_WAIT_S: Final = 0.5
_LONGEST_WAIT_S: Final = 30.0
_MOST_FAILED_STARTS: Final = 5
# The death of a child that lived this long begins a new series.
_WELL_S: Final = 60.0
_PATH: Final = re.compile(r"(?<![\w.])/[^\s'\",;:()]+")

_log = logging.getLogger(__name__)


class RestartingEngine(ForwardingEngine):
    """Runs one child at a time; `start` makes one and reports each phase of that.

    `run` must run as a task beside the callers. `on_change` is called after each change of
    `state` or `phase`. `takes_bodies` says whether its children take an `EncodedTrainOp`.
    """

    def __init__(
        self,
        start: Start,
        clock: Clock,
        on_change: Callable[[], None] | None = None,
        *,
        takes_bodies: bool = False,
    ) -> None:
        self.takes_bodies = takes_bodies
        self._start = start
        self._clock = clock
        self._on_change = on_change
        # Mutable state: the child if one is ready, how many there have been, what happens now,
        # and why no other is started.
        self._child: Child | None = None
        self._models: Sequence[ModelSpec] = ()
        self._changed = anyio.Event()
        self.generation = 0
        self.state: State = "starting"
        self.phase = "starting the engine process"
        self.problem: TinkerError | None = None

    @property
    def models(self) -> Sequence[ModelSpec]:
        """The base models; none before the first child is ready."""
        return self._models

    @property
    def pid(self) -> int | None:
        """The child's process id, if there is one."""
        return None if self._child is None else self._child.pid

    @property
    def _closed(self) -> bool:
        return self.state == "closed"

    async def wait_ready(self) -> None:
        """Return when a child is ready; raises why there will be none."""
        await self._ready()

    async def run(self) -> None:
        """Start children, one after another, until closed or until another start cannot help."""
        deaths, failed_starts = 0, 0
        while not self._closed:
            try:
                child = await self._start(self._enter)
            except Exception as raised:  # noqa: BLE001 - such as a system without memory
                error = raised if isinstance(raised, TinkerError) else _not_started(raised)
                failed_starts += 1
                if not _worth_another(error, self.generation, failed_starts):
                    self._give_up(error)
                    return
                _log.error("the engine did not start: %s", error)
            else:
                failed_starts = 0
                deaths = deaths if await self._live(child) < _WELL_S else 0
            if not self._closed:
                await self._pause(deaths)
                deaths += 1

    async def _pause(self, deaths: int) -> None:
        """Restart at once after the first death of a series, and later after each further one."""
        if deaths:
            wait_s = min(_FIRST_WAIT_S * 2 ** (deaths - 1), _LONGEST_WAIT_S)
            self._enter(f"waiting {wait_s:g} s before the engine is started again")
            await self._clock.sleep(wait_s)

    async def close(self) -> None:
        """End the child; callers that wait get a `ClosedError`."""
        child, self._child = self._child, None
        self._become("closed", "closed")
        if child is not None:
            await child.close()

    async def _live(self, child: Child) -> float:
        """Serve calls with a child until it is dead; returns how long it lived."""
        born = self._clock.now()
        try:
            if not self._closed:
                self._child, self._models = child, child.models
                self.generation += 1
                self._become("ready", "ready")
                death = await child.wait_dead()
                if death is not None:
                    _log.error("the engine died and is started again: %s", death)
                self._lose(child)
        finally:
            # Shielded: also when this task is cancelled, no child stays behind.
            with anyio.CancelScope(shield=True):
                await child.close()
        return self._clock.now() - born

    def _lose(self, child: Child) -> None:
        """A child is dead: calls wait for the next one from now on."""
        if self._child is child:
            self._child = None
            self._become("restarting", "starting the engine process again")

    def _give_up(self, error: TinkerError) -> None:
        self.problem = error
        _log.critical("the engine cannot be started: %s", error)
        self._become("failed", f"the engine cannot be started: {first_line(error)}")

    def _become(self, state: State, phase: str) -> None:
        self.state = state
        self._enter(phase)
        changed, self._changed = self._changed, anyio.Event()
        changed.set()

    def _enter(self, phase: str) -> None:
        self.phase = phase
        if self._on_change is not None:
            self._on_change()

    async def _ready(self) -> Child:
        while self._child is None:
            if self._closed:
                raise ClosedError("the engine was closed")
            if self.problem is not None:
                raise self.problem if self.generation == 0 else EngineDiedError(self.phase)
            await self._changed.wait()
        return self._child

    async def _call(self, name: str, **arguments: Any) -> Any:
        child = await self._ready()
        try:
            return await getattr(child, name)(**arguments)
        except EngineDiedError as error:
            # Before `wait_dead` notices: a caller that retries at once must not get the dead child.
            self._lose(child)
            raise EngineDiedError(first_line(error)) from error

    async def stats(self) -> Mapping[str, float]:
        """The child's gauges; none, and no wait, while there is no child."""
        return {} if self._child is None else await self._call("stats")


def _not_started(error: Exception) -> EngineDiedError:
    failed = EngineDiedError(f"the engine process could not be started: {error}")
    failed.__cause__ = error
    return failed


def first_line(error: BaseException) -> str:
    """What a tenant may read of an error: one line, without paths of this machine."""
    line = (str(error).splitlines() or [type(error).__name__])[0]
    return _PATH.sub("(a file)", line.partition("; its last lines:")[0])


def _worth_another(error: TinkerError, generation: int, failed_starts: int) -> bool:
    """Whether another start may succeed: not after a first start, nor one that was refused."""
    if generation == 0 or not isinstance(error, EngineDiedError):
        return False
    return failed_starts < _MOST_FAILED_STARTS

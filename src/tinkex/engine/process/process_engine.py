"""`Engine` for the API process, computed by a child process. Nothing here imports torch.

The parent decides when the child counts as dead: its connection closed, it exited, or it is frozen.
Then every waiting call fails at once with an `EngineDiedError`. A child that is given up is killed
first, so that the next one finds the device free. `supervisor` starts the next one.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import TYPE_CHECKING, Any, Literal

import anyio
import anyio.lowlevel

from tinkex.clock import SystemClock, time_limit
from tinkex.engine.process.calls import Calls, ForwardingEngine
from tinkex.engine.process.messages import (
    Broken,
    CallReply,
    EngineReady,
    Logged,
    Phase,
    Start,
    Stop,
    Tokens,
    open_channel,
)
from tinkex.engine.process.program import (
    CHILD,
    LOOKS,
    Silence,
    computes,
    how_it_ended,
    is_stopped,
    start_program,
    verdict,
)
from tinkex.engine.process.spec import ProcessSettings
from tinkex.errors import ClosedError, EngineDiedError, InputError, RequestFailedError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tinkex.clock import Clock
    from tinkex.engine.process.messages import Channel, Message
    from tinkex.engine.process.program import Program
    from tinkex.engine.process.spec import EngineSpec
    from tinkex.engine.protocol import ModelSpec, OnToken
    from tinkex.errors import TinkerError

ProcessState = Literal["starting", "ready", "dead", "closed"]

_STOPPED = "stopped by a signal; its work waits until it is continued"

_log = logging.getLogger(__name__)


class ProcessEngine(ForwardingEngine):
    """An engine in a child process: make one with `start`, use it on the loop that started it.

    Close it, or use it as an async context manager. One that died stays dead; start another.
    """

    def __init__(
        self, settings: ProcessSettings, clock: Clock, on_phase: Callable[[str], None] | None
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._on_phase = on_phase
        self._loop = asyncio.get_running_loop()
        # Mutable state: its state and phase, why it was or has to be killed, and its parts.
        self.state: ProcessState = "starting"
        self._phase = "starting the engine process"
        self._models: Sequence[ModelSpec] = ()
        self._ready: asyncio.Future[None] = self._loop.create_future()
        self._lost = asyncio.Event()
        self._over = asyncio.Event()
        self._dead = asyncio.Event()
        self._reason: str | None = None
        self._broken: TinkerError | None = None
        self._report = ""
        self._channel: Channel
        self._program: Program
        self._calls: Calls
        self._life: asyncio.Task[None] | None = None

    @classmethod
    async def start(
        cls,
        spec: EngineSpec,
        settings: ProcessSettings | None = None,
        *,
        clock: Clock | None = None,
        on_phase: Callable[[str], None] | None = None,
        module: str = CHILD,
    ) -> ProcessEngine:
        """Spawn a child, have it load `spec`, and return when it is ready.

        The child runs `main` of `module`, which may add a decoder of bodies to that of `child`.

        `on_phase` gets what the child does meanwhile, such as "loading ... on cuda". Raises what
        the child ran into (`InputError`, `ModelError`, `MissingPackageError`), or an
        `EngineDiedError` when it ended or fell silent.
        """
        engine = cls(settings or ProcessSettings(), clock or SystemClock(), on_phase)
        try:
            await engine._start(spec, module)
        except BaseException:
            # Shielded: a caller that cancels the start must not leave the child behind.
            with anyio.CancelScope(shield=True):
                await engine._kill()
            raise
        return engine

    @property
    def models(self) -> Sequence[ModelSpec]:
        """The base models."""
        return self._models

    @property
    def pid(self) -> int:
        """The child's process id."""
        return self._program.pid

    async def wait_dead(self) -> EngineDiedError | None:
        """Return when the child has ended: how it died, or None when it was closed."""
        await self._dead.wait()
        return None if self.state == "closed" else EngineDiedError(self._report)

    async def close(self) -> None:
        """End the child: what runs now may finish within the grace time; callers get an error.

        That is a `ClosedError`, also for calls made later.
        """
        if self.state in ("starting", "ready"):
            self.state = "closed"
            self._calls.fail(lambda: ClosedError("the engine was closed"))
            self._channel.send(Stop())
        try:
            async with time_limit(self._clock, self._settings.close_grace_s):
                await self._over.wait()
        finally:
            await self._kill()

    async def __aenter__(self) -> ProcessEngine:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _call(self, name: str, *, on_token: OnToken | None = None, **arguments: Any) -> Any:
        if asyncio.get_running_loop() is not self._loop:
            raise InputError("is used on another event loop than the one that started it", "engine")
        if self.state == "closed":
            raise ClosedError("the engine is closed")
        if self.state == "dead":
            raise EngineDiedError(self._report)
        return await self._calls.call(name, on_token=on_token, **arguments)

    # -- start and messages -------------------------------------------------------------------

    async def _start(self, spec: EngineSpec, module: str) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            # Shielded: a child that is spawned while its caller is cancelled would have no owner.
            with anyio.CancelScope(shield=True):
                self._program = await start_program(theirs, self._over.set, module)
        self._channel = await open_channel(ours, self._take, self._on_lost)
        self._calls = Calls(self._channel.send)
        self._life = self._loop.create_task(self._live())
        level = logging.getLogger("tinkex").getEffectiveLevel()
        self._channel.send(Start(spec, self._settings.heartbeat_interval_s, level))
        await self._ready

    def _take(self, message: Message) -> None:
        if isinstance(message, CallReply | Tokens):
            self._calls.take(message)
        elif isinstance(message, Logged):
            logging.getLogger(message.logger).log(message.level, "%s", message.text)
        elif isinstance(message, Phase):
            self._enter(message.text)
        elif isinstance(message, EngineReady):
            self._models = message.models
            if self.state == "starting":
                self.state = "ready"
                self._enter("ready")
                if not self._ready.done():
                    self._ready.set_result(None)
        elif isinstance(message, Broken):
            self._broken = message.error

    def _enter(self, phase: str) -> None:
        self._phase = phase
        _log.info("engine process %d: %s", self.pid, phase)
        if self._on_phase is not None:
            self._loop.call_soon(self._on_phase, phase)

    def _on_lost(self, error: Exception | None) -> None:
        if error is not None:
            self._reason = self._reason or f"broke the protocol and was killed: {error}"
        self._lost.set()
        self._over.set()

    # -- the end ------------------------------------------------------------------------------

    async def _kill(self) -> None:
        """End the child at once, if there is one."""
        if self._life is not None:
            self._reason = self._reason or "was ended"
            self._over.set()
            await asyncio.wait([self._life])

    async def _live(self) -> None:
        """Watch the child until its end, then fail the calls that wait."""
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(self._watch)
                await self._over.wait()
                group.cancel_scope.cancel()
            if self._reason is None and self.state != "closed":
                # It exited by itself: its last messages, such as `Broken`, are still to be read.
                async with time_limit(self._clock, self._settings.reap_timeout_s):
                    await self._lost.wait()
        except Exception as error:  # noqa: BLE001 - the calls that wait must not wait for ever
            _log.exception("the engine process cannot be watched any more")
            self._reason = self._reason or f"could not be watched and was killed: {error}"
        finally:
            # Also when the loop is closed while this runs: no child stays behind.
            self._channel.abort()
            self._program.kill()
        code = await self._program.wait(self._clock, self._settings.reap_timeout_s)
        self._bury(code)

    async def _watch(self) -> None:
        look_s = self._settings.heartbeat_timeout_s / LOOKS
        silence, stop = Silence(), Silence()
        stopped_s = 0.0
        while self._reason is None:
            await self._clock.sleep(look_s)
            heard = self._channel.heard()
            silent_s = silence.look(look_s, heard=heard)
            suspicious = stopped_s > 0 or silent_s >= look_s * LOOKS / 2
            stopped = suspicious and not heard and self.state == "ready" and is_stopped(self.pid)
            if stopped != bool(stopped_s):
                self._enter(_STOPPED if stopped else "ready")
            stopped_s = stop.look(look_s, heard=not stopped)
            if stopped:
                # Once it is continued, it has the usual time to give a sign of life.
                silence.look(look_s, heard=True)
                if stopped_s >= self._settings.stopped_timeout_s:
                    self._reason = f"was stopped by a signal for {stopped_s:g} s and was killed"
            else:
                reason = self._judge(silent_s)
                if reason is not None and await self._has_just_said_something():
                    silence.look(look_s, heard=True)
                else:
                    self._reason = reason
        self._over.set()

    async def _has_just_said_something(self) -> bool:
        """Whether anything arrived while its threads were looked at.

        A process that had no CPU time sends what is due as soon as it gets some, and sleeps again.
        """
        for _ in range(2):  # one pass of the loop reads the socket, the next one handles it
            await anyio.lowlevel.checkpoint()
        return self._channel.heard()

    def _judge(self, silent_s: float) -> str | None:
        settings, starting = self._settings, self.state == "starting"
        limit_s = settings.start_timeout_s if starting else settings.heartbeat_timeout_s
        return verdict(silent_s, limit_s, settings.busy_timeout_s, lambda: computes(self.pid))

    def _bury(self, code: int | None) -> None:
        reason = self._reason
        if reason is None and self._broken is not None:
            reason = f"gave up: {self._broken}"
        self._report = how_it_ended(code, reason, self._program.lines)
        if self.state == "starting":
            self._report += f"\n(while it was {self._phase})"
        if self.state != "closed":
            self.state = "dead"
            _log.error("%s", self._report)
        if not self._ready.done():
            self._ready.set_exception(self._start_error())
        self._calls.fail(lambda: EngineDiedError(self._report))
        self._dead.set()

    def _start_error(self) -> TinkerError:
        if self._broken is None or isinstance(self._broken, RequestFailedError):
            return EngineDiedError(self._report)
        return self._broken

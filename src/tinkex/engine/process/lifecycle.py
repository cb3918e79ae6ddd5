"""One child process from its start to its end, as its parent sees it.

`EngineProcess` decides when the child counts as dead (its connection closed, it exited, or it is
frozen) and sees to it that everybody who waits is told once. A child that is given up is killed
first, so that whoever starts the next one finds the device free.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import TYPE_CHECKING, Literal

import anyio

from tinkex.clock import time_limit
from tinkex.engine.process.calls import Calls
from tinkex.engine.process.channel import open_channel
from tinkex.engine.process.liveness import LOOKS, Silence, computes, how_it_ended, verdict
from tinkex.engine.process.messages import (
    Answer,
    Broken,
    Logged,
    Phase,
    Ready,
    Start,
    Stop,
    Tokens,
)
from tinkex.engine.process.program import start_program
from tinkex.errors import ClosedError, EngineDiedError, InputError, RequestFailedError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tinkex.clock import Clock
    from tinkex.engine.process.channel import Channel
    from tinkex.engine.process.messages import Message
    from tinkex.engine.process.program import Program
    from tinkex.engine.process.spec import EngineSpec, ProcessSettings
    from tinkex.engine.protocol import ModelSpec
    from tinkex.errors import TinkerError

State = Literal["starting", "ready", "dead", "closed"]

_log = logging.getLogger(__name__)


class EngineProcess:
    """A child that runs an engine; `start` it once."""

    def __init__(
        self,
        settings: ProcessSettings,
        clock: Clock,
        on_phase: Callable[[str], None] | None,
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._on_phase = on_phase
        self._loop = asyncio.get_running_loop()
        # Mutable state: how far it is, why it was or has to be given up, and its parts.
        self.state: State = "starting"
        self.phase = "starting the engine process"
        self.models: Sequence[ModelSpec] = ()
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

    @property
    def pid(self) -> int:
        """The child's process id."""
        return self._program.pid

    @property
    def calls(self) -> Calls:
        """Where calls are made; raises when there is nobody to make them to."""
        if asyncio.get_running_loop() is not self._loop:
            raise InputError("is used on another event loop than the one that started it", "engine")
        if self.state == "closed":
            raise ClosedError("the engine is closed")
        if self.state == "dead":
            raise EngineDiedError(self._report)
        return self._calls

    async def start(self, spec: EngineSpec) -> None:
        """Spawn the child and wait until it is ready; raises what kept it from that."""
        ours, theirs = socket.socketpair()
        with theirs:
            # A child spawned for somebody who has gone would be nobody's.
            with anyio.CancelScope(shield=True):
                self._program = await start_program(theirs, self._over.set)
        self._channel = await open_channel(ours, self._take, self._on_lost)
        self._calls = Calls(self._channel.send)
        self._life = self._loop.create_task(self._live())
        level = logging.getLogger("tinkex").getEffectiveLevel()
        self._channel.send(Start(spec, self._settings.heartbeat_interval_s, level))
        await self._ready

    async def wait_dead(self) -> EngineDiedError | None:
        """Return when the child has ended: how it died, or None when it was closed."""
        await self._dead.wait()
        return None if self.state == "closed" else EngineDiedError(self._report)

    async def close(self) -> None:
        """End the child: what it does now may finish within the grace time, nothing else."""
        if self.state in ("starting", "ready"):
            self.state = "closed"
            self._calls.fail(lambda: ClosedError("the engine was closed"))
            self._channel.send(Stop())
        try:
            async with time_limit(self._clock, self._settings.close_grace_s):
                await self._over.wait()
        finally:
            await self.kill()

    async def kill(self) -> None:
        """End the child at once, if there is one."""
        if self._life is not None:
            self._reason = self._reason or "was ended"
            self._over.set()
            await asyncio.wait([self._life])

    # -- what the child says ------------------------------------------------------------------

    def _take(self, message: Message) -> None:
        if isinstance(message, Answer | Tokens):
            self._calls.take(message)
        elif isinstance(message, Logged):
            logging.getLogger(message.logger).log(message.level, "%s", message.text)
        elif isinstance(message, Phase):
            self._enter(message.text)
        elif isinstance(message, Ready):
            self.models = message.models
            if self.state == "starting":
                self.state = "ready"
                self._enter("ready")
                if not self._ready.done():
                    self._ready.set_result(None)
        elif isinstance(message, Broken):
            self._broken = message.error

    def _enter(self, phase: str) -> None:
        self.phase = phase
        _log.info("engine process %d: %s", self.pid, phase)
        if self._on_phase is not None:
            self._loop.call_soon(self._on_phase, phase)

    def _on_lost(self, error: Exception | None) -> None:
        if error is not None:
            self._reason = self._reason or f"broke the protocol and was killed: {error}"
        self._lost.set()
        self._over.set()

    # -- its end ------------------------------------------------------------------------------

    async def _live(self) -> None:
        """Watch over the child until its end, then tell everybody."""
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(self._watch)
                await self._over.wait()
                group.cancel_scope.cancel()
            if self._reason is None and self.state != "closed":
                # It exited by itself: what it said before is still to be read.
                async with time_limit(self._clock, self._settings.reap_timeout_s):
                    await self._lost.wait()
        finally:
            # Also when the loop ends under it: no child stays behind.
            self._channel.abort()
            self._program.kill()
        code = await self._program.wait(self._clock, self._settings.reap_timeout_s)
        self._bury(code)

    async def _watch(self) -> None:
        look_s = self._settings.heartbeat_timeout_s / LOOKS
        silence = Silence()
        while self._reason is None:
            await self._clock.sleep(look_s)
            self._reason = self._judge(silence.look(look_s, heard=self._channel.heard()))
        self._over.set()

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
            self._report += f"\n(while it was {self.phase})"
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

"""One server process from its start to its end: claims, loads, listens, drains.

It listens before the engine is ready, so that `/healthz` answers at once and `/readyz` tells what
is going on. Work that was accepted is in the store; ending loses nothing of it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any, cast

import anyio

from tinkex.clock import SystemClock
from tinkex.engine.process import EngineSpec, LocalSettings, ModelSource, ProcessEngine
from tinkex.engine.process.supervisor import RestartingEngine
from tinkex.errors import ClosedError
from tinkex.server.observability.meters import Meters, Readiness
from tinkex.serving.data_dir import claimed_folder
from tinkex.serving.host_settings import base_models
from tinkex.serving.resources import raise_file_limit, settle

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    from anyio.abc import TaskGroup

    from tinkex.server.server_settings import ServerSettings
    from tinkex.serving.host_settings import HostSettings
    from tinkex.serving.web import Web

_INTERRUPTED = 130
_FORCED = 1
# What an orderly end needs besides waiting for what runs: answers, snapshots, the engine's end.
_FORCE_AFTER_S = 15.0

_log = logging.getLogger(__name__)


def run_host(host: Host, data_dir: Path, *, wait_s: float = 0.0) -> None:
    """Run a server until it is told to end; raises what keeps it from starting.

    A server that has the folder is given `wait_s` to leave it.
    """
    raise_file_limit()
    with claimed_folder(data_dir, wait_s), asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(host.run())


class Host:
    """The parts of one server, and how they end. `run` it once."""

    def __init__(
        self,
        settings: HostSettings,
        server: ServerSettings,
        listener: socket.socket,
        *,
        on_ready: Callable[[], None],
        on_phase: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._settings = settings
        self._server = server
        self._listener = listener
        self._on_ready = on_ready
        self._on_phase = on_phase
        self._clock = SystemClock()
        self._readiness = Readiness()
        self._meters = Meters()
        # Mutable state: its loop once it runs, whether it answers, whether the end has begun,
        # and what came in the way.
        self._loop: asyncio.AbstractEventLoop | None = None
        self._answering = asyncio.Event()
        self._stopping = asyncio.Event()
        self._failure: Exception | None = None
        self._engine = RestartingEngine(  # pyright: ignore[reportAbstractUsage] - derived methods
            self._start_engine, self._clock, self._on_change
        )

    async def run(self) -> None:
        """Serve until told to end."""
        self._loop = asyncio.get_running_loop()
        self._on_signals(self._loop)
        async with anyio.create_task_group() as group:
            group.start_soon(self._engine.run)
            group.start_soon(self._announce)
            try:
                await self._serve(group)
            except Exception as error:  # noqa: BLE001 - raised below, outside the group
                self._failure = error
            await self._engine.close()
            group.cancel_scope.cancel()
        if self._failure is not None:
            raise self._failure

    async def _serve(self, group: TaskGroup) -> None:
        # Loaded beside the engine, which takes longer to start.
        opened = await asyncio.to_thread(_load_web)
        async with opened(
            self._settings,
            self._server,
            self._engine,
            self._clock,
            self._meters,
            self._readiness,
        ) as web:
            group.start_soon(self._end, web)
            await web.serve(self._listener, self._answering.set)

    def stop(self) -> None:
        """Begin the end; on its loop."""
        self._stopping.set()

    def stop_from_thread(self) -> None:
        """Begin the end; from any other thread."""
        loop = self._loop
        if loop is None:
            os._exit(_INTERRUPTED)  # it has not begun
        with suppress(RuntimeError):  # it has ended
            loop.call_soon_threadsafe(self.stop)

    async def _announce(self) -> None:
        try:
            await self._engine.wait_ready()
        except ClosedError:
            return
        except Exception as error:  # noqa: BLE001 - raised by `run`
            self._failure = error
            self.stop()
            return
        await self._answering.wait()
        settle()
        self._on_ready()

    async def _end(self, web: Web) -> None:
        await self._stopping.wait()
        _log.info("shutting down")
        web.close()
        await self._clock.sleep(self._settings.shutdown_s + _FORCE_AFTER_S)
        _log.error(
            "the end takes too long, so it is forced; what was accepted is kept, and goes on when "
            "the server is started again"
        )
        os._exit(_FORCED)

    def _on_change(self) -> None:
        """The engine does something else now: tell whoever watches."""
        engine = self._engine
        if engine.state == "ready":
            self._readiness.ready("engine")
            if engine.generation > 1:
                self._meters.engine_restarted()
        else:
            self._readiness.waits("engine", engine.phase)
            self._on_phase(engine.phase)

    def _on_signals(self, loop: asyncio.AbstractEventLoop) -> None:
        loop.add_signal_handler(signal.SIGTERM, self.stop)
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            loop.add_signal_handler(signal.SIGINT, self._interrupt)

    def _interrupt(self) -> None:
        if self._stopping.is_set():
            # The engine's process ends by itself when this one is gone.
            os._exit(_INTERRUPTED)
        self.stop()

    async def _start_engine(self, on_phase: Callable[[str], None]) -> ProcessEngine:
        return await ProcessEngine.start(
            _engine_spec(self._settings), clock=self._clock, on_phase=on_phase
        )


def _engine_spec(settings: HostSettings) -> EngineSpec:
    return EngineSpec(
        models=tuple(
            ModelSource(source, name, deferred=settings.deferred)
            for name, source in base_models(settings)
        ),
        folder=settings.data_dir / "adapters",
        artifacts=settings.artifacts,
        device=settings.device,
        dtype=settings.dtype,
        threads=settings.threads,
        settings=LocalSettings(
            adapter_bytes=settings.adapter_bytes, host_bytes=settings.parked_bytes
        ),
    )


def _load_web() -> Callable[..., AbstractAsyncContextManager[Web]]:
    from tinkex.serving.web import open_web

    return open_web


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    if sys.platform != "win32":
        with suppress(ImportError):
            import uvloop  # pyright: ignore[reportMissingImports] - faster where it is installed

            return cast("Any", uvloop).new_event_loop
    return None

"""One server process from its start to its end: locks its folder, loads, listens, drains.

It listens before the engine is ready, so that `/healthz` answers at once and `/readyz` reports the
progress. Accepted work is in the store, so a shutdown loses nothing of it.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import resource
import signal
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any, cast

import anyio

from tinkex.clock import SystemClock
from tinkex.engine.heap import return_large_blocks
from tinkex.engine.process import (
    EngineSpec,
    LocalSettings,
    ModelSource,
    ProcessEngine,
    ProcessSettings,
)
from tinkex.engine.process.supervisor import RestartingEngine
from tinkex.errors import ClosedError
from tinkex.server.observability.meters import Meters, Readiness
from tinkex.server.supervision import no_stray_cancellation
from tinkex.serving.data_dir import claimed_folder
from tinkex.serving.host_settings import base_models
from tinkex.serving.no_engine import NoEngine

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
_LEASE_LOST = 75  # EX_TEMPFAIL: whatever supervises the process starts it again
# What a shutdown needs besides waiting for what runs: replies, snapshots, the engine's exit.
_FORCE_AFTER_S = 15.0

_log = logging.getLogger(__name__)

_OPEN_FILES = 65_536
# With the default of 700, almost all objects are still in use: a request makes a few hundred.
_OBJECTS_BETWEEN_COLLECTIONS = 10_000


def run_host(host: Host, data_dir: Path, *, wait_s: float = 0.0) -> None:
    """Run a server until it is stopped; raises what keeps it from starting.

    Waits up to `wait_s` for a server that has locked the folder.
    """
    raise_file_limit()
    return_large_blocks()
    with claimed_folder(data_dir, wait_s), asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(host.run())


class Host:
    """The parts of one server, and their shutdown. `run` it once."""

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
        self._readiness.on_failure = self._fail
        self._meters = Meters()
        # Mutable state: its loop once it runs, whether it answers, whether it shuts down, the
        # error that `run` raises, and which engine was ready last.
        self._loop: asyncio.AbstractEventLoop | None = None
        self._answering = asyncio.Event()
        self._stopping = asyncio.Event()
        self._failure: Exception | None = None
        self._generation = 0
        self._engine = RestartingEngine(  # pyright: ignore[reportAbstractUsage] - derived methods
            self._start_engine, self._clock, self._on_change, takes_bodies=True
        )

    async def run(self) -> None:
        """Serve until `stop` or a signal."""
        self._loop = asyncio.get_running_loop()
        self._on_signals(self._loop)
        async with anyio.create_task_group() as group:
            group.start_soon(self._supervise)
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
        # Imported in a thread while the engine starts, which takes longer.
        opened = await asyncio.to_thread(_load_web)
        async with opened(
            self._settings,
            self._server,
            self._engine,
            self._clock,
            self._meters,
            self._readiness,
            _end_at_once,
        ) as web:
            group.start_soon(self._end, web)
            await web.serve(self._listener, self._answering.set)

    def stop(self) -> None:
        """Begin to shut down; call it on the loop."""
        self._stopping.set()

    def stop_from_thread(self) -> None:
        """Begin to shut down; call it from any other thread."""
        loop = self._loop
        if loop is None:
            os._exit(_INTERRUPTED)  # nothing has started yet
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(self.stop)

    def _fail(self, reason: str) -> None:
        """Shut down with an error: a part has ended, and a new process begins from the store."""
        _log.critical("the server ends, because %s; accepted work is kept", reason)
        self._failure = self._failure or ClosedError(f"the server ended, because {reason}")
        self.stop()

    async def _supervise(self) -> None:
        """Run the supervisor of the engine; without it nothing would start another engine."""
        try:
            with no_stray_cancellation():
                await self._engine.run()
        except Exception as error:  # noqa: BLE001 - raised by `run`
            _log.critical("the supervisor of the engine has failed", exc_info=error)
            self._readiness.fails("engine", f"its supervisor failed ({type(error).__name__})")

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
            "the shutdown takes too long, so it is forced; accepted work is kept and continues "
            "when the server is started again"
        )
        os._exit(_FORCED)

    def _on_change(self) -> None:
        """Report a new state or phase of the engine."""
        engine = self._engine
        if engine.state == "ready" and engine.phase == "ready":
            self._readiness.ready("engine")
            if 1 < engine.generation != self._generation:
                self._meters.engine_restarted()
            self._generation = engine.generation
        else:
            self._readiness.waits("engine", engine.phase)
            self._on_phase(engine.phase)

    def _on_signals(self, loop: asyncio.AbstractEventLoop) -> None:
        loop.add_signal_handler(signal.SIGTERM, self.stop)
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            loop.add_signal_handler(signal.SIGINT, self._interrupt)

    def _interrupt(self) -> None:
        if self._stopping.is_set():
            # The engine's process exits by itself when this one has exited.
            os._exit(_INTERRUPTED)
        self.stop()

    async def _start_engine(self, on_phase: Callable[[str], None]) -> ProcessEngine | NoEngine:
        if self._settings.role == "api":
            return NoEngine()  # pyright: ignore[reportAbstractUsage] - derived methods
        return await ProcessEngine.start(
            _engine_spec(self._settings),
            _process_settings(self._settings),
            clock=self._clock,
            on_phase=on_phase,
            module="tinkex.serving.engine_child",
        )


def _end_at_once(reason: str) -> None:
    """End the process without a shutdown: nothing that it would still write is accepted."""
    _log.critical("this node ends, because %s; start it again to join anew", reason)
    logging.shutdown()
    os._exit(_LEASE_LOST)


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
            cache_bytes=settings.cache_bytes,
            adapter_bytes=settings.adapter_bytes,
            host_bytes=settings.parked_bytes,
        ),
    )


def _process_settings(settings: HostSettings) -> ProcessSettings:
    return ProcessSettings(stopped_timeout_s=settings.engine_stopped_timeout_s)


def _load_web() -> Callable[..., AbstractAsyncContextManager[Web]]:
    from tinkex.serving.web import open_web

    return open_web


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    if sys.platform != "win32":
        with suppress(ImportError):
            import uvloop  # pyright: ignore[reportMissingImports] - faster where it is installed

            return cast("Any", uvloop).new_event_loop
    return None


def raise_file_limit() -> None:
    """Allow as many open connections as the system lets this user have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    wanted = _OPEN_FILES if hard == unlimited else min(_OPEN_FILES, hard)
    if soft != unlimited and soft < wanted:
        # Some systems allow less than they report.
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def settle() -> None:
    """Exclude everything that is loaded by now from garbage collection: it lives until exit."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_OBJECTS_BETWEEN_COLLECTIONS)

"""What the engine's process runs: builds a `LocalEngine` and runs the calls of its parent.

The main thread runs a loop that reads calls, sends results and sends heartbeats; the engine has a
thread of its own, so heartbeats continue while it computes. The process exits when its parent
exits, for whatever reason, because that closes the connection. It ignores SIGINT and SIGTERM, which
reach a whole process group or service at once: the parent decides what they mean.
"""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import logging
import os
import signal
import socket
import threading
import traceback
from typing import TYPE_CHECKING, Final

from tinkex.clock import SystemClock
from tinkex.engine.process.calls import CallRunner, sendable
from tinkex.engine.process.messages import (
    Beat,
    Broken,
    CallMessage,
    Cancel,
    EngineReady,
    Logged,
    Phase,
    Start,
    open_channel,
)
from tinkex.errors import ClosedError, InputError, MissingPackageError, ModelError

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from tinkex.engine.local import LocalEngine
    from tinkex.engine.models.loader import BaseModel, DeferredModel
    from tinkex.engine.process.calls import Decode
    from tinkex.engine.process.messages import Channel, Message
    from tinkex.engine.process.spec import EngineSpec

LOG_NAME: Final = "tinkex.engine.process.child"
_BROKEN_CODE: Final = 3
_DTYPES: Final = {"cuda": "bfloat16"}
_FLUSH_TIMEOUT_S: Final = 2.0

_log = logging.getLogger(LOG_NAME)


def main(fd: int, decode: Decode | None = None) -> None:
    """Serve on an inherited socket until `Stop`; never returns. `decode` reads encoded bodies."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    faulthandler.enable()
    # A process that the engine starts, such as a compiler, must not keep the connection open.
    os.set_inheritable(fd, False)
    asyncio.run(_Child(SystemClock(), decode).run(socket.socket(fileno=fd)))


class _Child:
    """The main thread's state."""

    def __init__(self, clock: SystemClock, decode: Decode | None) -> None:
        self._clock = clock
        self._decode = decode
        self._started = asyncio.Event()
        self._stopped = asyncio.Event()
        # Mutable state: how it was asked to start, why it must exit, and its parts once they exist.
        self._start: Start | None = None
        self._broken: BaseException | None = None
        self._runner: CallRunner | None = None
        self._channel: Channel | None = None
        self._beating: asyncio.Task[None] | None = None

    async def run(self, end: socket.socket) -> None:
        channel = self._channel = await open_channel(end, self._take, _on_lost)
        await self._started.wait()
        assert self._start is not None
        self._watch_threads()
        _send_logs(channel, self._start.log_level)
        self._beating = asyncio.get_running_loop().create_task(self._beat(channel))
        engine = await self._build(self._start.spec)
        if engine is not None:
            # Objects that live until exit need no garbage collection: with torch loaded, one
            # collection takes longer than many passes.
            gc.collect()
            gc.freeze()
            self._runner = CallRunner(engine, channel.send, self._give_up, self._decode)
            channel.send(EngineReady(engine.models))
            await self._stopped.wait()
        if self._broken is not None:
            await self._report(self._broken)
        elif engine is not None:
            await engine.close()
        await channel.drained()
        _leave(0)

    async def _build(self, spec: EngineSpec) -> LocalEngine | None:
        loop = asyncio.get_running_loop()

        def say(text: str) -> None:
            # Waits, so that the parent knows the step before that holds up every thread.
            asyncio.run_coroutine_threadsafe(self._say(text), loop).result()

        try:
            return await asyncio.to_thread(build_engine, spec, say)
        except Exception as error:  # noqa: BLE001 - reported to the parent
            self._broken = error
            return None

    async def _say(self, text: str) -> None:
        assert self._channel is not None
        self._channel.send(Phase(text))

    async def _report(self, error: BaseException) -> None:
        assert self._channel is not None
        # A device that hangs must not keep the process from reporting it and exiting.
        threading.Timer(_FLUSH_TIMEOUT_S, _leave, [_BROKEN_CODE]).start()
        self._channel.send(Broken(sendable(error)))
        await self._channel.drained()
        _leave(_BROKEN_CODE)

    async def _beat(self, channel: Channel) -> None:
        assert self._start is not None
        while True:
            channel.send(Beat())
            await self._clock.sleep(self._start.heartbeat_interval_s)

    def _take(self, message: Message) -> None:
        if isinstance(message, Start):
            self._start = message
            self._started.set()
        elif isinstance(message, CallMessage | Cancel):
            if self._runner is not None:
                self._runner.take(message)
        else:
            self._stopped.set()

    def _give_up(self, error: BaseException) -> None:
        self._broken = self._broken or error
        self._stopped.set()

    def _watch_threads(self) -> None:
        """Exit when a thread of the engine ends with an error: its callers would wait for ever."""
        loop = asyncio.get_running_loop()
        usual = threading.excepthook

        def ended(args: threading.ExceptHookArgs) -> None:
            usual(args)
            error = args.exc_value or ClosedError("a thread of the engine ended")
            loop.call_soon_threadsafe(self._give_up, error)

        threading.excepthook = ended


def build_engine(spec: EngineSpec, say: Callable[[str], None]) -> LocalEngine:
    """Load what `spec` names; `say` gets each step before it begins."""
    say("importing torch")
    try:
        import torch

        from tinkex.engine.heap import keep_freed_memory
        from tinkex.engine.local import LocalEngine
        from tinkex.engine.models.loader import defer_model, load_model
    except ModuleNotFoundError as error:
        needs = f"the engine needs {error.name}"
        raise MissingPackageError(needs, "'tinkex[engine]'") from error

    device = _device(spec.device)
    dtype: torch.dtype = getattr(torch, spec.dtype or _DTYPES.get(device.type, "float32"))
    threads = spec.threads
    if device.type == "cpu":
        keep_freed_memory()
    elif threads is None:
        threads = 1  # small sums between kernels: waking other threads takes longer
    if threads is not None:
        torch.set_num_threads(threads)
    models: list[BaseModel | DeferredModel] = []
    left_out: list[ModelError] = []
    for model in spec.models:
        say(f"loading {model.name or model.source} on {device} as {str(dtype).split('.')[-1]}")
        load = defer_model if model.deferred else load_model
        try:
            models.append(load(model.source, dtype=dtype, device=device, name=model.name))
        except ModelError as error:
            if not model.deferred:
                raise
            # It may never be used, and the others can be.
            left_out.append(error)
    if left_out and not models:
        raise left_out[0]
    for error in left_out:
        _log.warning("a base model is left out: %s", error)
    say("preparing the engine")
    return LocalEngine(models, spec.folder, spec.settings, artifacts=spec.artifacts)


def _device(name: str) -> torch.device:
    import torch

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise InputError(f"{name!r} is not a device: {error}", "device") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise InputError(f"{name!r} was asked for, and torch sees no CUDA device here", "device")
    return device


class _Forwarder(logging.Handler):
    """Hands log records of any thread to the parent."""

    def __init__(self, channel: Channel) -> None:
        super().__init__()
        self._channel = channel
        self._loop = asyncio.get_running_loop()

    def emit(self, record: logging.LogRecord) -> None:
        message = Logged(record.levelno, record.name, self.format(record))
        self._loop.call_soon_threadsafe(self._channel.send, message)


def _send_logs(channel: Channel, level: int) -> None:
    logging.getLogger().addHandler(_Forwarder(channel))
    logging.getLogger("tinkex").setLevel(level)


def _on_lost(error: Exception | None) -> None:
    """The parent has exited, or sent bytes that are no message: exit."""
    if error is not None:
        traceback.print_exception(error)
    _leave(0 if error is None else _BROKEN_CODE)


def _leave(code: int) -> None:
    """Exit without clean-up of the interpreter, which could wait for a device that hangs."""
    os._exit(code)

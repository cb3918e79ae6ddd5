"""The server that a program starts for itself: `ServiceClient()` with nothing configured.

It is `tinkex serve` in a child process on loopback, with a random port and key. All clients of the
program with the same settings share it, also those in its own children. It exits with the program,
for whatever reason that exits: it reads a pipe whose other end the program holds. If it dies by
itself, another is started on the same port and continues with what it had stored: the program binds
the port and passes it to each child, so clients that connect in between wait.
"""

from __future__ import annotations

import asyncio
import atexit
import importlib.util
import json
import logging
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tinkex.announcement import announced
from tinkex.clock import SystemClock
from tinkex.config import DEFAULT_MODEL, announce_to_children, announced_folder
from tinkex.errors import (
    EngineDiedError,
    InputError,
    MissingPackageError,
    ModelError,
    ServerSilentError,
    StorageError,
)
from tinkex.serving.data_dir import listen, url_of

if TYPE_CHECKING:
    from tinkex.config import Config
    from tinkex.errors import TinkerError

DEFAULT_MODELS = ("tinkex/tiny", DEFAULT_MODEL)
_NEEDED = ("starlette", "uvicorn", "torch")

_log = logging.getLogger(__name__)
_BOOT: Final = (
    "import sys; sys.path[:] = sys.argv[1:]; from tinkex.serving.owned import main; main()"
)
_LOG: Final = "server.log"
_SHOWN_LINES: Final = 10
_TICK_S: Final = 1.0
_GRACE_S: Final = 15.0
# Children that live shorter than this may die of their own start; after so many, none follows.
_WELL_S: Final = 30.0
_MOST_DEATHS: Final = 5
_KINDS: Final = {kind.__name__: kind for kind in (InputError, ModelError, StorageError)}


@dataclass(frozen=True, slots=True)
class EmbeddedSpec:
    """What an embedded server serves; clients with equal ones share a server."""

    models: tuple[str, ...]
    data_dir: Path | None


@dataclass(frozen=True, slots=True)
class Reached:
    """The address and key of a server."""

    url: str
    key: str


async def connect(config: Config) -> Config:
    """The settings of a client of the embedded server, which is started if there is none."""
    loop = asyncio.get_running_loop()
    found: asyncio.Future[Reached] = loop.create_future()

    def work() -> None:
        try:
            outcome: Reached | BaseException = reach(config)
        except BaseException as error:  # noqa: BLE001 - raised at the caller
            outcome = error
        with suppress(RuntimeError):  # the loop is closed, and its callers with it
            loop.call_soon_threadsafe(_settle, found, outcome)

    # Not the executor's thread: an interrupted program waits for those at exit.
    threading.Thread(target=work, name="tinkex-embedded-start", daemon=True).start()
    server = await found
    # Without a proxy, even a configured one: it could not reach this machine's loopback address.
    return replace(config, base_url=server.url, api_key=server.key, proxy=None, embedded=False)


def reach(config: Config) -> Reached:
    """Find the server of this program, or start it; blocks until it can be used."""
    spec = EmbeddedSpec(config.embedded_models or DEFAULT_MODELS, config.data_dir)
    own = _servers.own(spec)
    if own is None:
        above = _of_parent(spec)
        if above is not None:
            return above
        own = _servers.start(spec)
    own.wait_ready(config.bootstrap_deadline_s)
    announce_to_children(own.folder)
    return Reached(own.url, own.key)


def stop() -> None:
    """Stop the embedded servers of this process now; a later client starts another."""
    _servers.stop()


def _of_parent(spec: EmbeddedSpec) -> Reached | None:
    """The server that the parent of this process runs, if it fits and can be reached."""
    folder = announced_folder()
    found = announced(folder)
    if found is None or found.models != spec.models:
        return None
    if spec.data_dir is not None and str(spec.data_dir) != folder:
        return None
    host, _, port = found.url.removeprefix("http://").rpartition(":")
    try:
        socket.create_connection((host, int(port)), 1.0).close()
    except (OSError, ValueError):
        return None
    return Reached(found.url, found.key)


class _Servers:
    """The servers of this process."""

    def __init__(self) -> None:
        # Mutable state: the servers by their specs. The lock is held while one is started, so that
        # threads with the same spec get one server.
        self._lock = threading.Lock()
        self._running: dict[EmbeddedSpec, EmbeddedServer] = {}
        atexit.register(self.stop)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self.after_fork)

    def own(self, spec: EmbeddedSpec) -> EmbeddedServer | None:
        with self._lock:
            found = self._running.get(spec)
            return found if found is not None and found.alive else None

    def start(self, spec: EmbeddedSpec) -> EmbeddedServer:
        with self._lock:
            found = self._running.get(spec)
            if found is not None and found.alive:
                return found
            if found is not None:
                found.stop()
            _check_packages()
            found = self._running[spec] = EmbeddedServer(spec.models, spec.data_dir)
            return found

    def stop(self) -> None:
        with self._lock:
            running, self._running = self._running, {}
        for server in running.values():
            server.stop()

    def after_fork(self) -> None:
        """In a forked child: the servers belong to the parent, and so do their pipes."""
        self._lock = threading.Lock()
        for server in self._running.values():
            server.disown()
        self._running = {}


def _check_packages() -> None:
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingPackageError(
            "no server is configured (set TINKER_API_KEY for hosted Tinker, or TINKER_BASE_URL and "
            f"a key for another one), and starting one here needs {', '.join(missing)}",
            "'tinkex[server,engine]'",
        )


def _settle(found: asyncio.Future[Reached], outcome: Reached | BaseException) -> None:
    if found.done():
        return
    if isinstance(outcome, BaseException):
        found.set_exception(outcome)
    else:
        found.set_result(outcome)


_servers = _Servers()


# -- one server: one child process after another on one port -----------------------------------


class EmbeddedServer:
    """A server that belongs to this process; the constructor starts it."""

    def __init__(self, models: tuple[str, ...], data_dir: Path | None) -> None:
        self.key = f"tml-{secrets.token_urlsafe(24)}"
        self._models = models
        self._throwaway = data_dir is None
        self.folder = Path(tempfile.mkdtemp(prefix="tinkex-")) if data_dir is None else data_dir
        self._listener = listen("127.0.0.1", 0)
        self.url = url_of(self._listener)
        # Mutable state, guarded by the condition: the child, its phase, and how it ended.
        self._condition = threading.Condition()
        self._popen: subprocess.Popen[bytes] | None = None
        self._phase = "starting"
        self._ready = False
        self._ended = False
        self._error: TinkerError | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._live, name="tinkex-embedded", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether it runs or starts; False once it was given up or stopped."""
        return not self._ended

    def wait_ready(self, silence_s: float) -> None:
        """Return when it can be used; raises why it cannot.

        After a second a terminal shows its phase.
        """
        clock, silent_s = SystemClock(), 0.0
        begun = clock.now()
        progress = _StartLine()
        with self._condition:
            while not self._ready and not self._ended:
                heard = self._condition.wait(_TICK_S)
                silent_s = 0.0 if heard else silent_s + _TICK_S
                if silent_s >= silence_s:
                    raise ServerSilentError(
                        f"the embedded server said nothing for {silent_s:g} s while it was "
                        f"{self._phase}; its log is {self.folder / _LOG}"
                    )
                if clock.now() - begun >= _TICK_S:
                    progress.show(self._phase)
            progress.clear()
            if not self._ready:
                raise self._error or EngineDiedError("the embedded server was stopped")

    def stop(self) -> None:
        """Stop it, and wait until it has exited."""
        self._closing.set()
        with self._condition:
            popen = self._popen
        if popen is not None:
            _close_input(popen)
            with suppress(subprocess.TimeoutExpired):
                popen.wait(_GRACE_S)
            popen.kill()
        self._thread.join(_GRACE_S)
        if self._throwaway:
            shutil.rmtree(self.folder, ignore_errors=True)

    def disown(self) -> None:
        """In a forked child: release the parent's pipes and listener.

        By redirecting their descriptors, not by closing the objects: a thread of the parent may
        have held one of their locks during the fork, and no thread here releases it.
        """
        popen, null = self._popen, os.open(os.devnull, os.O_RDWR)
        pipes = () if popen is None else (popen.stdin, popen.stdout)
        for held in (self._listener, *pipes):
            if held is not None:
                with suppress(OSError, ValueError):  # closed already
                    os.dup2(null, held.fileno(), inheritable=False)
        os.close(null)
        if popen is not None:
            popen.returncode = 0  # not a child of this process, so `wait` must not be called

    # -- the thread ---------------------------------------------------------------------------

    def _live(self) -> None:
        """Run children until `stop`, or until another cannot help."""
        deaths, clock = 0, SystemClock()
        while not self._closing.is_set():
            born = clock.now()
            try:
                self._run_child()
            except OSError as error:
                self._error = StorageError(f"no server can be started here: {error}")
                break
            deaths = deaths + 1 if clock.now() - born < _WELL_S else 1
            if not self._ready or deaths >= _MOST_DEATHS:
                break
            self._closing.wait(0.1 * 2**deaths)
        with self._condition:
            self._ended, self._ready = True, False
            self._listener.close()
            self._condition.notify_all()

    def _run_child(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with (self.folder / _LOG).open("ab") as log:
            popen = subprocess.Popen(
                [sys.executable, "-c", _BOOT, *sys.path],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                pass_fds=[self._listener.fileno()],
                # Signals that a terminal sends to the program's group are not meant for it.
                start_new_session=True,
            )
        with self._condition:
            self._popen = popen
        with popen:
            if not self._closing.is_set():
                self._order(popen)
                self._listen_to(popen)
            _close_input(popen)
            code = popen.wait()
        if self._error is None:
            self._error = EngineDiedError(self._how_it_ended(code))

    def _order(self, popen: subprocess.Popen[bytes]) -> None:
        assert popen.stdin is not None
        order = {
            "models": self._models,
            "data_dir": str(self.folder),
            "throwaway": self._throwaway,
            "key": self.key,
            "listener": self._listener.fileno(),
        }
        with suppress(OSError):  # it has exited already, which the reader of its output notices
            popen.stdin.write(json.dumps(order).encode() + b"\n")
            popen.stdin.flush()

    def _listen_to(self, popen: subprocess.Popen[bytes]) -> None:
        assert popen.stdout is not None
        for line in popen.stdout:
            said: dict[str, Any] = json.loads(line)
            with self._condition:
                self._phase = said.get("phase", self._phase)
                self._ready = self._ready or "ready" in said
                if "warning" in said:
                    _log.warning("the embedded server: %s", said["warning"])
                if "error" in said:
                    self._error = _rebuilt(said["error"])
                self._condition.notify_all()

    def _how_it_ended(self, code: int) -> str:
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        with suppress(OSError):
            lines = (self.folder / _LOG).read_text(errors="replace").splitlines()[-_SHOWN_LINES:]
            how += "; its last lines:\n" + "\n".join(lines) if lines else ""
        return f"the embedded server {how}"


class _StartLine:
    """One line with the phase on a terminal; nothing without one."""

    def __init__(self) -> None:
        self._stream = sys.stderr if sys.stderr is not None and sys.stderr.isatty() else None
        self._shown = ""

    def show(self, phase: str) -> None:
        line = f"tinkex: starting a server of its own: {phase} …"
        if self._stream is not None and line != self._shown:
            self._shown = line
            # A line that wraps could not be erased.
            width = shutil.get_terminal_size((80, 24)).columns
            self._stream.write(f"\r\x1b[K{line[: width - 1]}")
            self._stream.flush()

    def clear(self) -> None:
        if self._stream is not None and self._shown:
            self._stream.write("\r\x1b[K")
            self._stream.flush()


def _rebuilt(said: dict[str, str]) -> TinkerError:
    message = said["message"]
    kind = _KINDS.get(said["kind"])
    if kind is not None:
        return kind(message)
    return EngineDiedError(f"the embedded server could not start: {message}")


def _close_input(popen: subprocess.Popen[bytes]) -> None:
    assert popen.stdin is not None
    with suppress(OSError):
        popen.stdin.close()

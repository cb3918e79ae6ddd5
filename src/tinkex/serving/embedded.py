"""The server that a program starts for itself: `ServiceClient()` with nothing configured.

It is `tinkex serve` in a child process on loopback, with a random port and key. All clients of the
program with the same settings share it, also those in its own children. It exits with the program,
for whatever reason that exits: it reads a pipe whose other end the program holds. If it dies by
itself, another is started on the same port and continues with what it had stored.
"""

from __future__ import annotations

import asyncio
import atexit
import importlib.util
import os
import socket
import threading
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tinkex.announcement import announced
from tinkex.config import DEFAULT_MODEL, announce_to_children, announced_folder
from tinkex.errors import MissingPackageError
from tinkex.serving.embedded_process import EmbeddedServer

if TYPE_CHECKING:
    from pathlib import Path

    from tinkex.config import Config

DEFAULT_MODELS = ("tinkex/tiny", DEFAULT_MODEL)
_NEEDED = ("starlette", "uvicorn", "torch")


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

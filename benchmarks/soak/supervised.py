"""A `tinkex serve` with keys that is killed now and then and started again on the same port."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from tests.e2e.serving import MODEL, children, environment, started, wait_gone

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from pathlib import Path

    from tests.e2e.serving import Served

Victim = Literal["engine", "server"]
TENANTS = ("sft", "rl", "rest")
# Work that was under way this long after a kill counts as disturbed by it.
SETTLE_S = 20.0


@dataclass(frozen=True)
class Kill:
    """A process that was ended with SIGKILL, and when the server was ready again."""

    victim: Victim
    at: float
    ready_at: float


class Supervised:
    """The server of a soak; a context manager."""

    def __init__(self, folder: Path, database: str | None, settings: dict[str, float]) -> None:
        self.data = folder / "data"
        self._place = () if database is None else ("--database", database)
        self._settings = [f"--set={name}={value:g}" for name, value in settings.items()]
        # Mutable state: the process, its port (the same after a restart), and what was killed.
        self._life: AbstractContextManager[Served] | None = None
        self._server: Served | None = None
        self._port = 0
        self._starting = threading.Lock()
        self.kills: list[Kill] = []
        self.keys: dict[str, str] = {}

    def __enter__(self) -> Supervised:
        self.data.parent.mkdir(parents=True, exist_ok=True)
        self.keys = {tenant: self._new_key(tenant) for tenant in TENANTS}
        self._start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._server is not None and self._server.popen.poll() is None:
            self._server.popen.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                self._server.popen.wait(30.0)
        if self._life is not None:
            self._life.__exit__(None, None, None)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    @property
    def pid(self) -> int:
        assert self._server is not None
        return self._server.pid

    @property
    def engine_pids(self) -> list[int]:
        """The engine's process, with those below it; none while it is started again."""
        return children(self.pid)

    @property
    def log(self) -> str:
        assert self._server is not None
        return self._server.log.read_text()

    def kill(self, victim: Victim) -> None:
        """End a process at once. The server starts its engine again, we start the server."""
        at = time.monotonic()
        below = self.engine_pids
        if victim == "engine":
            for pid in below:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            ready_at = at
        else:
            assert self._server is not None
            assert self._life is not None
            self._server.popen.kill()
            self._server.popen.wait()
            self._life.__exit__(None, None, None)
            for pid in below:  # the engine ends by itself when its server is gone
                wait_gone(pid)
            self._start()
            ready_at = time.monotonic()
        self.kills.append(Kill(victim, at, ready_at))

    def disturbed(self, began: float, ended: float) -> bool:
        """Whether a kill may have delayed what ran between these times."""
        return any(began < k.ready_at + SETTLE_S and ended > k.at for k in self.kills)

    def _start(self) -> None:
        flags = ("--base-model", MODEL, "--threads", "1", "--port", str(self._port))
        flags += ("--log-level", "warning")
        self._life = started(self.data, *flags, *self._place, *self._settings)
        self._server = self._life.__enter__()
        self._server.wait_ready()
        self._port = int(self._server.port)

    def _new_key(self, owner: str) -> str:
        command = [sys.executable, "-m", "tinkex.cli", "key", "create", "--owner", owner]
        done = subprocess.run(
            [*command, "--data-dir", str(self.data), *self._place],
            env=environment(self.data.parent),
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout.strip()

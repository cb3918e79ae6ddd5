"""A server that is killed now and then, behind an address that stays.

Clients talk to a relay. It counts their requests and, at moments that a seed has chosen, kills
the engine's process, the server's, or both with SIGKILL, before or after it passes the request on.
The server is started again on the same folder.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
import threading
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from tests.e2e.serving import children, started, wait_gone

if TYPE_CHECKING:
    from collections.abc import Generator
    from contextlib import AbstractContextManager
    from pathlib import Path

    from tests.e2e.serving import Served

Victim = Literal["engine", "server", "both"]

_REQUEST = re.compile(rb"(?:POST|GET|PUT|DELETE) /api/v1/(?!session_heartbeat)")
FLAGS = ("--base-model", "tinkex/tiny", "--threads", "1", "--no-auth", "--port", "0")


@dataclass(frozen=True)
class Moment:
    """After so many more requests, who dies, and whether that request still gets through."""

    requests: int
    victim: Victim
    first_passed_on: bool


def moments(seed: int, kills: int) -> list[Moment]:
    chosen = random.Random(seed)
    victims: list[Victim] = ["engine", "server", "both"]
    return [
        Moment(chosen.randint(2, 26), chosen.choice(victims), chosen.random() < 0.5)
        for _ in range(kills)
    ]


@dataclass
class Mortal:
    """The server, its folder, and what is still to happen to it."""

    data_dir: Path
    moments: list[Moment]
    flags: tuple[str, ...] = ()
    killed: list[Moment] = field(default_factory=list)

    def __post_init__(self) -> None:
        # Mutable state: the process, and the requests since the last kill.
        self.server: Served | None = None
        self._life: AbstractContextManager[Served] | None = None
        self._seen = 0
        self._changing = threading.Lock()

    @property
    def port(self) -> int:
        """Where it listens now; raises when it does not."""
        if self.server is None or not self.server.url:
            raise ConnectionRefusedError
        return int(self.server.port)

    def start(self) -> None:
        self._life = started(self.data_dir, *FLAGS, *self.flags)
        self.server = self._life.__enter__()
        self.server.wait_ready()

    def end(self) -> None:
        if self._life is not None:
            self._life.__exit__(None, None, None)

    def count(self) -> Moment | None:
        """One more request; the moment that has come with it, if one has."""
        with self._changing:
            if not self.moments or self.server is None or not self.server.url:
                return None
            self._seen += 1
            if self._seen < self.moments[0].requests:
                return None
            self._seen = 0
            return self.moments.pop(0)

    def kill(self, moment: Moment) -> None:
        """End a process at once, and bring the server back if it was that."""
        with self._changing:
            server = self.server
            assert server is not None
            below = children(server.pid)
            self.killed.append(moment)
            if moment.victim != "server":
                for pid in below:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            if moment.victim != "engine":
                self.server = None
                server.end(signal.SIGKILL)
                self.end()
                for pid in below:
                    wait_gone(pid)
                self.start()


class Target(Protocol):
    """What a relay passes bytes on to; counts requests, and dies or not at some of them."""

    @property
    def port(self) -> int: ...
    def count(self) -> Any: ...
    def kill(self, moment: Any) -> None: ...


class Relay:
    """Passes bytes between clients and whatever server there is.

    While there is none, a connection is held for `held_s` before it is closed.
    """

    def __init__(self, mortal: Target, held_s: float = 0.0) -> None:
        self._mortal = mortal
        self._held_s = held_s
        self.port = 0
        self._ready = threading.Event()
        self._stop: asyncio.Event
        self._loop: asyncio.AbstractEventLoop
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)

    def start(self) -> None:
        self._thread.start()
        self._ready.wait()

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    async def _run(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        listener = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.port = listener.sockets[0].getsockname()[1]
        self._ready.set()
        async with listener:
            await self._stop.wait()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with suppress(OSError, asyncio.IncompleteReadError):
                up_reader, up_writer = await self._server()
                down = asyncio.create_task(_copy(up_reader, writer))
                try:
                    await self._up(reader, up_writer)
                finally:  # also when the relay is stopped
                    up_writer.close()
                await down
        finally:
            writer.close()

    async def _server(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        deadline = self._loop.time() + self._held_s
        while True:
            try:
                port = await asyncio.to_thread(lambda: self._mortal.port)
                return await asyncio.open_connection("127.0.0.1", port)
            except OSError:
                if self._loop.time() >= deadline:
                    raise
            await asyncio.sleep(0.5)

    async def _up(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            moment = next(
                filter(None, (self._mortal.count() for _ in _REQUEST.findall(data))), None
            )
            if moment is not None and not moment.first_passed_on:
                await asyncio.to_thread(self._mortal.kill, moment)
            try:
                writer.write(data)
                await writer.drain()
            finally:  # also when this connection still led to the server that was killed before
                if moment is not None and moment.first_passed_on:
                    await asyncio.to_thread(self._mortal.kill, moment)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    except OSError:
        return
    finally:
        writer.close()  # also when the other side was killed: clients must notice


@contextmanager
def mortal_server(
    data_dir: Path, planned: list[Moment], *flags: str
) -> Generator[tuple[Mortal, str]]:
    """A server under fire, and the address that stays."""
    mortal = Mortal(data_dir, list(planned), flags)
    relay = Relay(mortal)
    try:
        mortal.start()
        relay.start()
        yield mortal, f"http://127.0.0.1:{relay.port}"
        relay.stop()
    finally:
        mortal.end()

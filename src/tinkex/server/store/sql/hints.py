"""Hints between nodes by LISTEN and NOTIFY: what has changed, so that others need not ask.

A hint is sent in the transaction that changes something, and arrives after its commit. The channel
is that of one schema. A payload is `ORIGIN KIND ID`, where the origin is the node that sent it (or
`-`), so that a node can ignore its own. SQLite has one node and no hints.
"""

from __future__ import annotations

import logging
import selectors
import socket
import threading
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import text

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from sqlalchemy import Connection, Engine

_log = logging.getLogger(__name__)

ALL: Final = "all"
"""Anything may have changed."""
_CHANNEL = "'tinkex_' || md5(current_schema())"
_NOTIFY = text(f"SELECT pg_notify({_CHANNEL}, :payload)")
_LONGEST_BYTES = 7900
_SHORTEST_WAIT_S = 0.1
_LONGEST_WAIT_S = 5.0


def notify(connection: Connection, origin: str | None, hint: str) -> None:
    """Send a hint when the transaction commits."""
    if connection.dialect.name != "postgresql":
        return
    payload = f"{origin or '-'} {hint}".replace("\0", "\u2400").encode(errors="replace").decode()
    if len(payload.encode()) > _LONGEST_BYTES:
        payload = f"- {ALL}"
    connection.execute(_NOTIFY, {"payload": payload})


class Listener:
    """One connection that only listens, and its thread. Callbacks run on the event loop.

    `connected(True)` is called when every later change will be heard, `connected(False)` when
    that is no longer so.
    """

    def __init__(
        self,
        engine: Engine,
        origin: str,
        loop: asyncio.AbstractEventLoop,
        heard: Callable[[str], None],
        connected: Callable[[bool], None],
    ) -> None:
        self._engine = engine
        self._origin = origin
        self._loop = loop
        self._heard = heard
        self._connected = connected
        self._wake, self._waker = socket.socketpair()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="tinkex-hints", daemon=True)
        self._tried = threading.Event()

    def start(self) -> None:
        """Listen until `close`."""
        self._thread.start()

    def wait(self, timeout_s: float) -> None:
        """Block until the first connection is there, or has failed."""
        self._tried.wait(timeout_s)

    def close(self) -> None:
        """End the thread; blocks."""
        self._closing.set()
        self._waker.send(b"x")
        self._thread.join()
        self._wake.close()
        self._waker.close()

    def _serve(self) -> None:
        wait_s = _SHORTEST_WAIT_S
        while not self._closing.is_set():
            try:
                with closing(self._connect()) as connection:
                    self._prepare(connection)
                    wait_s = _SHORTEST_WAIT_S
                    self._call(self._connected, True)
                    self._tried.set()
                    self._listen(connection)
            except Exception as error:  # noqa: BLE001 - one connection ends here; the next may live
                _log.warning("hints of other nodes are not heard until it works again: %s", error)
            finally:
                self._call(self._connected, False)
                self._tried.set()
            self._closing.wait(wait_s)
            wait_s = min(wait_s * 2, _LONGEST_WAIT_S)

    def _connect(self) -> Any:
        pooled = self._engine.raw_connection()
        connection = pooled.driver_connection
        # The pool would report a lost connection once more.
        pooled.detach()
        return connection

    def _prepare(self, connection: Any) -> None:
        connection.autocommit = True
        name = connection.execute(f"SELECT {_CHANNEL}").fetchone()[0]
        connection.execute(f'LISTEN "{name}"')

    def _listen(self, connection: Any) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake, selectors.EVENT_READ)
            selector.register(connection.fileno(), selectors.EVENT_READ)
            while not self._closing.is_set():
                selector.select()
                for each in connection.notifies(timeout=0):
                    self._pass(each.payload)

    def _pass(self, payload: str) -> None:
        origin, _, hint = payload.partition(" ")
        if origin != self._origin:
            self._call(self._heard, hint)

    def _call(self, callback: Callable[[Any], None], value: object) -> None:
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(callback, value)

"""A socket in front of a PostgreSQL server that loses connections on demand."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Literal, Self

if TYPE_CHECKING:
    from pathlib import Path

_NAME = ".s.PGSQL.5432"

Loss = Literal["before the commit", "after the commit"]


class LossyProxy:
    """Hands everything on, until it is told to lose a connection at its next commit."""

    def __init__(self, folder: Path, server_folder: str) -> None:
        self.folder = folder
        self._server = f"{server_folder}/{_NAME}"
        self._listener = socket.socket(socket.AF_UNIX)
        self._threads: list[threading.Thread] = []
        self._ends: list[socket.socket] = []
        # Mutable state: what happens to the next commit, and how often something did.
        self.next_loss: Loss | None = None
        self.losses = 0

    def __enter__(self) -> Self:
        self._listener.bind(str(self.folder / _NAME))
        self._listener.listen()
        self._start(self._accept)
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        for end in self._ends:
            _hang_up(end)
        for thread in self._threads:
            thread.join()
        for end in (self._listener, *self._ends):
            end.close()

    def _start(self, work: object, *args: object) -> None:
        thread = threading.Thread(target=work, args=args)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.socket(socket.AF_UNIX)
                server.connect(self._server)
                self._ends += (client, server)
                self._start(self._requests, client, server)
                self._start(_hand_on, server, client)

    def _requests(self, client: socket.socket, server: socket.socket) -> None:
        with suppress(OSError):
            while data := client.recv(65536):
                loss = self.next_loss if b"COMMIT" in data else None
                if loss is not None:
                    self.next_loss = None
                    self.losses += 1
                    # The client hears nothing more, whatever the server answers.
                    _hang_up(client)
                if loss != "before the commit":
                    server.sendall(data)
                if loss is not None:
                    break
        # The server reads to the end what was sent, then it lets go.
        with suppress(OSError):
            server.shutdown(socket.SHUT_WR)


def _hand_on(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(65536):
            target.sendall(data)
    _hang_up(target)


def _hang_up(end: socket.socket) -> None:
    with suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)

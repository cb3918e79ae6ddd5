"""A server that answers by a script and remembers what it was asked; in-process or on loopback."""

from __future__ import annotations

import http.server
import json
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, urlsplit

from tinkex.clients.connection import Connection
from tinkex.config import Config
from tinkex.transport.base import HttpRequest, Reply

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tinkex.clients.portal import Portal
    from tinkex.clock import Clock

KEY = "tml-test"


@dataclass
class Asked:
    """One request as the server saw it."""

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    body: Any


@dataclass
class Script:
    """Answers by `METHOD /path`; a list is answered one by one, its last item for ever."""

    answers: dict[str, Any] = field(default_factory=dict)
    asked: list[Asked] = field(default_factory=list)
    closed: threading.Event = field(default_factory=threading.Event)

    def answer(self, asked: Asked) -> tuple[int, bytes]:
        if not asked.path.startswith("/api/v1/client/"):
            self.asked.append(asked)
        key = f"{asked.method} {asked.path.removeprefix('/api/v1')}"
        found = self.answers.get(key, {} if key.startswith("POST /client/") else None)
        if isinstance(found, list):
            found = found.pop(0) if len(found) > 1 else found[0]
        if found is None:
            return 404, json.dumps({"detail": f"nothing at {key}"}).encode()
        status, content = found if isinstance(found, tuple) else (200, found)
        return status, b"" if content == "" else json.dumps(content).encode()

    # -- as a transport -----------------------------------------------------------------------

    async def send(self, request: HttpRequest) -> Reply:
        body = json.loads(request.body) if request.body else None
        headers = {name.lower(): value for name, value in request.headers.items()}
        query = dict(parse_qsl(request.query))
        status, data = self.answer(Asked(request.method, request.path, query, headers, body))
        return Reply(status, {"content-length": str(len(data))}, data)

    def stream(self, request: HttpRequest) -> Any:
        raise NotImplementedError

    async def aclose(self) -> None:
        self.closed.set()

    def connection(self, *, clock: Clock | None = None, portal: Portal | None = None) -> Connection:
        config = Config(base_url="http://test", api_key=KEY)
        return Connection(config, clock=clock, portal=portal, transport=lambda *_: self)


@contextmanager
def on_loopback(script: Script) -> Iterator[str]:
    """The base URL of a real HTTP server that answers by `script`."""

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_any(self) -> None:
            length = int(self.headers.get("content-length") or 0)
            raw = self.rfile.read(length)
            parts = urlsplit(self.path)
            headers = {name.lower(): value for name, value in self.headers.items()}
            body = json.loads(raw) if raw else None
            status, data = script.answer(
                Asked(self.command, parts.path, dict(parse_qsl(parts.query)), headers, body)
            )
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = do_PUT = do_DELETE = handle_any

        def log_message(self, format: str, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()

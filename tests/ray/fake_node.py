"""A program that behaves like `tinkex serve --join` towards its supervisor.

What it does is chosen by its base model: `fake/fails` exits at once, `fake/stubborn` ignores
SIGTERM, any other one listens. Every event is a line in the file `TINKEX_FAKE_EVENTS`.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, TextIO


def main() -> None:
    parser = argparse.ArgumentParser()
    settings = ("host", "port", "data-dir", "format", "base-model", "device")
    for option in ("join", "node-name", "role", *settings):
        parser.add_argument(f"--{option}")
    args = parser.parse_args()
    events = Path(os.environ["TINKEX_FAKE_EVENTS"])

    def note(event: str) -> None:
        with events.open("a") as file:
            file.write(f"{event} {args.join} {args.base_model or args.role} {os.getpid()}\n")

    note("started")
    # What a careless library might log.
    _write(sys.stderr, f"connecting to {os.environ['TINKEX_DATABASE']}")
    if args.base_model == "fake/fails":
        _write(sys.stderr, "the model is damaged")
        sys.exit(1)

    def leave(*_: object) -> None:
        note("drained")
        os._exit(0)

    handle = signal.SIG_IGN if args.base_model == "fake/stubborn" else leave
    signal.signal(signal.SIGTERM, handle)
    server = ThreadingHTTPServer((args.host, int(args.port)), _Requests)
    url = f"http://{args.host}:{server.server_address[1]}"
    _write(sys.stdout, json.dumps({"url": url, "models": [args.base_model]}))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    while True:
        signal.pause()


def _write(file: TextIO, line: str) -> None:
    file.write(f"{line}\n")
    file.flush()


class _Requests(BaseHTTPRequestHandler):
    """`/` says who it is; `/exit/N` exits with status N."""

    def do_GET(self) -> None:
        if self.path.startswith("/exit/"):
            os._exit(int(self.path.rpartition("/")[2]))
        about = {
            "pid": os.getpid(),
            "database": os.environ.get("TINKEX_DATABASE"),
            "devices": os.environ.get("CUDA_VISIBLE_DEVICES"),
            "arguments": sys.argv[1:],
        }
        body = json.dumps(about).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        pass


if __name__ == "__main__":
    main()

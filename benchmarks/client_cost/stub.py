"""A server that answers as cheaply as possible, in a process of its own.

`python -m benchmarks.client_cost.stub --sample-delay 2` listens on a free loopback port and prints
it. A result becomes available a fixed delay after its submission; an earlier poll is held. When
standard input closes the stub prints what it saw as one JSON line and ends, so it never outlives
the process that started it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import resource
import sys
from collections import Counter
from dataclasses import dataclass, field

from benchmarks.client_cost.payloads import forward_backward_output, sample_response

PREFIX = b"/api/v1/"
HOLD_S = 30.0


def http_reply(body: bytes, media_type: bytes = b"application/json") -> bytes:
    """A complete HTTP/1.1 answer with status 200."""
    return b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n%b" % (
        media_type,
        len(body),
        body,
    )


def json_reply(value: object) -> bytes:
    """`value` as a JSON answer."""
    return http_reply(json.dumps(value).encode())


FIXED = {
    b"client/config": json_reply({}),
    b"client/dynamic_config": json_reply({}),
    b"create_session": json_reply({"session_id": "s-1"}),
    b"create_sampling_session": json_reply({"sampling_session_id": "s-1:sample:0"}),
    b"session_heartbeat": json_reply({}),
    b"telemetry": json_reply({"status": "accepted"}),
    b"cancel_future": json_reply({}),
    b"get_server_capabilities": json_reply({"supported_models": []}),
}
JSON_RESULTS = {
    b"create_model": json_reply({"model_id": "s-1:train:0"}),
    b"optim_step": json_reply({"metrics": {}}),
}


@dataclass
class Record:
    """What the stub saw; all of its mutable state besides open connections."""

    sample_delay_s: float
    train_delay_s: float
    results: dict[bytes, bytes]
    started: dict[str, tuple[float, bytes]] = field(default_factory=dict)
    requests: Counter[str] = field(default_factory=Counter)
    session_at: float = 0.0
    heartbeats: list[float] = field(default_factory=list)
    delivered: set[str] = field(default_factory=set)
    peak_in_flight: int = 0
    connections: int = 0
    open_connections: int = 0
    peak_connections: int = 0

    def submit(self, kind: bytes, now: float) -> str:
        """Note a submission and return its request id."""
        request_id = f"r-{len(self.started)}"
        delay_s = self.sample_delay_s if kind == b"asample" else self.train_delay_s
        self.started[request_id] = (now + delay_s, kind)
        in_flight = len(self.started) - len(self.delivered)
        self.peak_in_flight = max(self.peak_in_flight, in_flight)
        return request_id

    def summary(self, now: float) -> dict[str, object]:
        """The JSON line printed at the end; heartbeat times count from the session's start."""
        return {
            "requests": dict(self.requests),
            "heartbeats": [round(t - self.session_at, 4) for t in self.heartbeats],
            "session_s": round(now - self.session_at, 4),
            "peak_in_flight": self.peak_in_flight,
            "connections": self.connections,
            "peak_connections": self.peak_connections,
        }


class Connection(asyncio.Protocol):
    """One keep-alive connection; clients of HTTP/1.1 have one request open on it at a time."""

    def __init__(self, record: Record, loop: asyncio.AbstractEventLoop) -> None:
        self.record = record
        self.loop = loop
        self.buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        record = self.record
        record.connections += 1
        record.open_connections += 1
        record.peak_connections = max(record.peak_connections, record.open_connections)

    def connection_lost(self, exc: Exception | None) -> None:
        self.record.open_connections -= 1

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        while (end := self.buffer.find(b"\r\n\r\n")) >= 0:
            head = self.buffer[:end]
            stop = end + 4 + content_length(head)
            if len(self.buffer) < stop:
                return
            body, self.buffer = self.buffer[end + 4 : stop], self.buffer[stop:]
            self.answer(head, body)

    def answer(self, head: bytes, body: bytes) -> None:
        path = head.split(b" ", 2)[1].partition(b"?")[0].removeprefix(PREFIX)
        self.record.requests[path.decode()] += 1
        if path == b"retrieve_future":
            self.deliver(json.loads(body)["request_id"])
        elif path in self.record.results:
            self.transport.write(self.accept(path, body))
        else:
            self.note(path)
            self.transport.write(FIXED.get(path) or json_reply({}))

    def accept(self, path: bytes, body: bytes) -> bytes:
        request_id = self.record.submit(path, self.loop.time())
        if path != b"asample":
            return json_reply({"request_id": request_id, "model_id": "s-1:train:0"})
        count = json.loads(body).get("num_samples", 1)
        ids = [f"{request_id}.{i}" for i in range(count)]
        return json_reply({"request_id": request_id, "sample_sequence_ids": ids})

    def deliver(self, request_id: str) -> None:
        ready_at, kind = self.record.started[request_id]
        now = self.loop.time()
        if ready_at <= now:
            self.finish(request_id, kind)
        elif ready_at - now <= HOLD_S:
            self.loop.call_at(ready_at, self.finish, request_id, kind)
        else:
            pending = json_reply({"type": "try_again", "request_id": request_id})
            self.loop.call_at(now + HOLD_S, self.transport.write, pending)

    def finish(self, request_id: str, kind: bytes) -> None:
        self.record.delivered.add(request_id)
        self.transport.write(self.record.results[kind])

    def note(self, path: bytes) -> None:
        if path == b"session_heartbeat":
            self.record.heartbeats.append(self.loop.time())
        elif path == b"create_session":
            self.record.session_at = self.loop.time()


def content_length(head: bytes) -> int:
    """The body's length as the header says; a chunked body is not understood."""
    lower = head.lower()
    assert b"\r\ntransfer-encoding:" not in lower, "the stub reads no chunked bodies"
    at = lower.find(b"\r\ncontent-length:")
    return int(lower[at + 17 :].split(b"\r\n", 1)[0]) if at >= 0 else 0


def raise_file_limit() -> None:
    """Allow as many sockets as the system lets this process have."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


async def serve(record: Record) -> None:
    """Serve until standard input closes, then print the record."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(
        lambda: Connection(record, loop), "127.0.0.1", 0, backlog=4096
    )
    print(server.sockets[0].getsockname()[1], flush=True)
    await loop.run_in_executor(None, sys.stdin.read)
    server.close()
    with contextlib.suppress(BrokenPipeError):  # the reader may have ended first
        print(json.dumps(record.summary(loop.time())), flush=True)


def main() -> None:
    """Parse the flags and serve."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sample-delay", type=float, default=0.05, metavar="S")
    parser.add_argument("--train-delay", type=float, default=0.05, metavar="S")
    parser.add_argument("--sample-tokens", type=int, default=64)
    parser.add_argument("--datums", type=int, default=64)
    parser.add_argument("--datum-tokens", type=int, default=1024)
    args = parser.parse_args()
    raise_file_limit()
    binary = b"application/x-protobuf"
    results = {
        **JSON_RESULTS,
        b"asample": http_reply(sample_response(args.sample_tokens), binary),
        b"forward_backward": http_reply(
            forward_backward_output(args.datums, args.datum_tokens), binary
        ),
    }
    asyncio.run(serve(Record(args.sample_delay, args.train_delay, results)))


if __name__ == "__main__":
    main()

"""What the load balancers of the page about clusters pass on, and to which nodes.

Small HTTP servers stand in for nodes, and record what reaches them.
"""

from __future__ import annotations

import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, cast

import pytest

from tests.cluster.balancers import ADDRESSES, HOST, NONE, balanced, behind_each, behind_envoy
from tests.patience import PATIENCE_S, until
from tinkex.server.server_settings import ServerSettings

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping
    from pathlib import Path

    from tests.cluster.balancers import Balanced, Balancer

LARGEST = ServerSettings().max_body_bytes
LONG_POLL_S = ServerSettings().long_poll_s
AT_ONCE = 16


@dataclass(frozen=True)
class Received:
    path: str
    headers: dict[str, str]
    size: int


class Requests(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        node = cast("StandIn", self.server)
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        if self.path == "/healthz":
            self.answer()
        elif self.path == "/readyz":
            self.answer(200 if node.ready else 503, "keep-alive")
        else:
            headers = {name.lower(): value for name, value in self.headers.items()}
            node.received.append(Received(self.path, headers, len(body)))
            node.reply(self)

    do_POST = do_GET

    def answer(self, status: int = 200, connection: str = "close") -> None:
        self.send_response(status)
        self.send_header("content-length", "0")
        self.send_header("connection", connection)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass


class StandIn(ThreadingHTTPServer):
    """A server in the place of a node."""

    request_queue_size = 4 * AT_ONCE

    def __init__(self, reply: Callable[[Requests], None]) -> None:
        super().__init__((HOST, 0), Requests)
        self.reply = reply
        # Mutable state: what `/readyz` says, and the requests so far.
        self.ready = True
        self.received: list[Received] = []

    def refuse_connections(self) -> None:
        """Accept no more; those that are open, such as one for health checks, stay."""
        self.shutdown()
        self.server_close()

    @contextmanager
    def running(self) -> Generator[None]:
        thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield
        finally:
            self.shutdown()
            thread.join()


@dataclass(frozen=True)
class Lab:
    """A load balancer and its nodes."""

    front: Balanced
    nodes: dict[str, StandIn]

    @property
    def received(self) -> list[Received]:
        return [each for node in self.nodes.values() for each in node.received]


@contextmanager
def lab(
    balancer: Balancer,
    folder: Path,
    reply: Callable[[Requests], None] = Requests.answer,
    changes: Mapping[str, str] = NONE,
) -> Generator[Lab]:
    with ExitStack() as stack:
        nodes = {name: stack.enter_context(StandIn(reply)) for name in ADDRESSES}
        for node in nodes.values():
            stack.enter_context(node.running())
        ports = {name: node.server_port for name, node in nodes.items()}
        front = stack.enter_context(balanced(balancer, folder, ports, changes))
        yield Lab(front, nodes)


@behind_each
def test_nodes_get_the_address_of_the_client_and_its_request_id(
    balancer: Balancer, tmp_path: Path
) -> None:
    with lab(balancer, tmp_path) as found:
        sent = {"x-forwarded-for": "192.0.2.1", "x-forwarded-proto": "http", "x-request-id": "own"}
        assert found.front.status("GET", "/api/v1/models", headers=sent) == 200
        (received,) = found.received
    assert [received.headers[name] for name in sent] == [HOST, "https", "own"]


@behind_each
@pytest.mark.parametrize("path", ["/metrics", "/metrics?a=b", "/%6detrics", "/a/../readyz"])
def test_pages_for_operators_are_not_passed_on(
    balancer: Balancer, tmp_path: Path, path: str
) -> None:
    with lab(balancer, tmp_path) as found:
        assert found.front.status("GET", path) == 404
        assert found.received == []


@behind_each
def test_answers_are_passed_on_while_the_node_writes_them(
    balancer: Balancer, tmp_path: Path
) -> None:
    begun = threading.Event()

    def stream(request: Requests) -> None:
        request.send_response(200)
        request.send_header("connection", "close")
        request.end_headers()
        request.wfile.write(b"one\n")
        assert begun.wait(PATIENCE_S)
        request.wfile.write(b"two\n")

    with (
        lab(balancer, tmp_path, stream) as found,
        found.front.asked("POST", "/v1/completions", b"{}") as reply,
    ):
        assert reply.readline() == b"one\n"
        begun.set()
        assert reply.read() == b"two\n"


@behind_each
def test_a_request_that_a_node_may_have_handled_is_not_sent_to_another(
    balancer: Balancer, tmp_path: Path
) -> None:
    def hang_up(request: Requests) -> None:
        request.close_connection = True
        request.connection.shutdown(socket.SHUT_RDWR)

    with lab(balancer, tmp_path, hang_up) as found:
        assert found.front.status("POST", "/api/v1/optim_step", b"{}") in (502, 503)
        assert len(found.received) == 1


@behind_each
def test_requests_reach_a_node_that_listens_when_connecting_to_others_fails(
    balancer: Balancer, tmp_path: Path
) -> None:
    all_there = threading.Barrier(AT_ONCE)

    def hold(request: Requests) -> None:
        if request.path == "/poll":
            all_there.wait(PATIENCE_S)
        request.answer()

    with lab(balancer, tmp_path, hold) as found:
        for name in ("front", "a"):
            found.nodes[name].refuse_connections()
        for _ in ADDRESSES:
            assert found.front.status("POST", "/train", bytes(LARGEST)) == 200
        with ThreadPoolExecutor(AT_ONCE) as pool:
            polls = [pool.submit(found.front.status, "POST", "/poll") for _ in range(AT_ONCE)]
            assert [poll.result() for poll in polls] == [200] * AT_ONCE
    assert [each.size for each in found.received] == [LARGEST] * 3 + [0] * AT_ONCE


@behind_envoy
def test_a_node_that_is_not_ready_gets_no_requests(balancer: Balancer, tmp_path: Path) -> None:
    often = {"interval: 5s": "interval: 0.1s"}
    with lab(balancer, tmp_path, changes=often) as found:

        def reached() -> set[str]:
            """The nodes that get some of a few requests."""
            for node in found.nodes.values():
                node.received.clear()
            for _ in range(2 * len(ADDRESSES)):
                found.front.status("GET", "/api/v1/models")
            return {name for name, node in found.nodes.items() if node.received}

        until(lambda: reached() == {"front", "a", "b"}, "not all nodes are used")
        found.nodes["front"].ready = found.nodes["b"].ready = False
        until(lambda: reached() == {"a"}, "nodes that are not ready are used")
        found.nodes["b"].ready = True
        until(lambda: reached() == {"a", "b"}, "a node that is ready again is not used")


@behind_each
@pytest.mark.exhaustive
def test_a_long_poll_may_take_its_time(balancer: Balancer, tmp_path: Path) -> None:
    def wait(request: Requests) -> None:
        threading.Event().wait(LONG_POLL_S + 1)
        request.answer()

    with lab(balancer, tmp_path, wait) as found:
        assert found.front.status("POST", "/api/v1/retrieve_future", b"{}") == 200

"""Sockets: what a hostile or unlucky server makes of a request."""

from __future__ import annotations

import asyncio
import gzip
import os
import socket
import ssl
import sys
import zlib
from typing import TYPE_CHECKING

import pytest
from transport_fakes import read_request, reply_bytes, serve

from tests.patience import PATIENCE_S
from tinkex.errors import APIConnectionError, APITimeoutError, InputError, RequestInfo
from tinkex.transport.base import HttpRequest, Pool
from tinkex.transport.http import HttpTransport, describe
from tinkex.transport.http_connection import MAX_HEAD_BYTES, HttpConnection

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.anyio


def post(body: bytes | None = b"{}", pool: Pool = Pool.TRAIN, **options) -> HttpRequest:
    options = {"timeout_s": 5.0, **options}
    return HttpRequest("POST", "/api/v1/x", pool, body=body, **options)


def always(*pieces: bytes, close: bool = True):
    """A handler that answers every request with the same pieces."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            await read_request(reader)
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0)
            if close:
                return

    return handle


async def ask(handler, request: HttpRequest | None = None, **options):
    async with serve(handler) as url:
        transport = HttpTransport(url, **options)
        try:
            return await transport.send(request or post())
        finally:
            await transport.aclose()


# -- what is sent and what comes back -------------------------------------------------------------


async def test_a_request_is_written_as_asked():
    seen: list[tuple[bytes, bytes]] = []

    async def handle(reader, writer):
        seen.append(await read_request(reader))
        writer.write(reply_bytes(b"ok"))

    async with serve(handle) as url:
        transport = HttpTransport(url + "/prefix/")
        request = HttpRequest(
            "POST", "/api/v1/x", Pool.SAMPLE, 5.0, "a=1", {"X-One": "1", "Accept": "x/y"}, b"{}"
        )
        reply = await transport.send(request)
        await transport.aclose()
    assert (reply.status, reply.body) == (200, b"ok")
    head, body = seen[0]
    lines = head.decode().split("\r\n")
    assert lines[0] == "POST /prefix/api/v1/x?a=1 HTTP/1.1"
    assert set(lines[1:]) - {""} == {
        f"Host: {url[7:]}",
        "X-One: 1",
        "Accept: x/y",
        "Content-Length: 2",
    }
    assert body == b"{}"


async def test_a_body_less_post_says_so_and_a_get_does_not():
    heads: list[bytes] = []

    async def handle(reader, writer):
        heads.append((await read_request(reader))[0])
        writer.write(reply_bytes(b""))

    await ask(handle, post(body=None))
    await ask(handle, HttpRequest("GET", "/api/v1/x", Pool.REST, 5.0))
    assert b"Content-Length: 0" in heads[0]
    assert b"Content-Length" not in heads[1]


@pytest.mark.parametrize("size", [0, 1, 65_535, 65_536, 5_000_000])
async def test_bodies_of_any_size_arrive_whole_in_both_directions(size: int):
    body = os.urandom(size)

    async def handle(reader, writer):
        _, received = await read_request(reader)
        writer.write(reply_bytes(received))

    assert (await ask(handle, post(body=body))).body == body


@pytest.mark.parametrize(
    ("pieces", "body"),
    [
        ((b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello",), b"hello"),
        ((b"HTTP/1.1 200 OK\r\nContent-Le", b"ngth: 5\r\n\r", b"\nhel", b"lo"), b"hello"),
        (
            (
                b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n",
                b"3\r\nhel\r\n2\r\nlo\r\n0\r\n\r\n",
            ),
            b"hello",
        ),
        (
            (
                b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nTrailer: x\r\n\r\n",
                b"5\r\nhello\r\n0\r\nx: 1\r\n\r\n",
            ),
            b"hello",
        ),
        ((b"HTTP/1.1 200 OK\r\n\r\nhello",), b"hello"),
        ((b"HTTP/1.0 200 OK\r\n\r\nhel", b"lo"), b"hello"),
        (
            (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello",),
            b"hello",
        ),
        ((b"HTTP/1.1 204 No Content\r\n\r\n",), b""),
    ],
)
async def test_every_framing_of_a_reply_is_understood(pieces, body):
    reply = await ask(always(*pieces))
    assert reply.body == body
    assert reply.status in (200, 204)
    assert "x" not in reply.headers


async def test_header_names_are_lower_case_and_repeated_ones_joined():
    reply = await ask(always(b"HTTP/1.1 200 OK\r\nX-A: 1\r\nx-a: 2\r\nContent-Length: 0\r\n\r\n"))
    assert reply.headers["x-a"] == "1, 2"


@pytest.mark.parametrize("status", ["400 Bad", "408 Late", "429 Slow", "500 Oops", "302 Found"])
async def test_any_status_is_a_reply(status: str):
    reply = await ask(always(reply_bytes(b"{}", status, Retry_After="3")))
    assert (reply.status, reply.headers["retry-after"]) == (int(status[:3]), "3")


@pytest.mark.parametrize(
    ("encoding", "packed"),
    [
        ("gzip", gzip.compress(b"hello" * 100, mtime=0)),
        ("deflate", zlib.compress(b"hello" * 100)),
        ("zstd", zstd.compress(b"hello" * 100)),
        ("gzip, zstd", zstd.compress(gzip.compress(b"hello" * 100, mtime=0))),
        ("identity", b"hello" * 100),
    ],
)
async def test_compressed_replies_arrive_plain(encoding: str, packed: bytes):
    reply = await ask(always(reply_bytes(packed, Content_Encoding=encoding)))
    assert reply.body == b"hello" * 100


@pytest.mark.parametrize(
    ("encoding", "packed"),
    [
        ("gzip", b"not gzip"),
        ("gzip", gzip.compress(b"hello", mtime=0)[:-9]),
        ("zstd", zstd.compress(b"hello" * 100)[:-3]),
        ("br", b"whatever"),
    ],
)
async def test_a_reply_that_cannot_be_unpacked_is_a_connection_error(encoding, packed):
    with pytest.raises(APIConnectionError, match="unusable"):
        await ask(always(reply_bytes(packed, Content_Encoding=encoding)))


# -- what goes wrong ------------------------------------------------------------------------------


async def test_a_refused_connection_says_what_to_check():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        with pytest.raises(APIConnectionError, match="Nothing listens at") as caught:
            await HttpTransport(url).send(post(query="a=1"))
    assert "TINKER_BASE_URL" in str(caught.value)
    assert caught.value.request == RequestInfo("POST", f"{url}/api/v1/x?a=1")
    assert isinstance(caught.value.__cause__, ConnectionRefusedError)


async def test_a_refused_localhost_with_two_addresses_is_still_called_refused():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        with pytest.raises(APIConnectionError, match="Nothing listens at"):
            await HttpTransport(f"http://localhost:{sock.getsockname()[1]}").send(post())


async def test_a_host_that_does_not_exist_is_named():
    with pytest.raises(APIConnectionError, match=r"cannot be resolved.*TINKER_BASE_URL"):
        await HttpTransport("http://no-such-host.invalid").send(post())


@pytest.mark.parametrize(
    ("pieces", "says"),
    [
        ((b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhel",), "middle of the answer"),
        ((b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhel",), "middle"),
        ((b"HTTP/1.1 200 OK\r\nContent-Le",), "without an answer"),
        ((), "without an answer"),
        ((b"SSH-2.0-OpenSSH_9.6\r\n",), "not valid HTTP"),
        ((b"\x16\x03\x01\x02\x00\x01\x00",), "not valid HTTP"),
        ((b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\n",), "not valid HTTP"),
        ((b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab",), "not valid"),
        ((b"HTTP/1.1 101 Switching\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\nraw",), "unusable"),
    ],
)
async def test_cut_or_garbled_replies_are_connection_errors(pieces, says):
    with pytest.raises(APIConnectionError, match=says):
        await ask(always(*pieces))


async def test_a_reset_connection_is_a_connection_error():
    async def handle(reader, writer):
        await read_request(reader)
        sock = writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhel")
        await writer.drain()
        writer.transport.abort()

    with pytest.raises(APIConnectionError):
        await ask(handle)


async def test_headers_without_end_are_refused():
    async def handle(reader, writer):
        await read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\n")
        for _ in range(MAX_HEAD_BYTES // 1000 + 2):
            writer.write(b"x: " + b"y" * 1000 + b"\r\n")
        await writer.drain()
        await reader.read()

    with pytest.raises(APIConnectionError, match="do not end"):
        await ask(handle)


async def test_a_silent_server_times_out():
    async def handle(reader, writer):
        await reader.read()

    with pytest.raises(APITimeoutError, match=r"no complete reply within 0\.05 s") as caught:
        await ask(handle, post(timeout_s=0.05))
    assert isinstance(caught.value.__cause__, TimeoutError)


async def test_a_reply_that_keeps_coming_is_not_timed_out_but_not_for_ever():
    async def trickle(reader, writer):
        await read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
        while not writer.is_closing():
            writer.write(b"x")
            await asyncio.sleep(0.01)

    started = asyncio.get_running_loop().time()
    with pytest.raises(APITimeoutError):
        # Longer than a busy machine keeps the other task from running.
        await ask(trickle, post(timeout_s=0.3))
    took_s = asyncio.get_running_loop().time() - started
    assert took_s >= 0.6


async def test_an_endpoint_that_never_accepts_times_out_within_the_connect_time():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen(0)
        port = sock.getsockname()[1]
        with socket.socket() as filler, socket.socket() as more:
            for each in (filler, more):  # the backlog is full: further SYNs are dropped
                each.setblocking(False)
                each.connect_ex(("127.0.0.1", port))
            transport = HttpTransport(f"http://127.0.0.1:{port}", connect_timeout_s=0.2)
            with pytest.raises(APITimeoutError):
                await transport.send(post(timeout_s=0.2))


async def test_plain_http_where_tls_is_expected_says_so():
    async def handle(reader, writer):
        writer.write(b"HTTP/1.1 400 Bad HttpRequest\r\n\r\n")

    with pytest.raises(APIConnectionError, match="speak https"):
        async with serve(handle) as url:
            await HttpTransport(url.replace("http", "https")).send(post())


def test_certificate_and_open_file_errors_have_a_next_step():
    refused = ssl.SSLCertVerificationError(1, "verify failed")
    refused.verify_message = "self-signed certificate"
    assert "SSL_CERT_FILE" in describe(refused, "https://h")
    assert "ulimit" in describe(OSError(24, "Too many open files"), "https://h")


async def test_cancelling_the_caller_aborts_the_request():
    closed, arrived = asyncio.Event(), asyncio.Event()

    async def handle(reader, writer):
        await read_request(reader)
        arrived.set()
        await reader.read()
        closed.set()

    async with serve(handle) as url:
        transport = HttpTransport(url)
        task = asyncio.create_task(transport.send(post()))
        await arrived.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.wait_for(closed.wait(), PATIENCE_S)
        await transport.aclose()


@pytest.mark.parametrize(
    "headers",
    [{"X-A": "a\r\nX-B: b"}, {"X-A": "a\nb"}, {"X-A\r\n": "b"}, {"X-A": "é"}, {"X": "\0"}],
)
async def test_headers_cannot_smuggle_other_headers(headers):
    with pytest.raises(InputError, match="ASCII"):
        await HttpTransport("http://127.0.0.1:9").send(post(headers=headers))


# -- connections ----------------------------------------------------------------------------------


async def until(holds: Callable[[], bool]) -> None:
    while not holds():  # noqa: ASYNC110 - the other end is a socket, not a task that could tell
        await asyncio.sleep(0)


def counting(log: list[list[str]], hold: asyncio.Event | None = None):
    """A server that notes which connection carried what, and how many carried two at once."""

    async def handle(reader, writer):
        mine: list[str] = []
        log.append(mine)
        while True:
            head, _ = await read_request(reader)
            mine.append(head.split(b" ")[1].decode())
            if hold is not None:
                await hold.wait()
            writer.write(reply_bytes(b"ok"))
            await writer.drain()

    return handle


async def test_a_connection_is_kept_and_used_again():
    log: list[list[str]] = []
    async with serve(counting(log)) as url:
        transport = HttpTransport(url)
        for _ in range(3):
            await transport.send(post())
        await transport.aclose()
    assert log == [["/api/v1/x"] * 3]


@pytest.mark.req("S28")
async def test_a_connection_carries_one_request_at_a_time():
    log: list[list[str]] = []
    hold = asyncio.Event()
    async with serve(counting(log, hold)) as url:
        transport = HttpTransport(url)
        tasks = [asyncio.create_task(transport.send(post())) for _ in range(5)]
        await until(lambda: sum(map(len, log)) == 5)
        assert [len(one) for one in log] == [1] * 5
        hold.set()
        await asyncio.gather(*tasks)
        await transport.aclose()


@pytest.mark.req("S28")
async def test_pools_share_no_connections():
    log: list[list[str]] = []
    async with serve(counting(log)) as url:
        transport = HttpTransport(url)
        for pool in Pool:
            await transport.send(post(pool=pool))
        await transport.aclose()
    assert [len(one) for one in log] == [1] * len(Pool)


@pytest.mark.req("S28")
async def test_a_heartbeat_goes_out_while_every_sampling_connection_is_busy():
    log: list[list[str]] = []
    hold = asyncio.Event()

    async def handle(reader, writer):
        while True:
            head, _ = await read_request(reader)
            log.append([head.split(b"\r\n")[0].decode()])
            if b"pool: sample" in head:
                await hold.wait()
            writer.write(reply_bytes(b"ok"))

    async with serve(handle) as url:
        transport = HttpTransport(url, max_connections=50)
        busy = [
            asyncio.create_task(transport.send(post(pool=Pool.SAMPLE, headers={"pool": "sample"})))
            for _ in range(2000)
        ]
        await until(lambda: len(log) >= 50)
        reply = await asyncio.wait_for(transport.send(post(pool=Pool.SESSION)), PATIENCE_S)
        assert reply.body == b"ok"
        assert not any(task.done() for task in busy)
        hold.set()
        assert len(await asyncio.gather(*busy)) == 2000
        await transport.aclose()


async def test_past_the_limit_callers_wait_their_turn_and_a_cancelled_one_gives_it_on():
    log: list[list[str]] = []
    hold = asyncio.Event()
    async with serve(counting(log, hold)) as url:
        transport = HttpTransport(url, max_connections=1)
        tasks = [asyncio.create_task(transport.send(post())) for _ in range(4)]
        await until(lambda: bool(log and log[0]))
        tasks[1].cancel()
        hold.set()
        done = await asyncio.gather(*tasks, return_exceptions=True)
        await transport.aclose()
    assert [type(each).__name__ for each in done] == ["Reply", "CancelledError", "Reply", "Reply"]
    assert [len(one) for one in log] == [3]


async def test_a_failed_connection_gives_its_place_back():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        transport = HttpTransport(f"http://127.0.0.1:{sock.getsockname()[1]}", max_connections=1)
        for _ in range(3):
            with pytest.raises(APIConnectionError):
                await asyncio.wait_for(transport.send(post()), PATIENCE_S)


async def test_a_connection_the_server_closes_is_not_used_again():
    log: list[list[str]] = []

    async def handle(reader, writer):
        log.append([])
        await read_request(reader)
        writer.write(reply_bytes(b"ok", Connection="close"))
        await writer.drain()

    async with serve(handle) as url:
        transport = HttpTransport(url)
        await transport.send(post())
        await transport.send(post())
        await transport.aclose()
    assert len(log) == 2


async def test_a_connection_is_not_used_again_from_the_moment_the_server_says_goodbye():
    connection = HttpConnection(asyncio.get_running_loop())
    assert connection.reusable
    # Between this and the connection's end a request would be lost.
    connection.eof_received()
    assert not connection.reusable


async def test_a_second_answer_nobody_asked_for_is_not_taken_for_the_next_ones():
    async def handle(reader, writer):
        await read_request(reader)
        writer.write(reply_bytes(b"mine") + reply_bytes(b"evil"))
        await writer.drain()
        await reader.read()

    async with serve(handle) as url:
        transport = HttpTransport(url)
        assert (await transport.send(post())).body == b"mine"
        assert (await transport.send(post())).body == b"mine"
        await transport.aclose()


def test_a_transport_moves_to_another_loop_with_fresh_connections():
    transport: list[HttpTransport] = []
    bodies: list[bytes] = []

    async def once() -> None:
        async with serve(always(reply_bytes(b"ok"), close=False)) as url:
            transport.append(transport[0] if transport else HttpTransport(url))
            if len(transport) == 1:
                bodies.append((await transport[0].send(post())).body)
            else:
                with pytest.raises(APIConnectionError):  # the first server is gone
                    await transport[0].send(post())
            await transport[0].aclose()

    asyncio.run(once())
    asyncio.run(once())
    assert bodies == [b"ok"]


async def test_a_changed_process_id_means_fresh_connections(monkeypatch: pytest.MonkeyPatch):
    log: list[list[str]] = []
    async with serve(counting(log)) as url:
        transport = HttpTransport(url)
        await transport.send(post())
        monkeypatch.setattr(os, "getpid", lambda: -1)
        await transport.send(post())
        await transport.aclose()
        assert len(log) == 2


# -- redirects ------------------------------------------------------------------------------------


async def test_redirects_are_followed_only_when_asked_and_carry_no_credentials_elsewhere():
    heads: list[bytes] = []

    async def elsewhere(reader, writer):
        heads.append((await read_request(reader))[0])
        writer.write(reply_bytes(b"log"))

    async with serve(elsewhere) as there:

        async def handle(reader, writer):
            await read_request(reader)
            writer.write(reply_bytes(b"", "307 There", Location=f"{there}/signed?x=1"))

        request = HttpRequest(
            "GET", "/api/v1/audit", Pool.REST, 5.0,
            headers={"X-API-Key": "tml-canary", "Accept": "application/json"},
            follow_redirects=True,
        )  # fmt: skip
        assert (await ask(handle, request)).body == b"log"
        plain = HttpRequest("GET", "/api/v1/audit", Pool.REST, 5.0)
        assert (await ask(handle, plain)).status == 307
    assert heads[0].startswith(b"GET /signed?x=1 HTTP/1.1")
    assert b"tml-canary" not in heads[0]


@pytest.mark.parametrize("location", ["ftp://h/x", "http://[::1", "//user:pw@h/", "http://h:0/"])
async def test_a_redirect_to_nowhere_is_a_connection_error(location: str):
    handler = always(reply_bytes(b"", "302 There", Location=location))
    request = HttpRequest("GET", "/api/v1/audit", Pool.REST, 5.0, follow_redirects=True)
    with pytest.raises(APIConnectionError, match="no URL"):
        await ask(handler, request)


async def test_a_redirect_loop_ends():
    loop = always(reply_bytes(b"", "302 Again", Location="/api/v1/audit"), close=False)
    request = HttpRequest("GET", "/api/v1/audit", Pool.REST, 5.0, follow_redirects=True)
    with pytest.raises(APIConnectionError, match="redirects"):
        await ask(loop, request)


# -- streams --------------------------------------------------------------------------------------


async def drain(transport: HttpTransport, request: HttpRequest, received: list[bytes]) -> None:
    async with transport.stream(request) as reply:
        async for chunk in reply.chunks:
            received.append(chunk)


async def test_a_stream_gives_chunks_as_they_come_and_keeps_the_connection():
    log: list[int] = []
    step = asyncio.Event()

    async def handle(reader, writer):
        log.append(1)
        while True:
            await read_request(reader)
            writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\none\r\n")
            await step.wait()
            writer.write(b"3\r\ntwo\r\n0\r\n\r\n")

    async with serve(handle) as url:
        transport = HttpTransport(url)
        async with transport.stream(post()) as reply:
            assert reply.status == 200
            assert await anext(aiter(reply.chunks)) == b"one"
            step.set()
            assert [chunk async for chunk in reply.chunks] == [b"two"]
        await transport.send(post())
        await transport.aclose()
    assert log == [1]


async def test_a_stream_cut_short_is_a_connection_error():
    async with serve(
        always(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\none\r\n")
    ) as url:
        received: list[bytes] = []
        with pytest.raises(APIConnectionError, match="middle of the answer"):
            await drain(HttpTransport(url), post(), received)
        assert received == [b"one"]


async def test_a_silent_stream_times_out():
    async def handle(reader, writer):
        await read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\none\r\n")
        await reader.read()

    async with serve(handle) as url:
        with pytest.raises(APITimeoutError):
            await drain(HttpTransport(url), post(timeout_s=0.05), [])


async def test_leaving_a_stream_early_closes_its_connection():
    closed = asyncio.Event()

    async def handle(reader, writer):
        await read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\none\r\n")
        await reader.read()
        closed.set()

    async with serve(handle) as url, HttpTransport(url).stream(post()) as reply:
        async for _ in reply.chunks:
            break
    await asyncio.wait_for(closed.wait(), PATIENCE_S)


async def test_a_compressed_stream_arrives_plain():
    packed = gzip.compress(b"one\ntwo\n" * 50, mtime=0)
    half = len(packed) // 2
    async with (
        serve(
            always(
                b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\n",
                b"Content-Length: %d\r\n\r\n" % len(packed),
                packed[:half],
                packed[half:],
            )
        ) as url,
        HttpTransport(url).stream(post()) as reply,
    ):
        assert b"".join([chunk async for chunk in reply.chunks]) == b"one\ntwo\n" * 50


async def test_a_slow_reader_holds_the_server_back_and_still_gets_everything():
    async def handle(reader, writer):
        await read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 4000000\r\n\r\n")
        for _ in range(400):
            writer.write(b"x" * 10_000)
            await writer.drain()

    async with serve(handle) as url, HttpTransport(url).stream(post()) as reply:
        size = 0
        async for chunk in reply.chunks:
            size += len(chunk)
            await asyncio.sleep(0)
    assert size == 4_000_000


async def test_closing_the_transport_lets_go_of_connections_in_use_when_they_end():
    closed, hold, arrived = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def handle(reader, writer):
        await read_request(reader)
        arrived.set()
        await hold.wait()
        writer.write(reply_bytes(b"ok"))
        await reader.read()
        closed.set()

    async with serve(handle) as url:
        transport = HttpTransport(url)
        task = asyncio.create_task(transport.send(post()))
        await arrived.wait()
        await transport.aclose()
        hold.set()
        assert (await task).body == b"ok"
        await asyncio.wait_for(closed.wait(), PATIENCE_S)


async def test_an_answer_that_comes_before_the_whole_request_was_read_ends_the_connection():
    log: list[int] = []
    answered = asyncio.Event()

    async def handle(reader, writer):
        log.append(1)
        await reader.readuntil(b"\r\n\r\n")
        writer.write(reply_bytes(b"too large", "413 No"))
        await answered.wait()

    async with serve(handle) as url:
        transport = HttpTransport(url)
        for _ in range(2):
            reply = await transport.send(post(body=b"x" * 50_000_000))
            assert reply.status == 413
        answered.set()
        await transport.aclose()
    assert log == [1, 1]


async def test_a_stream_on_a_connection_that_closed_while_idle_fails_at_once():
    connection = HttpConnection(asyncio.get_running_loop())
    connection.connection_lost(None)
    # The timeout is far beyond that of the test.
    with pytest.raises(ConnectionResetError, match="closed while idle"):
        await connection.stream(b"GET / HTTP/1.1\r\n\r\n", None, 3600.0)
    assert not connection.reusable

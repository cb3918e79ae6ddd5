"""Requests through a real proxy on loopback: tunnels, forwarded requests, and every refusal."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import logging
import pickle
import socket
import ssl
import traceback
from typing import TYPE_CHECKING

import pytest
from transport_fakes import read_request, reply_bytes, serve

from tests.forward_proxy import ForwardProxy
from tinkex.clock import SystemClock
from tinkex.config import Config
from tinkex.errors import APIConnectionError, APIError, APITimeoutError, ProxyError, TinkerError
from tinkex.proxy import ProxyRules
from tinkex.transport.api import connect
from tinkex.transport.base import HttpRequest, Pool
from tinkex.transport.http import HttpTransport
from tinkex.wire import routes

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

pytestmark = pytest.mark.anyio

REQUEST = HttpRequest("POST", "/api/v1/x", Pool.TRAIN, 5.0, query="a=1", body=b"{}")
FORBIDDEN = b"HTTP/1.1 403 Forbidden\r\nContent-Type: text/html\r\nContent-Length: 2\r\n\r\nno"
BAD_GATEWAY = b"HTTP/1.1 502 Bad Gateway\r\nContent-Type: text/html\r\nContent-Length: 0\r\n\r\n"
UNAUTHORIZED = b"HTTP/1.1 407 X\r\nProxy-Authenticate: Basic\r\nContent-Length: 0\r\n\r\n"


def answering(reply: Callable[[bytes], bytes], heads: list[bytes] | None = None):
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            head, _ = await read_request(reader)
            if heads is not None:
                heads.append(head)
            writer.write(reply(head))
            await writer.drain()

    return handle


OK = answering(lambda _: reply_bytes(b"ok"))


@contextlib.asynccontextmanager
async def serve_tls(certificate: tuple[str, str]) -> AsyncIterator[str]:
    server_side = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server_side.load_cert_chain(*certificate)

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            await OK(reader, writer)
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0, ssl=server_side)
    try:
        yield f"https://localhost:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


@contextlib.asynccontextmanager
async def transport_to(
    url: str, proxy: str | ProxyRules, **options
) -> AsyncIterator[HttpTransport]:
    transport = HttpTransport(url, proxy=proxy, **options)
    try:
        yield transport
    finally:
        await transport.aclose()


async def failure(url: str, proxy: str, **options) -> APIError:
    async with transport_to(url, proxy, **options) as transport:
        with pytest.raises(APIError) as caught:
            await transport.send(REQUEST)
    return caught.value


# -- what works -----------------------------------------------------------------------------------


async def test_an_http_request_is_sent_to_the_proxy_with_its_whole_url():
    heads: list[bytes] = []
    handler = answering(lambda _: reply_bytes(b"ok"), heads)
    with ForwardProxy() as proxy:
        async with serve(handler) as url, transport_to(f"{url}/base", proxy.url()) as transport:
            replies = [(await transport.send(REQUEST)).body for _ in range(2)]
            async with transport.stream(REQUEST) as streamed:
                replies += [chunk async for chunk in streamed.chunks]
    assert replies == [b"ok"] * 3
    assert proxy.request_lines == [f"POST {url}/base/api/v1/x?a=1 HTTP/1.1"] * 3
    assert proxy.connections == 1
    assert heads[0].startswith(b"POST /base/api/v1/x?a=1 HTTP/1.1\r\n")
    assert f"Host: {url[7:]}\r\n".encode() in proxy.heads[0]


async def test_the_proxy_and_not_this_machine_resolves_the_server():
    with ForwardProxy() as proxy:
        async with serve(OK) as url:
            proxy.upstream = url[7:]
            async with transport_to("http://tinker.invalid", proxy.url()) as transport:
                assert (await transport.send(REQUEST)).body == b"ok"


async def test_an_https_request_goes_through_a_tunnel_that_is_kept(certificate):
    trusting = ssl.create_default_context(cafile=certificate[0])
    with ForwardProxy() as proxy:
        async with (
            serve_tls(certificate) as url,
            transport_to(url, proxy.url(), ssl_context=trusting) as transport,
        ):
            for _ in range(2):
                assert (await transport.send(REQUEST)).body == b"ok"
    assert proxy.request_lines == [f"CONNECT {url[8:]} HTTP/1.1"]


async def test_the_server_in_a_tunnel_must_be_trusted(certificate):
    with ForwardProxy() as proxy:
        async with serve_tls(certificate) as url:
            error = await failure(url, proxy.url())
    assert isinstance(error, APIConnectionError)
    assert f"The certificate of {url} (through {proxy.url()}) was refused" in error.message


@pytest.mark.parametrize("user_info", ["me:pass", "me%40corp:p%2Fw%3A"])
async def test_credentials_open_the_proxy_and_never_reach_the_server(user_info: str, certificate):
    heads: list[bytes] = []
    handler = answering(lambda _: reply_bytes(b"ok"), heads)
    trusting = ssl.create_default_context(cafile=certificate[0])
    plain = user_info.replace("%40", "@").replace("%2F", "/").replace("%3A", ":")
    with ForwardProxy(user_info=plain) as proxy:
        async with (
            serve(handler) as url,
            serve_tls(certificate) as secure,
            transport_to(url, proxy.url(user_info)) as one,
            transport_to(secure, proxy.url(user_info), ssl_context=trusting) as two,
        ):
            assert (await one.send(REQUEST)).body == b"ok"
            assert (await two.send(REQUEST)).body == b"ok"
    assert all(b"Proxy-Authorization: Basic " in head for head in proxy.heads)
    assert b"Proxy-Authorization" not in heads[0]


async def test_a_proxy_may_be_reached_over_tls(certificate):
    trusting = ssl.create_default_context(cafile=certificate[0])
    server_side = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server_side.load_cert_chain(*certificate)
    with ForwardProxy(tls=server_side) as proxy:
        where = proxy.url(host="localhost")
        async with (
            serve(OK) as url,
            serve_tls(certificate) as secure,
            transport_to(url, where, ssl_context=trusting) as one,
            transport_to(secure, where, ssl_context=trusting) as two,
        ):
            assert (await one.send(REQUEST)).body == b"ok"
            assert (await two.send(REQUEST)).body == b"ok"
            # TLS in TLS is the fragile one: a body larger than all buffers on the way.
            large = HttpRequest("POST", "/api/v1/x", Pool.TRAIN, 5.0, body=bytes(3_000_000))
            assert (await two.send(large)).body == b"ok"


async def test_a_redirect_is_followed_by_the_way_of_its_own_server():
    heads: list[bytes] = []
    with ForwardProxy() as proxy:
        variables = {
            "http_proxy": ("HTTP_PROXY", proxy.url()),
            "no_proxy": ("NO_PROXY", "tinker.invalid:99,127.0.0.1"),
        }
        async with serve(answering(lambda _: reply_bytes(b"there"), heads)) as there:
            redirect = answering(lambda _: reply_bytes(b"", "302 Found", Location=f"{there}/y"))
            async with serve(redirect) as url:
                proxy.upstream = url[7:]
                way = transport_to("http://tinker.invalid", ProxyRules.from_variables(variables))
                async with way as transport:
                    hop = HttpRequest("GET", "/api/v1/x", Pool.REST, 5.0, follow_redirects=True)
                    assert (await transport.send(hop)).body == b"there"
    assert proxy.request_lines == ["GET http://tinker.invalid/api/v1/x HTTP/1.1"]
    assert heads[0].startswith(b"GET /y HTTP/1.1")


async def test_without_a_proxy_nothing_of_it_is_in_a_request():
    heads: list[bytes] = []
    async with serve(answering(lambda _: reply_bytes(b"ok"), heads)) as url:
        transport = HttpTransport(url)
        await transport.send(REQUEST)
        await transport.aclose()
    assert heads[0].startswith(b"POST /api/v1/x?a=1 HTTP/1.1\r\n")
    assert b"proxy" not in heads[0].lower()


# -- what does not --------------------------------------------------------------------------------

SERVERS = ["http://tinker.invalid", "https://tinker.invalid"]


@pytest.mark.parametrize("server", SERVERS)
@pytest.mark.parametrize(
    ("answer", "status", "words"),
    [(FORBIDDEN, 403, "answered 403 Forbidden"), (UNAUTHORIZED, 407, "asks for a user name")],
)
async def test_a_refusal_is_named_as_the_proxys_and_is_final(server, answer, status, words):
    with ForwardProxy(answer=answer) as proxy:
        error = await failure(server, proxy.url())
    assert isinstance(error, ProxyError)
    assert (error.status_code, error.code, error.retryable) == (status, "proxy", False)
    assert f"The proxy {proxy.url()}" in error.message
    assert words in error.message


@pytest.mark.parametrize("server", SERVERS)
async def test_a_server_that_the_proxy_cannot_reach_may_be_tried_again(server):
    with ForwardProxy(answer=BAD_GATEWAY) as proxy:
        error = await failure(server, proxy.url())
    assert isinstance(error, APIConnectionError)
    assert error.retryable
    assert f"The proxy {proxy.url()} did not reach {server}" in error.message
    assert "the proxy answered 502 Bad Gateway" in error.message


@pytest.mark.parametrize("server", SERVERS)
async def test_a_streamed_request_is_refused_alike(server):
    with ForwardProxy(answer=FORBIDDEN) as proxy:
        async with transport_to(server, proxy.url()) as transport:
            with pytest.raises(ProxyError, match="403"):
                async with transport.stream(REQUEST):
                    pass


@pytest.mark.parametrize("status", ["403 Forbidden", "503 Service Unavailable"])
async def test_what_the_server_says_through_a_proxy_stays_the_servers(status):
    reply = reply_bytes(b'{"detail": "no"}', status, Content_Type="application/json")
    with ForwardProxy() as proxy:
        async with (
            serve(answering(lambda _: reply)) as url,
            transport_to(url, proxy.url()) as transport,
        ):
            got = await transport.send(REQUEST)
    assert (got.status, got.body) == (int(status[:3]), b'{"detail": "no"}')


@pytest.mark.parametrize("server", SERVERS)
@pytest.mark.parametrize(
    ("answer", "words"),
    [(b"SSH-2.0-x\r\n\r\n", "unusable"), (b"", "without an answer")],
    ids=["garbage", "closed"],
)
async def test_what_is_no_proxy_is_said_with_its_address(server, answer, words):
    with ForwardProxy(answer=answer) as proxy:
        error = await failure(server, proxy.url())
    assert isinstance(error, APIConnectionError)
    assert proxy.url() in error.message
    assert words in error.message


@pytest.mark.parametrize("server", SERVERS)
async def test_a_proxy_that_does_not_listen_is_named(server):
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        where = f"http://127.0.0.1:{sock.getsockname()[1]}"
        error = await failure(server, where)
    assert isinstance(error, APIConnectionError)
    assert f"Nothing listens at the proxy {where}" in error.message
    assert "TINKER_BASE_URL" not in error.message


async def test_a_plain_proxy_that_was_written_with_https_is_explained():
    async def plain(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(reply_bytes(b"", "400 Bad Request"))
        await writer.drain()

    async with serve(plain) as where:
        error = await failure("http://tinker.invalid", where.replace("http:", "https:"))
    assert "write http:// instead of https:// in proxy=" in error.message


@pytest.mark.req("S22")
@pytest.mark.parametrize("server", SERVERS)
async def test_a_silent_proxy_ends_in_a_time_out(server):
    request = HttpRequest("POST", "/api/v1/x", Pool.TRAIN, 0.05, body=b"{}")
    with ForwardProxy(silent=True) as proxy:
        async with transport_to(server, proxy.url(), connect_timeout_s=0.05) as transport:
            with pytest.raises(APITimeoutError, match=f"{proxy.url()}"):
                await transport.send(request)
            # The place of the failed connection is free again.
            with pytest.raises(APITimeoutError):
                await transport.send(request)


@pytest.mark.req("S22")
async def test_a_tunnel_to_a_silent_server_ends_in_a_time_out():
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.Event().wait()

    with ForwardProxy() as proxy:
        async with serve(silent) as url:
            proxy.upstream = url[7:]
            error = await failure("https://tinker.invalid", proxy.url(), connect_timeout_s=0.2)
    assert isinstance(error, APITimeoutError)
    assert proxy.url() in error.message


# -- secrets --------------------------------------------------------------------------------------

USER_INFO = "me:canary-p4ss"
WAYS: dict[str, bytes | None] = {
    "407": UNAUTHORIZED,
    "403": FORBIDDEN,
    "502": BAD_GATEWAY,
    "garbage": b"canary-p4ss\r\n\r\n",
    "closed": b"",
    "silence": None,
}


@pytest.mark.req("B1")
@pytest.mark.parametrize("server", SERVERS)
@pytest.mark.parametrize("way", WAYS)
async def test_no_failure_makes_the_proxys_password_show_up(
    way: str, server: str, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.DEBUG)
    with ForwardProxy(answer=WAYS[way], silent=WAYS[way] is None) as proxy:
        config = Config(base_url=server, api_key="tml-x", proxy=proxy.url(USER_INFO))
        connect_s = 0.1 if way == "silence" else 60.0
        transport = HttpTransport(server, connect_timeout_s=connect_s, proxy=config.proxy)
        api = connect(config, transport, SystemClock())
        with pytest.raises(TinkerError) as caught:
            await api.call(routes.OPTIM_STEP, body=b"{}", deadline_s=0.05)
        await api.aclose()
    token = base64.b64encode(USER_INFO.encode()).decode()
    assert way == "silence" or token.encode() in proxy.heads[0]
    error = caught.value
    places = {
        "log": caplog.text + "".join(repr(record.__dict__) for record in caplog.records),
        "error": repr(error) + str(error) + repr(error.__dict__) + repr(error.__cause__),
        "notes": " ".join(getattr(error, "__notes__", [])),
        "traceback": "".join(traceback.format_exception(error)),
        "pickle": pickle.dumps(error).decode("latin-1"),
        "others": repr([config, api, api.auth, transport]),
    }
    leaks = [name for name, text in places.items() if "canary" in text or token in text]
    assert not leaks
    assert {"canary-p4ss", token} <= set(api.auth.secrets())

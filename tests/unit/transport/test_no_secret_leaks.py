"""A canary key goes through every way a call can fail, and must show up nowhere."""

from __future__ import annotations

import asyncio
import base64
import logging
import pickle
import socket
import traceback
from typing import TYPE_CHECKING

import pytest
from transport_fakes import read_request, reply_bytes, serve

from tinkex.clock import SystemClock
from tinkex.config import Config
from tinkex.errors import TinkerError
from tinkex.testing.asgi import AsgiTransport
from tinkex.transport.api import connect
from tinkex.transport.http import HttpTransport
from tinkex.types import ClientConfigResponse
from tinkex.wire import routes

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = [pytest.mark.anyio, pytest.mark.req("B1")]

CANARY = "tml-canary-9f1c"
SECRET = "cloudflare-canary-77aa"


async def failure(base_url: str, **settings) -> tuple[TinkerError, list[object]]:
    """The error of one call that cannot succeed, and everything that was handled on the way."""
    settings = {"api_key": CANARY, "headers": {"CF-Access-Client-Secret": SECRET}, **settings}
    config = Config(base_url=base_url, **settings)
    clock = SystemClock()
    transport = HttpTransport(config.base_url, clock, connect_timeout_s=1)
    api = connect(config, transport, clock)
    try:
        await api.call(routes.OPTIM_STEP, body=b"{}", deadline_s=0.05)
    except TinkerError as error:
        return error, [config, api, api.auth, transport]
    finally:
        await api.aclose()
    raise AssertionError("the call was meant to fail")


def assert_clean(error: BaseException, caplog: pytest.LogCaptureFixture, *others: object) -> None:
    places = {
        "log": caplog.text + "".join(repr(record.__dict__) for record in caplog.records),
        "repr": repr(error) + str(error) + repr(getattr(error, "__dict__", "")),
        "notes": " ".join(getattr(error, "__notes__", [])),
        "traceback": "".join(traceback.format_exception(error)),
        "pickle": pickle.dumps(error).decode("latin-1"),
        "others": " ".join(map(repr, others)),
    }
    for name, text in places.items():
        assert "canary" not in text, name


def answering(reply: Callable[[bytes], bytes]):
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head, _ = await read_request(reader)
        assert CANARY.encode() in head
        writer.write(reply(head))
        await writer.drain()

    return handle


def echoing(status: str) -> Callable[[bytes], bytes]:
    """A server that quotes the whole request, credentials and all."""
    return lambda head: reply_bytes(head, status, X_Echo=CANARY)


WAYS: dict[str, Callable[[bytes], bytes]] = {
    **{str(code): echoing(f"{code} X") for code in (400, 401, 402, 403, 404, 409, 410, 422, 429)},
    "500": echoing("500 X"),
    "302": echoing("302 X"),
    "json detail": lambda _: reply_bytes(
        f'{{"detail": "bad key {CANARY}"}}'.encode(), "401 X", Content_Type="application/json"
    ),
    "bad answer": lambda head: reply_bytes(head),
    "wrong type": lambda _: reply_bytes(f'{{"request_id": ["{CANARY}"]}}'.encode()),
    "garbage": lambda head: head,
    "cut": lambda head: b"HTTP/1.1 200 OK\r\nContent-Length: 99999\r\n\r\n" + head,
    "silence": lambda _: b"",
    "deprecated": lambda _: reply_bytes(b"{}", "404 X", X_Deprecation_Note="soon"),
}


@pytest.mark.parametrize("way", WAYS)
async def test_no_answer_makes_the_key_show_up(way: str, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.DEBUG)
    async with serve(answering(WAYS[way])) as url:
        error, others = await failure(url)
    assert_clean(error, caplog, *others)


async def test_a_refused_connection_does_not_show_it(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.DEBUG)
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        error, others = await failure(f"http://127.0.0.1:{sock.getsockname()[1]}")
    assert_clean(error, caplog, *others)


async def test_a_time_out_does_not_show_it(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.DEBUG)

    async def app(scope, receive, send):
        await asyncio.sleep(60)

    config = Config(api_key=CANARY, base_url="http://h")
    api = connect(config, AsgiTransport(app, "http://h"), SystemClock())
    with pytest.raises(TinkerError) as caught:
        await api.send(routes.RETRIEVE_FUTURE, b"{}", timeout_s=0.01)
    assert_clean(caught.value, caplog, api, config)


@pytest.mark.parametrize(
    "settings",
    [
        {"api_key": "canary-without-prefix"},
        {"api_key": f"{CANARY}\r\nX: y"},
        {"api_key": None, "stored_key": "canary"},
        {"api_key": None, "credential_cmd": "echo canary >&2"},
        {"api_key": None, "credential_cmd": "echo canary; echo canary"},
        {"api_key": None},
    ],
)
async def test_unusable_credentials_are_not_quoted(settings, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.DEBUG)
    error, others = await failure("http://127.0.0.1:9", **settings)
    assert_clean(error, caplog, *others)


async def test_a_failed_exchange_shows_neither_key_nor_token(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.DEBUG)
    token = "eyJ." + base64.urlsafe_b64encode(b'{"exp": 1, "canary": 1}').decode() + ".canary"
    answered: list[str] = []

    async def app(scope, receive, send):
        key = dict(scope["headers"])[b"x-api-key"].decode()
        exchange = scope["path"].endswith("/auth/token")
        first = not answered
        answered.append(scope["path"])
        body = f'{{"jwt": "{token}"}}' if exchange and first else f'{{"detail": "{key} {token}"}}'
        status = 200 if exchange and first else 403
        length = str(len(body)).encode()
        await send(
            {
                "type": "http.response.start",
                "status": status,
                "headers": [(b"content-length", length)],
            }
        )
        await send({"type": "http.response.body", "body": body.encode()})

    config = Config(api_key=CANARY, base_url="http://h")
    api = connect(config, AsgiTransport(app, "http://h"), SystemClock())
    api.follow(ClientConfigResponse(pjwt_auth_enabled=True))
    for _ in range(2):
        with pytest.raises(TinkerError) as caught:
            await api.call(routes.GET_INFO, body=b"{}")
        assert_clean(caught.value, caplog, api, api.auth)
    assert "could not be refreshed" in caplog.text

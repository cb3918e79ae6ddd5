"""Names that a server answers to, and proxies that it believes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.unit.serving.raw_http import App, limits, running
from tinkex.errors import InputError
from tinkex.serving.host_settings import load_settings
from tinkex.serving.hosts import HostCheck

if TYPE_CHECKING:
    from collections.abc import MutableMapping

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def asked(check: HostCheck, *headers: tuple[str, str]) -> tuple[int, bytes]:
    sent: list[MutableMapping[str, Any]] = []

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    async def receive() -> MutableMapping[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    given = [(name.encode(), value.encode()) for name, value in headers]
    scope = {
        "type": "http",
        "path": "/",
        "headers": given,
        "client": ("127.0.0.1", 1),
        "scheme": "http",
    }
    await check(scope, receive, send)
    return sent[0]["status"], sent[1]["body"]


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1", 200),
        ("127.0.0.1:8000", 200),
        ("localhost:8000", 200),
        ("LOCALHOST", 200),
        ("localhost.", 200),
        ("[::1]:8000", 200),
        ("127.0.0.2:1", 200),
        ("box.example.com:8000", 200),
        ("evil.example", 421),
        ("127.0.0.1.evil.example", 421),
        ("localhost.evil.example", 421),
        ("192.0.2.1", 421),
        ("", 421),
        ("a" * 10_000, 421),
    ],
)
async def test_a_server_without_keys_answers_only_to_its_names(host: str, status: int):
    check = HostCheck(App(), ["box.example.com"], loopback=True)
    found, body = await asked(check, ("host", host))
    assert found == status
    if status == 421:
        assert b"allowed_hosts" in body
        assert len(body) < 1000


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        ("http://localhost:8000", 200),
        ("http://127.0.0.1:3000", 200),
        ("https://evil.example", 403),
        ("null", 403),
        ("http://[", 403),
    ],
)
async def test_pages_of_other_names_are_refused(origin: str, status: int):
    check = HostCheck(App(), [], loopback=True)
    found, _ = await asked(check, ("host", "localhost"), ("origin", origin))
    assert found == status


async def test_a_second_host_is_looked_at_too():
    check = HostCheck(App(), [], loopback=True)
    assert (await asked(check, ("host", "localhost"), ("host", "evil.example")))[0] == 421


async def test_listed_names_of_a_server_with_keys_are_its_only_ones():
    check = HostCheck(App(), ["Tinker.Example.com"], loopback=False)
    assert (await asked(check, ("host", "tinker.example.com")))[0] == 200
    assert (await asked(check, ("host", "localhost")))[0] == 421


FORWARDED = "x-forwarded-for: 192.0.2.9, 127.0.0.1\r\nx-forwarded-proto: https\r\n"


def test_forwarded_addresses_are_ignored_by_default():
    with running() as server:
        said = server.get(headers=FORWARDED).json
    assert (said["client"], said["scheme"]) == ("127.0.0.1", "http")


def test_forwarded_addresses_of_a_named_proxy_are_believed():
    with running(limits(), trusted_proxies=["127.0.0.0/31"]) as server:
        said = server.get(headers=FORWARDED).json
        assert (said["client"], said["scheme"]) == ("192.0.2.9", "https")
        other = server.get(headers=FORWARDED, source="127.0.0.2").json
        assert (other["client"], other["scheme"]) == ("127.0.0.2", "http")


@pytest.mark.parametrize("proxy", ["*", "proxy.example.com", "10.0.0.1/8", "10.0.0"])
def test_a_proxy_is_an_address_or_a_network(proxy: str):
    with pytest.raises(InputError, match="trusted_proxies"):
        load_settings({"trusted_proxies": proxy}, {})


@pytest.mark.parametrize("url", ["tinker.example.com", "ftp://a", "https://", "https://a/?b"])
def test_a_public_url_is_a_url(url: str):
    with pytest.raises(InputError, match="public_url"):
        load_settings({"public_url": url}, {})


@pytest.mark.parametrize(
    "name", ["max_connections", "max_connections_per_address", "head_timeout_s", "send_stall_s"]
)
def test_no_limit_of_connections_is_zero(name: str):
    with pytest.raises(InputError, match=name):
        load_settings({name: "0"}, {})

"""How a host's addresses are looked up and remembered."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from tinkex import urls
from tinkex.testing import FakeClock
from tinkex.transport.pool import Dialer

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Resolver:
    """A loop's resolver that stops working when the process ends."""

    def __init__(self) -> None:
        self.ending = False
        self.asked = 0

    async def getaddrinfo(self, host: str, port: int, **_: Any) -> list[Any]:
        self.asked += 1
        if self.ending:
            raise RuntimeError("cannot schedule new futures after interpreter shutdown")
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", ("192.0.2.1", port))]


@pytest.mark.req("S38")
async def test_stale_addresses_serve_a_process_that_is_ending() -> None:
    clock, resolver = FakeClock(), Resolver()
    dialer = Dialer(urls.parse("http://host.invalid:80"), clock, 1.0)
    found = await dialer._resolve(resolver)  # type: ignore[arg-type]
    assert found == [(socket.AF_INET, ("192.0.2.1", 80))]
    await clock.advance(31.0)
    resolver.ending = True
    assert await dialer._resolve(resolver) == found  # type: ignore[arg-type]
    assert resolver.asked == 2

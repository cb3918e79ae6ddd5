"""Pytest fixtures that come with the package: a server to test against, and a client on it.

    def test_my_loop(tinkex_service):
        training = tinkex_service.create_lora_training_client(base_model="tinkex/tiny")

    def test_my_retries(tinkex_server, tinkex_service):
        tinkex_server.faults.on("asample", faults.rate_limit(), times=2)

Nothing of tinkex is imported before a test asks for a fixture.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tinkex.clients.service import ServiceClient
    from tinkex.testing.fake_server import FakeServer


@pytest.fixture
def tinkex_server() -> Iterator[FakeServer]:
    """A `FakeServer` that listens on a loopback port (`tinkex_server.url`)."""
    from tinkex.testing.fake_server import FakeServer

    with FakeServer().serve() as server:
        yield server


@pytest.fixture
def tinkex_service(tinkex_server: FakeServer) -> Iterator[ServiceClient]:
    """A `ServiceClient` of `tinkex_server`, closed after the test."""
    from tinkex.clients.service import ServiceClient
    from tinkex.testing.fake_server import API_KEY

    with ServiceClient(base_url=tinkex_server.url, api_key=API_KEY) as client:
        yield client

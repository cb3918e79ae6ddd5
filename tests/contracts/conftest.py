"""Where stores are made, and the one PostgreSQL server of a test run."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from tests.contracts.postgres import postgres_server

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.contracts.postgres import PostgresServer


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """A server that all processes of a test run share."""
    with postgres_server(os.environ.get("PYTEST_XDIST_TESTRUNUID")) as server:
        yield server

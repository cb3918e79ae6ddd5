"""Fixtures of the transport tests."""

from __future__ import annotations

import pytest
from transport_fakes import StillClock


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def clock() -> StillClock:
    return StillClock()

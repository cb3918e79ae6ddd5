"""Every store against the one suite."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TYPE_CHECKING

import pytest

from tests.contracts.store_suite import StoreSuite
from tinkex.server import MemoryStore, Store

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class TestMemoryStore(StoreSuite):
    def open_store(self) -> AbstractAsyncContextManager[Store]:
        @asynccontextmanager
        async def memory() -> AsyncIterator[Store]:
            yield MemoryStore()

        return memory()

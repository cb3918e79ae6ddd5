"""Every store against the one suite."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TYPE_CHECKING

import pytest

from tests.contracts.store_suite import DurableStoreSuite, StoreSuite
from tinkex.server import MemoryStore, Store
from tinkex.server.store.sql import SqlStore

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from tests.contracts.postgres import PostgresServer


class TestMemoryStore(StoreSuite):
    @pytest.fixture
    def place(self) -> str:
        return "memory"

    def open_store(self, place: str) -> AbstractAsyncContextManager[Store]:
        @asynccontextmanager
        async def memory() -> AsyncIterator[Store]:
            yield MemoryStore()

        return memory()


class TestSqlite(DurableStoreSuite):
    @pytest.fixture
    def place(self, tmp_path: Path) -> str:
        return str(tmp_path / "store.db")

    def open_store(self, place: str) -> AbstractAsyncContextManager[Store]:
        return SqlStore.open(place)


class TestPostgres(DurableStoreSuite):
    @pytest.fixture
    def place(self, postgres: PostgresServer) -> str:
        return postgres.new_place()

    def open_store(self, place: str) -> AbstractAsyncContextManager[Store]:
        return SqlStore.open(place)

"""Nodes and claims in every store."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

from tests.contracts.ownership_suite import ClusterSuite, OwnershipSuite
from tinkex.server import MemoryStore, Store
from tinkex.server.store.sql import SqlStore

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from tests.contracts.postgres import PostgresServer


class TestMemoryNodes(ClusterSuite):
    @pytest.fixture
    def place(self) -> MemoryStore:
        return MemoryStore()

    def open_store(self, place: Any) -> AbstractAsyncContextManager[Store]:
        @asynccontextmanager
        async def memory() -> AsyncIterator[Store]:
            yield place.beside()

        return memory()


class TestSqliteNode(OwnershipSuite):
    @pytest.fixture
    def place(self, tmp_path: Path) -> str:
        return str(tmp_path / "store.db")

    def open_store(self, place: Any) -> AbstractAsyncContextManager[Store]:
        return SqlStore.open(place)


class TestPostgresNodes(ClusterSuite):
    @pytest.fixture
    def place(self, postgres: PostgresServer) -> str:
        return postgres.new_place()

    def open_store(self, place: Any) -> AbstractAsyncContextManager[Store]:
        return SqlStore.open(place)

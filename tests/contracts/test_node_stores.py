"""The suite of every store, on the store of a node: it has joined, and owns what it writes for."""

from __future__ import annotations

import itertools
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

from tests.contracts.ownership_suite import LEASE_S, node
from tests.contracts.store_suite import DurableStoreSuite
from tinkex.server.store.sql import SqlStore

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from tests.contracts.postgres import PostgresServer
    from tinkex.server import Store
    from tinkex.server.store.records import Operation

_NUMBERS = itertools.count(1)


class NodeStore(SqlStore):
    """Claims and adopts a key before it writes for it, as requests have a node do."""

    async def own(self, key: str | None) -> None:
        if key is None or key in self._adopted:
            return
        claim = await self.claim(key, self._me(), owner="o", base_model="b")
        if claim.node_id != self._me():
            given = await self.reassign(claim, self._me())
            assert given is not None, "the node before this one has ended"
            claim = given
        await self.adopt(claim)

    async def submit(self, operation: Operation) -> tuple[Operation, bool]:
        await self.own(operation.model_id)
        return await super().submit(operation)

    async def change_model(self, model_id: str, **fields: Any) -> None:
        await self.own(model_id)
        await super().change_model(model_id, **fields)

    async def trim_journal(self, model_id: str, through: int) -> None:
        await self.own(model_id)
        await super().trim_journal(model_id, through)


@asynccontextmanager
async def joined(place: str) -> AsyncIterator[Store]:
    """A node that takes over what nodes before it have left."""
    async with NodeStore.open(place) as store:
        await store.join("c", node(f"n{next(_NUMBERS)}"), LEASE_S)
        for claim in await store.claims():
            await store.own(claim.key)
        yield store
        await store.leave()


class TestSqliteOfANode(DurableStoreSuite):
    @pytest.fixture
    def place(self, tmp_path: Path) -> str:
        return str(tmp_path / "store.db")

    def open_store(self, place: str) -> AbstractAsyncContextManager[Store]:
        return joined(place)


class TestPostgresOfANode(DurableStoreSuite):
    @pytest.fixture
    def place(self, postgres: PostgresServer) -> str:
        return postgres.new_place()

    def open_store(self, place: str) -> AbstractAsyncContextManager[Store]:
        return joined(place)

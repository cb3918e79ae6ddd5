"""How many statements a node sends to PostgreSQL, as the page about clusters says."""

from __future__ import annotations

import re
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import event
from sqlalchemy.engine import Engine

from tests.contracts.ownership_suite import KEY, LEASE_S, node
from tests.contracts.store_suite import model, session, step, used
from tests.docs.blocks import DOCS
from tinkex.server.store.ownership import NodeLoad
from tinkex.server.store.records import OperationOutcome
from tinkex.server.store.sql import SqlStore
from tinkex.testing import FakeClock

if TYPE_CHECKING:
    from collections.abc import Awaitable, Generator

    from tests.contracts.postgres import PostgresServer

pytestmark = pytest.mark.anyio


@contextmanager
def statements() -> Generator[list[str]]:
    """What is sent meanwhile; begin and commit are not listed."""
    sent: list[str] = []

    def note(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        sent.append(statement)

    event.listen(Engine, "before_cursor_execute", note)
    try:
        yield sent
    finally:
        event.remove(Engine, "before_cursor_execute", note)


async def test_calls_send_as_many_statements_as_the_page_says(postgres: PostgresServer) -> None:
    found: dict[str, int] = {}
    with statements() as sent:

        async def count(name: str, call: Awaitable[Any]) -> Any:
            sent.clear()
            result = await call
            found[name] = len(sent)
            return result

        # Time stands still: nothing is written later by itself, and no copy becomes too old.
        place, clock = postgres.new_place(), FakeClock()
        async with (
            SqlStore.open(place, clock=clock) as store,
            SqlStore.open(place, clock=clock) as other,
        ):
            me = (await store.join("c", node("a"), LEASE_S)).node.node_id
            target = (await other.join("c", node("b"), LEASE_S)).node.node_id
            await store.put_session(session())
            await store.nodes()  # the connection for listings is opened by the first one
            await count("renew", store.renew(LEASE_S, NodeLoad()))
            await count("nodes", store.nodes())
            await count("claims", store.claims([me]))
            claim = await count("claim", store.claim(KEY, me, owner="o", base_model="tiny"))
            await count("get_claim", store.get_claim(KEY))
            await count("adopt", store.adopt(claim))
            await store.put_model(model())
            await count("submit", store.submit(step(0, body=b"x")))
            await count("get_operation", store.get_operation(step(0).op_id))
            await count("touch_session", store.touch_session(session().session_id, 3.0))
            done = OperationOutcome(body=b"y")
            await count("finish", store.finish(step(0).op_id, done, 2.0, used(2.0)))
            await count("reassign", store.reassign(claim, target))
    page = (DOCS / "explanation" / "cluster.md").read_text()
    listed = re.findall(r"^\| `(\w+)` \| .+ \| (\d+) \|$", page, re.MULTILINE)
    assert found == {name: int(number) for name, number in listed}

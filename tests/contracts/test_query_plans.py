"""Every listing, count and sum finds its rows by an index, whatever else the tables hold."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import event, text

from tests.contracts.store_suite import checkpoint, key, model, sampler, session, step
from tinkex.server.store.records import AuditEntry
from tinkex.server.store.sql import SqlStore
from tinkex.server.store.sql.schema import METADATA

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from sqlalchemy import Connection

    from tests.contracts.postgres import PostgresServer

pytestmark = pytest.mark.anyio

OWNERS, EACH = 30, 20
TABLES = "sessions|models|samplers|checkpoints|losses|operations|bodies|results|audit|usage"


@pytest.fixture(params=["sqlite", "postgres"])
def place(request: pytest.FixtureRequest, tmp_path: Any) -> str:
    if request.param == "postgres":
        server: PostgresServer = request.getfixturevalue("postgres")
        return server.new_place()
    return str(tmp_path / "store.db")


LISTINGS: dict[str, Callable[[SqlStore], Awaitable[object]]] = {
    "sessions": lambda s: s.sessions("o1", limit=5),
    "sessions before": lambda s: s.sessions("o1", before=9.0, limit=5),
    "sessions of a project": lambda s: s.sessions("o1", project_id="p1", limit=5),
    "active sessions": lambda s: s.count_sessions("o1", active=True, heartbeats=True),
    "session ids": lambda s: s.session_ids("o1", 0, 5),
    "session ids of a project": lambda s: s.session_ids("o1", 0, 5, project_id="p1"),
    "count of sessions": lambda s: s.count_sessions("o1"),
    "runs": lambda s: s.models(owner="o1", limit=5),
    "runs of a project": lambda s: s.models(owner="o1", project_id="p1", limit=5),
    "runs of a session": lambda s: s.models(session_id="s1-1"),
    "count of runs": lambda s: s.count_models("o1", project_id="p1"),
    "runs of all": lambda s: s.models(owner="o1", published_at=1.0, offset=3, limit=5),
    "runs of all of a project": lambda s: s.models(
        owner="o1", published_at=1.0, project_id="p1", limit=5
    ),
    "count of runs of all": lambda s: s.count_models("o1", published_at=1.0),
    "samplers": lambda s: s.samplers("s1-1"),
    "checkpoints": lambda s: s.checkpoints(owner="o1", live_at=1.0, limit=5),
    "checkpoints of a run": lambda s: s.checkpoints(model_id="s1-1:train:0", limit=5),
    "checkpoints of a project": lambda s: s.checkpoints(owner="o1", project_id="p1", limit=5),
    "count of checkpoints": lambda s: s.count_checkpoints("o1", live_at=1.0),
    "storage": lambda s: s.stored_by_project("o1", live_at=1.0),
    "what is kept": lambda s: s.kept("o1"),
    "saved by a session": lambda s: s.saved_by_session("s1-1"),
    "usage": lambda s: s.usage("o1", 0.0, 3600.0),
    "audit": lambda s: s.audit_log("o1", limit=5),
    "operations of a session": lambda s: s.operations("s1-1"),
    "old audit": lambda s: s.forget_audit_before(0.5, 10),
}

# Few checkpoints are public, so that their own index is the one to go by.
THROUGH = {
    "runs of all": "checkpoints_public",
    "runs of all of a project": "checkpoints_public",
    "count of runs of all": "checkpoints_public",
}


async def filled(store: SqlStore) -> None:
    """Rows of many owners, so that reading a whole table is the worse plan."""
    for owner in range(OWNERS):
        name = f"o{owner}"
        await store.add_key(key(f"key {owner}", owner=name))
        for number in range(EACH):
            at, project, run = float(number), f"p{number}", f"s{owner}-{number}:train:0"
            await store.put_session(session(f"s{owner}-{number}", name, at, project_id=project))
            await store.add_model(model(run, name, project_id=project))
            await store.add_sampler(sampler(f"s{owner}-{number}:sample:0"))
            each = checkpoint(run=run, at=at)
            await store.put_checkpoint(type(each)(**{**fields(each), "owner": name}))
            await store.submit(step(1, run, body=b"x"))
            await store.audit(AuditEntry(at=at, owner=name, topic="projects", event="e"))


def fields(record: Any) -> dict[str, Any]:
    return {name: getattr(record, name) for name in record.__dataclass_fields__}


async def test_every_listing_goes_by_an_index(place: str) -> None:
    async with SqlStore.open(place) as store:
        await filled(store)
        # By name: without one, PostgreSQL locks the tables of all other tests until it is done.
        for table in METADATA.tables:
            await store._database.write(lambda c, t=table: c.execute(text(f"ANALYZE {t}")) and None)
        seen: list[tuple[str, Any]] = []

        def note(c: Any, cursor: Any, statement: str, parameters: Any, *_: Any) -> None:
            if re.match(r"\s*(SELECT|DELETE)", statement) and re.search(TABLES, statement):
                seen.append((statement, parameters))

        lanes = (store._database._main, store._database._listings)
        for lane in lanes:
            event.listen(lane._connections.driver.engine, "before_cursor_execute", note)
        for name, listing in LISTINGS.items():
            seen.clear()
            await listing(store)
            assert seen, name
            plans: list[str] = []
            for statement, parameters in list(seen):
                plan = await store._database.read(
                    lambda c, s=statement, p=parameters: told(c, s, p)
                )
                assert not scanned(plan), (name, statement, plan)
                plans.append(plan)
            assert THROUGH.get(name, "") in "".join(plans), (name, plans)


def told(connection: Connection, statement: str, parameters: Any) -> str:
    sqlite = connection.dialect.name == "sqlite"
    if not sqlite:  # the tables are small enough for it to read them whole
        connection.exec_driver_sql("SET LOCAL enable_seqscan = off")
    how = "EXPLAIN QUERY PLAN" if sqlite else "EXPLAIN"
    rows = connection.exec_driver_sql(f"{how} {statement}", parameters).all()
    return "\n".join(str(row[-1]) for row in rows)


def scanned(plan: str) -> list[str]:
    """The tables that a plan reads from end to end."""
    sqlite = re.findall(rf"^SCAN ({TABLES})(?! USING)", plan, re.MULTILINE)
    return sqlite + re.findall(rf"Seq Scan on ({TABLES})", plan)

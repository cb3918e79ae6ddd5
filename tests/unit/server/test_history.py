"""What a server does costs the same however much has ended before.

The cost is counted in the steps of SQLite's virtual machine, which are the same on every machine.
`python -m benchmarks.history` measures times.
"""

from __future__ import annotations

import re
import sqlite3
from contextlib import AsyncExitStack, asynccontextmanager, closing, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import Engine, event

from benchmarks.history.filling import Past, fill
from tinkex.clock import SystemClock
from tinkex.server.api.identity import owner_of_key
from tinkex.server.store.records import UsageEntry
from tinkex.server.store.sql import SqlStore
from tinkex.testing import FakeServer
from tinkex.transport.base import HttpRequest, Pool
from tinkex.types import Usage

from .conftest import Api

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
    from pathlib import Path

pytestmark = pytest.mark.anyio

OWNER = owner_of_key("tml-one")
SUCCESS = {"reason": {"type": "success"}, "detail": None}
SHORT, LONG = Past(sessions=300, samplers=30, imports=30), Past(5000, 500, 100)
# What only what is alive is in, so that reading all of it is reading what is alive.
OF_THE_LIVING = (
    "sessions_active|sessions_unattended|models_open|samplers_location|samplers_unsaved|"
    "checkpoints_public|operations_unfinished"
)
TABLES = "sessions|models|samplers|checkpoints|losses|operations|bodies|results|answers|audit|usage"
FULL_SCAN = re.compile(rf"SCAN ({TABLES})\b(?! USING (COVERING )?INDEX ({OF_THE_LIVING})\b)")
# Two counts that go through an index: a page of runs or checkpoints says how many there are.
STEPS_PER_COUNTED = 10


@dataclass
class Work:
    """What a database was asked to do, and how much it did."""

    steps: int = 0
    statements: dict[str, Any] = field(default_factory=dict[str, Any])

    async def of(self, work: Awaitable[object], path: Path, before: int | None = None) -> int:
        """The steps of some work, of which nothing may go through a whole table."""
        if before is None:
            self.statements.clear()
            before = self.steps
        await work
        assert self.scans(path) == []
        return self.steps - before

    def scans(self, path: Path) -> list[str]:
        """The statements that go through a whole table, or a whole index of it."""
        with closing(sqlite3.connect(path)) as database:
            return [
                f"{plan[3]}: {statement}"
                for statement, parameters in list(self.statements.items())
                if statement.startswith(("SELECT", "UPDATE", "DELETE"))
                for plan in database.execute(f"EXPLAIN QUERY PLAN {statement}", parameters)
                if FULL_SCAN.match(plan[3])
            ]


@contextmanager
def watched() -> Iterator[Work]:
    """Count what all databases that are opened in the block do."""
    work = Work()

    def step() -> None:
        work.steps += 1

    def connect(connection: sqlite3.Connection, record: object) -> None:
        connection.set_progress_handler(step, 1)

    def execute(
        connection: object, cursor: object, statement: str, parameters: Any, *_: object
    ) -> None:
        work.statements[statement] = parameters

    event.listen(Engine, "connect", connect)
    event.listen(Engine, "before_cursor_execute", execute)
    try:
        yield work
    finally:
        event.remove(Engine, "connect", connect)
        event.remove(Engine, "before_cursor_execute", execute)


async def old_store(path: Path, past: Past) -> None:
    async with SqlStore.open(path):
        pass
    fill(path, past, OWNER, "tinkex/tiny", SystemClock().wall())


@asynccontextmanager
async def serving(path: Path) -> AsyncIterator[Api]:
    clock: Any = SystemClock()
    async with SqlStore.open(path) as store:
        sql: Any = store
        async with FakeServer(clock=clock, store=sql) as server:
            yield Api(server, clock)


def assert_no_more(
    short: dict[str, int], long: dict[str, int], counted: dict[str, int] | None = None
) -> None:
    """A little more is allowed: a heartbeat may be written meanwhile."""
    more = counted or {}
    allowed = {name: 1.2 * steps + 300 + more.get(name, 0) for name, steps in short.items()}
    assert {name: steps for name, steps in long.items() if steps > allowed[name]} == {}
    assert any(short.values())


# -- through the API -------------------------------------------------------------------------------


async def list_sessions(api: Api) -> None:
    assert len((await api.get("/sessions", query="limit=10&offset=20"))["sessions"]) == 10


async def search_sessions(api: Api) -> None:
    found = await api.post("/sessions/search", {"limit": 10})
    assert len(found["sessions"]) == 10


async def list_runs(api: Api) -> None:
    assert len((await api.get("/training_runs", query="limit=10"))["training_runs"]) == 10


async def list_everybodys_runs(api: Api) -> None:
    query = "limit=10&access_scope=accessible"
    assert len((await api.get("/training_runs", query=query))["training_runs"]) == 10


async def list_checkpoints(api: Api) -> None:
    assert len((await api.get("/checkpoints", query="limit=10"))["checkpoints"]) == 10


async def read_metrics(api: Api) -> None:
    reply = await api.transport.send(HttpRequest("GET", "/metrics", Pool.REST, 60))
    assert b"tinkex_sessions_active" in reply.body


async def create_a_session(api: Api) -> None:
    await api.session()


async def create_a_model(api: Api) -> None:
    await api.model(await api.session())


async def copy_a_checkpoint(api: Api) -> None:
    source = "tinker://import-0:train:0/weights/imported"
    # The engine has no such file; by then the room for it was looked at.
    await api.call("POST", "/copy_weights", {"source_path": source})


async def read_the_audit_log(api: Api) -> None:
    await api.get("/audit")


REQUESTS: dict[str, Callable[[Api], Awaitable[None]]] = {
    function.__name__: function
    for function in (
        list_sessions,
        search_sessions,
        list_runs,
        list_everybodys_runs,
        list_checkpoints,
        read_metrics,
        create_a_session,
        create_a_model,
        copy_a_checkpoint,
        read_the_audit_log,
    )
}
COUNTING = {list_runs, list_everybodys_runs, list_checkpoints, copy_a_checkpoint}


async def steps_of_requests(path: Path, past: Past) -> dict[str, int]:
    """What each request costs the second time, when nothing is new to the process."""
    await old_store(path, past)
    found: dict[str, int] = {}
    with watched() as work:
        async with serving(path) as api:
            await create_a_model(api)  # then it has started
            for name, request in REQUESTS.items():
                await request(api)
                found[name] = await work.of(request(api), path)
    return found


async def check_requests(folder: Path, past: Past) -> None:
    short = await steps_of_requests(folder / "short.db", SHORT)
    long = await steps_of_requests(folder / "long.db", past)
    counted = STEPS_PER_COUNTED * (past.runs + past.imports)
    assert_no_more(short, long, {function.__name__: counted for function in COUNTING})


async def test_no_request_costs_more_after_a_long_life(tmp_path: Path) -> None:
    await check_requests(tmp_path, LONG)


@pytest.mark.exhaustive
async def test_no_request_costs_more_after_100_000_sessions(tmp_path: Path) -> None:
    await check_requests(tmp_path, Past())


# -- a whole life ----------------------------------------------------------------------------------


async def steps_of_a_life(path: Path, past: Past) -> dict[str, int]:
    """A start, and what a session comes to after it."""
    await old_store(path, past)
    async with AsyncExitStack() as stack:
        work = stack.enter_context(watched())
        api = await stack.enter_async_context(serving(path))
        session = await api.session()
        found = {"start": await work.of(api.model(session), path, before=0)}
        run = f"{session}:train:0"
        save = {"model_id": run, "seq_id": 1, "path": "one"}
        saved = api.post("/save_weights", save)
        found["save"] = await work.of(api.result(await saved), path)
        publish = {"model_id": run, "seq_id": 2, "sampling_session_seq_id": 0}
        published = api.post("/save_weights_for_sampler", publish)
        found["publish"] = await work.of(api.result(await published), path)
        deleted = api.call("DELETE", f"/training_runs/{run}/checkpoints/weights/one")
        found["delete"] = await work.of(deleted, path)
        ended = api.post(f"/sessions/{session}/finish", SUCCESS)
        found["end"] = await work.of(ended, path)
    return found


async def test_a_start_and_a_session_cost_no_more_after_a_long_life(tmp_path: Path) -> None:
    short = await steps_of_a_life(tmp_path / "short.db", SHORT)
    long = await steps_of_a_life(tmp_path / "long.db", LONG)
    counted = STEPS_PER_COUNTED * (LONG.runs + LONG.imports)
    assert_no_more(short, long, {"save": counted, "publish": counted})


# -- what the server asks its store ----------------------------------------------------------------

NOW = SystemClock().wall()
CALLS: dict[str, Callable[[SqlStore], Awaitable[object]]] = {
    # at a start
    "touch_sessions": lambda store: store.touch_sessions(NOW),
    "open_models": lambda store: store.open_models(),
    "pending": lambda store: store.pending(),
    "located samplers": lambda store: store.samplers(located=True),
    "unsaved samplers": lambda store: store.samplers(unsaved=True),
    # for one model, session, sampler or checkpoint
    "last_turn": lambda store: store.last_turn("old-0:train:0"),
    "journal": lambda store: store.journal("old-0:train:0", -1),
    "trim_journal": lambda store: store.trim_journal("old-0:train:0", 9),
    "models of a session": lambda store: store.models(session_id="old-0"),
    "samplers of a session": lambda store: store.samplers("old-0"),
    "samplers of a model": lambda store: store.samplers(model_id="old-0:train:0"),
    "unsaved of a model": lambda store: store.samplers(model_id="old-0:train:0", unsaved=True),
    "samplers of a location": lambda store: store.samplers(location="nowhere"),
    "close_samplers": lambda store: store.close_samplers(["old-0:sample:0"]),
    "saved_by_session": lambda store: store.saved_by_session("import-0"),
    "operations of a session": lambda store: store.operations("old-0"),
    "newest checkpoints of runs": lambda store: store.newest_checkpoints(
        ["import-0:train:0", "import-1:train:0"], kinds=["weights"], live_at=NOW
    ),
    # for a tenant
    "count_sessions of a tenant": lambda store: store.count_sessions(
        OWNER, active=True, heartbeats=True
    ),
    "open models of a tenant": lambda store: store.open_models(OWNER),
    "sessions of a tenant": lambda store: store.sessions(OWNER, before=NOW, limit=10),
    "models of a project": lambda store: store.models(owner=OWNER, project_id="p", limit=10),
    "usage": lambda store: store.usage(OWNER, NOW - 3600, NOW),
    "audit_log of a day": lambda store: store.audit_log(OWNER, start=NOW - 3600, end=NOW),
    # again and again
    "count_sessions": lambda store: store.count_sessions(active=True),
    "active sessions": lambda store: store.sessions(active=True),
    "unattended_sessions": lambda store: store.unattended_sessions(NOW, 100),
    "expired checkpoints": lambda store: store.checkpoints(expired_at=NOW),
    "published checkpoints": lambda store: store.checkpoints(public=True),
    "drop_results_before": lambda store: store.drop_results_before(NOW),
    "forget_operations_before": lambda store: store.forget_operations_before(NOW),
    "prune": lambda store: store.prune(NOW - 7 * 24 * 3600, 1000),
    "add_usage": lambda store: store.add_usage(
        UsageEntry(
            at=NOW,
            owner=OWNER,
            session_id="",
            base_model=None,
            project_id=None,
            kind="sample",
            usage=Usage(prompt_tokens=1),
        )
    ),
}


async def steps_of_calls(path: Path, past: Past) -> dict[str, int]:
    await old_store(path, past)
    with watched() as work:
        async with SqlStore.open(path) as store:
            return {name: await work.of(call(store), path) for name, call in CALLS.items()}


async def test_no_question_to_the_store_reads_what_has_ended(tmp_path: Path) -> None:
    short = await steps_of_calls(tmp_path / "short.db", SHORT)
    long = await steps_of_calls(tmp_path / "long.db", LONG)
    assert_no_more(short, long)


@pytest.mark.exhaustive
async def test_no_question_to_the_store_reads_100_000_sessions(tmp_path: Path) -> None:
    short = await steps_of_calls(tmp_path / "short.db", SHORT)
    long = await steps_of_calls(tmp_path / "long.db", Past())
    assert_no_more(short, long)


async def test_what_is_pruned_goes_in_parts_of_the_same_size(tmp_path: Path) -> None:
    await old_store(tmp_path / "store.db", LONG)
    with watched() as work:
        async with SqlStore.open(tmp_path / "store.db") as store:
            steps: list[int] = []
            forgotten = part = 1
            while part:
                before = work.steps
                part = await store.prune(NOW, 500)
                forgotten += part
                steps.append(work.steps - before)
            assert forgotten - 1 == LONG.sessions + 2 * LONG.samplers
            assert max(steps) < 500 * 200
            assert len(await store.models()) == LONG.runs + LONG.imports

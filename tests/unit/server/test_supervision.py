"""Tasks that run as long as the server does: each is ended in turn, and its work goes on."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from tests.patience import PATIENCE_S
from tinkex.server.api.call import Uploads
from tinkex.server.scheduler.upkeep import SessionEnds, Upkeep
from tinkex.server.store.sql.write_behind import SEEN_EVERY_S, USAGE_EVERY_S, WriteBehind
from tinkex.server.supervision import keep_running, retry_wait_s
from tinkex.testing import FakeClock

from .test_bodies import send
from .test_containment import SUCCESS, is_ready

if TYPE_CHECKING:
    from collections.abc import Callable

    from .conftest import Start

pytestmark = pytest.mark.anyio

ERRORS = (RuntimeError, MemoryError, KeyError, asyncio.CancelledError)


class FailingClock(FakeClock):
    """Its sleep fails where it is told to: that is where most tasks wait."""

    def __init__(self) -> None:
        super().__init__()
        self.fail: Callable[[float], BaseException | None] = lambda _: None

    async def sleep(self, seconds: float) -> None:
        error = self.fail(seconds)
        if error is not None:
            raise error
        await super().sleep(seconds)


async def test_a_task_that_ends_is_started_again_after_longer_and_longer_pauses() -> None:
    clock, began = FakeClock(), list[float]()
    ends = iter([RuntimeError(), MemoryError(), asyncio.CancelledError(), None, KeyError()])

    async def work() -> None:
        began.append(clock.now())
        if (error := next(ends, StopAsyncIteration())) is None:
            return  # which is no end either
        if isinstance(error, StopAsyncIteration):
            await clock.sleep(61)  # it works for a while, and a new series begins
            raise RuntimeError
        raise error

    async with clock.running(), anyio.create_task_group() as group:
        group.start_soon(keep_running, "work", work, clock)
        await clock.sleep(200)
        group.cancel_scope.cancel()
    pauses = [later - sooner for sooner, later in pairwise(began)]
    assert pauses[:5] == [0.5, 1.0, 2.0, 4.0, 8.0]
    assert pauses[5:] == [61.5, 61.5]
    assert max(map(retry_wait_s, range(1, 100))) == 30.0


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("task", [SessionEnds, Upkeep, Uploads], ids=lambda task: task.__name__)
async def test_each_task_may_end_and_its_work_goes_on(
    start: Start, monkeypatch: pytest.MonkeyPatch, task: Any, error: type[BaseException]
) -> None:
    inner, runs = task.run, list[object]()

    async def run(self: Any) -> None:
        runs.append(self)
        if len(runs) == 1:
            raise error("ended")
        await inner(self)

    monkeypatch.setattr(task, "run", run)
    async with start(session_timeout_s=60, upkeep_interval_s=10, upload_timeout_s=5) as api:
        await api.clock.sleep(1)
        assert len(runs) == 2
        assert await is_ready(api)
        silent, closed = await api.session(), await api.session()
        await api.model(closed)
        await api.post("/session_heartbeat", {"session_id": silent})
        await api.post(f"/sessions/{closed}/finish", SUCCESS)
        assert (await send(api, _nothing))[0] == 408
        await api.clock.sleep(100)
        assert await api.server.store.sessions(active=True) == []
        assert not any(api.server._parts.worker.held().values())


async def _nothing() -> dict[str, Any]:
    """A body that never comes."""
    await anyio.Event().wait()
    raise AssertionError


async def test_a_body_is_given_up_although_its_watcher_was_started_again() -> None:
    """The event that had woken the watcher was forgotten with it."""
    clock = FailingClock()
    uploads = Uploads(clock, 5.0)
    failures = iter([RuntimeError()])
    clock.fail = lambda seconds: next(failures, None) if seconds > 4 else None
    async with clock.running(), anyio.create_task_group() as group:
        group.start_soon(keep_running, "watching uploads", uploads.run, clock)
        with (
            anyio.fail_after(PATIENCE_S),
            pytest.raises(Exception, match="did not arrive within 5 s"),
        ):
            await uploads.within_limit(_nothing())  # type: ignore[arg-type]
        assert clock.now() == pytest.approx(5.0)
        group.cancel_scope.cancel()


class Database:
    """Writes nothing, and fails as often as told."""

    def __init__(self, *errors: BaseException) -> None:
        self.errors = list(errors)
        self.written = 0

    async def write_lightly(self, _: object) -> None:
        if self.errors:
            raise self.errors.pop(0)
        self.written += 1


@pytest.mark.parametrize("error", [RuntimeError, MemoryError, asyncio.CancelledError])
async def test_what_could_not_be_written_is_written_in_the_next_round(
    error: type[BaseException],
) -> None:
    clock, database = FakeClock(), Database(error("no"))
    behind = WriteBehind(database, clock)  # type: ignore[arg-type]
    async with clock.running(), behind.running():
        behind.use_key(1, 5.0)
        await clock.sleep(SEEN_EVERY_S + 60 * USAGE_EVERY_S)
        assert database.errors == []
        assert database.written == 1


async def test_what_can_never_be_written_is_dropped_and_what_comes_later_is_written() -> None:
    errors = [OverflowError("too large for the database") for _ in range(5)]
    clock, database = FakeClock(), Database(*errors)
    behind = WriteBehind(database, clock)  # type: ignore[arg-type]
    async with clock.running(), behind.running():
        behind.use_key(1, 5.0)
        await clock.sleep(20 * SEEN_EVERY_S)
        assert (database.errors, database.written) == ([], 0)
        behind.use_key(1, 6.0)
        await clock.sleep(2 * SEEN_EVERY_S)
        assert database.written == 1


async def test_entries_are_written_although_the_task_was_started_again() -> None:
    clock, database = FailingClock(), Database()
    behind = WriteBehind(database, clock)  # type: ignore[arg-type]
    async with clock.running(), behind.running():
        await clock.sleep(10)
        failures = iter([RuntimeError()])
        clock.fail = lambda seconds: next(failures, None) if seconds == USAGE_EVERY_S else None
        behind.use_key(1, 5.0)
        await clock.sleep(2 * SEEN_EVERY_S)
        assert next(failures, None) is None
        assert database.written == 1

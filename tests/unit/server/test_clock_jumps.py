"""The date is set by a day, forward or back, and the server is away for a while."""

from __future__ import annotations

from typing import Any

import pytest

from tinkex.clock import SteadyDate
from tinkex.server.scheduler.upkeep import Upkeep
from tinkex.testing import FakeClock, FakeServer

from .conftest import Api

pytestmark = pytest.mark.anyio

DAY_S = 24 * 3600.0
HOUR_S = 3600.0


@pytest.mark.parametrize("by", [DAY_S, -DAY_S])
async def test_a_date_that_is_set_is_followed_after_an_hour(by: float) -> None:
    clock = FakeClock()
    steady = SteadyDate(clock)
    begun = steady.wall()
    clock.set_date(by)
    assert steady.wall() == begun
    await clock.advance(HOUR_S - 1)
    assert steady.wall() == begun + HOUR_S - 1
    await clock.advance(2)
    assert steady.wall() == begun + HOUR_S + 1 + by


@pytest.mark.parametrize("by", [DAY_S, -DAY_S])
async def test_a_date_that_is_set_right_again_was_never_another(by: float) -> None:
    clock = FakeClock()
    steady = SteadyDate(clock)
    begun = steady.wall()
    for _ in range(10):
        clock.set_date(by)
        assert steady.wall() == begun + clock.now()
        await clock.advance(HOUR_S / 2)
        clock.set_date(-by)
        assert steady.wall() == begun + clock.now()
    clock.set_date(30)  # adjusted, not set
    assert steady.wall() == begun + clock.now() + 30


async def beat(api: Api, session: str) -> Any:
    return await api.post("/session_heartbeat", {"session_id": session})


async def is_active(api: Api, session: str) -> bool:
    stored = await api.server.store.get_session(session)
    assert stored is not None
    return stored.active


@pytest.mark.parametrize("by", [DAY_S, -DAY_S])
async def test_a_date_that_is_set_ends_no_session_and_expires_nothing(
    start: Any, by: float
) -> None:
    async with start() as api:
        session = await api.session()
        model = await api.model(session)
        body = {"model_id": model, "seq_id": 1, "path": "kept", "overwrite": False}
        saving = await api.post("/save_weights", {**body, "ttl_seconds": 5 * 3600})
        path = (await api.result(saving))["path"]
        result = await api.train(model, 2)
        loss = await api.loss(result)
        await beat(api, session)
        api.clock.set_date(by)
        for _ in range(30):  # five minutes of sweeps: the client goes on
            await api.clock.sleep(10)
            await beat(api, session)
        assert await is_active(api, session)
        assert await api.server.store.get_checkpoint(path) is not None
        assert await api.loss(result) == loss
        assert await api.loss(await api.train(model, 3)) > 0
        # A client that is silent still ends, on time.
        await api.clock.sleep(400)
        assert not await is_active(api, session)


@pytest.mark.parametrize("by", [DAY_S, -DAY_S])
async def test_sessions_outlive_the_moment_in_which_the_date_is_followed(
    start: Any, by: float
) -> None:
    async with start() as api:
        session = await api.session()
        model = await api.model(session)
        api.clock.set_date(by)
        for _ in range(400):  # beyond the hour after which the date is followed
            await api.clock.sleep(10)
            await beat(api, session)
        assert await is_active(api, session)
        assert await api.loss(await api.train(model, 1)) > 0
        assert (await api.server.store.get_session(session)).last_seen_at == api.clock.wall()  # type: ignore[union-attr]
        await api.clock.sleep(400)
        assert not await is_active(api, session)


async def test_the_time_in_which_the_server_was_stopped_is_no_silence(start: Any) -> None:
    async with start(upkeep_interval_s=1e9) as api:
        parts = api.server._parts
        upkeep = Upkeep(parts.store, parts.worker, parts.clock, parts.settings)
        session = await api.session()
        await beat(api, session)
        object.__setattr__(parts.settings, "upkeep_interval_s", 30.0)
        await upkeep.sweep()
        await api.clock.sleep(600)  # no sweep: the process was stopped
        await upkeep.sweep()
        assert await is_active(api, session)
        for _ in range(9):
            await api.clock.sleep(30)
            await upkeep.sweep()
        assert await is_active(api, session)
        for _ in range(3):
            await api.clock.sleep(30)
            await upkeep.sweep()
        assert not await is_active(api, session)


async def test_samples_are_found_lost_after_the_date_was_set_back() -> None:
    """Cursors of the start before are beyond those of this one."""
    clock = FakeClock()
    server = FakeServer(clock=clock)
    async with clock.running(), server:
        api = Api(server, clock)
        session = await api.session()
        sampler = await api.sampler(session)
        await api.sampled(await api.sample(sampler, 0))
        before = await server.store.get_sampler(sampler)
        assert before is not None
        cursor = server._parts.worker.lost.cursor(1, before)
    clock.set_date(-DAY_S)
    after = FakeServer(clock=clock, after=server)
    async with clock.running(), after:
        lost = after._parts.worker.lost
        stored = await after.store.get_sampler(sampler)
        assert stored is not None
        assert lost.position(cursor, stored) == 0
        assert f"{sampler}:0" in await lost.since(cursor, stored, 0)
        assert await lost.since(lost.cursor(0, stored), stored, 0) == []

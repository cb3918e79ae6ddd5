"""Samples of these endpoints share limits, turns and counts with all others."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio
import pytest

from tinkex.testing.fake_engine import Delays
from tinkex.transport.base import HttpRequest, Pool

from .conftest import V1, completion

if TYPE_CHECKING:
    from tests.unit.server.conftest import Start

pytestmark = pytest.mark.anyio

SLOW = Delays(token_s=1.0)


async def metrics(v1: V1) -> str:
    reply = await v1.api.transport.send(HttpRequest("GET", "/metrics", Pool.REST, 60))
    assert reply.status == 200
    return reply.body.decode()


async def test_a_tenant_with_many_requests_does_not_hold_up_one_with_a_single_one(
    start: Start,
) -> None:
    async with start(SLOW, max_sequences_running=2) as api:
        many, one = V1(api), V1(api.other())
        ended: list[str] = []

        async def ask(v1: V1, name: str) -> None:
            await v1.complete(max_tokens=10)
            ended.append(name)

        async with anyio.create_task_group() as group:
            for _ in range(6):
                group.start_soon(ask, many, "many")
            await api.clock.sleep(1)
            group.start_soon(ask, one, "one")
        assert ended.index("one") <= 2
        assert len(ended) == 7


async def test_requests_wait_for_samples_of_the_sampling_api_and_the_other_way_round(
    start: Start,
) -> None:
    async with start(SLOW, max_sequences_running=1) as api:
        sampler = await api.sampler(await api.session())
        began = api.clock.now()
        future = await api.sample(sampler, sampling_params={"max_tokens": 10, "seed": 1})
        await V1(api).complete(max_tokens=10)
        assert api.clock.now() - began >= 20
        await api.sampled(future)


async def test_what_is_in_flight_counts_for_the_tenants_limit(start: Start) -> None:
    async with start(SLOW, max_samples_in_flight=2) as api:
        v1 = V1(api)
        async with anyio.create_task_group() as group:
            for _ in range(2):
                group.start_soon(lambda: v1.complete(max_tokens=10))
            await api.clock.sleep(1)
            reply = await v1.call("POST", "/completions", completion({}))
            assert reply.status == 429
            assert reply.headers["retry-after"] == "1"
            await V1(api.other()).complete()
        await v1.complete()


async def test_nothing_is_left_of_requests_that_ended_failed_or_were_given_up(start: Start) -> None:
    async with start(SLOW, max_sequences_running=1) as api:
        v1 = V1(api)
        await v1.complete()
        await v1.refused("/completions", prompt=[5000])
        with anyio.move_on_after(None) as scope:
            async with anyio.create_task_group() as group:
                # The second waits for its turn when both are given up.
                group.start_soon(lambda: v1.complete(max_tokens=1000))
                group.start_soon(lambda: v1.complete(max_tokens=1000))
                await api.clock.sleep(5)
                scope.cancel()
        text = await metrics(v1)
        assert "tinkex_samples_in_flight 0.0" in text
        assert 'tinkex_queue_length{kind="sample"}' not in text
        await v1.complete()


async def test_a_request_goes_on_when_the_samples_of_operations_are_lost(start: Start) -> None:
    async with start(SLOW, max_sequences_running=1) as api:
        sampler = await api.sampler(await api.session())
        await api.sample(sampler, sampling_params={"max_tokens": 1000})
        async with anyio.create_task_group() as group:
            group.start_soon(V1(api).complete)
            await api.clock.sleep(1)
            api.server.lose_samples()
        assert api.clock.now() < 100


async def test_tokens_and_samples_show_in_the_metrics(v1: V1) -> None:
    await v1.complete(n=2)
    await v1.refused("/completions", prompt=[5000])
    text = await metrics(v1)
    assert 'tinkex_operations_total{kind="sample",outcome="ok"} 1.0' in text
    assert 'tinkex_operations_total{kind="sample",outcome="error_user"} 1.0' in text
    assert 'tinkex_tokens_total{kind="generated"} 32.0' in text
    assert 'route="openai_completions",status="200"' in text

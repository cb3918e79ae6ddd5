"""The completion feed: one poll for many samples, and a way on when it fails."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from tests.unit.futures.conftest import REFUSED, reply
from tinkex.futures.feed import CompletionFeed

if TYPE_CHECKING:
    from tests.unit.futures.conftest import Stage


def news(cursor: int, *finished: str, size: int | None = 10, failed: tuple[str, ...] = ()):
    completions: list[dict[str, Any]] = [
        {"state": "finished", "request_id": name, "response_payload_uncompressed_size": size}
        for name in finished
    ]
    completions += [{"state": "failed", "request_id": name} for name in failed]
    return reply({"completions": completions, "cursor": cursor})


def feed(stage: Stage, *answers: Any) -> CompletionFeed:
    api = stage.api(*answers, held_s=5.0)
    tasks: set[asyncio.Task[None]] = set()
    return CompletionFeed(
        api,
        stage.clock,
        lambda work: tasks.add(asyncio.ensure_future(work)),
        "s:sample:0",
        3,
        silence_s=60.0,
    )


@pytest.mark.req("S27")
def test_many_samples_are_waited_for_with_one_poll(stage: Stage):
    names = [f"r{i}" for i in range(500)]
    made = feed(stage, news(1, *names))

    async def work() -> list[int | None]:
        return await asyncio.gather(*(made.finished(name) for name in names))

    assert stage.run(work) == [10] * 500
    assert len(stage.script.requests) == 1
    target = stage.script.requests[0]["target"]
    assert (target["sampling_session_id"], target["cloned_sampler_id"]) == ("s:sample:0", 3)


def test_the_cursor_and_acknowledgements_are_echoed_until_a_poll_succeeds(stage: Stage):
    made = feed(stage, news(4, "a", failed=("b",)), REFUSED, news(5, "c"))

    async def work() -> tuple[Any, ...]:
        first = await asyncio.gather(made.finished("a"), made.finished("b"))
        made.retrieved("b")
        made.retrieved("a")
        return (*first, await made.finished("c"))

    assert stage.run(work) == (10, None, 10)
    seen = [(r["prev_cursor"], r["retrieved_request_ids"]) for r in stage.script.requests]
    assert seen == [(0, []), (4, ["a", "b"]), (4, ["a", "b"])]


def test_a_completion_may_come_before_anybody_asks(stage: Stage):
    made = feed(stage, news(1, "a", "b"))

    async def work() -> tuple[Any, ...]:
        return await made.finished("a"), await made.finished("b")

    assert stage.run(work) == (10, 10)
    assert len(stage.script.requests) == 1


@pytest.mark.req("S22")
@pytest.mark.parametrize("answer", [reply({}, 404), reply({"completions": 1}), REFUSED])
def test_when_the_feed_fails_for_good_everybody_goes_on_alone(stage: Stage, answer: Any):
    made = feed(stage, answer)

    async def work() -> tuple[Any, ...]:
        waiting = await asyncio.gather(made.finished("a"), made.finished("b"))
        return (*waiting, await made.finished("c"))

    assert stage.run(work) == (None, None, None)
    assert stage.clock.now() < 120


@pytest.mark.req("S22")
def test_an_account_that_cannot_pay_does_not_hold_the_feed_for_ever(stage: Stage):
    made = feed(stage, reply({}, 402))
    assert stage.run(lambda: made.finished("a")) is None
    assert stage.clock.now() < 120

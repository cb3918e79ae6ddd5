"""Waiting for one result: what ends a wait, and what does not."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from tests.unit.futures.conftest import PENDING, REFUSED, reply
from tinkex.errors import (
    APIResponseValidationError,
    BillingError,
    NotFoundError,
    PromiseLostError,
    RequestFailedError,
    ServerSilentError,
)
from tinkex.futures.admission import ByteBudget
from tinkex.futures.call_results import Ticket
from tinkex.futures.future import Promise
from tinkex.futures.lifecycle import CallContext, Lifecycle, charge
from tinkex.wire import routes

if TYPE_CHECKING:
    from tests.unit.futures.conftest import Stage
    from tinkex.wire.results import PendingResult

STEP = Ticket("r", "OptimStep")
DONE = reply({"metrics": {"loss": 1.0}}, x_tinkex_usage='{"queue_s": 1.5, "device_s": 0.25}')


class Announced:
    """A feed that has announced the payload of every request."""

    last_life = 0.0

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.calls: list[str] = []

    async def finished(self, request_id: str) -> int:
        return self.size_bytes

    def retrieved(self, request_id: str) -> None:
        self.calls.append("retrieved")

    def abandoned(self, request_id: str) -> None:
        self.calls.append("abandoned")

    def lost(self) -> None:
        self.calls.append("lost")


class Heard:
    """Keeps every "pending" answer."""

    def __init__(self, heard: list[PendingResult]) -> None:
        self._heard = heard

    def observe(self, promise: Promise[Any], pending: PendingResult) -> None:
        self._heard.append(pending)


def wait(stage: Stage, *answers: Any, held_s: float = 0.0, **options: Any):
    api = stage.api(*answers, held_s=held_s)
    heard: list[PendingResult] = options.pop("heard", [])
    known_size = options.pop("known_size", None)
    budget = options.pop("budget", ByteBudget(100))
    limits = {"silence_s": 300.0, "submit_s": 300.0, **options}
    wire = CallContext(api, stage.clock, budget, lambda request_id: None, **limits)

    async def result() -> Any:
        feed = None if known_size is None else Announced(known_size)
        life = Lifecycle(
            wire, routes.OPTIM_STEP, "OptimStep", Promise(), Heard(heard).observe, feed=feed
        )
        async with wire.limit("optim_step", stage.clock.now()):
            return await life.result(STEP)

    return stage.run(result)


def test_a_result_carries_what_it_cost(stage: Stage):
    result = wait(stage, DONE)
    assert result.value.metrics == {"loss": 1.0}
    usage = charge(result, trained_tokens=3)
    assert (usage.queue_s, usage.device_s, usage.trained_tokens) == (1.5, 0.25, 3)
    assert result.value.usage == usage


@pytest.mark.req("S17")
def test_pending_is_waited_for_however_long_it_takes(stage: Stage):
    held = [PENDING] * 200
    heard: list[PendingResult] = []
    result = wait(stage, *held, DONE, held_s=30.0, heard=heard)
    assert result.value.metrics == {"loss": 1.0}
    assert len(heard) == 200
    assert stage.clock.now() > 6000


@pytest.mark.req("S17")
def test_a_408_with_a_queue_state_is_an_honest_pending(stage: Stage):
    paused = reply({"queue_state": "paused_capacity", "queue_state_reason": "full"}, status=408)
    heard: list[PendingResult] = []
    wait(stage, paused, DONE, heard=heard)
    assert [(item.queue_state, item.reason) for item in heard] == [("paused_capacity", "full")]


@pytest.mark.req("S22")
@pytest.mark.parametrize("body", [b"", b"<html>Request Timeout</html>"])
def test_a_408_that_the_api_did_not_write_is_no_sign_of_life(stage: Stage, body: bytes):
    with pytest.raises(ServerSilentError, match="no sign of life"):
        wait(stage, reply(body, 408, media="text/html"), held_s=5.0)
    assert 300 <= stage.clock.now() < 320


def test_waiting_for_the_byte_budget_is_no_silence(stage: Stage):
    budget = ByteBudget(100)
    announced = reply({"status": "complete_metadata", "response_payload_size": 50})

    async def hold() -> None:
        await budget.take(200)
        await stage.clock.sleep(400.0)
        budget.give_back(200)

    async def main() -> Any:
        held = asyncio.ensure_future(hold())
        api = stage.api(announced, reply({}, 503), reply({}, 503), DONE)
        wire = CallContext(
            api, stage.clock, budget, lambda _: None, silence_s=300.0, submit_s=300.0
        )
        await asyncio.sleep(0)
        result = await Lifecycle(
            wire, routes.OPTIM_STEP, "OptimStep", Promise(), Heard([]).observe
        ).result(STEP)
        await held
        return result

    assert stage.run(main).value.metrics == {"loss": 1.0}


def test_a_server_that_does_not_hold_polls_is_not_hammered(stage: Stage):
    wait(stage, *[PENDING] * 50, DONE)
    assert stage.clock.now() > 30
    gaps = [b - a for a, b in zip(stage.script.times, stage.script.times[1:], strict=False)]
    assert min(gaps) > 0
    assert max(gaps) == pytest.approx(1.0)


@pytest.mark.req("S22")
@pytest.mark.parametrize("answer", [REFUSED, reply({}, 500), reply({}, 503), reply({}, 429)])
def test_a_dead_server_ends_the_wait_with_a_typed_error(stage: Stage, answer: Any):
    with pytest.raises(ServerSilentError, match="no sign of life"):
        wait(stage, PENDING, answer, silence_s=100.0)
    assert 100 <= stage.clock.now() < 140


def test_the_silence_is_counted_from_the_last_sign_of_life(stage: Stage):
    troubled = [REFUSED, REFUSED, REFUSED, PENDING] * 30
    wait(stage, *troubled, DONE, silence_s=20.0)
    assert stage.clock.now() > 20


def test_a_total_deadline_ends_even_an_honest_queue(stage: Stage):
    with pytest.raises(ServerSilentError, match="total deadline"):
        wait(stage, PENDING, held_s=30.0, total_s=100.0)


@pytest.mark.req("B8")
@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (reply({"detail": "gone"}, 410), PromiseLostError),
        (reply({"detail": "who?"}, 404), NotFoundError),
        (reply({"error": "bad data", "category": "USER"}), RequestFailedError),
        (reply(b"garbage"), APIResponseValidationError),
        (reply([1]), APIResponseValidationError),
        (reply({"metrics": {"a": "x"}}), APIResponseValidationError),
    ],
)
def test_what_cannot_become_a_result_is_raised_as_itself(stage: Stage, answer: Any, kind: Any):
    with pytest.raises(kind) as caught:
        wait(stage, answer)
    assert len(stage.script.requests) == 1
    if kind is RequestFailedError:
        assert caught.value.category == "user"


def test_a_billing_pause_has_a_limit_of_its_own(stage: Stage):
    wait(stage, *[reply({}, 402)] * 10, DONE)
    assert stage.clock.now() == 50.0
    with pytest.raises(BillingError):
        wait(stage, reply({}, 402))
    assert stage.clock.now() > 3600


def test_a_large_payload_is_announced_and_then_asked_for(stage: Stage):
    announced = reply({"status": "complete_metadata", "response_payload_size": 500})
    budget = ByteBudget(100)
    wait(stage, announced, DONE, budget=budget)
    asked = [request["allow_metadata_only"] for request in stage.script.requests]
    assert (asked, budget.left) == ([True, False], 100)


def test_a_size_known_from_elsewhere_is_reserved_first(stage: Stage):
    budget = ByteBudget(100)
    wait(stage, DONE, budget=budget, known_size=70)
    assert stage.script.requests[0]["allow_metadata_only"] is False
    assert budget.left == 100


def test_the_budget_is_given_back_when_the_wait_fails(stage: Stage):
    budget = ByteBudget(100)
    with pytest.raises(PromiseLostError):
        wait(stage, reply({}, 410), budget=budget, known_size=70)
    assert budget.left == 100

"""Telemetry and spans of a whole client, against the fake server on the virtual clock."""

from __future__ import annotations

import logging
import pickle
import threading
import traceback
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from tests.patience import PATIENCE_S
from tests.unit.clients.world import MODEL, World, datum
from tinkex import AdamParams, ModelInput, SamplingParams
from tinkex.errors import BadRequestError, TinkerError
from tinkex.spans import Span, span, subscribe
from tinkex.testing import faults

if TYPE_CHECKING:
    from collections.abc import Iterator

CANARY = "tml-canary-7Qx"
PROMPT = ModelInput.from_ints([1, 2, 3])


@pytest.fixture
def ended() -> Iterator[list[Span]]:
    spans: list[Span] = []
    stop = subscribe(spans.append)
    yield spans
    stop()


def events(world: World) -> list[dict[str, Any]]:
    return [event for seen in world.server.seen("telemetry") for event in seen.json["events"]]


def kinds(world: World) -> list[str]:
    return [event.get("event_name", event["event"]) for event in events(world)]


@pytest.mark.req("S34")
def test_a_session_reports_its_start_its_errors_and_its_end() -> None:
    async def scenario(world: World) -> None:
        async with world.service() as service:
            training = await service.create_lora_training_client_async(MODEL)
            world.server.faults.on("forward_backward", faults.reply(400))
            with pytest.raises(BadRequestError):
                await training.forward_backward([datum()], "cross_entropy")
            await world.clock.sleep(1.0)
            # Before the ten seconds are over: an error is sent at once.
            assert "user_error" in kinds(world)

    world = World()
    world.run(scenario)
    assert kinds(world) == ["SESSION_START", "user_error", "SESSION_END"]
    assert {seen.json["session_id"] for seen in world.server.seen("telemetry")} == {"session-0"}
    assert events(world)[1]["event_data"]["status_code"] == 400
    assert events(world)[2]["duration"] == "0:00:01"


@pytest.mark.req("S34")
def test_one_switch_turns_it_off() -> None:
    async def scenario(world: World) -> None:
        async with world.service() as service:
            training = await service.create_lora_training_client_async(MODEL)
            assert service.get_telemetry() is None
            assert training.get_telemetry() is None
            await world.clock.sleep(60.0)

    world = World(telemetry=False)
    world.run(scenario)
    assert world.server.seen("telemetry") == []


@pytest.mark.req("B2")
@pytest.mark.parametrize("down", [faults.hang, faults.drop, lambda: faults.reply(503)])
def test_an_error_surfaces_at_once_and_closing_stays_short_when_the_route_is_down(
    down: Any,
) -> None:
    async def scenario(world: World) -> None:
        world.server.faults.on("telemetry", down(), times=None)
        service = world.service()
        training = await service.create_lora_training_client_async(MODEL)
        world.server.faults.on("forward_backward", faults.reply(400), times=None)
        before = world.clock.now()
        for _ in range(3):
            with pytest.raises(BadRequestError):
                await training.forward_backward([datum()], "cross_entropy")
        assert world.clock.now() - before < 0.1
        before = world.clock.now()
        await service.close_async()
        assert world.clock.now() - before < 2.5

    World().run(scenario)


def quoting(status: int, text: str) -> Any:
    """A reply that repeats what it was sent."""
    return faults.reply(status, {"detail": text, "error": text, "headers": {"x-api-key": text}})


TROUBLE = {
    "400": lambda: quoting(400, CANARY),
    "401": lambda: quoting(401, CANARY),
    "404": lambda: quoting(404, CANARY),
    "422": lambda: quoting(422, CANARY),
    "garbage": lambda: faults.garbage(CANARY.encode()),
    "dropped": faults.drop,
    "failed": lambda: faults.reply(200, {"error": CANARY, "category": "server"}),
    "users": lambda: faults.reply(200, {"error": CANARY, "category": "user"}),
}


@pytest.mark.req("B1")
@pytest.mark.parametrize("trouble", TROUBLE)
@pytest.mark.parametrize(
    "route", ["create_session", "create_model", "forward_backward", "retrieve_future", "asample"]
)
def test_the_key_is_in_no_event_log_repr_pickle_or_traceback(
    route: str, trouble: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    said: list[str] = []

    def note(error: BaseException) -> None:
        said.append("".join(traceback.format_exception(error)))
        said.append(repr(error) + str(error) + repr(vars(error)))
        said.append(repr(pickle.dumps(error)))

    async def scenario(world: World) -> None:
        service = world.service()
        if route != "create_session":
            sampler = await service.create_sampling_client_async(base_model=MODEL)
        if route not in ("create_session", "create_model"):
            training = await service.create_lora_training_client_async(MODEL)
        world.server.faults.on(route, TROUBLE[trouble](), times=None)
        try:
            if route in ("create_session", "create_model"):
                training = await service.create_lora_training_client_async(MODEL)
            elif route == "asample":
                await sampler.sample_async(PROMPT, 1, SamplingParams(max_tokens=1))
            else:
                await training.forward_backward([datum()], "cross_entropy")
        except TinkerError as error:
            note(error)
        world.server.faults.clear()
        await service.close_async()

    world = World(silence_deadline_s=20.0, submit_deadline_s=20.0, bootstrap_deadline_s=20.0)
    world.config = replace(world.config, api_key=CANARY)
    world.run(scenario)
    assert said
    sent = b"".join(seen.raw_body for seen in world.server.seen("telemetry"))
    if route in ("forward_backward", "retrieve_future", "asample"):
        assert b"UNHANDLED_EXCEPTION" in sent or b"user_error" in sent
    assert CANARY.encode() not in sent
    assert CANARY not in "".join(said)
    assert CANARY not in caplog.text
    assert CANARY not in repr(world.config) + repr(pickle.dumps(world.config))


@pytest.mark.req("S17")
def test_a_change_of_the_queue_is_an_event() -> None:
    async def scenario(world: World) -> None:
        async with world.service() as service:
            training = await service.create_lora_training_client_async(MODEL)
            world.server.faults.on(
                "retrieve_future", faults.try_again("paused_capacity", "busy"), times=2
            )
            await training.forward_backward([datum()], "cross_entropy")

    world = World()
    world.run(scenario)
    changes = [
        e["event_data"] for e in events(world) if e.get("event_name") == "queue_state_changed"
    ]
    assert changes[0]["queue_state"] == "paused_capacity"
    # The reason is the server's text; the log and the callback have it.
    assert set(changes[0]) == {"queue_state", "request_id"}
    assert len(changes) <= 2


@pytest.mark.req("S17")
def test_a_hook_that_raises_is_logged_and_harms_no_operation(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def broken(state: str, reason: str | None) -> None:
        raise RuntimeError("bug in a hook")

    async def scenario(world: World) -> None:
        async with world.service() as service:
            training = await service.create_lora_training_client_async(MODEL)
            training.on_queue_state_change = broken  # type: ignore[method-assign]
            world.server.faults.on("retrieve_future", faults.try_again("paused_capacity"))
            await training.forward_backward([datum()], "cross_entropy")

    World().run(scenario)
    for thread in threading.enumerate():
        if thread.name == "tinkex-callback":
            thread.join(PATIENCE_S)
    assert "bug in a hook" in caplog.text


@pytest.mark.req("S35")
def test_operations_are_spans_below_the_callers_own(ended: list[Span]) -> None:
    async def scenario(world: World) -> None:
        async with world.service() as service:
            training = await service.create_lora_training_client_async(MODEL)
            sampler = await service.create_sampling_client_async(base_model=MODEL)
            with span("my.step"):
                step = training.forward_backward([datum()], "cross_entropy")
                sample = sampler.sample(PROMPT, 1, SamplingParams(max_tokens=1))
            # Outside the span: what counts is where the calls were made.
            await step
            await sample

    World().run(scenario)

    def path(one: Span | None) -> str:
        return "" if one is None else f"{path(one.parent)}/{one.name}"

    paths = {path(one) for one in ended}
    assert "/my.step/training.forward_backward/training.submit" in paths
    assert "/my.step/training.forward_backward/training.wait/futures.decode" in paths
    assert "/my.step/sampling.sample/sampling.submit" in paths
    assert "/my.step/sampling.sample/sampling.wait/futures.decode" in paths
    outer = next(one for one in ended if one.name == "training.forward_backward")
    assert set(outer.ids) == {"model_id", "seq_id", "request_id"}


@pytest.mark.req("S35")
def test_a_failed_operation_is_a_failed_span(ended: list[Span]) -> None:
    async def scenario(world: World) -> None:
        async with world.service() as service:
            training = await service.create_lora_training_client_async(MODEL)
            world.server.faults.on("optim_step", faults.reply(400))
            with pytest.raises(BadRequestError):
                await training.optim_step(AdamParams())

    World().run(scenario)
    failed = [one.name for one in ended if isinstance(one.error, BadRequestError)]
    assert failed == ["training.submit", "training.optim_step"]

"""The queue's state reaches the user: log line, callback, status, telemetry; once per change."""

from __future__ import annotations

import asyncio
import logging
import threading
from typing import TYPE_CHECKING, Any

import pytest

from tests.own_thread import own_records
from tests.patience import PATIENCE_S
from tests.unit.clients.world import MODEL, World, datum
from tinkex import ModelInput, SamplingParams, TrainingClient
from tinkex.testing import Delays, faults

if TYPE_CHECKING:
    from tinkex import ServiceClient
    from tinkex.futures.future import FutureStatus

pytestmark = pytest.mark.req("S17")

PROMPT = ModelInput.from_ints([1, 2, 3])
PARAMS = SamplingParams(max_tokens=3, seed=1)
# Each state for more than a minute of polls that are ten seconds apart.
SCRIPT = [
    *[("paused_rate_limit", "too many tokens a minute")] * 7,
    *[("paused_capacity", None)] * 7,
    *[("active", None)] * 7,
]


class Heard:
    """A callback that remembers its calls; it runs on a thread of its own."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str | None]] = []
        self._changed = threading.Condition()

    def __call__(self, state: str, reason: str | None) -> None:
        with self._changed:
            self.calls.append((state, reason))
            self._changed.notify_all()

    def states(self, count: int) -> list[str]:
        """The states of the first calls, which must come."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.calls) >= count, PATIENCE_S)
            return [state for state, _ in self.calls]


def script(world: World, status: int) -> None:
    """The next polls are answered by the script, ten seconds apart."""

    def after_ten_seconds(effect: Any) -> Any:
        async def delayed(exchange: Any) -> None:
            await exchange.clock.sleep(10.0)
            await effect(exchange)

        return delayed

    for position, (state, reason) in enumerate(SCRIPT):
        effect = after_ten_seconds(faults.try_again(state, reason, status))
        world.server.faults.on("retrieve_future", effect, nth=position)


async def client(service: ServiceClient, kind: str) -> tuple[Any, Any]:
    """A client, and how to call it."""
    if kind == "training":
        training = await service.create_lora_training_client_async(MODEL, rank=2)
        return training, lambda: training.forward_backward([datum()], "cross_entropy")
    sampler = await service.create_sampling_client_async(base_model=MODEL)
    return sampler, lambda: sampler.sample(PROMPT, 1, PARAMS)


def changes(world: World) -> list[dict[str, Any]]:
    events = [event for seen in world.server.seen("telemetry") for event in seen.json["events"]]
    return [e["event_data"] for e in events if e.get("event_name") == "queue_state_changed"]


@pytest.mark.parametrize("kind", ["training", "sampling"])
@pytest.mark.parametrize("status", [200, 408])
def test_every_change_reaches_log_callback_status_and_telemetry(
    kind: str, status: int, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.INFO, logger="tinkex")
    heard = Heard()
    statuses: list[FutureStatus] = []

    async def scenario(world: World) -> None:
        async with world.service() as service:
            subject, call = await client(service, kind)
            subject.on_queue_state_change = heard
            script(world, status)
            future = call()
            while not future.done():
                await world.clock.sleep(5.0)
                statuses.append(future.status())
            await future

    world = World()
    world.run(scenario)
    assert heard.states(3) == ["paused_rate_limit", "paused_capacity", "active"]
    assert heard.calls[0][1] == "too many tokens a minute"
    warnings = [r.getMessage() for r in own_records(caplog) if r.levelno == logging.WARNING]
    # A pause that lasts is logged again after a minute.
    assert len(warnings) == 3
    assert "too many tokens a minute" in warnings[0]
    assert "paused_capacity" in warnings[2]
    assert "capacity" in warnings[2].split(":")[-1]
    assert any("moves again" in r.getMessage() for r in caplog.records)
    seen = [status.queue_state for status in statuses]
    assert list(dict.fromkeys(seen)) == [None, "paused_rate_limit", "paused_capacity", "active"]
    assert [data["queue_state"] for data in changes(world)] == [
        "paused_rate_limit",
        "paused_capacity",
        "active",
    ]


def test_a_long_pause_is_logged_once_a_minute_and_waited_for(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.WARNING, logger="tinkex")

    async def scenario(world: World) -> None:
        async with world.service() as service:
            _, call = await client(service, "training")
            paused = faults.try_again("paused_capacity", "full")
            # Answered at once, so the client paces itself: at most one poll a second.
            world.server.faults.on("retrieve_future", paused, times=600)
            started = world.clock.now()
            await call()
            assert world.clock.now() - started > 300.0

    World().run(scenario)
    lines = [r for r in caplog.records if "paused_capacity" in r.getMessage()]
    assert 8 <= len(lines) <= 12


def test_the_hook_may_be_overridden_in_a_subclass_or_replaced_on_the_class(
    monkeypatch: pytest.MonkeyPatch,
):
    heard = Heard()
    monkeypatch.setattr(
        TrainingClient, "on_queue_state_change", lambda self, state, reason: heard(state, reason)
    )

    async def scenario(world: World) -> None:
        async with world.service() as service:
            _, call = await client(service, "training")
            world.server.faults.on("retrieve_future", faults.try_again("paused_capacity"))
            await call()

    World().run(scenario)
    assert heard.states(1) == ["paused_capacity"]


def test_requests_in_different_states_do_not_make_the_client_flap(
    caplog: pytest.LogCaptureFixture,
):
    caplog.set_level(logging.WARNING, logger="tinkex")
    heard = Heard()

    async def one_in_five_is_paused(exchange: Any) -> None:
        await exchange.clock.sleep(0.25)
        number = int(exchange.request.json["request_id"].rpartition(":")[2])
        state = "paused_capacity" if number % 5 == 4 else "active"
        await faults.try_again(state)(exchange)

    async def scenario(world: World) -> None:
        async with world.service() as service:
            sampler, call = await client(service, "sampling")
            sampler.on_queue_state_change = heard
            world.server.faults.on("retrieve_future", one_in_five_is_paused, times=400)
            await asyncio.gather(*(call() for _ in range(20)))

    World().run(scenario)
    assert heard.calls == []
    assert [r for r in caplog.records if "is paused" in r.getMessage()] == []


def test_creating_a_model_while_capacity_is_short_is_reported(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.WARNING, logger="tinkex")

    async def scenario(world: World) -> None:
        async with world.service() as service:
            paused = faults.try_again("paused_capacity", "all devices are busy")
            world.server.faults.on("retrieve_future", paused, times=3)
            await service.create_lora_training_client_async(MODEL, rank=2)

    World().run(scenario)
    assert "the new training run is paused (paused_capacity): all devices are busy" in caplog.text


def test_a_callback_that_blocks_delays_no_request():
    entered, leave = threading.Event(), threading.Event()

    def hook(state: str, reason: str | None) -> None:
        entered.set()
        assert leave.wait(PATIENCE_S)

    async def scenario(world: World) -> None:
        async with world.service() as service:
            sampler, call = await client(service, "sampling")
            sampler.on_queue_state_change = hook
            world.server.faults.on("retrieve_future", faults.try_again("paused_capacity"))
            assert len((await call()).sequences) == 1

    World().run(scenario)
    # The sample has ended while its callback is still under way.
    assert entered.wait(PATIENCE_S)
    leave.set()


@pytest.mark.req("B10")
def test_status_tells_queued_running_and_done_with_times_and_places():
    async def scenario(world: World) -> None:
        world.server.engine.delays = Delays(train_s=30.0)
        async with world.service() as service:
            _, call = await client(service, "training")
            world.server.faults.on("forward_backward", faults.slow(10.0))
            first, second = call(), call()
            await world.clock.sleep(5.0)
            assert (first.status().state, first.status().position) == ("queued", 0)
            assert (second.status().state, second.status().position) == ("queued", 1)
            await world.clock.sleep(10.0)
            running = first.status()
            assert (running.state, running.position) == ("running", None)
            assert running.since == pytest.approx(10.0)
            assert running.request_id is not None
            await asyncio.gather(first, second)
            assert first.status().state == second.status().state == "done"
            world.server.faults.on("forward_backward", faults.reply(400))
            failed = call()
            with pytest.raises(Exception, match="400"):
                await failed
            assert failed.status().state == "failed"

    World().run(scenario)


def test_in_feed_mode_a_long_pause_is_still_reported(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.WARNING, logger="tinkex")

    async def scenario(world: World) -> None:
        world.server.engine.delays = Delays(sample_s=200.0)
        async with world.service() as service:
            _, call = await client(service, "sampling")
            paused = faults.try_again("paused_capacity", "full")
            world.server.faults.on("retrieve_future", paused)
            await asyncio.gather(call(), call())

    World({"sample_use_retrieve_futures": True}).run(scenario)
    assert "full" in caplog.text

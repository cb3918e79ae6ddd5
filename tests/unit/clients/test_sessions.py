"""The life of a session: made once and late, kept alive, finished, and never missed by callers."""

from __future__ import annotations

import asyncio
import gc
import itertools
import logging
from dataclasses import replace
from typing import Any

import pytest

from tests.own_thread import own_records
from tests.patience import PATIENCE_S
from tests.unit.clients.world import MODEL, World, datum
from tinkex import (
    AdamParams,
    Config,
    ModelInput,
    SamplingParams,
    ServerSilentError,
    ServiceClient,
    TinkerError,
)
from tinkex.clients.portal import CurrentLoop
from tinkex.clients.session import Session
from tinkex.testing import Delays, FakeServer, faults

PROMPT = ModelInput.from_ints([1, 2, 3])
PARAMS = SamplingParams(max_tokens=2, seed=1)


def test_making_a_client_sends_nothing_and_many_first_calls_make_one_session():
    async def scenario(world: World) -> None:
        service = world.service()
        await world.clock.sleep(30.0)
        assert world.server.requests == []
        await asyncio.gather(
            *(service.create_sampling_client_async(base_model=MODEL) for _ in range(20))
        )
        await service.close_async()

    world = World()
    world.run(scenario)
    assert len(world.server.seen("create_session")) == 1
    assert len(world.server.seen("client_config")) == 1
    numbers = [
        s.json["sampling_session_seq_id"] for s in world.server.seen("create_sampling_session")
    ]
    assert sorted(numbers) == list(range(20))


def test_what_was_said_about_the_session_reaches_the_server_and_its_words_the_log(
    caplog: pytest.LogCaptureFixture,
):
    caplog.set_level(logging.INFO, logger="tinkex")

    async def scenario(world: World) -> None:
        service = world.service(
            user_metadata={"run": "7"}, display_name="a try", project_id="project-1"
        )
        await service.create_sampling_client_async(base_model=MODEL)
        await service.close_async("errored", "my own reason")

    world = World(tags=("a", "b"))
    words = {"info": "hello", "warning": "mind the gap", "error": "oh no"}
    world.server = FakeServer(
        clock=world.clock, settings=replace(world.server.settings, session_messages=words)
    )
    world.run(scenario)
    (made,) = world.server.seen("create_session")
    assert made.json["user_metadata"] == {"run": "7"}
    assert made.json["display_name"] == "a try"
    assert made.json["project_id"] == "project-1"
    assert made.json["tags"] == ["a", "b"]
    (finished,) = world.server.seen("finish_session")
    assert finished.json == {"reason": {"type": "errored"}, "detail": "my own reason"}
    said = {record.getMessage(): record.levelno for record in caplog.records}
    assert said["hello"] == logging.INFO
    assert said["mind the gap"] == logging.WARNING
    assert said["oh no"] == logging.ERROR


@pytest.mark.req("S28")
@pytest.mark.parametrize("feed", [True, False])
def test_heartbeats_do_not_drift_while_samples_are_under_way(feed: bool):
    async def scenario(world: World) -> None:
        world.server.engine.delays = Delays(sample_s=95.0)
        async with world.service() as service:
            sampler = await service.create_sampling_client_async(base_model=MODEL)
            await asyncio.gather(*(sampler.sample(PROMPT, 1, PARAMS) for _ in range(100)))

    world = World({"sample_use_retrieve_futures": feed})
    world.run(scenario)
    beats = [seen.at for seen in world.server.seen("session_heartbeat")]
    assert len(beats) >= 9
    assert all(b - a == pytest.approx(10.0, abs=0.01) for a, b in itertools.pairwise(beats))


def test_a_slow_heartbeat_is_not_followed_by_a_burst():
    async def scenario(world: World) -> None:
        async with world.service() as service:
            await service.create_sampling_client_async(base_model=MODEL)
            world.server.faults.on("session_heartbeat", faults.slow(8.0), times=3)
            await world.clock.sleep(65.0)

    world = World()
    world.run(scenario)
    beats = [seen.at for seen in world.server.seen("session_heartbeat")]
    assert [round(at) for at in beats] == [10, 20, 30, 40, 50, 60]


def test_lost_heartbeats_are_logged_after_two_minutes_and_once_a_minute(
    caplog: pytest.LogCaptureFixture,
):
    caplog.set_level(logging.WARNING, logger="tinkex")

    def lost() -> list[logging.LogRecord]:
        return [r for r in own_records(caplog) if "no heartbeat" in r.getMessage()]

    async def scenario(world: World) -> None:
        async with world.service() as service:
            await service.create_sampling_client_async(base_model=MODEL)
            world.server.faults.on("session_heartbeat", faults.reply(503), times=None)
            await world.clock.sleep(110.0)
            assert not lost()
            await world.clock.sleep(170.0)

    World().run(scenario)
    assert 2 <= len(lost()) <= 3


@pytest.mark.req("S22")
def test_a_session_the_server_has_ended_gives_typed_errors_and_stops_beating():
    async def scenario(world: World) -> None:
        service = world.service()
        training = await service.create_lora_training_client_async(MODEL, rank=2)
        await world.server.finish_session()
        await world.clock.sleep(60.0)
        beats = len(world.server.seen("session_heartbeat"))
        await world.clock.sleep(60.0)
        assert len(world.server.seen("session_heartbeat")) == beats <= 2
        with pytest.raises(TinkerError):
            await training.optim_step(AdamParams())
        await service.close_async()

    world = World()
    world.run(scenario)
    assert world.server.seen("finish_session") == []


@pytest.mark.req("S30")
def test_two_clients_with_other_servers_keys_and_headers_do_not_mix():
    async def scenario(world: World) -> None:
        other = FakeServer(clock=world.clock)
        async with other:

            def client(server: FakeServer, key: str, team: str) -> Any:
                config = Config(
                    base_url=f"http://{team}.invalid", api_key=key, headers={"X-Team": team}
                )
                session = Session(
                    config,
                    clock=world.clock,
                    portal=CurrentLoop(),
                    transport=lambda config, clock: server.transport(config.base_url),
                )
                return ServiceClient.over(session)

            async with (
                client(world.server, "tml-a", "red") as red,
                client(other, "tml-b", "blue") as blue,
            ):
                mine = await red.create_lora_training_client_async(MODEL, rank=2)
                theirs = await blue.create_lora_training_client_async(MODEL, rank=2)
                await asyncio.gather(
                    *(mine.forward_backward([datum()], "cross_entropy") for _ in range(3)),
                    *(theirs.forward_backward([datum()], "cross_entropy") for _ in range(4)),
                )
                assert red.holder.pause is not blue.holder.pause
                assert red.usage().trained_tokens == 12
                assert blue.usage().trained_tokens == 16
        for server, team, count in ((world.server, "red", 3), (other, "blue", 4)):
            assert {seen.headers.get("x-team") for seen in server.requests} == {team}
            assert {seen.headers["host"] for seen in server.requests} == {f"{team}.invalid"}
            assert len(server.seen("forward_backward")) == count

    World().run(scenario)


@pytest.mark.req("S30")
def test_the_environment_is_read_once_when_the_client_is_made(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TINKER_BASE_URL", "http://127.0.0.1:9/prefix/")
    monkeypatch.setenv("TINKER_API_KEY", "tml-first")
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    service = ServiceClient()
    monkeypatch.setenv("TINKER_BASE_URL", "http://127.0.0.1:10")
    monkeypatch.setenv("TINKER_API_KEY", "tml-second")
    monkeypatch.setenv("TINKER_TELEMETRY", "1")
    assert service.holder.config.base_url == "http://127.0.0.1:9/prefix"
    assert service.holder.config.api_key == "tml-first"
    assert service.get_telemetry() is None
    service.close().result(PATIENCE_S)


@pytest.mark.req("S22")
def test_a_caller_that_goes_away_leaves_no_noise_and_no_task(
    caplog: pytest.LogCaptureFixture,
):
    async def scenario(world: World) -> None:
        world.server.engine.delays = Delays(sample_s=50.0, train_s=50.0)
        service = world.service()
        training = await service.create_lora_training_client_async(MODEL, rank=2)
        sampler = await service.create_sampling_client_async(base_model=MODEL)
        await world.clock.sleep(1.0)
        before = len(asyncio.all_tasks())
        waiting = [
            asyncio.ensure_future(sampler.sample_async(PROMPT, 1, PARAMS)) for _ in range(10)
        ]
        forgotten = [training.forward_backward([datum()], "cross_entropy") for _ in range(3)]
        await world.clock.sleep(5.0)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        del waiting, forgotten
        gc.collect()
        await world.clock.sleep(300.0)
        assert len(asyncio.all_tasks()) <= before
        await service.close_async()
        del service, training, sampler
        gc.collect()

    World().run(scenario)
    assert [r for r in own_records(caplog) if r.levelno >= logging.WARNING] == []


@pytest.mark.req("S22")
def test_a_total_deadline_ends_even_an_honest_queue():
    async def scenario(world: World) -> None:
        async with world.service() as service:
            training = await service.create_lora_training_client_async(MODEL, rank=2)
            world.server.engine.delays = Delays(train_s=10_000.0)
            started = world.clock.now()
            with pytest.raises(ServerSilentError, match="total deadline"):
                await training.forward_backward([datum()], "cross_entropy")
            assert world.clock.now() - started == pytest.approx(100.0, abs=0.1)

    World(total_deadline_s=100.0).run(scenario)


@pytest.mark.req("S17")
def test_an_honest_queue_is_waited_for_however_long_and_a_dead_server_is_not():
    async def scenario(world: World) -> None:
        async with world.service() as service:
            training = await service.create_lora_training_client_async(MODEL, rank=2)
            world.server.engine.delays = Delays(train_s=10_000.0)
            started = world.clock.now()
            await training.forward_backward([datum()], "cross_entropy")
            assert world.clock.now() - started >= 10_000.0
            world.server.engine.delays = Delays()
            world.server.faults.on("retrieve_future", faults.drop(), times=None)
            started = world.clock.now()
            with pytest.raises(ServerSilentError):
                await training.forward_backward([datum()], "cross_entropy")
            assert 300.0 <= world.clock.now() - started <= 350.0

    World().run(scenario)


@pytest.mark.req("S28")
@pytest.mark.parametrize("feed", [True, False])
def test_heartbeats_keep_their_beat_while_two_thousand_samples_wait(feed: bool):
    async def scenario(world: World) -> None:
        world.server.engine.delays = Delays(sample_s=65.0)
        async with world.service() as service:
            sampler = await service.create_sampling_client_async(base_model=MODEL)
            opened = world.server.seen("create_session")[0].at
            prompt, params = ModelInput.from_ints([1]), SamplingParams(max_tokens=1)
            await asyncio.gather(*(sampler.sample(prompt, 1, params) for _ in range(2000)))
            beats = [seen.at - opened for seen in world.server.seen("session_heartbeat")]
        assert beats == pytest.approx([10.0, 20.0, 30.0, 40.0, 50.0, 60.0])

    World({"sample_use_retrieve_futures": feed}).run(scenario)

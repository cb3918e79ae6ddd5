"""Real sockets under load: heartbeats on time, connections apart, no blocking call on a loop."""

from __future__ import annotations

import asyncio
import itertools
from typing import TYPE_CHECKING, Any

import pytest
from blockbuster import blockbuster_ctx

from tests.e2e.workers import MODEL, PARAMS, PROMPT, datum
from tinkex import AdamParams, RestClient, SamplingParams, ServiceClient
from tinkex.clients.session import Session
from tinkex.clock import SystemClock
from tinkex.config import Config
from tinkex.testing import API_KEY, Delays, FakeServer

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer().serve() as server:
        yield server


_HURRY = 8.0


class Hurried(SystemClock):
    """A clock on which the ten seconds between two heartbeats take little more than one."""

    def now(self) -> float:
        return super().now() * _HURRY

    async def sleep(self, seconds: float) -> None:
        await super().sleep(seconds / _HURRY)


@pytest.mark.req("S28")
@pytest.mark.req("S27")
@pytest.mark.parametrize("feed", [True, False])
def test_heartbeats_go_out_on_time_with_two_thousand_samples_in_flight(feed: bool):
    from tinkex.server.settings import Settings
    from tinkex.types import ClientConfigResponse

    flags = ClientConfigResponse(sample_use_retrieve_futures=feed)
    fake = FakeServer(settings=Settings(client_config=flags), delays=Delays(sample_s=4.0))
    with fake.serve() as server:
        config = Config(base_url=server.url, api_key=API_KEY)
        service = ServiceClient.over(Session(config, clock=Hurried()))
        sampler = service.create_sampling_client(base_model=MODEL)
        begun = server.clock.now()
        futures = [sampler.sample(PROMPT, 1, SamplingParams(max_tokens=1)) for _ in range(2000)]
        for future in futures:
            assert len(future.result(30).sequences) == 1
        ended = server.clock.now()
        service.close().result(10)
        beats = [begun, *(s.at for s in server.seen("session_heartbeat") if s.at < ended)]
    every_s = 10.0 / _HURRY
    assert len(beats) - 1 >= (ended - begun) / every_s - 2.0
    # A second and a half is for client and server sharing one busy interpreter.
    assert max(b - a for a, b in itertools.pairwise(beats)) < every_s + 1.5


@pytest.mark.req("B5")
@pytest.mark.req("B11")
def test_no_async_method_blocks_the_callers_loop(server: FakeServer):
    async def main() -> None:
        async with ServiceClient(base_url=server.url, api_key=API_KEY) as service:
            await service.get_server_capabilities_async()
            training = await service.create_lora_training_client_async(MODEL, rank=2)
            step = await training.forward_backward_async([datum()], "cross_entropy")
            await (await training.optim_step_async(AdamParams()))
            assert (await step).metrics
            saved = await (await training.save_state_async("a"))
            await (await training.save_weights_for_sampler_async("b"))
            await training.get_info_async()
            await service.create_training_client_from_state_async(saved.path)
            sampler = await training.save_weights_and_get_sampling_client_async()
            await asyncio.gather(*(sampler.sample_async(PROMPT, 1, PARAMS) for _ in range(50)))
            await sampler.compute_logprobs_async(PROMPT)
            assert await sampler.get_base_model_async() == MODEL
            async with RestClient(base_url=server.url, api_key=API_KEY) as rest:
                await rest.list_training_runs_async()
                await rest.list_user_checkpoints_async()

    async def guarded() -> None:
        # Entered inside the loop, so that starting the loop itself is not counted.
        with blockbuster_ctx():
            await main()

    asyncio.run(guarded())


@pytest.mark.req("B5")
def test_the_first_call_does_not_hold_up_other_tasks_of_the_callers_loop(server: FakeServer):
    async def main() -> float:
        longest, running = 0.0, True
        clock = SystemClock()

        async def tick() -> None:
            nonlocal longest
            last = clock.now()
            while running:
                await clock.sleep(0.001)
                longest, last = max(longest, clock.now() - last), clock.now()

        ticking = asyncio.create_task(tick())
        await clock.sleep(0.01)
        service = ServiceClient(base_url=server.url, api_key=API_KEY)
        training = await service.create_lora_training_client_async(MODEL, rank=2)
        await (await training.forward_backward_async([datum()], "cross_entropy"))
        running = False
        await ticking
        await service.close_async()
        return longest

    # The official client stops the loop for one to two seconds here.
    assert asyncio.run(main()) < 0.5


@pytest.mark.req("S28")
def test_training_sampling_and_session_traffic_never_share_a_connection():
    carried: dict[Any, set[str]] = {}
    fake = FakeServer()
    inner = fake.app

    class Watched:
        """Notes which connection carries which route."""

        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            if scope["type"] == "http":
                name = scope["path"].rsplit("/", 1)[-1]
                carried.setdefault(scope["client"], set()).add(name)
            await inner(scope, receive, send)

    fake.app = Watched()  # pyright: ignore[reportAttributeAccessIssue]
    with fake.serve() as watched, ServiceClient(base_url=watched.url, api_key=API_KEY) as service:
        training = service.create_lora_training_client(MODEL, rank=2)
        sampler = service.create_sampling_client(base_model=MODEL)
        calls: list[Any] = [sampler.sample(PROMPT, 1, PARAMS) for _ in range(20)]
        calls += [training.forward_backward([datum()], "cross_entropy") for _ in range(5)]
        for call in calls:
            call.result(20)
    for names in carried.values():
        for one, others in (
            ("asample", {"forward_backward", "create_session", "telemetry", "retrieve_future"}),
            ("forward_backward", {"retrieve_future", "create_session", "telemetry"}),
        ):
            assert one not in names or not names & others, names
    assert any("asample" in names for names in carried.values())
    assert any("forward_backward" in names for names in carried.values())

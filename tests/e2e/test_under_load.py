"""Real sockets under load: heartbeats, connections apart, no blocking call on a loop."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

import pytest
from blockbuster import blockbuster_ctx

from tests.e2e.workers import MODEL, PARAMS, PROMPT, datum
from tests.patience import PATIENCE_S
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
SAMPLES = 2000


class Hurried(SystemClock):
    """A clock on which the ten seconds between two heartbeats take little more than one."""

    def now(self) -> float:
        return super().now() * _HURRY

    async def sleep(self, seconds: float) -> None:
        await super().sleep(seconds / _HURRY)


@pytest.mark.req("S28")
@pytest.mark.req("S27")
@pytest.mark.parametrize("feed", [True, False])
def test_heartbeats_go_out_while_two_thousand_samples_wait(feed: bool):
    from tinkex.server import Settings
    from tinkex.types import ClientConfigResponse

    flags = ClientConfigResponse(sample_use_retrieve_futures=feed)
    # Samples that never end by themselves: the test, not the machine's speed, says how long.
    fake = FakeServer(settings=Settings(client_config=flags), delays=Delays(sample_s=1e6))
    beats = 0
    enough = threading.Event()

    async def count(exchange: Any) -> None:
        nonlocal beats
        beats += len(fake.seen("asample")) == SAMPLES
        if beats == 2:
            enough.set()
        await exchange.forward()

    fake.faults.on("session_heartbeat", count, times=None)
    with fake.serve() as server:
        config = Config(base_url=server.url, api_key=API_KEY)
        service = ServiceClient.over(Session(config, clock=Hurried()))
        sampler = service.create_sampling_client(base_model=MODEL)
        futures = [sampler.sample(PROMPT, 1, SamplingParams(max_tokens=1)) for _ in range(SAMPLES)]
        # How late they are is measured by benchmarks/client_cost.
        assert enough.wait(PATIENCE_S)
        assert not any(future.done() for future in futures)
        service.close().result(PATIENCE_S)


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
    ticked = threading.Event()
    in_time: list[bool] = []

    async def until_the_caller_ticks(exchange: Any) -> None:
        in_time.append(await asyncio.to_thread(ticked.wait, PATIENCE_S))
        await exchange.forward()

    server.faults.on("client_config", until_the_caller_ticks)
    server.faults.on("create_session", until_the_caller_ticks)

    async def tick() -> None:
        ticked.set()

    async def main() -> None:
        # The server answers only once another task of this loop has run, and that one cannot
        # run before the first call lets go of the loop.
        service = ServiceClient(base_url=server.url, api_key=API_KEY)
        ticking = asyncio.create_task(tick())
        await service.create_lora_training_client_async(MODEL, rank=2)
        await ticking
        await service.close_async()

    asyncio.run(main())
    assert in_time == [True, True]


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
            call.result(PATIENCE_S)
    for names in carried.values():
        for one, others in (
            ("asample", {"forward_backward", "create_session", "telemetry", "retrieve_future"}),
            ("forward_backward", {"retrieve_future", "create_session", "telemetry"}),
        ):
            assert one not in names or not names & others, names
    assert any("asample" in names for names in carried.values())
    assert any("forward_backward" in names for names in carried.values())

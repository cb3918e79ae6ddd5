"""Sampling: one place for 429, new numbers after a loss, real cancelling, thousands at once."""

from __future__ import annotations

import asyncio
import itertools
from typing import TYPE_CHECKING, Any

import pytest

from tests.patience import PATIENCE_S
from tests.unit.clients.world import MODEL, World
from tinkex import (
    APIConnectionError,
    BadRequestError,
    InternalServerError,
    ModelInput,
    PermissionDeniedError,
    RequestFailedError,
    RetryConfig,
    SamplingParams,
    ServerSilentError,
    ServiceClient,
    TensorData,
    UnprocessableEntityError,
)
from tinkex.clients.sampling import CLONE_BLOCK
from tinkex.testing import API_KEY, Delays, FakeServer, faults
from tinkex.transport.retry import MAX_HINT_S

if TYPE_CHECKING:
    from collections.abc import Callable

    from tinkex import SamplingClient

PROMPT = ModelInput.from_ints([1, 2, 3])
PARAMS = SamplingParams(max_tokens=3, seed=1)
FEED = {"sample_use_retrieve_futures": True, "sample_join_sampling_session": True}
MODES = [pytest.param({}, id="per request"), pytest.param(FEED, id="feed")]


def seq_ids(server: FakeServer) -> list[int]:
    return [seen.json["seq_id"] for seen in server.seen("asample")]


def sampling(
    scenario: Callable[[World, SamplingClient], Any],
    flags: dict[str, Any] | None = None,
    retry_config: RetryConfig | None = None,
    **config: Any,
) -> World:
    """Run `scenario` with a sampling client of its own."""

    async def main(world: World) -> None:
        async with world.service() as service:
            sampler = await service.create_sampling_client_async(
                base_model=MODEL, retry_config=retry_config
            )
            await scenario(world, sampler)

    world = World(flags, **config)
    world.run(main)
    return world


# -- 429 --------------------------------------------------------------------------------------


@pytest.mark.req("S15")
@pytest.mark.req("S14")
@pytest.mark.parametrize(
    ("form", "seconds", "waits"),
    [("retry-after-ms", 2.5, 2.5), ("retry-after", 4, 4.0), ("date", 3, 3.0), ("none", 0, 1.0)],
)
def test_a_429_pauses_as_the_header_says_and_the_same_request_goes_out_again(
    form: Any, seconds: float, waits: float
):
    async def scenario(world: World, sampler: SamplingClient) -> None:
        world.server.faults.on("asample", faults.rate_limit(form, seconds), times=2)
        await sampler.sample(PROMPT, 1, PARAMS)

    world = sampling(scenario)
    first, second, third = world.server.seen("asample")
    assert first.raw_body == second.raw_body == third.raw_body
    assert seq_ids(world.server) == [0, 0, 0]
    for earlier, later in ((first, second), (second, third)):
        assert later.at - earlier.at == pytest.approx(waits, abs=1.0 if form == "date" else 0.01)
    # Nobody underneath retried as well.
    assert all("retry-count" not in name for name in third.headers)


@pytest.mark.req("S15")
def test_a_large_sample_waits_longer_when_the_server_gives_no_hint():
    # 14,000 tokens are above 128 KiB by the protocol's estimate; the model takes fewer.
    async def scenario(world: World, sampler: SamplingClient) -> None:
        world.server.faults.on("asample", faults.rate_limit())
        with pytest.raises((BadRequestError, RequestFailedError)):
            await sampler.sample(ModelInput.from_ints([1] * 14_000), 1, PARAMS)

    first, second = sampling(scenario).server.seen("asample")
    assert second.at - first.at == pytest.approx(5.0, abs=0.01)


@pytest.mark.req("S16")
def test_a_429_on_one_sample_holds_back_the_others_of_its_client():
    async def scenario(world: World, sampler: SamplingClient) -> None:
        world.server.faults.on("asample", faults.rate_limit("retry-after", 7))
        first = sampler.sample(PROMPT, 1, PARAMS)
        await world.clock.sleep(1.0)
        others = [sampler.sample(PROMPT, 1, PARAMS) for _ in range(5)]
        await asyncio.gather(first, *others)

    world = sampling(scenario)
    arrivals = [seen.at for seen in world.server.seen("asample")]
    assert len(arrivals) == 7
    assert all(at - arrivals[0] >= 7.0 for at in arrivals[1:])


@pytest.mark.req("S16")
@pytest.mark.req("S30")
def test_clients_of_one_server_and_key_share_the_pause_and_others_do_not():
    with FakeServer().serve() as server, FakeServer().serve() as elsewhere:
        services = {
            "mine": ServiceClient(base_url=server.url, api_key=API_KEY),
            "mine too": ServiceClient(base_url=server.url + "/", api_key=API_KEY),
            "other key": ServiceClient(base_url=server.url, api_key="tml-other"),
            "other server": ServiceClient(base_url=elsewhere.url, api_key=API_KEY),
        }
        samplers = {
            name: service.create_sampling_client(base_model=MODEL)
            for name, service in services.items()
        }
        # Much longer than a busy machine needs for the samples of the others.
        server.faults.on("asample", faults.rate_limit("retry-after", MAX_HINT_S))
        refused = samplers["mine"].sample(PROMPT, 1, PARAMS)
        while services["mine"].holder.pause.remaining_s == 0:
            assert not refused.done()
        held = samplers["mine too"].sample(PROMPT, 1, PARAMS)
        for name in ("other key", "other server"):
            samplers[name].sample(PROMPT, 1, PARAMS).result(PATIENCE_S)
            assert services[name].holder.pause.remaining_s == 0
        assert services["mine too"].holder.pause.remaining_s > 0
        assert not refused.done()
        assert not held.done()
        assert len(server.seen("asample")) == 2  # the refused one, and that of the other key
        for service in services.values():
            service.close().result(PATIENCE_S)


# -- losses and other failures ----------------------------------------------------------------


@pytest.mark.req("S18")
@pytest.mark.parametrize("flags", MODES)
@pytest.mark.parametrize("effect", [faults.lost, faults.restart])
def test_a_lost_sample_is_sent_again_under_a_new_number(flags: dict[str, Any], effect: Any):
    async def scenario(world: World, sampler: SamplingClient) -> None:
        world.server.engine.delays = Delays(sample_s=1.0)
        world.server.faults.on("retrieve_future", effect())
        if flags and effect is faults.restart:
            world.server.faults.on("retrieve_futures", effect())
        answer = await sampler.sample(PROMPT, 1, PARAMS)
        assert len(answer.sequences[0].tokens) == 3

    assert seq_ids(sampling(scenario, flags).server) == [0, 1]


@pytest.mark.req("S5")
def test_samples_are_numbered_from_zero_without_reuse():
    async def scenario(world: World, sampler: SamplingClient) -> None:
        world.server.faults.on("asample", faults.drop(handled=True), nth=3)
        await asyncio.gather(*(sampler.sample(PROMPT, 1, PARAMS) for _ in range(20)))

    world = sampling(scenario)
    numbers = seq_ids(world.server)
    # The one whose reply was lost came twice, under the same number, and was drawn once.
    assert sorted(set(numbers)) == list(range(20))
    assert len(numbers) == 21
    assert sum(call.name == "sample" for call in world.server.engine.calls) == 20
    by_number: dict[int, set[bytes]] = {}
    for seen in world.server.seen("asample"):
        by_number.setdefault(seen.json["seq_id"], set()).add(seen.raw_body)
    assert all(len(bodies) == 1 for bodies in by_number.values())


@pytest.mark.req("S13")
@pytest.mark.parametrize(
    ("status", "error"),
    [(400, BadRequestError), (422, UnprocessableEntityError), (403, PermissionDeniedError)],
)
def test_a_callers_error_is_never_sent_again(status: int, error: type[Exception]):
    async def scenario(world: World, sampler: SamplingClient) -> None:
        world.server.faults.on("asample", faults.reply(status), times=None)
        with pytest.raises(error):
            await sampler.sample(PROMPT, 1, PARAMS)

    assert len(sampling(scenario).server.seen("asample")) == 1


@pytest.mark.req("S13")
@pytest.mark.parametrize("category", ["server", "user"])
def test_a_failed_sample_is_tried_again_within_limits_unless_the_user_is_to_blame(category: Any):
    async def scenario(world: World, sampler: SamplingClient) -> None:
        for _ in range(10):
            world.server.engine.fail_next("sample", RequestFailedError("no luck", None, category))
        with pytest.raises(RequestFailedError) as caught:
            await sampler.sample(PROMPT, 1, PARAMS)
        assert caught.value.category == category

    assert len(seq_ids(sampling(scenario).server)) == (3 if category == "server" else 1)


@pytest.mark.req("S15")
@pytest.mark.parametrize("how", ["config", "flag"])
def test_retries_can_be_turned_off_by_the_user_and_by_the_server(how: str):
    async def scenario(world: World, sampler: SamplingClient) -> None:
        world.server.faults.on("asample", faults.reply(500), times=None)
        with pytest.raises(InternalServerError):
            await sampler.sample(PROMPT, 1, PARAMS)
        world.server.faults.clear()
        # A 429 is not a failure, so it is still waited for.
        world.server.faults.on("asample", faults.rate_limit("retry-after", 2))
        await sampler.sample(PROMPT, 1, PARAMS)

    if how == "config":
        world = sampling(scenario, retry_config=RetryConfig(enable_retry_logic=False))
    else:
        world = sampling(scenario, {"sample_no_retries": True})
    assert len(world.server.seen("asample")) == 3


@pytest.mark.req("S13")
def test_a_5xx_is_retried_with_the_configured_delays_until_patience_ends():
    config = RetryConfig(retry_delay_base=2.0, retry_delay_max=8.0, jitter_factor=0.0)

    async def scenario(world: World, sampler: SamplingClient) -> None:
        world.server.faults.on("asample", faults.reply(503), times=None)
        # Not ServerSilentError: the server answers.
        with pytest.raises(InternalServerError) as caught:
            await sampler.sample(PROMPT, 1, PARAMS)
        assert "gave up after" in caught.value.__notes__[0]

    world = sampling(scenario, retry_config=config, silence_deadline_s=60.0)
    arrivals = [seen.at for seen in world.server.seen("asample")]
    waits = [round(b - a, 3) for a, b in itertools.pairwise(arrivals)]
    assert waits[:4] == [2.0, 4.0, 8.0, 8.0]
    assert sum(waits) <= 68.0


@pytest.mark.req("S22")
def test_progress_timeout_ends_a_sample_whose_server_went_silent():
    async def scenario(world: World, sampler: SamplingClient) -> None:
        world.server.faults.on("asample", faults.drop(), times=None)
        started = world.clock.now()
        with pytest.raises((ServerSilentError, APIConnectionError)):
            await sampler.sample(PROMPT, 1, PARAMS)
        assert world.clock.now() - started <= 45.0

    sampling(scenario, retry_config=RetryConfig(progress_timeout=30.0))


# -- cancelling -------------------------------------------------------------------------------


@pytest.mark.req("S24")
@pytest.mark.parametrize("flags", MODES)
@pytest.mark.parametrize("how", ["cancel", "task", "logprobs"])
def test_a_cancelled_sample_is_cancelled_on_the_server_and_frees_its_slot(
    flags: dict[str, Any], how: str
):
    async def scenario(world: World, sampler: SamplingClient) -> None:
        world.server.engine.delays = Delays(sample_s=1000.0)
        if how == "task":
            waiting = asyncio.ensure_future(sampler.sample_async(PROMPT, 1, PARAMS))
            await world.clock.sleep(5.0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
        else:
            ask = sampler.compute_logprobs if how == "logprobs" else sampler.sample
            args = () if how == "logprobs" else (1, PARAMS)
            future = ask(PROMPT, *args)
            await world.clock.sleep(5.0)
            assert future.cancel()
            assert future.cancelled()
        await world.clock.sleep(1.0)
        cancelled = world.server.seen("cancel_future")
        assert [seen.json["request_id"] for seen in cancelled] == [
            f"{sampler.sampling_session_id}:0"
        ]
        # The only slot is free again, and the engine no longer works for nobody.
        world.server.engine.delays = Delays()
        started = world.clock.now()
        await sampler.sample(PROMPT, 1, PARAMS)
        assert world.clock.now() - started < 10.0

    sampling(scenario, {"sample_max_concurrent_requests": 1, **flags})


@pytest.mark.req("S24")
def test_a_sample_cancelled_before_it_was_sent_is_never_sent():
    async def scenario(world: World, sampler: SamplingClient) -> None:
        world.server.engine.delays = Delays(sample_s=100.0)
        first = sampler.sample(PROMPT, 1, PARAMS)
        waiting = sampler.sample(PROMPT, 1, PARAMS)
        at_once = sampler.sample(PROMPT, 1, PARAMS)
        at_once.cancel()
        await world.clock.sleep(5.0)
        waiting.cancel()
        await first

    world = sampling(scenario, {"sample_max_concurrent_requests": 1})
    assert seq_ids(world.server) == [0]
    assert world.server.seen("cancel_future") == []


@pytest.mark.req("S24")
def test_many_abandoned_samples_are_all_cancelled_once():
    async def scenario(world: World, sampler: SamplingClient) -> None:
        world.server.engine.delays = Delays(sample_s=1000.0)
        futures = [sampler.sample(PROMPT, 1, PARAMS) for _ in range(200)]
        await world.clock.sleep(5.0)
        for future in futures:
            future.cancel()
        await world.clock.sleep(5.0)

    world = sampling(scenario)
    cancelled = [seen.json["request_id"] for seen in world.server.seen("cancel_future")]
    assert len(cancelled) == len(set(cancelled)) == 200


# -- many at once -----------------------------------------------------------------------------


@pytest.mark.req("S27")
@pytest.mark.parametrize("flags", MODES)
def test_two_thousand_samples_at_once_all_finish(flags: dict[str, Any]):
    count = 2000

    async def scenario(world: World, sampler: SamplingClient) -> None:
        world.server.engine.delays = Delays(sample_s=10.0)
        # A network between the two, without which the feed would hear of each sample by itself.
        world.server.faults.on("retrieve_futures", faults.slow(0.1), times=None)
        started = world.clock.now()
        answers = await asyncio.gather(
            *(sampler.sample_async(PROMPT, 1, SamplingParams(max_tokens=1)) for _ in range(count))
        )
        assert all(len(answer.sequences) == 1 for answer in answers)
        # All of them run at the same time: nothing on the way lets them through one by one.
        assert world.clock.now() - started < 15.0

    server = sampling(scenario, flags).server
    assert sorted(seq_ids(server)) == list(range(count))
    if flags:
        assert len(server.seen("retrieve_futures")) < 10
        assert len(server.seen("retrieve_future")) == count
    else:
        assert server.seen("retrieve_futures") == []


@pytest.mark.req("S27")
def test_the_servers_limit_on_samples_under_way_is_kept():
    async def scenario(world: World, sampler: SamplingClient) -> None:
        world.server.engine.delays = Delays(sample_s=10.0)
        await asyncio.gather(*(sampler.sample(PROMPT, 1, PARAMS) for _ in range(9)))

    arrivals = [
        seen.at
        for seen in sampling(scenario, {"sample_max_concurrent_requests": 3}).server.seen("asample")
    ]
    assert arrivals[3] - arrivals[0] >= 10.0
    assert arrivals[6] - arrivals[3] >= 10.0


@pytest.mark.req("S22")
def test_the_feed_falls_back_to_single_polls_when_the_server_does_not_have_it():
    async def scenario(world: World, sampler: SamplingClient) -> None:
        world.server.faults.on("retrieve_futures", faults.reply(404), times=None)
        answers = await asyncio.gather(*(sampler.sample(PROMPT, 1, PARAMS) for _ in range(5)))
        assert len(answers) == 5

    world = sampling(scenario, FEED)
    assert len(world.server.seen("retrieve_future")) >= 5


@pytest.mark.req("S22")
def test_samples_lost_while_the_feed_is_silent_are_found_and_sent_again():
    async def scenario(world: World, sampler: SamplingClient) -> None:
        world.server.engine.delays = Delays(sample_s=1000.0)
        samples = [sampler.sample(PROMPT, 1, PARAMS) for _ in range(100)]
        await world.clock.sleep(5.0)
        world.server.lose_samples()
        world.server.engine.delays = Delays(sample_s=1.0)
        started = world.clock.now()
        await asyncio.gather(*samples)
        assert world.clock.now() - started < 120.0

    assert sorted(seq_ids(sampling(scenario, FEED).server)) == list(range(200))


# -- what is asked for ------------------------------------------------------------------------


def test_every_argument_of_sample_reaches_the_server_and_its_answer_the_caller():
    target = TensorData(data=[1, 2, 3, -1], dtype="int64", shape=[2, 2])

    async def scenario(world: World, sampler: SamplingClient) -> None:
        answer = await sampler.sample(
            PROMPT,
            2,
            PARAMS,
            include_prompt_logprobs=True,
            topk_prompt_logprobs=2,
            topk_sample_logprobs=2,
            target_prompt_logprobs=target,
            prompt_alt_tokens_k=2,
        )
        assert answer.prompt_logprobs is not None
        assert answer.prompt_logprobs[0] is None
        assert answer.topk_prompt_logprobs is not None
        assert answer.target_prompt_logprobs is not None
        assert answer.prompt_alt_tokens is not None
        last = await sampler.compute_logprobs_async(PROMPT, prompt_logprobs_last_n=1)
        assert [value is None for value in last] == [True, True, False]

    (seen, _) = sampling(scenario).server.seen("asample")
    assert seen.json["num_samples"] == 2
    assert seen.json["prompt_logprobs"] is True
    assert seen.json["topk_prompt_logprobs"] == 2
    assert seen.json["sampling_params"]["seed"] == 1


@pytest.mark.req("S5")
@pytest.mark.parametrize("flags", MODES)
def test_a_copy_of_a_sampler_numbers_its_requests_from_a_block_of_its_own(flags: dict[str, Any]):
    async def scenario(world: World, sampler: SamplingClient) -> None:
        copy = type(sampler).from_sampler_handle(sampler.get_sampler_handle())
        await sampler.sample(PROMPT, 1, PARAMS)
        await asyncio.gather(*(copy.sample(PROMPT, 1, PARAMS) for _ in range(3)))

    own, *copied = seq_ids(sampling(scenario, flags).server)
    assert own == 0
    assert copied[0] >= CLONE_BLOCK
    assert copied[0] % CLONE_BLOCK == 0
    assert sorted(copied) == [copied[0], copied[0] + 1, copied[0] + 2]

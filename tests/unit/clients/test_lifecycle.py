"""One owner from submission to result: numbers, deadlines and signs of life in combination."""

from __future__ import annotations

import asyncio
import concurrent.futures
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.patience import PATIENCE_S
from tests.unit.clients.test_sampling import FEED, MODES, PARAMS, PROMPT, sampling, seq_ids
from tests.unit.clients.world import MODEL, World, datum
from tinkex import (
    AdamParams,
    BillingError,
    InternalServerError,
    ServerSilentError,
    ServiceClient,
    TensorData,
    UnprocessableEntityError,
)
from tinkex.errors import PromiseLostError, TinkerError
from tinkex.testing import API_KEY, Delays, FakeServer, faults

if TYPE_CHECKING:
    from collections.abc import Callable

    from tinkex import SamplingClient, TrainingClient


def training(
    scenario: Callable[[World, TrainingClient], Any],
    flags: dict[str, Any] | None = None,
    **config: Any,
) -> World:
    """Run `scenario` with a training client of its own."""

    async def main(world: World) -> None:
        async with world.service() as service:
            await scenario(world, await service.create_lora_training_client_async(MODEL, rank=2))

    world = World(flags, **config)
    world.run(main)
    return world


def numbers(world: World, *routes: str) -> list[int]:
    """The numbers of training requests, in order of arrival."""
    found: list[int] = []
    for seen in world.server.requests:
        if seen.route == "forward_backward" and "forward_backward" in routes:
            found.append(seen.body.seq_id)
        elif seen.route in routes:
            found.append(seen.json["seq_id"])
    return found


def draws(world: World) -> int:
    return sum(call.name == "sample" for call in world.server.engine.calls)


# -- samples ---------------------------------------------------------------------------------------


@pytest.mark.req("S5")
@pytest.mark.parametrize("flags", MODES)
@pytest.mark.parametrize("effect", [faults.drop(handled=True), faults.reply(503), faults.drop()])
def test_a_sample_keeps_its_number_until_it_is_accepted_and_is_drawn_once(
    flags: dict[str, Any], effect: Any
):
    async def scenario(world: World, sampler: SamplingClient) -> None:
        world.server.faults.on("asample", effect, times=2)
        assert len((await sampler.sample(PROMPT, 1, PARAMS)).sequences) == 1

    world = sampling(scenario, flags)
    assert seq_ids(world.server) == [0, 0, 0]
    assert draws(world) == 1


@pytest.mark.req("S13")
@pytest.mark.parametrize("flags", MODES)
def test_a_sample_whose_account_stays_out_of_credit_ends_as_a_billing_error(flags: dict[str, Any]):
    async def scenario(world: World, sampler: SamplingClient) -> None:
        world.server.faults.on("asample", faults.reply(402), times=None)
        started = world.clock.now()
        with pytest.raises(BillingError):
            await sampler.sample(PROMPT, 1, PARAMS)
        assert 5.0 <= world.clock.now() - started <= 11.0

    sampling(scenario, {**flags, "billing_exception_max_pause_duration_sec": 10})


@pytest.mark.req("S15")
def test_an_answered_429_is_a_sign_of_life_however_long_it_goes_on():
    async def scenario(world: World, sampler: SamplingClient) -> None:
        world.server.faults.on("asample", faults.rate_limit("retry-after", 31), times=10)
        world.server.faults.on("asample", faults.reply(503), nth=10)
        started = world.clock.now()
        assert len((await sampler.sample(PROMPT, 1, PARAMS)).sequences) == 1
        assert world.clock.now() - started > 310.0

    assert draws(sampling(scenario)) == 1


@pytest.mark.req("S15")
def test_a_training_call_that_is_told_to_slow_down_waits_and_says_so(
    caplog: pytest.LogCaptureFixture,
):
    async def scenario(world: World, client: TrainingClient) -> None:
        world.server.faults.on("optim_step", faults.rate_limit("retry-after", 40), times=10)
        started = world.clock.now()
        await client.optim_step(AdamParams())
        assert world.clock.now() - started == pytest.approx(400.0, abs=1.0)

    training(scenario)
    said = [one for one in caplog.messages if "the server asks to send less (429)" in one]
    assert 4 <= len(said) <= 7  # at most once a minute


@pytest.mark.req("S22")
def test_waiting_for_a_local_place_is_no_silence_of_the_server():
    async def scenario(world: World, sampler: SamplingClient) -> None:
        world.server.engine.delays = Delays(sample_s=400.0)
        first = sampler.sample(PROMPT, 1, PARAMS)
        second = sampler.sample(PROMPT, 1, PARAMS)
        # The second is sent when the first has ended, and meets one 503.
        world.server.faults.on("asample", faults.reply(503), nth=1)
        await first
        assert len((await second).sequences) == 1

    sampling(scenario, {"sample_max_concurrent_requests": 1})


@pytest.mark.req("S22")
@pytest.mark.parametrize("flags", MODES)
def test_the_total_deadline_is_kept_by_every_sample(flags: dict[str, Any]):
    async def scenario(world: World, sampler: SamplingClient) -> None:
        world.server.engine.delays = Delays(sample_s=5000.0)
        started = world.clock.now()
        ends: list[float] = []

        async def one() -> None:
            with pytest.raises(ServerSilentError, match="total deadline of 100 s"):
                await sampler.sample(PROMPT, 1, PARAMS)
            ends.append(world.clock.now() - started)

        await asyncio.gather(*(one() for _ in range(4)))
        assert ends == pytest.approx([100.0] * 4, abs=1.0)

    world = sampling(scenario, flags, total_deadline_s=100.0)
    # And the server need not draw them any more.
    assert len(world.server.seen("cancel_future")) == 4


@pytest.mark.req("S18")
@pytest.mark.parametrize("flags", MODES)
def test_a_server_that_loses_every_sample_ends_it_after_ten_tries(flags: dict[str, Any]):
    async def scenario(world: World, sampler: SamplingClient) -> None:
        world.server.faults.on("retrieve_future", faults.lost(), times=None)
        with pytest.raises(PromiseLostError):
            await sampler.sample(PROMPT, 1, PARAMS)

    world = sampling(scenario, flags)
    # Each time under another number: the old one is the server's to lose.
    assert seq_ids(world.server) == list(range(10))


@pytest.mark.req("S13")
@pytest.mark.parametrize("flags", MODES)
def test_tries_of_one_kind_are_not_counted_against_another(flags: dict[str, Any]):
    async def scenario(world: World, sampler: SamplingClient) -> None:
        for place, status in enumerate((503, 503, 409, 409, 503)):
            world.server.faults.on("asample", faults.reply(status), nth=place)
        assert len((await sampler.sample(PROMPT, 1, PARAMS)).sequences) == 1

    assert seq_ids(sampling(scenario, flags).server) == [0] * 6


@pytest.mark.req("S24")
def test_cancelled_samples_leave_nothing_in_the_feed_and_are_acknowledged():
    async def scenario(world: World, sampler: SamplingClient) -> None:
        world.server.engine.delays = Delays(sample_s=30.0)
        futures = [sampler.sample(PROMPT, 1, PARAMS) for _ in range(20)]
        await world.clock.sleep(5.0)
        for future in futures:
            future.cancel()
        await world.clock.sleep(700.0)
        feed = sampler._feed
        assert feed is not None
        left = (feed._waiters, feed._unclaimed, feed._abandoned, feed._retrieved)
        assert not any(left)

    world = sampling(scenario, FEED)
    told = [seen.json["retrieved_request_ids"] for seen in world.server.seen("retrieve_futures")]
    assert len({one for ids in told for one in ids}) == 20


@pytest.mark.req("S24")
def test_a_sample_cancelled_while_it_is_sent_is_cancelled_on_the_server():
    async def scenario(world: World, sampler: SamplingClient) -> None:
        world.server.engine.delays = Delays(sample_s=3000.0)
        world.server.faults.on("asample", faults.slow(5.0))
        future = sampler.sample(PROMPT, 1, PARAMS)
        await world.clock.sleep(1.0)
        assert future.cancel()
        await world.clock.sleep(30.0)

    world = sampling(scenario)
    accepted = f"{world.server.seen('asample')[0].json['sampling_session_id']}:0"
    assert [seen.json["request_id"] for seen in world.server.seen("cancel_future")] == [accepted]


@pytest.mark.req("B10")
def test_waiting_for_cancelled_futures_returns():
    with (
        FakeServer(delays=Delays(sample_s=3600.0)).serve() as server,
        ServiceClient(base_url=server.url, api_key=API_KEY) as service,
    ):
        sampler = service.create_sampling_client(base_model=MODEL)
        first, second = (sampler.sample(PROMPT, 1, PARAMS) for _ in range(2))
        assert first.cancel()
        done, pending = concurrent.futures.wait([first], timeout=PATIENCE_S)
        assert (done, pending) == ({first}, set())
        assert first.cancel()  # and again, which changes nothing
        assert second.cancel()
        found = concurrent.futures.as_completed([first, second], timeout=PATIENCE_S)
        assert set(found) == {first, second}


# -- creation --------------------------------------------------------------------------------------


@pytest.mark.req("S18")
def test_the_creation_of_a_model_that_was_lost_is_sent_again_with_the_same_number():
    async def scenario(world: World) -> None:
        world.server.faults.on("retrieve_future", faults.lost(), times=2)
        async with world.service() as service:
            client = await service.create_lora_training_client_async(MODEL, rank=2)
            await client.optim_step(AdamParams())

    world = World()
    world.run(scenario)
    assert [s.json["model_seq_id"] for s in world.server.seen("create_model")] == [0, 0, 0]


# -- training --------------------------------------------------------------------------------------

ONE_BY_ONE = {"fwdbwd_max_chunk_len": 1, "parallel_fwdbwd_chunks": False}
PARALLEL = {"fwdbwd_max_chunk_len": 1, "parallel_fwdbwd_chunks": True}


@pytest.mark.req("S25")
def test_a_refused_request_gives_its_number_back():
    async def scenario(world: World, client: TrainingClient) -> None:
        world.server.faults.on("forward_backward", faults.reply(422))
        first = client.forward_backward([datum()], "cross_entropy")
        second = client.forward_backward([datum()], "cross_entropy")
        step = client.optim_step(AdamParams())
        started = world.clock.now()
        with pytest.raises(UnprocessableEntityError):
            await first
        await second
        await step
        assert world.clock.now() - started < 5.0

    world = training(scenario)
    assert numbers(world, "forward_backward", "optim_step") == [1, 1, 2]


@pytest.mark.req("S25")
@pytest.mark.parametrize("flags", [ONE_BY_ONE, PARALLEL], ids=["one by one", "parallel"])
def test_a_refused_chunk_leaves_no_gap(flags: dict[str, Any]):
    async def scenario(world: World, client: TrainingClient) -> None:
        world.server.faults.on("forward_backward", faults.reply(422), nth=1)
        batch = [datum(first=1 + i) for i in range(4)]
        started = world.clock.now()
        with pytest.raises(UnprocessableEntityError):
            await client.forward_backward(batch, "cross_entropy")
        await client.forward_backward([datum()], "cross_entropy")
        await client.optim_step(AdamParams())
        assert world.clock.now() - started < 5.0

    training(scenario, flags)


@pytest.mark.req("S25")
@pytest.mark.parametrize("handled", [False, True])
def test_an_outage_longer_than_the_deadline_leaves_no_gap(handled: bool):
    async def scenario(world: World, client: TrainingClient) -> None:
        world.server.faults.on("optim_step", faults.drop(handled=handled), times=None)
        with pytest.raises(TinkerError):
            await client.optim_step(AdamParams())
        world.server.faults.clear()
        started = world.clock.now()
        await client.forward_backward([datum()], "cross_entropy")
        await client.optim_step(AdamParams())
        assert world.clock.now() - started < 5.0

    world = training(scenario, submit_deadline_s=20.0)
    assert [seen.json["seq_ids"] for seen in world.server.seen("release_numbers")] == [[1]]
    assert numbers(world, "forward_backward") == [2]


@pytest.mark.req("S25")
def test_a_server_that_cannot_release_numbers_is_asked_once():
    async def scenario(world: World, client: TrainingClient) -> None:
        world.server.faults.on("release_numbers", faults.reply(404), times=None)
        for _ in range(2):
            world.server.faults.on("optim_step", faults.drop(), times=None)
            with pytest.raises(TinkerError):
                await client.optim_step(AdamParams())
            world.server.faults.clear()
            world.server.faults.on("release_numbers", faults.reply(404), times=None)
            await client.forward_backward([datum()], "cross_entropy")

    world = training(scenario, submit_deadline_s=20.0)
    assert len(world.server.seen("release_numbers")) == 1


@pytest.mark.req("S25")
@pytest.mark.req("S24")
@pytest.mark.parametrize("effect", [faults.slow(5.0), faults.drop(handled=True)])
def test_a_training_call_cancelled_while_it_is_sent_leaves_no_gap(effect: Any):
    async def scenario(world: World, client: TrainingClient) -> None:
        world.server.faults.on("optim_step", effect)
        first = client.optim_step(AdamParams())
        await world.clock.sleep(0.1)
        first.cancel()
        started = world.clock.now()
        await client.forward_backward([datum()], "cross_entropy")
        await client.optim_step(AdamParams())
        assert world.clock.now() - started < 10.0

    training(scenario)


@pytest.mark.req("S22")
def test_the_total_deadline_of_a_training_call_counts_from_the_call():
    async def scenario(world: World, client: TrainingClient) -> None:
        world.server.engine.delays = Delays(train_s=5000.0)
        started = world.clock.now()
        with pytest.raises(ServerSilentError, match="total deadline"):
            await client.forward_backward([datum()], "cross_entropy")
        assert world.clock.now() - started == pytest.approx(100.0, abs=1.0)

    training(scenario, total_deadline_s=100.0)


@pytest.mark.req("S5")
def test_what_is_sent_again_after_a_loss_is_what_was_sent():
    tokens = np.arange(1, 9)
    weights = np.ones(8, np.float32)

    async def scenario(world: World, client: TrainingClient) -> None:
        from tinkex import Datum, ModelInput

        world.server.faults.on("retrieve_future", faults.lost(), times=2)
        one = Datum(ModelInput.from_ints(tokens), {"target_tokens": tokens + 1, "weights": weights})
        future = client.forward_backward([one], "cross_entropy")
        # A caller that reuses its buffers for the next batch.
        weights[:] = 7.0
        await future

    world = training(scenario)
    sent = world.server.seen("forward_backward")
    assert len({seen.raw_body for seen in sent}) == 1
    assert len(sent) == 3
    assert set(sent[0].body.data[0].loss_fn_inputs["weights"].to_numpy()) == {1.0}


@pytest.mark.req("S12")
@pytest.mark.parametrize("flags", [{}, {"fwdbwd_max_chunk_len": 1}], ids=["whole", "in chunks"])
def test_a_call_sends_what_it_was_given_whatever_its_caller_changes(flags: dict[str, Any]):
    async def scenario(world: World, client: TrainingClient) -> None:
        weights = np.ones(4, np.float32)
        batch = [datum(), datum()]
        for one in batch:
            one.loss_fn_inputs["weights"] = TensorData.from_numpy(weights)
        future = client.forward_backward(batch, "cross_entropy")
        weights[:] = 7.0
        for one in batch:
            one.loss_fn_inputs["target_tokens"].to_numpy()[:] = 9
            one.model_input.chunks[0].tokens[:] = [9]
            one.loss_fn_inputs.clear()
        await future

    world = training(scenario, flags)
    sent = [one for seen in world.server.seen("forward_backward") for one in seen.body.data]
    assert len(sent) == 2
    for one in sent:
        assert one.model_input.to_ints() == [1, 2, 3, 4]
        assert one.loss_fn_inputs["target_tokens"].tolist() == [2, 3, 4, 5]
        assert one.loss_fn_inputs["weights"].tolist() == [1.0] * 4


@pytest.mark.req("S40")
def test_the_chunks_of_a_large_batch_are_sent_a_few_at_a_time():
    under_way = most = 0

    async def counted(exchange: Any) -> None:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await exchange.clock.sleep(1.0)
        under_way -= 1
        await exchange.forward()

    async def scenario(world: World, client: TrainingClient) -> None:
        world.server.faults.on("forward_backward", counted, times=None)
        batch = [datum(first=1 + i % 9) for i in range(200)]
        assert len((await client.forward(batch, "cross_entropy")).loss_fn_outputs) == 200

    training(scenario, PARALLEL)
    assert 2 <= most <= 16


# -- custom losses ---------------------------------------------------------------------------------


def _squared(data: Any, logprobs: Any) -> Any:
    loss = sum((one**2).sum() for one in logprobs)
    return loss, {"mine": 1.0}


@pytest.mark.req("S19")
@pytest.mark.req("S26")
def test_a_step_called_beside_a_custom_loss_comes_after_its_backward_pass():
    async def scenario(world: World, client: TrainingClient) -> None:
        custom, step = await asyncio.gather(
            client.forward_backward_custom_async([datum()], _squared),
            client.optim_step_async(AdamParams()),
        )
        await custom
        await step

    world = training(scenario)
    order = world.routes("forward_backward", "optim_step")
    assert order == ["forward_backward", "forward_backward", "optim_step"]


@pytest.mark.req("S26")
def test_a_custom_loss_that_fails_frees_the_place_of_its_backward_pass():
    def fails(data: Any, logprobs: Any) -> Any:
        raise RuntimeError("no loss")

    async def scenario(world: World, client: TrainingClient) -> None:
        with pytest.raises(RuntimeError, match="no loss"):
            await client.forward_backward_custom_async([datum()], fails)
        await client.optim_step(AdamParams())

    assert training(scenario).routes("optim_step") == ["optim_step"]


@pytest.mark.req("S22")
@pytest.mark.req("S26")
def test_a_custom_loss_may_call_its_own_client():
    with (
        FakeServer().serve() as server,
        ServiceClient(base_url=server.url, api_key=API_KEY) as service,
    ):
        client = service.create_lora_training_client(MODEL, rank=2)

        def asks(data: Any, logprobs: Any) -> Any:
            client.forward([datum()], "cross_entropy").result(PATIENCE_S)
            return _squared(data, logprobs)

        assert client.forward_backward_custom([datum()], asks).result(PATIENCE_S).metrics["mine"]


@pytest.mark.req("S21")
@pytest.mark.req("S26")
def test_a_chunked_custom_loss_comes_as_one_part_with_its_own_loss():
    async def scenario(world: World, client: TrainingClient) -> None:
        batch = [datum(first=1 + i) for i in range(3)]
        future = await client.forward_backward_custom_async(batch, _squared)
        parts = [part async for part in future]
        whole = await future
        assert [part.metrics["loss:sum"] for part in parts] == [whole.metrics["loss:sum"]]

    training(scenario, ONE_BY_ONE)


@pytest.mark.req("S13")
@pytest.mark.parametrize(
    ("status", "retryable"),
    [(400, False), (402, True), (404, False), (408, True), (409, True), (410, True), (429, True)],
)
def test_an_error_says_what_the_table_does(status: int, retryable: bool):
    from tinkex.errors import ResponseInfo, status_error

    assert status_error(ResponseInfo(status), None).retryable is retryable
    assert InternalServerError.retryable

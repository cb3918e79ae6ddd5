"""Turn order of a training client: strict, without gaps, and never blocked by what fails."""

from __future__ import annotations

import asyncio
import concurrent.futures
import itertools
import threading
from typing import TYPE_CHECKING, Any

import pytest

from tests.held import held
from tests.patience import PATIENCE_S
from tests.unit.clients.world import MODEL, World, datum
from tinkex import AdamParams, BadRequestError, InternalServerError, ServiceClient, types
from tinkex.testing import API_KEY, Delays, FakeServer, faults

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tinkex.testing import SeenRequest

TRAINING = ("forward_backward", "optim_step", "save_weights")


def seq_id(seen: SeenRequest) -> int:
    body = seen.body
    return int(body["seq_id"] if isinstance(body, dict) else body.seq_id)


def seq_ids(server: FakeServer, routes: Iterable[str] = TRAINING) -> list[int]:
    """The numbers the server saw, in order of arrival."""
    return [seq_id(seen) for seen in server.requests if seen.route in tuple(routes)]


def tags(server: FakeServer) -> list[int]:
    """The learning rates of the optimizer steps, which tests use to tell calls apart."""
    steps = server.seen("optim_step")
    return [round(seen.json["adam_params"]["learning_rate"] * 1e6) for seen in steps]


def tagged(tag: int) -> AdamParams:
    return AdamParams(learning_rate=tag / 1e6)


# -- order ------------------------------------------------------------------------------------


@pytest.mark.req("S19")
@pytest.mark.req("S5")
def test_calls_of_many_threads_are_sent_in_call_order_and_numbered_without_gaps():
    threads, each = 8, 20
    with (
        FakeServer().serve() as server,
        ServiceClient(base_url=server.url, api_key=API_KEY) as service,
    ):
        training = service.create_lora_training_client(MODEL, rank=2)
        ready = threading.Barrier(threads)

        def caller(number: int) -> list[Any]:
            ready.wait()
            return [training.optim_step(tagged(1 + number * each + i)) for i in range(each)]

        with concurrent.futures.ThreadPoolExecutor(threads) as pool:
            futures = [f for calls in pool.map(caller, range(threads)) for f in calls]
        for future in futures:
            future.result(PATIENCE_S)
        assert seq_ids(server) == list(range(1, threads * each + 1))
        seen = tags(server)
        for number in range(threads):
            own = range(1 + number * each, 1 + (number + 1) * each)
            assert [tag for tag in seen if tag in own] == list(own)


@pytest.mark.req("S19")
@pytest.mark.req("S5")
def test_calls_of_many_tasks_are_sent_in_the_order_in_which_they_were_made():
    called: list[int] = []

    async def caller(world: World, training: Any, first: int) -> None:
        for tag in range(first, first + 5):
            called.append(tag)
            future = await training.optim_step_async(tagged(tag))
            await world.clock.sleep((tag * 7) % 3)
            await future

    async def scenario(world: World) -> None:
        async with world.service() as service:
            training = await service.create_lora_training_client_async(MODEL, rank=2)
            await asyncio.gather(*(caller(world, training, 1 + 5 * n) for n in range(10)))

    world = World()
    world.run(scenario)
    assert tags(world.server) == called
    assert seq_ids(world.server) == list(range(1, 51))


@pytest.mark.req("S12")
def test_an_optimizer_step_is_sent_with_the_parameters_it_was_called_with():
    async def scenario(world: World) -> None:
        async with world.service() as service:
            training = await service.create_lora_training_client_async(MODEL, rank=2)
            params: Any = types.OptimParamsBase(type="lion", betas=[0.9])  # pyright: ignore[reportCallIssue]
            call = training.optim_step(params)
            params.betas.append(0.5)
            await call

    world = World()
    world.run(scenario)
    (seen,) = world.server.seen("optim_step")
    assert seen.json["optimizer_params"]["betas"] == [0.9]


@pytest.mark.req("S19")
def test_a_call_is_sent_only_when_the_one_before_it_was_accepted():
    async def scenario(world: World) -> None:
        async with world.service() as service:
            training = await service.create_lora_training_client_async(MODEL, rank=2)
            world.server.faults.on("optim_step", faults.slow(5.0), times=2)
            calls = [training.optim_step(tagged(i)) for i in (1, 2, 3)]
            await asyncio.gather(*calls)

    world = World()
    world.run(scenario)
    first, second, third = (seen.at for seen in world.server.seen("optim_step"))
    assert second - first >= 5.0
    assert third - second >= 5.0


@pytest.mark.req("S19")
def test_results_are_waited_for_at_the_same_time():
    async def scenario(world: World) -> None:
        world.server.engine.delays = Delays(train_s=20.0, optim_s=20.0)
        async with world.service() as service:
            training = await service.create_lora_training_client_async(MODEL, rank=2)
            started = world.clock.now()
            calls = [
                training.forward_backward([datum()], "cross_entropy"),
                training.optim_step(AdamParams()),
                training.forward_backward([datum()], "cross_entropy"),
            ]
            await asyncio.gather(*calls)
            assert world.clock.now() - started == pytest.approx(60.0, abs=1.0)
            asked = [s.json["request_id"] for s in world.server.seen("retrieve_future")[1:4]]
            assert len(set(asked)) == 3
            assert all(s.at < started + 1.0 for s in world.server.seen("retrieve_future")[1:4])

    World().run(scenario)


@pytest.mark.req("S19")
@pytest.mark.parametrize("parallel", [True, False])
def test_chunks_go_out_with_the_first_one_last_or_one_by_one(parallel: bool):
    async def scenario(world: World) -> None:
        async with world.service() as service:
            training = await service.create_lora_training_client_async(MODEL, rank=2)
            world.server.faults.on("forward_backward", faults.slow(1.0), times=None)
            data = [datum(first=1 + i) for i in range(4)]
            chunked = training.forward_backward(data, "cross_entropy")
            behind = training.optim_step(AdamParams())
            whole, _ = await asyncio.gather(chunked, behind)
            assert len(whole.loss_fn_outputs) == 4
            # The order of the data survives whatever the order of sending.
            for one, item in zip(whole.loss_fn_outputs, data, strict=True):
                alone = await training.forward([item], "cross_entropy")
                assert one["logprobs"].tolist() == pytest.approx(
                    alone.loss_fn_outputs[0]["logprobs"].tolist(), rel=1e-3
                )

    world = World({"fwdbwd_max_chunk_len": 1, "parallel_fwdbwd_chunks": parallel})
    world.run(scenario)
    ids = seq_ids(world.server)[:5]
    times = [seen.at for seen in world.server.seen("forward_backward")][:4]
    if parallel:
        assert (sorted(ids[:3]), ids[3:]) == ([2, 3, 4], [1, 5])
        assert times[0] == times[1] == times[2]
    else:
        assert ids == [1, 2, 3, 4, 5]
        assert all(b - a >= 1.0 for a, b in itertools.pairwise(times))


# -- turns are always given back --------------------------------------------------------------


@pytest.mark.req("B3")
@pytest.mark.req("S25")
@pytest.mark.parametrize("parallel", [True, False])
def test_a_rejected_chunk_fails_its_call_and_not_the_ones_behind(parallel: bool):
    async def scenario(world: World) -> None:
        async with world.service() as service:
            training = await service.create_lora_training_client_async(MODEL, rank=2)
            world.server.faults.on(
                "forward_backward", faults.reply(400), times=None, when=lambda s: seq_id(s) == 2
            )
            data = [datum(first=1 + i) for i in range(3)]
            chunked = training.forward_backward(data, "cross_entropy")
            behind = training.optim_step(AdamParams())
            with pytest.raises(BadRequestError):
                await chunked
            await behind
            await training.optim_step(AdamParams())

    World({"fwdbwd_max_chunk_len": 1, "parallel_fwdbwd_chunks": parallel}).run(scenario)


@pytest.mark.req("B3")
@pytest.mark.req("S24")
@pytest.mark.req("S25")
@pytest.mark.parametrize("how", ["cancel", "task"])
def test_a_call_withdrawn_while_it_waits_is_never_sent_and_leaves_no_gap(how: str):
    async def withdraw(world: World, call: Any) -> None:
        if how == "cancel":
            assert call.cancel()
            return
        waiting = asyncio.ensure_future(call.result_async())
        await world.clock.sleep(1.0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert call.cancelled()

    async def scenario(world: World) -> None:
        async with world.service() as service:
            training = await service.create_lora_training_client_async(MODEL, rank=2)
            hold = asyncio.Event()

            async def handle(exchange: Any) -> None:
                await hold.wait()
                await exchange.forward()

            world.server.faults.on("optim_step", handle)
            calls = [training.optim_step(tagged(i)) for i in (1, 2, 3)]
            await world.clock.sleep(1.0)
            assert [call.status().position for call in calls] == [0, 1, 2]
            await withdraw(world, calls[1])
            hold.set()
            await calls[0]
            await calls[2]
            assert calls[1].status().state == "cancelled"

    world = World()
    world.run(scenario)
    assert tags(world.server) == [1, 3]
    assert seq_ids(world.server) == [1, 2]


@pytest.mark.req("B3")
def test_a_call_that_times_out_while_it_waits_lets_the_next_one_through():
    go_on = threading.Event()
    with (
        FakeServer().serve() as server,
        ServiceClient(base_url=server.url, api_key=API_KEY) as service,
    ):
        training = service.create_lora_training_client(MODEL, rank=2)
        server.faults.on("optim_step", held(go_on))
        first, second, third = (training.optim_step(tagged(i)) for i in (1, 2, 3))

        async def hasty() -> None:
            await second.result_async(timeout=0.01)

        with pytest.raises(TimeoutError):
            asyncio.run(hasty())
        go_on.set()
        first.result(PATIENCE_S)
        third.result(PATIENCE_S)
        assert tags(server) == [1, 3]
        assert seq_ids(server) == [1, 2]


@pytest.mark.req("B3")
@pytest.mark.req("S25")
def test_a_call_cancelled_while_its_request_is_retried_frees_the_queue():
    async def scenario(world: World) -> None:
        async with world.service() as service:
            training = await service.create_lora_training_client_async(MODEL, rank=2)
            stuck = faults.reply(503)
            world.server.faults.on("optim_step", stuck, times=None, when=lambda s: seq_id(s) == 1)
            first = training.optim_step(tagged(1))
            second = training.optim_step(tagged(2))
            await world.clock.sleep(10.0)
            assert not first.done()
            first.cancel()
            started = world.clock.now()
            await second
            # The server waits for the missing number before it goes on; the client does not.
            sent = next(s.at for s in world.server.seen("optim_step") if seq_id(s) == 2)
            assert sent - started < 0.5
            assert world.clock.now() - started <= 61.0

    World().run(scenario)


@pytest.mark.req("B3")
@pytest.mark.req("S25")
def test_a_call_that_fails_for_good_lets_the_next_one_through():
    async def scenario(world: World) -> None:
        async with world.service() as service:
            training = await service.create_lora_training_client_async(MODEL, rank=2)
            world.server.faults.on("optim_step", faults.reply(500), times=None)
            failing = training.optim_step(tagged(1))
            behind = training.save_state("after")
            with pytest.raises(InternalServerError):
                await failing
            assert (await behind).path.endswith("/weights/after")

    World(submit_deadline_s=20.0).run(scenario)


# -- one number, one content ------------------------------------------------------------------


@pytest.mark.req("S5")
@pytest.mark.parametrize("effect", [faults.duplicate, faults.duplicate_at_once])
def test_a_request_delivered_twice_runs_once(effect: Any):
    async def scenario(world: World) -> None:
        async with world.service() as service:
            training = await service.create_lora_training_client_async(MODEL, rank=2)
            world.server.faults.on("forward_backward", effect())
            world.server.faults.on("optim_step", effect())
            await training.forward_backward([datum()], "cross_entropy")
            step = await training.optim_step(AdamParams())
            assert step.metrics is not None
            assert service.usage().trained_tokens == 4

    world = World()
    world.run(scenario)
    ran = [call.name for call in world.server.engine.calls]
    assert (ran.count("train"), ran.count("optim_step")) == (1, 1)


@pytest.mark.req("S5")
@pytest.mark.parametrize("flag", [True, False])
def test_a_request_whose_answer_was_lost_is_sent_again_with_the_same_number_and_bytes(flag: bool):
    async def scenario(world: World) -> None:
        async with world.service() as service:
            training = await service.create_lora_training_client_async(MODEL, rank=2)
            for route in TRAINING:
                world.server.faults.on(route, faults.drop(handled=True), times=2)
            await training.forward_backward([datum()], "cross_entropy")
            await training.optim_step(AdamParams())
            await training.save_state("twice")

    world = World({"proto_compress_fwdbwd": flag})
    world.run(scenario)
    for route in TRAINING:
        sent = world.server.seen(route)
        assert len(sent) == 3
        assert len({(seq_id(seen), seen.raw_body) for seen in sent}) == 1
    assert seq_ids(world.server) == [1] * 3 + [2] * 3 + [3] * 3
    ran = [call.name for call in world.server.engine.calls]
    assert (ran.count("train"), ran.count("optim_step")) == (1, 1)


@pytest.mark.req("S18")
def test_a_training_promise_that_was_lost_is_asked_for_again_with_the_same_number():
    async def scenario(world: World) -> None:
        async with world.service() as service:
            training = await service.create_lora_training_client_async(MODEL, rank=2)
            world.server.faults.on("retrieve_future", faults.lost(), times=2)
            await training.optim_step(tagged(1))
            await training.optim_step(tagged(2))

    world = World()
    world.run(scenario)
    assert seq_ids(world.server) == [1, 1, 1, 2]
    assert [c.name for c in world.server.engine.calls].count("optim_step") == 2


@pytest.mark.req("S20")
@pytest.mark.req("S21")
def test_the_parts_of_a_chunked_call_come_as_they_arrive():
    async def scenario(world: World) -> None:
        async with world.service() as service:
            training = await service.create_lora_training_client_async(MODEL, rank=2)
            # The last part keeps everybody waiting.
            late = faults.slow(30.0)
            asked: dict[str, int] = {}

            def is_last(seen: SeenRequest) -> bool:
                asked.setdefault(seen.json["request_id"], len(asked))
                return asked[seen.json["request_id"]] == 2

            world.server.faults.on("retrieve_future", late, when=is_last)
            future = training.forward_backward(
                [datum(first=1 + i) for i in range(3)], "cross_entropy"
            )
            started = world.clock.now()
            arrivals = [(world.clock.now() - started, part) async for part in future]
            assert [len(part.loss_fn_outputs) for _, part in arrivals] == [1, 1, 1]
            assert arrivals[0][0] < 1.0
            assert arrivals[1][0] < 1.0
            assert arrivals[2][0] >= 30.0
            whole = await future
            assert whole.metrics["loss:sum"] == pytest.approx(
                sum(part.metrics["loss:sum"] for _, part in arrivals)
            )

    World({"fwdbwd_max_chunk_len": 1}).run(scenario)

"""Results: waiting, payloads, completions, and what is lost or not one's own."""

from __future__ import annotations

import threading
from typing import Any

import anyio
import msgspec
import pytest

from tinkex.server.api.futures import LOOP_BYTES
from tinkex.testing.fake_engine import Delays
from tinkex.wire import results

from .conftest import PROTOBUF, Api, Start, datum

pytestmark = pytest.mark.anyio


def target(sampler: str, clone: int = 0, cursor: int = 0, **members: object) -> dict[str, object]:
    chosen = {
        "type": "sampling_session",
        "sampling_session_id": sampler,
        "cloned_sampler_id": clone,
    }
    return {"target": chosen, "prev_cursor": cursor, **members}


@pytest.mark.req("S17")
async def test_a_poll_is_held_for_the_long_poll_time_and_then_says_pending(start: Start) -> None:
    async with start(Delays(train_s=100), long_poll_s=25) as api:
        model = await api.model()
        running, waiting = await api.train(model, 1), await api.step(model, 2)
        begun = api.clock.now()
        answer = msgspec.json.decode((await api.poll(waiting)).body)
        assert api.clock.now() - begun == 25
        assert answer["type"] == "try_again"
        assert answer["request_id"] == waiting["request_id"]
        assert answer["queue_state"] == "active"
        assert answer["progress"]["state"] == "queued"
        answer = msgspec.json.decode((await api.poll(running)).body)
        assert answer["progress"]["state"] == "running"


async def test_a_poll_is_answered_the_moment_the_result_is_there(start: Start) -> None:
    async with start(Delays(train_s=7)) as api:
        model = await api.model()
        begun = api.clock.now()
        await api.result(await api.train(model, 1))
        assert api.clock.now() - begun == 7


async def test_the_position_counts_what_goes_first(start: Start) -> None:
    async with start(Delays(train_s=100), long_poll_s=1) as api:
        model = await api.model()
        await api.train(model, 1)
        await api.clock.sleep(1)
        futures = [await api.step(model, seq) for seq in (2, 3, 4)]
        answer = msgspec.json.decode((await api.poll(futures[2])).body)
        assert answer["progress"]["position"] == 2


async def test_large_results_are_announced_first_to_those_who_ask_for_it(start: Start) -> None:
    async with start(inline_result_bytes=50) as api:
        model = await api.model()
        future = await api.train(model, 1, datum(list(range(1, 40))))
        announced = await api.poll(future, binary=True, metadata=True)
        assert announced.headers["content-type"] == "application/json"
        answer = msgspec.json.decode(announced.body)
        assert answer["status"] == "complete_metadata"
        payload = await api.poll(future, binary=True, metadata=False)
        assert payload.headers["content-type"] == PROTOBUF
        assert len(payload.body) == answer["response_payload_size"] > 50


@pytest.mark.parametrize(("datums", "on_loop"), [(1, True), (200, False)])
async def test_large_results_become_json_in_a_thread(
    api: Api, monkeypatch: pytest.MonkeyPatch, datums: int, on_loop: bool
) -> None:
    model = await api.model()
    future = await api.train(model, 1, *[datum(list(range(1, 501)))] * datums)
    as_protobuf = await api.poll(future, binary=True)
    assert (len(as_protobuf.body) > LOOP_BYTES) is not on_loop
    threads: list[int] = []
    inner = results.decode_result

    def noted(*args: Any) -> Any:
        threads.append(threading.get_ident())
        return inner(*args)

    monkeypatch.setattr(results, "decode_result", noted)
    as_json = await api.poll(future)
    assert as_json.headers["content-type"] == "application/json"
    assert len(msgspec.json.decode(as_json.body)["loss_fn_outputs"]) == datums
    assert [thread == threading.get_ident() for thread in threads] == [on_loop]


@pytest.mark.req("B17")
async def test_finished_answers_carry_what_the_operation_used(start: Start) -> None:
    async with start(Delays(train_s=4, sample_s=2)) as api:
        session = await api.session()
        model = await api.model(session)
        first, second = await api.train(model, 1), await api.train(model, 2, forward_only=True)
        await api.result(first)
        usage = msgspec.json.decode((await api.poll(first)).headers["x-tinkex-usage"])
        assert usage["trained_tokens"] == 3
        assert usage["device_s"] == pytest.approx(4, abs=0.01)
        await api.result(second)
        usage = msgspec.json.decode((await api.poll(second)).headers["x-tinkex-usage"])
        assert usage["prompt_tokens"] == 3
        assert usage["trained_tokens"] == 0
        assert usage["queue_s"] == pytest.approx(4)
        future = await api.sample(await api.sampler(session), num_samples=2)
        await api.result(future)
        usage = msgspec.json.decode((await api.poll(future)).headers["x-tinkex-usage"])
        assert usage["prompt_tokens"] == 3
        assert usage["generated_tokens"] == 8
        assert usage["cached_tokens"] == 0
        again = await api.sample(await api.sampler(session), 1)
        assert (await api.sampled(again)).prompt_cache_hit_tokens == 2


async def test_a_failure_is_json_even_for_those_who_want_protobuf(api: Api) -> None:
    model = await api.model()
    future = await api.train(model, 1, loss_fn="nonsense")
    reply = await api.poll(future, binary=True)
    assert reply.headers["content-type"] == "application/json"
    assert set(msgspec.json.decode(reply.body)) == {"error", "category"}


@pytest.mark.req("S18")
async def test_a_sample_lost_by_a_restart_is_gone_and_a_stranger_s_never_was(api: Api) -> None:
    session = await api.session()
    sampler = await api.sampler(session)
    future = await api.sample(sampler)
    await api.result(future)
    api.server.lose_samples()
    assert (await api.poll(future)).status == 410
    assert (await api.other().poll(future)).status == 404
    assert (await api.poll("nothing:like:this")).status == 404
    assert await api.sample(sampler) == future
    await api.result(future)


async def test_a_restart_wakes_the_polls_of_what_it_lost(start: Start) -> None:
    async with start(Delays(sample_s=1000)) as api:
        future = await api.sample(await api.sampler(await api.session()))
        statuses: list[int] = []

        async def poll() -> None:
            statuses.append((await api.poll(future)).status)

        async with anyio.create_task_group() as group:
            group.start_soon(poll)
            await api.clock.sleep(1)
            api.server.lose_samples()
        assert statuses == [410]
        assert api.clock.now() == 1


async def test_a_lost_sample_sent_again_under_its_old_number_can_be_cancelled(
    start: Start,
) -> None:
    async with start(Delays(sample_s=1000)) as api:
        sampler = await api.sampler(await api.session())
        await api.sample(sampler)
        await api.clock.sleep(1)
        api.server.lose_samples()
        again = await api.sample(sampler)
        await api.clock.sleep(1)
        worker = api.server._parts.worker
        assert worker.samples_in_flight == 1
        assert await api.post("/cancel_future", again) == {"cancelled": True}
        await api.clock.sleep(1)
        assert worker.samples_in_flight == 0


async def test_results_are_dropped_after_their_time(start: Start) -> None:
    async with start(result_ttl_s=1000, session_timeout_s=10_000) as api:
        model = await api.model()
        future = await api.train(model, 1)
        await api.result(future)
        await api.clock.sleep(500)
        await api.result(future)
        await api.clock.sleep(600)
        assert (await api.poll(future)).status == 410
        assert (await api.train(model, 1)) == future


async def test_nobody_reads_somebody_else_s_result(api: Api) -> None:
    future = await api.train(await api.model(), 1)
    assert (await api.other().poll(future)).status == 404
    reply = await api.other().call("POST", "/cancel_future", future)
    assert reply.status == 404


async def test_completions_come_in_order_after_the_cursor(api: Api) -> None:
    sampler = await api.sampler(await api.session())
    futures = [await api.sample(sampler, seq) for seq in range(3)]
    for future in futures:
        await api.result(future)
    page = await api.post("/retrieve_futures", target(sampler))
    assert [c["request_id"] for c in page["completions"]] == [f["request_id"] for f in futures]
    assert {c["state"] for c in page["completions"]} == {"finished"}
    assert all(c["response_payload_uncompressed_size"] > 0 for c in page["completions"])
    await api.result(await api.sample(sampler, 3))
    more = await api.post("/retrieve_futures", target(sampler, cursor=page["cursor"]))
    assert [c["request_id"] for c in more["completions"]] == [f"{sampler}:3"]


async def test_completions_are_waited_for_and_an_empty_wait_keeps_the_cursor(
    start: Start,
) -> None:
    async with start(Delays(sample_s=40), long_poll_s=30) as api:
        sampler = await api.sampler(await api.session())
        future = await api.sample(sampler)
        empty = await api.post("/retrieve_futures", target(sampler, cursor=0))
        assert empty == {"completions": [], "cursor": 0}
        assert api.clock.now() == 30
        page = await api.post("/retrieve_futures", target(sampler))
        assert [c["request_id"] for c in page["completions"]] == [future["request_id"]]
        assert api.clock.now() == 40


async def test_a_failed_sample_completes_as_failed(api: Api) -> None:
    sampler = await api.sampler(await api.session())
    await api.outcome(await api.sample(sampler, prompt={"chunks": []}))
    page = await api.post("/retrieve_futures", target(sampler))
    assert page["completions"] == [{"state": "failed", "request_id": f"{sampler}:0"}]


async def test_copies_of_a_sampler_see_only_their_own_completions(api: Api) -> None:
    sampler = await api.sampler(await api.session())
    own = await api.sample(sampler, 5_000_000_007)
    await api.result(own)
    page = await api.post("/retrieve_futures", target(sampler, clone=5))
    assert [c["request_id"] for c in page["completions"]] == [own["request_id"]]
    empty = await api.post("/retrieve_futures", target(sampler, timeout=0))
    assert empty["completions"] == []


async def test_acknowledged_payloads_are_dropped_and_others_are_not(api: Api) -> None:
    session = await api.session()
    sampler, other = await api.sampler(session), await api.sampler(session, 1)
    futures = [await api.sample(sampler), await api.sample(sampler, 1), await api.sample(other)]
    for future in futures:
        await api.result(future)
    ids = [futures[0]["request_id"], futures[2]["request_id"]]
    await api.post("/retrieve_futures", target(sampler, retrieved_request_ids=ids))
    statuses = [(await api.poll(future)).status for future in futures]
    assert statuses == [410, 200, 200]


async def test_completions_of_somebody_else_s_sampler_are_not_there(api: Api) -> None:
    sampler = await api.sampler(await api.session())
    reply = await api.other().call("POST", "/retrieve_futures", target(sampler))
    assert reply.status == 404


@pytest.mark.req("S24")
async def test_cancelling_a_sample_frees_its_place_at_once(start: Start) -> None:
    async with start(Delays(token_s=10)) as api:
        sampler = await api.sampler(await api.session())
        future = await api.sample(sampler, sampling_params={"max_tokens": 1000})
        await api.clock.sleep(15)
        assert api.server._parts.worker.samples_in_flight == 1
        assert await api.post("/cancel_future", future) == {"cancelled": True}
        await api.clock.sleep(0)
        assert api.server._parts.worker.samples_in_flight == 0
        assert (await api.outcome(future))["category"] == "user"
        assert await api.post("/cancel_future", future) == {"cancelled": False}
        assert api.clock.now() == 15


async def test_what_has_finished_keeps_its_result_when_it_is_cancelled(api: Api) -> None:
    future = await api.sample(await api.sampler(await api.session()))
    await api.result(future)
    assert await api.post("/cancel_future", future) == {"cancelled": False}
    await api.result(future)

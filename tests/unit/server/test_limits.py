"""What one tenant may have at a time, how it learns that it has that much, and how it goes on."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from tests.cross_tenant import LOSS
from tinkex.testing.fake_engine import Delays
from tinkex.wire.proto_training import encode_forward_backward

from .conftest import PROTOBUF, Api, Start, datum

if TYPE_CHECKING:
    from tinkex.transport.base import Reply

pytestmark = pytest.mark.anyio


def text(reply: Reply) -> str:
    return msgspec.json.decode(reply.body)["detail"]


def put_off(reply: Reply, limit: str) -> None:
    """The answer to one too many: a 429 that says when, what and how many."""
    assert reply.status == 429, reply
    assert 0 < float(reply.headers["retry-after"]) <= 60
    assert limit in text(reply)
    assert "0 more would fit" in text(reply)


def sample(sampler: str, seq: int) -> dict[str, Any]:
    return {
        "sampling_session_id": sampler,
        "seq_id": seq,
        "num_samples": 1,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1]}]},
        "sampling_params": {"max_tokens": 1},
    }


def step(model: str, seq: int) -> dict[str, Any]:
    return {"model_id": model, "seq_id": seq, "adam_params": {"learning_rate": 0.1}}


async def test_samples_over_the_limit_wait_outside_and_others_do_not_notice(start: Start) -> None:
    async with start(Delays(sample_s=5.0), max_samples_in_flight=2) as api:
        sampler = await api.sampler(await api.session())
        futures = [await api.sample(sampler, seq) for seq in range(2)]
        put_off(await api.call("POST", "/asample", sample(sampler, 2)), "max_samples_in_flight")
        # One that was accepted before is known, however full it is.
        assert await api.sample(sampler, 1) == futures[1]
        other = api.other()
        await other.sample(await other.sampler(await other.session()))
        await api.result(futures[0])
        await api.sample(sampler, 2)


async def test_cancelled_samples_make_room(start: Start) -> None:
    async with start(Delays(sample_s=500.0), max_samples_in_flight=1) as api:
        sampler = await api.sampler(await api.session())
        future = await api.sample(sampler, 0)
        await api.post("/cancel_future", {"request_id": future["request_id"]})
        await api.sample(sampler, 1)


async def test_models_over_the_limit_wait_until_a_session_ends(start: Start) -> None:
    async with start(max_models=2) as api:
        session, second = await api.session(), await api.session()
        model = await api.model(session, 0)
        await api.model(second, 0)
        body = {"session_id": session, "model_seq_id": 1, "base_model": "tinkex/tiny"}
        put_off(await api.call("POST", "/create_model", body), "max_models")
        assert await api.model(session, 0) == model
        await api.other().model()
        done = {"reason": {"type": "success"}, "detail": None}
        await api.post(f"/sessions/{second}/finish", done)
        await api.result(await api.post("/create_model", body))


async def test_an_unloaded_model_makes_room(start: Start) -> None:
    async with start(max_models=1) as api:
        session = await api.session()
        model = await api.model(session, 0)
        await api.result(await api.post("/unload_model", {"model_id": model}))
        await api.model(session, 1)


async def test_a_model_made_from_a_checkpoint_counts_too(start: Start) -> None:
    async with start(max_models=1) as api:
        session = await api.session()
        model = await api.model(session, 0)
        saved = await api.post("/save_weights", {"model_id": model, "seq_id": 1, "path": "a"})
        path = (await api.result(saved))["path"]
        body = {"session_id": session, "model_seq_id": 1, "path": path, "optimizer": False}
        put_off(await api.call("POST", "/load_weights", body), "max_models")


async def test_sessions_over_the_limit_wait_until_one_falls_silent(start: Start) -> None:
    async with start(max_sessions=1) as api:
        await api.session()
        body = {"tags": [], "user_metadata": {}, "sdk_version": "x"}
        put_off(await api.call("POST", "/create_session", body), "max_sessions")
        await api.other().session()
        await api.clock.sleep(400)
        await api.session()


async def test_clients_without_sessions_are_not_kept_out_by_the_ones_they_cannot_end(
    start: Start,
) -> None:
    async with start(max_sessions=1, max_models=1) as api:
        asked = {**sample("", 0), "base_model": "tinkex/tiny"}
        for number in range(3):
            body = {k: v for k, v in asked.items() if k not in ("sampling_session_id", "seq_id")}
            await api.post("/asample", body, headers={"x-idempotency-key": f"s{number}"})
        body = {"base_model": "tinkex/tiny", "lora_config": {"rank": 8}}
        await api.result(await api.post("/create_model", body, headers={"x-idempotency-key": "a"}))
        late = {"x-idempotency-key": "b"}
        put_off(await api.call("POST", "/create_model", body, headers=late), "max_models")
        await api.clock.sleep(3601)
        await api.result(await api.post("/create_model", body, headers=late))


async def test_training_far_ahead_of_the_server_is_put_off_and_then_goes_on(start: Start) -> None:
    async with start(Delays(optim_s=1.0), max_queued_ops=3) as api:
        model = await api.model()
        futures = [await api.step(model, seq) for seq in range(1, 4)]
        put_off(await api.call("POST", "/optim_step", step(model, 4)), "max_queued_ops")
        assert await api.step(model, 3) == futures[2]
        other = api.other()
        await other.step(await other.model(), 1)
        await api.result(futures[0])
        await api.result(await api.step(model, 4))


async def test_what_the_others_wait_for_is_always_let_in(start: Start) -> None:
    async with start(max_queued_ops=2) as api:
        model = await api.model()
        chunks = [await api.train(model, seq) for seq in (2, 3)]
        put_off(await api.call("POST", "/optim_step", step(model, 4)), "max_queued_ops")
        chunks.append(await api.train(model, 1))
        for chunk in chunks:
            await api.output(chunk)


async def test_bytes_in_flight_are_limited_but_one_request_always_fits(start: Start) -> None:
    async with start(Delays(train_s=1.0), max_queued_bytes=100) as api:
        model = await api.model()
        first = await api.train(model, 1)
        body = encode_forward_backward(
            model_id=model, seq_id=2, data=[datum()], loss_fn="cross_entropy"
        )
        assert len(body) > 100
        headers = {"content-type": PROTOBUF}
        reply = await api.call("POST", "/forward_backward", body, headers=headers)
        put_off(reply, "max_queued_bytes")
        await api.output(first)
        await api.output(await api.train(model, 2))


async def test_who_is_ahead_of_the_server_is_told_while_polling(start: Start) -> None:
    async with start(Delays(optim_s=40.0), max_training_ops=2, long_poll_s=5.0) as api:
        model = await api.model()
        futures = [await api.step(model, seq) for seq in range(1, 4)]
        running = msgspec.json.decode((await api.poll(futures[0])).body)
        waiting = msgspec.json.decode((await api.poll(futures[2])).body)
        assert running["queue_state"] == "active"
        assert waiting["type"] == "try_again"
        assert waiting["queue_state"] == "paused_rate_limit"
        assert "max_training_ops" in waiting["queue_state_reason"]
        await api.result(futures[0])
        waiting = msgspec.json.decode((await api.poll(futures[2])).body)
        assert waiting["queue_state"] == "active"
        assert "queue_state_reason" not in waiting


async def test_who_waits_for_others_is_told_that_the_server_is_busy(start: Start) -> None:
    async with start(Delays(train_s=60.0), long_poll_s=20.0) as api:
        await api.train(await api.model(), 1)
        other = api.other()
        future = await other.step(await other.model(), 1)
        waiting = msgspec.json.decode((await other.poll(future)).body)
        assert waiting["queue_state"] == "paused_capacity"
        assert waiting["queue_state_reason"]
        await other.result(future)


async def save(api: Api, model: str, seq: int, name: str, **members: Any) -> Any:
    body = {"model_id": model, "seq_id": seq, "path": name, **members}
    return await api.outcome(await api.post("/save_weights", body))


async def test_a_save_that_does_not_fit_fails_and_says_what_to_delete(start: Start) -> None:
    async with start(max_stored_bytes=60_000) as api:
        model = await api.model()
        first = (await save(api, model, 1, "a"))["path"]
        (listed,) = (await api.get("/checkpoints"))["checkpoints"]
        assert 25_000 > listed["size_bytes"] > 60_000 / 3
        await save(api, model, 2, "b")
        failed = await save(api, model, 3, "c")
        assert failed["category"] == "user"
        assert "max_stored_bytes" in failed["error"]
        assert first in failed["error"]
        used, fits = re.findall(r"takes up (\d+) of the 60000 .* so (\d+) more", failed["error"])[0]
        assert int(used) + int(fits) == 60_000
        # The checkpoints, and a little for their records, requests and results.
        assert 2 * listed["size_bytes"] < int(used) < 2 * listed["size_bytes"] + 10_000
        assert re.search(r"In bytes: checkpoints \d+, .*runs \d+", failed["error"])
        # Replacing one takes no more than there was.
        assert "path" in await save(api, model, 4, "b", overwrite=True)
        copied = await api.call("POST", "/copy_weights", {"source_path": first})
        check_full(copied, "max_stored_bytes", first)
        other = api.other()
        assert "path" in await save(other, await other.model(), 1, "a")
        url = f"/training_runs/{model}/checkpoints/weights/a"
        assert (await api.call("DELETE", url)).status == 200
        assert "path" in await save(api, model, 5, "c")


def check_full(reply: Reply, *words: str) -> None:
    """The answer to a copy or an import: 429, and clients raise it at once."""
    assert reply.status == 429, reply
    assert 0 < float(reply.headers["retry-after"]) <= 60
    assert reply.headers["x-should-retry"] == "false"
    assert text(reply)[0].isupper()
    assert all(word in text(reply) for word in words), text(reply)


async def test_a_copy_above_the_number_of_checkpoints_is_put_off_until_one_is_deleted(
    start: Start,
) -> None:
    async with start(max_checkpoints=2) as api:
        model = await api.model()
        first = (await save(api, model, 1, "a"))["path"]
        await save(api, model, 2, "b")
        check_full(
            await api.call("POST", "/copy_weights", {"source_path": first}),
            "You have 2 checkpoints",
            "max_checkpoints",
        )
        assert "max_checkpoints" in (await save(api, model, 3, "c"))["error"]
        url = f"/training_runs/{model}/checkpoints/weights/b"
        assert (await api.call("DELETE", url)).status == 200
        assert (await api.call("POST", "/copy_weights", {"source_path": first})).status == 200


async def test_a_copy_larger_than_the_whole_quota_is_wrong_and_not_put_off(start: Start) -> None:
    """Deleting everything would not help, so no client may wait for it."""
    async with start(max_stored_bytes=60_000) as api:
        path = (await save(api, await api.model(), 1, "a"))["path"]
        store = api.server.store
        checkpoint = await store.get_checkpoint(path)
        await store.put_checkpoint(replace(checkpoint, size_bytes=60_001))
        reply = await api.call("POST", "/copy_weights", {"source_path": path})
        assert reply.status == 400
        assert "takes 60001 bytes" in text(reply)
        assert "max_stored_bytes" in text(reply)


async def test_losses_over_the_quota_are_put_off_like_other_work(start: Start) -> None:
    async with start(max_stored_bytes=2_000) as api:
        session = await api.session()
        replies = [await upload_loss(api, session, number) for number in range(8)]
        full = next(number for number, reply in enumerate(replies) if reply.status != 200)
        assert full > 0
        for reply in replies[full:]:
            assert reply.status == 429, reply
            assert 0 < float(reply.headers["retry-after"]) <= 60
            assert "max_stored_bytes" in text(reply)
            assert text(reply).startswith("What is kept")
        # One that was accepted before is known, however full it is.
        assert (await upload_loss(api, session, 0)).body == replies[0].body
        other = api.other()
        assert (await upload_loss(other, await other.session(), 0)).status == 200


async def upload_loss(api: Api, session: str, number: int) -> Reply:
    body = {"session_id": session, **LOSS, "custom_loss_seq_id": number}
    return await api.call("POST", "/create_custom_loss", body)


async def test_changes_above_their_rate_are_put_off_and_others_do_not_notice(start: Start) -> None:
    # On average 0.01 per second, and two at once.
    async with start(max_changes_per_s=0.01, session_timeout_s=1e6) as api:
        session = await api.session()

        async def move(by: Api, of: str) -> Reply:
            return await by.call("PUT", f"/sessions/{of}/project", {"project_id": "p"})

        replies = [await move(api, session) for _ in range(3)]
        assert [reply.status for reply in replies] == [200, 200, 429]
        assert "max_changes_per_s" in text(replies[-1])
        # Nobody is told to wait for longer than a minute.
        assert replies[-1].headers["retry-after"] == "60"
        # Requests that change nothing of this kind are not affected, nor are other tenants.
        assert (await api.call("GET", "/sessions")).status == 200
        other = api.other()
        assert (await move(other, await other.session())).status == 200
        await api.clock.sleep(60)
        soon = await move(api, session)
        assert soon.status == 429
        await api.clock.sleep(float(soon.headers["retry-after"]))
        assert (await move(api, session)).status == 200


async def test_the_rate_of_requests_can_be_limited_and_heartbeats_are_free(start: Start) -> None:
    async with start(max_requests_per_s=2.0) as api:
        session = await api.session()
        codes = [(await api.call("GET", "/sessions")).status for _ in range(5)]
        assert codes == [200, 200, 200, 429, 429]
        late = await api.call("GET", "/sessions")
        assert late.headers["retry-after"] == "1"
        assert "max_requests_per_s" in text(late)
        await api.post("/session_heartbeat", {"session_id": session})
        assert (await api.other().call("GET", "/sessions")).status == 200
        await api.clock.sleep(0.5)
        assert (await api.call("GET", "/sessions")).status == 200

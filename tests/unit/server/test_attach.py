"""Attaching: which program may train a model, and what becomes of the program before it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import anyio
import msgspec
import pytest

from tinkex.testing import Delays, FakeServer
from tinkex.wire.routes import SESSION_HEADER

from .conftest import Api

if TYPE_CHECKING:
    from tinkex.transport.base import Reply

    from .conftest import Start

pytestmark = [pytest.mark.anyio, pytest.mark.req("S41")]

SILENT_S = 31.0


async def attach(api: Api, model: str, session: str) -> Reply:
    return await api.call(
        "POST", "/tinkex/attach_model", {"model_id": model, "session_id": session}
    )


def told(reply: Reply) -> Any:
    return msgspec.json.decode(reply.body)


async def beat(api: Api, session: str) -> int:
    return (await api.call("POST", "/session_heartbeat", {"session_id": session})).status


async def step(api: Api, model: str, seq_id: int, session: str | None = None) -> Reply:
    """Submit an optimizer step, as a program that attached does if `session` is given."""
    headers = {} if session is None else {SESSION_HEADER: session}
    body: dict[str, Any] = {"model_id": model, "seq_id": seq_id, "adam_params": {}}
    return await api.call("POST", "/optim_step", body, headers=headers)


async def test_a_model_moves_to_the_new_session_and_its_pending_operations_run(
    start: Start,
) -> None:
    async with start(Delays(train_s=100.0)) as api:
        old = await api.session()
        model = await api.model(old, lora_config={"rank": 4})
        pending = [await api.train(model, 1), await api.step(model, 2)]
        await api.clock.sleep(SILENT_S)
        new = await api.session()
        answer = told(await attach(api, model, new))
        assert answer["next_seq_id"] == 3
        assert (answer["base_model"], answer["lora_config"]["rank"]) == ("tinkex/tiny", 4)
        assert answer["optimizer_config"]["type"] == "adamw"
        for operation in pending:
            assert "error" not in await api.outcome(operation)
        assert (await api.get(f"/sessions/{new}"))["training_run_ids"] == [model]
        assert (await beat(api, old), await beat(api, new)) == (410, 200)
        found = await api.post("/sessions/search", {"session_id": old})
        assert found["sessions"][0]["status"] == {
            "type": "cancelled",
            "detail": f"session {new} attached to model {model}",
        }
        (line,) = await api.server.store.audit_log(api.owner)
        assert line.event == "session_finished"
        assert line.details == {"session_id": old, "attached_by": new}


async def test_a_model_whose_program_was_heard_from_is_refused_until_it_is_silent(
    api: Api,
) -> None:
    old, new = await api.session(), await api.session()
    model = await api.model(old)
    await api.clock.sleep(20.0)
    assert await beat(api, old) == 200
    await api.clock.sleep(20.0)
    refused = await attach(api, model, new)
    assert (refused.status, refused.headers["x-should-retry"]) == (409, "false")
    assert "heard from it 20 s ago" in told(refused)["detail"]
    assert "attach again in 10 s" in told(refused)["detail"]
    await api.clock.sleep(10.0)
    assert (await attach(api, model, new)).status == 200


async def test_a_training_request_is_a_sign_of_life_too(api: Api) -> None:
    model = await api.model()
    await api.clock.sleep(SILENT_S)
    await api.step(model, 1)
    assert (await attach(api, model, await api.session())).status == 409


async def test_of_two_programs_that_attach_at_once_one_succeeds(api: Api) -> None:
    model = await api.model()
    await api.clock.sleep(SILENT_S)
    sessions = [await api.session() for _ in range(5)]
    statuses: dict[str, int] = {}

    async def one(session: str) -> None:
        statuses[session] = (await attach(api, model, session)).status

    async with anyio.create_task_group() as group:
        for session in sessions:
            group.start_soon(one, session)
    assert sorted(statuses.values()) == [200, 409, 409, 409, 409]
    winner = next(session for session, status in statuses.items() if status == 200)
    assert (await api.get(f"/sessions/{winner}"))["training_run_ids"] == [model]


async def test_asking_again_after_a_lost_reply_gives_the_same_answer(api: Api) -> None:
    model = await api.model()
    await api.clock.sleep(SILENT_S)
    session = await api.session()
    first = await attach(api, model, session)
    assert told(await attach(api, model, session)) == told(first)


async def test_only_the_last_program_that_attached_can_train(api: Api) -> None:
    model = await api.model()
    await api.clock.sleep(SILENT_S)
    first, second = await api.session(), await api.session()
    assert (await attach(api, model, first)).status == 200
    await api.clock.sleep(SILENT_S)
    assert (await attach(api, model, second)).status == 200
    refused = [await step(api, model, 1), await step(api, model, 1, first)]
    assert [reply.status for reply in refused] == [400, 400]
    assert "Another program has attached to model" in told(refused[0])["detail"]
    released = {"model_id": model, "seq_ids": [1]}
    assert (await api.call("POST", "/tinkex/release_numbers", released)).status == 400
    accepted = await step(api, model, 1, second)
    assert "error" not in await api.outcome(told(accepted))


async def test_a_session_with_another_open_model_goes_on(api: Api) -> None:
    old = await api.session()
    model, other = await api.model(old), await api.model(old, number=1)
    await api.clock.sleep(SILENT_S)
    assert (await attach(api, model, await api.session())).status == 200
    assert await beat(api, old) == 200
    assert "error" not in await api.outcome(told(await step(api, other, 1)))


@pytest.mark.parametrize("saved", [True, False])
async def test_a_closed_model_is_refused_with_its_last_checkpoint(api: Api, saved: bool) -> None:
    session = await api.session()
    model = await api.model(session)
    if saved:
        for number, name in enumerate(("first", "last"), 1):
            body = {"model_id": model, "seq_id": number, "path": name}
            await api.result(await api.post("/save_weights", body))
    await api.post(f"/sessions/{session}/finish", {"reason": {"type": "success"}, "detail": None})
    refused = await attach(api, model, await api.session())
    assert refused.status == 410
    checkpoint = f"Its last checkpoint is tinker://{model}/weights/last; load it with"
    wanted = checkpoint if saved else "It has no checkpoint to continue from."
    assert wanted in told(refused)["detail"]


async def test_a_model_that_was_unloaded_is_closed(api: Api) -> None:
    session = await api.session()
    model = await api.model(session)
    await api.result(await api.post("/unload_model", {"model_id": model}))
    assert (await attach(api, model, await api.session())).status == 410


async def test_a_number_that_the_old_program_did_not_send_is_not_waited_for(api: Api) -> None:
    model = await api.model()
    await api.step(model, 1)
    behind = await api.step(model, 3)
    await api.clock.sleep(SILENT_S)
    before = api.clock.now()
    answer = await attach(api, model, await api.session())
    assert told(answer)["next_seq_id"] == 4
    assert "error" not in await api.outcome(behind)
    assert api.clock.now() - before < 1.0


async def test_weights_that_the_old_program_wanted_to_sample_from_take_no_number_of_the_new_one(
    start: Start,
) -> None:
    async with start(Delays(train_s=100.0)) as api:
        model = await api.model()
        await api.train(model, 1)
        body = {"model_id": model, "seq_id": 2, "sampling_session_seq_id": 0}
        published = await api.post("/save_weights_for_sampler", body)
        named = await api.post(
            "/save_weights_for_sampler", {"model_id": model, "seq_id": 3, "path": "kept"}
        )
        await api.clock.sleep(SILENT_S)
        session = await api.session()
        assert told(await attach(api, model, session))["next_seq_id"] == 4
        assert "error" in await api.outcome(published)
        assert (await api.result(named))["path"].endswith("/kept")
        assert (await api.get(f"/sessions/{session}"))["sampler_ids"] == []


async def test_a_server_that_starts_again_remembers_who_attached(api: Api) -> None:
    old, new = await api.session(), await api.session()
    model = await api.model(old)
    await api.clock.sleep(SILENT_S)
    await attach(api, model, new)
    await api.result(told(await step(api, model, 1, new)))
    async with FakeServer(clock=api.clock, after=api.server) as server:
        later = Api(server, api.clock)
        assert (await beat(later, old), await beat(later, new)) == (410, 200)
        assert (await step(later, model, 2)).status == 400
        assert told(await attach(later, model, new))["next_seq_id"] == 2


async def test_a_model_whose_creation_was_never_submitted_can_be_attached_to(api: Api) -> None:
    """A full disk between the model's record and its first operation leaves such a record."""
    old = await api.session()
    made = await api.server.store.get_model(await api.model(old))
    assert made is not None
    record = replace(made, model_id=f"{old}:train:7", snapshot_location=None, snapshot_seq=-1)
    await api.server.store.add_model(record)
    await api.clock.sleep(SILENT_S)
    reply = await attach(api, record.model_id, await api.session())
    assert (reply.status, told(reply)["next_seq_id"]) == (200, 1)

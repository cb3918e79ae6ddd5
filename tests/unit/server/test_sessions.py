"""Sessions: how they live, end, and are found again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tinkex.server.api.identity import owner_of_key
from tinkex.server.scheduler.upkeep import PRUNE_INTERVAL_S
from tinkex.server.store.records import StoredSession

if TYPE_CHECKING:
    from .conftest import Api, Start

pytestmark = pytest.mark.anyio

HOUR_S = 3600.0
SUCCESS = {"reason": {"type": "success"}, "detail": None}


async def test_a_finished_session_answers_heartbeats_with_410_and_takes_no_more_work(
    api: Api,
) -> None:
    session = await api.session()
    model = await api.model(session)
    sampler = await api.sampler(session)
    await api.post("/session_heartbeat", {"session_id": session})
    await api.post(f"/sessions/{session}/finish", SUCCESS)
    assert (await api.call("POST", "/session_heartbeat", {"session_id": session})).status == 410
    for path, body in [
        ("/create_model", {"session_id": session, "model_seq_id": 1, "base_model": "tinkex/tiny"}),
        ("/optim_step", {"model_id": model, "seq_id": 1, "adam_params": {}}),
        ("/create_sampling_session", {"session_id": session, "sampling_session_seq_id": 9}),
        (
            "/asample",
            {"sampling_session_id": sampler, "prompt": {"chunks": []}, "sampling_params": {}},
        ),
    ]:
        reply = await api.call("POST", path, body)
        assert reply.status == 400
        assert b"is over" in reply.body


async def test_the_first_reason_to_finish_wins(api: Api) -> None:
    session = await api.session()
    await api.post(f"/sessions/{session}/finish", {"reason": {"type": "errored"}, "detail": "oh"})
    await api.post(f"/sessions/{session}/finish", SUCCESS)
    (found,) = (await api.post("/sessions/search", {"limit": 5}))["sessions"]
    assert found["status"] == {
        "type": "client_finished",
        "reason": {"type": "errored"},
        "detail": "oh",
    }


async def test_finishing_frees_adapters_after_their_accepted_work_has_run(api: Api) -> None:
    session = await api.session()
    model = await api.model(session)
    futures = [await api.train(model, 1), await api.step(model, 2)]
    await api.post(f"/sessions/{session}/finish", SUCCESS)
    for future in futures:
        await api.result(future)
    assert api.server.engine.adapters == ()


async def test_a_clean_up_that_fails_does_not_stop_the_server(
    api: Api, caplog: pytest.LogCaptureFixture
) -> None:
    session = await api.session()
    model = await api.model(session)
    api.server.engine.fail_next("drop_adapter", RuntimeError("stuck"))
    await api.post(f"/sessions/{session}/finish", SUCCESS)
    await api.result(await api.train(await api.model(), 1))
    assert "clean-up failed" in caplog.text
    assert model in api.server.engine.adapters


async def test_silence_ends_a_session_and_its_samples(start: Start) -> None:
    from tinkex.testing.fake_engine import Delays

    async with start(Delays(sample_s=10_000), session_timeout_s=100) as api:
        session = await api.session()
        future = await api.sample(await api.sampler(session))
        await api.clock.sleep(60)
        await api.post("/session_heartbeat", {"session_id": session})
        await api.clock.sleep(90)
        assert (await api.poll(future)).body.find(b"try_again") > 0
        failed = await api.outcome(future)
        assert failed["category"] == "user"
        assert api.clock.now() < 300
        reply = await api.call("POST", "/session_heartbeat", {"session_id": session})
        assert reply.status == 410


async def test_a_session_that_falls_silent_has_one_line_in_the_audit_log(start: Start) -> None:
    async with start(session_timeout_s=100) as api:
        session, finished = await api.session(), await api.session()
        for each in (session, finished):
            await api.post("/session_heartbeat", {"session_id": each})
        await api.post(f"/sessions/{finished}/finish", SUCCESS)
        await api.clock.sleep(1000)
        _, line = await api.server.store.audit_log(api.owner)
        assert (line.topic, line.event) == ("sessions", "session_timed_out")
        assert line.details["session_id"] == session
        assert "no heartbeat for" in str(line.details["detail"])
        assert 100 < line.at - (await stored(api, session)).created_at < 200
        assert await api.other().get("/audit") == {"entries": []}


async def stored(api: Api, session: str) -> StoredSession:
    found = await api.server.store.get_session(session)
    assert found is not None
    return found


async def test_lines_of_the_audit_log_go_after_their_days(start: Start) -> None:
    async with start(audit_days=1, upkeep_interval_s=600, session_timeout_s=1e9) as api:
        first, second = await api.session(), await api.session()

        async def logged() -> list[object]:
            log = await api.server.store.audit_log(api.owner)
            return [line.details["session_id"] for line in log]

        await api.post(f"/sessions/{first}/finish", SUCCESS)
        await api.clock.sleep(12 * HOUR_S)
        await api.post(f"/sessions/{second}/finish", SUCCESS)
        await api.clock.sleep(11 * HOUR_S)
        assert await logged() == [first, second]
        await api.clock.sleep(2 * HOUR_S)
        assert await logged() == [second]
        await api.clock.sleep(12 * HOUR_S)
        assert await logged() == []


async def test_a_session_lists_its_runs_and_samplers(api: Api) -> None:
    session = await api.session(display_name="My run", user_metadata={"k": "v", "n": 3})
    first, second = await api.model(session, 0), await api.model(session, 1)
    sampler = await api.sampler(session)
    assert await api.get(f"/sessions/{session}") == {
        "training_run_ids": [first, second],
        "sampler_ids": [sampler],
        "user_metadata": {"k": "v", "n": "3"},
        "display_name": "My run",
    }


async def test_sessions_are_listed_newest_first_and_only_to_their_owner(api: Api) -> None:
    ids = []
    for _ in range(3):
        ids.append(await api.session())
        await api.clock.sleep(1)
    assert (await api.get("/sessions", query="limit=2"))["sessions"] == [ids[2], ids[1]]
    assert (await api.get("/sessions", query="limit=2&offset=2"))["sessions"] == [ids[0]]
    assert (await api.other().get("/sessions"))["sessions"] == []
    assert (await api.other().call("GET", f"/sessions/{ids[0]}")).status == 404
    assert (await api.call("GET", "/sessions", query="limit=-1")).status == 400


async def test_search_finds_by_name_metadata_project_and_status(api: Api) -> None:
    plain = await api.session()
    named = await api.session(display_name="Big Red Run", user_metadata={"team": "a"})
    await api.call("PUT", f"/sessions/{plain}/project", {"project_id": "p1"})
    await api.post(f"/sessions/{named}/finish", SUCCESS)

    async def ids(**query: object) -> list[str]:
        found = await api.post("/sessions/search", query)
        return [s["session_id"] for s in found["sessions"]]

    assert await ids(display_name="run big") == [named]
    assert await ids(display_name="blue") == []
    assert set(await ids(display_name="red", session_id=plain)) == {plain, named}
    assert await ids(user_metadata={"team": "a"}) == [named]
    assert await ids(project_ids=["p1"]) == [plain]
    assert await ids(statuses=[{"type": "active"}]) == [plain]
    finished = {"type": "client_finished", "reasons": ["success"]}
    assert await ids(statuses=[finished]) == [named]
    assert await ids(statuses=[{**finished, "reasons": ["errored"]}]) == []
    assert await ids(owner={"type": "user", "owner_urns": ["someone"]}) == []


async def test_search_looks_beyond_what_it_reads_at_once(api: Api) -> None:
    names = [f"run-{number}" for number in range(450)]
    for number, name in enumerate(names):
        at = api.clock.wall() + number // 3
        await api.server.store.put_session(
            StoredSession(
                session_id=name,
                owner=owner_of_key(api.key),
                created_at=at,
                last_seen_at=at,
                display_name=name,
            )
        )
    (found,) = (await api.post("/sessions/search", {"display_name": "RUN-0"}))["sessions"]
    assert found["session_id"] == "run-0"
    seen: list[str] = []
    query: dict[str, Any] = {"limit": 200}
    while True:
        page = await api.post("/sessions/search", query)
        seen += [s["session_id"] for s in page["sessions"]]
        if page.get("next_cursor") is None:
            break
        query["cursor"] = page["next_cursor"]
    assert sorted(seen) == sorted(names)


async def test_search_pages_by_cursor_without_losing_or_repeating_any(api: Api) -> None:
    made = []
    for number in range(5):
        made.append(await api.session())
        await api.clock.sleep(number % 2)  # some share a moment
    found, cursor = list[str](), None
    while True:
        query = {"limit": 2} if cursor is None else {"limit": 2, "cursor": cursor}
        page = await api.post("/sessions/search", query)
        found += [s["session_id"] for s in page["sessions"]]
        cursor = page.get("next_cursor")
        if cursor is None:
            break
    assert sorted(found) == sorted(made)
    assert len(found) == 5


async def test_a_session_that_ended_long_ago_is_forgotten_and_its_runs_are_not(
    start: Start,
) -> None:
    async with start(history_s=1000) as api:
        ended, going_on = await api.session(), await api.session()
        model, sampler = await api.model(ended), await api.sampler(ended)
        await api.result(await api.step(model, 1))
        await api.post(f"/sessions/{ended}/finish", SUCCESS)
        for _ in range(2 * int(PRUNE_INTERVAL_S) // 200):
            assert set((await api.get("/sessions"))["sessions"]) >= {going_on, ended}
            await api.clock.sleep(200)
            await api.post("/session_heartbeat", {"session_id": going_on})
        while ended in (await api.get("/sessions"))["sessions"]:
            await api.clock.sleep(200)
            await api.post("/session_heartbeat", {"session_id": going_on})
        assert api.clock.now() < 1000 + 2 * PRUNE_INTERVAL_S
        assert (await api.get("/sessions"))["sessions"] == [going_on]
        assert (await api.call("GET", f"/samplers/{sampler}")).status == 404
        (run,) = (await api.get("/training_runs"))["training_runs"]
        assert run["training_run_id"] == model


async def test_a_short_history_is_not_kept_for_much_longer_than_it_says(start: Start) -> None:
    async with start(history_s=60, upkeep_interval_s=5) as api:
        ended = await api.session()
        await api.post(f"/sessions/{ended}/finish", SUCCESS)
        await api.clock.sleep(130)
        assert ended not in (await api.get("/sessions"))["sessions"]


async def test_a_project_needs_a_name_and_a_session_of_one_s_own(api: Api) -> None:
    session = await api.session()
    path = f"/sessions/{session}/project"
    assert (await api.call("PUT", path, {"project_id": ""})).status == 400
    assert (await api.other().call("PUT", path, {"project_id": "p"})).status == 404
    assert (await api.call("PUT", path, {"project_id": "p"})).status == 200


async def test_messages_of_the_settings_reach_new_sessions(start: Start) -> None:
    async with start(session_messages={"warning": "maintenance at noon"}) as api:
        body = {"tags": [], "user_metadata": {}, "sdk_version": "x"}
        answer = await api.post("/create_session", body)
        assert answer["warning_message"] == "maintenance at noon"
        assert "info_message" not in answer

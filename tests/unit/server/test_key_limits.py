"""Keys that may do less than their tenant: read only, some routes, one project, until a time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from tinkex.server.api.access import GROUPS, READS, WRITES, Access
from tinkex.server.api.identity import KeyLimits, _make_jwt, _make_link, make_key
from tinkex.server.openai.routes import routes as openai_routes
from tinkex.wire.routes import ROUTES

from .conftest import Api, Start

if TYPE_CHECKING:
    from tinkex.transport.base import Reply

pytestmark = pytest.mark.anyio


def text(reply: Reply) -> str:
    return msgspec.json.decode(reply.body)["detail"]


async def with_key(api: Api, **limits: Any) -> Api:
    """A client of the tenant `alice` with a key of its own."""
    key, _ = await make_key(
        api.server.store, api.clock.wall(), owner="alice", limits=KeyLimits(**limits)
    )
    return Api(api.server, api.clock, key)


def route_names() -> set[str]:
    """Every route that asks for a key."""
    openai = {route.app.name for route in openai_routes(None)}  # type: ignore[arg-type, attr-defined]
    return {route.name for route in ROUTES} | openai | {"metrics"}


def test_every_route_either_reads_or_writes() -> None:
    assert not READS & WRITES
    assert route_names() == READS | WRITES


def test_every_route_but_the_keys_own_end_is_in_a_group_or_free() -> None:
    free = Access(routes=frozenset()).routes
    assert free is not None
    named = frozenset[str]().union(*GROUPS.values())
    assert named <= route_names()
    rest = route_names() - named
    everything = Access.of(None)
    assert all(everything.refused(name) is None for name in rest)
    # What remains is what any key may do, except ending itself.
    assert {name for name in rest if name in WRITES} == {"delete_api_key"}


async def test_a_read_only_key_reads_and_changes_nothing(start: Start) -> None:
    async with start(key_mode="stored") as api:
        full = await with_key(api)
        reader = await with_key(api, read_only=True)
        model = await full.model()
        session = model.split(":")[0]
        body = {"model_id": model, "seq_id": 1, "path": "a"}
        future = await full.post("/save_weights", body)
        saved = (await full.result(future))["path"]
        assert (await reader.get("/sessions"))["sessions"] == [session]
        assert (await reader.get("/checkpoints"))["checkpoints"][0]["tinker_path"] == saved
        assert (await reader.result(future))["path"] == saved
        url = f"/training_runs/{model}/checkpoints/weights/a"
        link = (await reader.get(f"{url}/archive"))["url"]
        assert link
        tries = [
            ("POST", "/create_session", {"tags": [], "user_metadata": {}, "sdk_version": "x"}),
            ("POST", "/session_heartbeat", {"session_id": session}),
            ("POST", "/optim_step", {"model_id": model, "seq_id": 2, "adam_params": {}}),
            ("POST", f"{url}/publish", None),
            ("DELETE", url, None),
            ("PUT", f"{url}/ttl", {"ttl_seconds": 3600}),
            ("DELETE", "/auth/apikey/me", None),
            ("POST", f"/sessions/{session}/finish", {"reason": {"type": "success"}}),
        ]
        token = Api(api.server, api.clock, (await reader.post("/auth/token"))["jwt"])
        for method, path, members in tries:
            for who in (reader, token):
                refused = await who.call(method, path, members)
                assert (refused.status, "only read" in text(refused)) == (403, True), path
        assert [c["tinker_path"] for c in (await full.get("/checkpoints"))["checkpoints"]] == [
            saved
        ]


async def test_a_key_for_sampling_samples_and_does_nothing_else(start: Start) -> None:
    async with start(key_mode="stored") as api:
        full, sampling = await with_key(api), await with_key(api, routes=("sample",))
        session = await sampling.session()
        await sampling.post("/session_heartbeat", {"session_id": session})
        future = await sampling.sample(await sampling.sampler(session))
        assert (await sampling.sampled(future)).sequences
        body = {"session_id": session, "model_seq_id": 0, "base_model": "tinkex/tiny"}
        refused = await sampling.call("POST", "/create_model", body)
        assert refused.status == 403
        assert "the routes of sample" in text(refused)
        for path in ("/checkpoints", "/sessions", "/audit"):
            assert (await sampling.call("GET", path)).status == 403
        assert (await sampling.get("/get_server_capabilities"))["supported_models"]
        await full.model(session)
        done = {"reason": {"type": "success"}, "detail": None}
        await sampling.post(f"/sessions/{session}/finish", done)


async def test_a_key_of_a_project_sees_and_makes_only_what_is_in_it(start: Start) -> None:
    async with start(key_mode="stored") as api:
        full, inside = await with_key(api), await with_key(api, project_id="p")
        theirs = await full.model(await full.session(project_id="q"))
        future = await full.post("/save_weights", {"model_id": theirs, "seq_id": 1, "path": "a"})
        hidden = (await full.result(future))["path"]
        session = await inside.session()
        model = await inside.model(session)
        mine = await inside.post("/save_weights", {"model_id": model, "seq_id": 1, "path": "b"})
        path = (await inside.result(mine))["path"]
        assert (await inside.get("/sessions"))["sessions"] == [session]
        found = (await inside.post("/sessions/search", {}))["sessions"]
        assert [(s["session_id"], s["project_id"]) for s in found] == [(session, "p")]
        runs = await inside.get("/training_runs")
        assert [r["training_run_id"] for r in runs["training_runs"]] == [model]
        assert runs["cursor"]["total_count"] == 1
        listed = await inside.get("/checkpoints")
        assert [c["tinker_path"] for c in listed["checkpoints"]] == [path]
        assert listed["cursor"]["total_count"] == 1
        other = theirs.split(":")[0]
        sampler = await full.sampler(other)
        tries = [
            ("GET", f"/sessions/{other}", None),
            ("GET", f"/sessions/{other}/trace_export", None),
            ("GET", f"/training_runs/{theirs}", None),
            ("GET", f"/training_runs/{theirs}/checkpoints", None),
            ("GET", f"/training_runs/{theirs}/checkpoints/weights/a/archive", None),
            ("DELETE", f"/training_runs/{theirs}/checkpoints/weights/a", None),
            ("GET", f"/samplers/{sampler}", None),
            ("POST", "/get_info", {"model_id": theirs}),
            ("POST", "/weights_info", {"tinker_path": hidden}),
            ("POST", "/copy_weights", {"source_path": hidden}),
            ("POST", "/load_weights",
             {"model_id": model, "seq_id": 2, "path": hidden, "optimizer": False}),
            ("POST", "/retrieve_future", {"request_id": future["request_id"]}),
            ("POST", "/cancel_future", {"request_id": future["request_id"]}),
            ("POST", "/create_sampling_session",
             {"session_id": session, "sampling_session_seq_id": 5, "model_path": hidden}),
        ]  # fmt: skip
        for method, route, members in tries:
            reply = await inside.call(method, route, members)
            assert reply.status == 404, (route, reply)
        for method, route, members in [
            ("GET", "/audit", None),
            ("POST", "/create_session",
             {"tags": [], "user_metadata": {}, "sdk_version": "x", "project_id": "q"}),
            ("PUT", f"/sessions/{session}/project", {"project_id": "q"}),
            ("DELETE", "/auth/apikey/me", None),
        ]:  # fmt: skip
            reply = await inside.call(method, route, members)
            assert (reply.status, "'p'" in text(reply)) == (403, True), (route, reply)


async def test_a_limited_key_gives_others_no_access_to_weights(start: Start) -> None:
    async with start(key_mode="stored") as api:
        full, inside = await with_key(api), await with_key(api, project_id="p")
        reader = await with_key(api, read_only=True)
        model = await full.model()
        future = await full.post("/save_weights", {"model_id": model, "seq_id": 1, "path": "a"})
        path = (await full.result(future))["path"]
        key, _ = await make_key(api.server.store, 1.0, owner="bob")
        bob = Api(api.server, api.clock, key)
        wanted = {"source_path": path, "weights_access_token": inside.key}
        assert (await bob.call("POST", "/copy_weights", wanted)).status == 403
        wanted["weights_access_token"] = reader.key
        assert (await bob.call("POST", "/copy_weights", wanted)).status == 200


async def test_a_key_its_tokens_and_its_links_end_at_its_time(start: Start) -> None:
    async with start(key_mode="stored", token_ttl_s=86400.0, url_ttl_s=86400.0) as api:
        full = await with_key(api)
        brief = await with_key(api, expires_at=api.clock.wall() + 100)
        model = await full.model()
        future = await full.post("/save_weights", {"model_id": model, "seq_id": 1, "path": "a"})
        await full.result(future)
        archive = f"/training_runs/{model}/checkpoints/weights/a/archive"
        token = Api(api.server, api.clock, (await brief.post("/auth/token"))["jwt"])
        link = (await brief.get(archive))["url"].partition("/api/v1")[2]
        lasting = (await full.get(archive))["url"].partition("/api/v1")[2]
        assert (await token.call("GET", "/sessions")).status == 200
        assert (await full.call("GET", link)).status == 200
        await api.clock.sleep(101)
        refused = await brief.call("GET", "/sessions")
        assert (refused.status, "has expired" in text(refused)) == (401, True)
        assert (await token.call("GET", "/sessions")).status == 401
        assert (await full.call("GET", link)).status == 403
        assert (await full.call("GET", lasting)).status == 200
        await full.call("DELETE", "/auth/apikey/me")
        assert (await full.call("GET", lasting)).status == 403


@pytest.mark.parametrize("exp", ["soon", None, True, [], -1, 0, 1e300, 10**400, 2**63, "1e99"])
async def test_a_time_that_is_none_is_long_past(start: Start, exp: Any) -> None:
    async with start(key_mode="open", secret=b"s" * 32) as api:
        claims = {"sub": "alice", "key": "open", "exp": exp}
        reply = await Api(api.server, api.clock, signed(_make_jwt, claims)).call("GET", "/sessions")
        assert reply.status == 401
        link = signed(_make_link, {"kind": "trace", "session": "s", "exp": exp})
        reply = await api.call("GET", f"/files/{link}/trace.json")
        assert reply.status in (403, 404)


def signed(make: Any, claims: dict[str, Any]) -> str:
    try:
        return make(b"s" * 32, claims)
    except OverflowError:  # msgspec writes no such number, and reads none
        return make(b"s" * 32, {**claims, "exp": 1e308})


async def test_tokens_outlive_a_date_that_is_set_for_a_while(start: Start) -> None:
    async with start(key_mode="stored", token_ttl_s=3600.0) as api:
        full = await with_key(api)
        token = Api(api.server, api.clock, (await full.post("/auth/token"))["jwt"])
        day = 86_400.0
        real = api.clock.wall
        for jump, status in ((day, 200), (0.0, 200), (-day, 200), (0.0, 200)):
            api.clock.wall = lambda jump=jump: real() + jump  # type: ignore[method-assign]
            assert (await token.call("GET", "/sessions")).status == status
            assert (await full.call("GET", "/sessions")).status == 200


async def test_the_last_use_of_a_key_is_noted_once_a_minute(start: Start) -> None:
    async with start(key_mode="stored") as api:
        full = await with_key(api)
        first = api.clock.wall()
        for _ in range(20):
            await full.get("/sessions")
            await api.clock.sleep(2)
        (kept,) = await api.server.store.keys("alice")
        assert kept.last_used_at == first
        await api.clock.sleep(30)
        await full.get("/sessions")
        (kept,) = await api.server.store.keys("alice")
        assert kept.last_used_at is not None
        assert kept.last_used_at > first + 60


async def test_refused_attempts_are_counted_in_the_audit_log(start: Start) -> None:
    async with start(key_mode="stored") as api:
        full, reader = await with_key(api), await with_key(api, read_only=True)
        body = {"tags": [], "user_metadata": {}, "sdk_version": "x"}
        for _ in range(30):
            await reader.call("POST", "/create_session", body)
            await api.other("tml-wrong").call("GET", "/sessions")
        entries = (await full.get("/audit"))["entries"]
        (line,) = [e for e in entries if e["event"] == "read_only_key:create_session"]
        assert line["event_details"]["count"] == 30
        everything = await api.server.store.audit_log(None)
        assert [e.details["count"] for e in everything if e.event == "bad_key"] == [30]

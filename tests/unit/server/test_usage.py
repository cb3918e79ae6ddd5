"""Usage and audit: tokens by the hour, never money."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, get_args

import msgspec
import pytest

from tinkex.server.api.identity import end_key, make_key
from tinkex.server.api.usage import stored_hours
from tinkex.server.store.records import Part, StoredCheckpoint
from tinkex.testing.fake_engine import Delays
from tinkex.types import (
    AdamOptimizerConfig,
    BillingUsageResponse,
    CurrentCheckpointStorageUsageResponse,
    LoraConfig,
)
from tinkex.wire.json_codec import decode

if TYPE_CHECKING:
    from .conftest import Api, Start

pytestmark = pytest.mark.anyio


def window(api: Api, hours: int = 2) -> str:
    start = datetime.fromtimestamp(api.clock.wall(), UTC).replace(minute=0, second=0, microsecond=0)
    end = start + timedelta(hours=hours)
    times = [t.strftime("%Y-%m-%dT%H:%M:%SZ") for t in (start, end)]
    return f"starting_on={times[0]}&ending_before={times[1]}"


@pytest.mark.req("B17")
async def test_usage_counts_tokens_by_hour_and_kind(api: Api) -> None:
    session = await api.session(user_metadata={"team": "a"})
    model = await api.model(session)
    for seq in (1, 2):
        await api.result(await api.train(model, seq))
    sampler = await api.sampler(session)
    for seq in (0, 1):
        await api.result(await api.sample(sampler, seq))
    usage = await api.get("/billing/usage/events", query=window(api))
    infos = {
        (e["event_info"]["type"], e["event_info"].get("cached")): e["event_info"]["token_count"]
        for e in usage["data"]
    }
    assert infos == {
        ("training", None): 6,
        ("sampling_prefill", False): 4,
        ("sampling_prefill", True): 2,
        ("sampling_sample", None): 8,
    }
    assert all(e.get("estimated_cost_usd") is None for e in usage["data"])
    assert usage["sessions"] == {session: {"user_metadata": {"team": "a"}}}
    assert (await api.other().get("/billing/usage/events", query=window(api)))["data"] == []


@pytest.mark.parametrize(
    "query",
    [
        "",
        "starting_on=yesterday&ending_before=2026-01-01T00:00:00Z",
        "starting_on=2026-01-01T00:30:00Z&ending_before=2026-01-01T01:00:00Z",
        "starting_on=2026-01-02T00:00:00Z&ending_before=2026-01-01T00:00:00Z",
        "starting_on=2026-01-01T00:00:00Z&ending_before=2026-02-01T00:00:00Z",
    ],
)
async def test_a_bad_window_is_refused(api: Api, query: str) -> None:
    assert (await api.call("GET", "/billing/usage/events", query=query)).status == 400


async def test_saved_checkpoints_are_counted_by_the_hour(api: Api) -> None:
    model, query = await api.model(), window(api, hours=4)
    for seq in (1, 2):
        await api.result(await api.post("/save_weights", {"model_id": model, "seq_id": seq}))
    usage = await api.get("/billing/usage/events", query=query)
    infos = [event["event_info"] for event in usage["data"]]
    assert [info["count"] for info in infos if info["type"] == "checkpoint"] == [2]


async def test_storage_is_summed_by_project(api: Api) -> None:
    model = await api.model(await api.session(project_id="p"))
    for seq in (1, 2):
        await api.result(await api.post("/save_weights", {"model_id": model, "seq_id": seq}))
    (item,) = (await api.get("/billing/usage/checkpoints/current"))["data"]
    assert item["project_id"] == "p"
    assert item["checkpoint_count"] == 2
    assert item["size_bytes"] > 0
    other = await api.get("/billing/usage/checkpoints/current", query="project_id=q")
    assert other["data"] == []


async def test_a_tenant_sees_what_its_quota_is_used_for(start: Start) -> None:
    async with start(max_stored_bytes=1_000_000) as api:
        model = await api.model()
        await api.result(await api.post("/save_weights", {"model_id": model, "seq_id": 1}))
        reply = await api.call("GET", "/billing/usage/checkpoints/current")
        answer = msgspec.json.decode(reply.body)
        kept = answer["kept_bytes"]
        assert set(kept) == set(get_args(Part))
        assert kept["checkpoints"] > answer["data"][0]["size_bytes"]
        assert kept["runs"] > 0
        assert kept["losses"] == 0
        assert answer["max_stored_bytes"] == 1_000_000
        # Clients skip what they do not know.
        assert len(decode(CurrentCheckpointStorageUsageResponse, reply.body).data) == 1
        other = await api.other().get("/billing/usage/checkpoints/current")
        assert sum(other["kept_bytes"].values()) == 0


async def test_the_audit_log_is_filtered_by_topic_and_day(api: Api) -> None:
    session = await api.session()
    model = await api.model(session)
    await api.result(await api.post("/save_weights", {"model_id": model, "seq_id": 1}))
    await api.call("PUT", f"/sessions/{session}/project", {"project_id": "p"})
    events = [e["event"] for e in (await api.get("/audit"))["entries"]]
    assert events == ["checkpoint_created", "session_moved"]
    (entry,) = (await api.get("/audit", query="event_type=checkpoints"))["entries"]
    assert entry["tinker_path"].startswith("tinker://")
    assert (await api.get("/audit", query="day=2001-01-01"))["entries"] == []
    assert (await api.call("GET", "/audit", query="day=soon")).status == 400
    assert (await api.call("GET", "/audit", query="event_type=x")).status == 400


async def test_usage_reports_device_seconds_beside_the_protocol_s_members(start: Start) -> None:
    async with start(delays=Delays(train_s=2.0, optim_s=1.0, sample_s=3.0)) as api:
        session = await api.session()
        model = await api.model(session)
        await api.result(await api.train(model, 1))
        await api.result(await api.step(model, 2))
        await api.result(await api.sample(await api.sampler(session)))
        reply = await api.call("GET", "/billing/usage/events", query=window(api))
        seconds = {
            event["event_info"]["type"]: event.get("device_seconds")
            for event in msgspec.json.decode(reply.body)["data"]
        }
        assert seconds["training"] == pytest.approx(3.0, abs=1e-3)
        assert seconds["sampling_sample"] == pytest.approx(3.0, abs=1e-3)
        # (The fake engine takes a little for each token as well.)
        # Every client reads it, and skips what it does not know.
        assert len(decode(BillingUsageResponse, reply.body).data) == len(seconds)


async def test_usage_reports_stored_gigabyte_hours(api: Api) -> None:
    model = await api.model(await api.session(project_id="p"))
    await api.result(await api.post("/save_weights", {"model_id": model, "seq_id": 1}))
    query = window(api)
    await api.clock.sleep(1800)
    usage = await api.get("/billing/usage/events", query=query)
    (size,) = [
        item["size_bytes"] for item in (await api.get("/billing/usage/checkpoints/current"))["data"]
    ]
    events = [e for e in usage["data"] if e["event_info"]["type"] == "storage"]
    assert sum(e["event_info"]["gigabyte_hours"] for e in events) == pytest.approx(size * 0.5 / 1e9)
    assert {e["project_id"] for e in events} == {"p"}
    assert all("estimated_cost_usd" not in e for e in events)


def checkpoint(created_h: float, size: int, expires_h: float | None = None, **members: Any):
    return StoredCheckpoint(
        path="tinker://m/weights/x",
        owner="o",
        model_id="m",
        kind="weights",
        name="x",
        location="l",
        base_model="b",
        lora=LoraConfig(rank=8),
        optimizer=AdamOptimizerConfig(),
        has_optimizer=True,
        created_at=created_h * 3600,
        size_bytes=size,
        expires_at=None if expires_h is None else expires_h * 3600,
        **members,
    )


@pytest.mark.parametrize(
    ("checkpoints", "expected"),
    [
        ([checkpoint(-9, 10**9)], [1, 1, 1, 0.5]),
        ([checkpoint(0.5, 10**9)], [0.5, 1, 1, 0.5]),
        ([checkpoint(1.25, 10**9, 1.75)], [0, 0.5, 0, 0]),
        ([checkpoint(1, 10**9, 2)], [0, 1, 0, 0]),
        ([checkpoint(1.5, 10**9, 2)], [0, 0.5, 0, 0]),
        ([checkpoint(0, 10**9), checkpoint(1.5, 2 * 10**9)], [1, 2, 3, 1.5]),
        ([checkpoint(3.5, 10**9)], [0, 0, 0, 0]),
        ([checkpoint(5, 10**9)], [0, 0, 0, 0]),
        ([checkpoint(-9, 10**9, -8)], [0, 0, 0, 0]),
    ],
)
def test_stored_hours_count_parts_of_hours_up_to_now(
    checkpoints: list[StoredCheckpoint], expected: list[float]
) -> None:
    found = {
        s.hour // 3600: s.gigabyte_hours for s in stored_hours(checkpoints, 0, 4 * 3600, 3.5 * 3600)
    }
    assert [found.get(hour, 0) for hour in range(4)] == pytest.approx(expected)


def test_stored_hours_are_kept_apart_by_project() -> None:
    found = stored_hours(
        [checkpoint(0, 10**9), checkpoint(0, 10**9, project_id="p")], 0, 3600, 3600
    )
    assert {(s.project_id, s.gigabyte_hours) for s in found} == {(None, 1.0), ("p", 1.0)}


async def test_the_audit_log_tells_of_publishing_copying_and_deleting(api: Api) -> None:
    model = await api.model()
    saved = await api.result(
        await api.post("/save_weights", {"model_id": model, "seq_id": 1, "path": "a"})
    )
    path = f"/training_runs/{model}/checkpoints/weights/a"
    await api.call("POST", f"{path}/publish")
    await api.call("DELETE", f"{path}/publish")
    await api.call("PUT", f"{path}/ttl", {"ttl_seconds": 7200})
    await api.post("/copy_weights", {"source_path": saved["path"]})
    await api.call("DELETE", path)
    entries = (await api.get("/audit"))["entries"]
    assert [entry["event"] for entry in entries] == [
        "checkpoint_created",
        "checkpoint_published",
        "checkpoint_unpublished",
        "checkpoint_ttl_set",
        "checkpoint_copied",
        "checkpoint_deleted",
    ]
    assert all(entry["model_id"] and entry["tinker_path"] for entry in entries)
    assert (await api.other().get("/audit"))["entries"] == []


@pytest.mark.parametrize("path", ["/sessions", "/sessions/x", "/training_runs", "/training_runs/x"])
async def test_an_unknown_access_scope_is_refused(api: Api, path: str) -> None:
    for scope in ("owned", "accessible"):
        assert (await api.call("GET", path, query=f"access_scope={scope}")).status in (200, 404)
    reply = await api.call("GET", path, query="access_scope=everything")
    assert reply.status == 400
    assert b"owned or accessible" in reply.body


async def test_the_audit_log_tells_of_keys_made_and_revoked(api: Api) -> None:
    store = api.server.store
    _, first = await make_key(store, 1.0, owner="a", name="laptop")
    _, other = await make_key(store, 2.0, owner="b")
    assert await end_key(store, first.key_id, 3.0)
    assert not await end_key(store, first.key_id, 4.0)
    assert not await end_key(store, 999, 4.0)
    assert [(e.event, e.at, e.details["name"]) for e in await store.audit_log("a")] == [
        ("api_key_created", 1.0, "laptop"),
        ("api_key_revoked", 3.0, "laptop"),
    ]
    assert [e.event for e in await store.audit_log(other.owner)] == ["api_key_created"]

"""Usage and audit: tokens by the hour, never money."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from .conftest import Api

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

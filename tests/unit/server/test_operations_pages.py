"""What an operator reads: health, readiness, metrics, the description of the interface."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.docs.blocks import page_named
from tinkex.engine.protocol import GAUGES
from tinkex.errors import EngineDiedError, StorageError
from tinkex.server.api.identity import make_key
from tinkex.server.cluster.figures import ClusterFigures
from tinkex.server.observability.meters import Meters
from tinkex.testing.fake_engine import Delays
from tinkex.transport.base import HttpRequest, Pool, Reply

if TYPE_CHECKING:
    from pathlib import Path

    from .conftest import Api, Start

pytestmark = pytest.mark.anyio

PAGE = page_named("metrics.md")


async def page(api: Api, path: str, **headers: str) -> Reply:
    """A page at the root, asked for without a key."""
    return await api.transport.send(HttpRequest("GET", path, Pool.REST, 60, headers=headers))


async def metrics(api: Api) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    reply = await page(api, "/metrics")
    assert reply.status == 200
    assert reply.headers["content-type"].startswith("text/plain")
    return {
        (sample.name.removeprefix("tinkex_"), tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(reply.body.decode())
        for sample in family.samples
    }


def parts(api: Api) -> Any:
    return api.server._parts


async def test_health_needs_no_key_and_says_only_that_the_process_answers(api: Api) -> None:
    reply = await page(api, "/healthz")
    assert (reply.status, reply.body) == (200, b'{"status":"ok"}')


async def test_metrics_count_requests_by_route_and_status(api: Api) -> None:
    await api.session()
    await api.call("GET", "/sessions/none")
    await page(api, "/no/such/page")
    found = await metrics(api)
    assert found["requests_total", (("route", "create_session"), ("status", "200"))] == 1
    assert found["requests_total", (("route", "get_session"), ("status", "404"))] == 1
    assert found["requests_total", (("route", "unknown"), ("status", "404"))] == 1
    assert found["request_seconds_count", (("route", "create_session"),)] == 1


async def test_metrics_count_operations_tokens_and_times(start: Start) -> None:
    async with start(delays=Delays(train_s=2.0)) as api:
        session = await api.session()
        model = await api.model(session)
        await api.result(await api.train(model, 1))
        await api.outcome(await api.train(model, 2, loss_fn="nonsense"))
        sampler = await api.sampler(session)
        await api.result(await api.sample(sampler))
        found = await metrics(api)
        ok = (("kind", "forward_backward"), ("outcome", "ok"))
        failed = (("kind", "forward_backward"), ("outcome", "error_user"))
        assert found["operations_total", ok] == 1
        assert found["operations_total", failed] == 1
        assert found["tokens_total", (("kind", "trained"),)] == 3
        assert found["tokens_total", (("kind", "prompt"),)] == 3
        assert found["tokens_total", (("kind", "generated"),)] == 4
        assert found["step_seconds_sum", (("kind", "forward_backward"),)] == pytest.approx(2.0)
        assert found["sessions_active", ()] == 1
        assert found["engine_adapters_resident", ()] >= 1


async def test_metrics_show_what_waits(start: Start) -> None:
    async with start(delays=Delays(train_s=1000.0, sample_s=1000.0)) as api:
        model = await api.model()
        for seq in (1, 3, 4):
            await api.train(model, seq)
        found = await metrics(api)
        assert found["queue_length", (("kind", "forward_backward"),)] == 2
        assert found["journal_bytes", ()] > 3 * 50
        sampler = await api.sampler(await api.session())
        await api.sample(sampler)
        assert (await metrics(api))["samples_in_flight", ()] == 1


async def test_metrics_do_not_wait_for_an_engine_that_says_nothing(api: Api) -> None:
    async def silent() -> dict[str, float]:
        await api.clock.sleep(3600)
        raise AssertionError("nobody waits so long")

    api.server.engine.stats = silent  # type: ignore[method-assign]
    before = api.clock.now()
    found = await metrics(api)
    assert api.clock.now() - before < 2
    assert found["engine_adapters_resident", ()] != found["engine_adapters_resident", ()]

    async def dead() -> dict[str, float]:
        raise EngineDiedError("the engine has ended")

    api.server.engine.stats = dead  # type: ignore[method-assign]
    await metrics(api)


async def test_metrics_do_not_need_a_store_that_answers(api: Api) -> None:
    await api.session()
    assert (await metrics(api))["sessions_active", ()] == 1

    async def failing(owner: str | None = None, **conditions: bool) -> int:
        raise StorageError("the disk is gone", "store.db")

    api.server.store.count_sessions = failing  # type: ignore[method-assign]
    assert (await metrics(api))["sessions_active", ()] == 1


@pytest.mark.parametrize("mode", ["fixed", "stored"])
async def test_metrics_need_a_key_where_all_others_do(start: Start, mode: str) -> None:
    keys = {"keys": frozenset({"tml-one"})} if mode == "fixed" else {}
    async with start(key_mode=mode, **keys) as api:
        key = "tml-one"
        if mode == "stored":
            key, _ = await make_key(api.server.store, 0.0, owner="me")
        refused = await page(api, "/metrics")
        assert refused.status == 401
        assert "key" in msgspec.json.decode(refused.body)["detail"]
        assert b"tinkex_" not in refused.body
        assert (await page(api, "/metrics", authorization="Bearer wrong")).status == 401
        for headers in ({"authorization": f"Bearer {key}"}, {"x-api-key": key}):
            reply = await page(api, "/metrics", **headers)
            assert reply.status == 200
            assert b"tinkex_sessions_active 0.0" in reply.body
        for open_page in ("/healthz", "/readyz", "/openapi.json"):
            assert (await page(api, open_page)).status == 200


async def test_metrics_need_no_key_on_a_server_of_one_tenant(start: Start) -> None:
    async with start(key_mode="single") as api:
        assert (await page(api, "/metrics")).status == 200


async def test_a_server_is_ready_until_a_part_says_what_it_waits_for(api: Api) -> None:
    assert (await page(api, "/readyz")).body == b'{"status":"ready"}'
    parts(api).readiness.waits("engine", "the engine loads tinkex/tiny")
    reply = await page(api, "/readyz")
    assert reply.status == 503
    assert msgspec.json.decode(reply.body) == {
        "status": "not ready",
        "detail": "engine: the engine loads tinkex/tiny",
        "reasons": {"engine": "the engine loads tinkex/tiny"},
    }
    assert (await metrics(api))["ready", ()] == 0
    parts(api).readiness.ready("engine")
    assert (await page(api, "/readyz")).status == 200


async def test_a_disk_that_is_nearly_full_makes_the_server_unready(
    start: Start, tmp_path: Path
) -> None:
    async with start(watched_folder=tmp_path, min_free_bytes=1 << 60) as api:
        reply = await page(api, "/readyz")
        assert reply.status == 503
        assert "min_free_bytes" in msgspec.json.decode(reply.body)["reasons"]["disk"]
    async with start(watched_folder=tmp_path, min_free_bytes=1) as api:
        assert (await page(api, "/readyz")).status == 200


async def test_a_store_that_fails_makes_the_server_unready_until_it_takes_a_write(
    api: Api, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = api.server.store

    async def full(*args: object, **more: object) -> None:
        raise StorageError("the disk of /data is full; free some space", "/data")

    with monkeypatch.context() as patch:
        patch.setattr(store, "add_session", full)
        patch.setattr(store, "probe", full)
        body = {"tags": [], "user_metadata": {}, "sdk_version": "x"}
        refused = await api.call("POST", "/create_session", body)
        assert refused.status == 507
        assert "its disk is full, read-only" in msgspec.json.decode(refused.body)["detail"]
        reply = await page(api, "/readyz")
        assert reply.status == 503
        assert "the disk is full" in msgspec.json.decode(reply.body)["reasons"]["store"]
        # The operator's log has the place; neither page shows it.
        assert b"/data" not in refused.body + reply.body
        assert "the disk of /data is full" in caplog.text
    assert (await page(api, "/readyz")).status == 200


async def test_a_store_that_does_not_answer_makes_the_server_unready(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def stuck(*args: object) -> None:
        await api.clock.sleep(3600)

    monkeypatch.setattr(api.server.store, "recall", stuck)
    reply = await page(api, "/readyz")
    assert reply.status == 503
    assert b"has not answered for 2 s" in reply.body


async def test_the_description_is_served_and_names_every_route(api: Api) -> None:
    from tinkex.wire.routes import ROUTES

    document = msgspec.json.decode((await page(api, "/openapi.json")).body)
    assert document["openapi"].startswith("3.1")
    named = {op["operationId"] for path in document["paths"].values() for op in path.values()}
    assert {route.name for route in ROUTES} <= named


def test_every_metric_is_documented_and_nothing_else() -> None:
    meters = Meters()
    meters.show(queues={"sample": 1}, engine=dict.fromkeys(GAUGES, 1.0))
    node: Any = SimpleNamespace(lease_age_s=0.0, roster=SimpleNamespace(nodes={}))
    node.keys = SimpleNamespace(owned={}, taken_over=0, handed_over=0)
    node.samples = SimpleNamespace(computed=0)
    meters.registry.register(ClusterFigures(node))
    made = {family.name for family in meters.registry.collect()}
    listed = set(re.findall(r"^\| `tinkex_(\w+)`", PAGE.read_text(), re.MULTILINE))
    assert {name.removesuffix("_total") for name in listed} == {
        name.removeprefix("tinkex_").removesuffix("_total") for name in made
    }


def test_connections_are_read_from_the_http_server() -> None:
    meters, refused = Meters(), {"limit": 2}
    assert b"tinkex_connections_open 0.0" in meters.text()
    meters.watch_connections(lambda: (3, refused))
    assert b"tinkex_connections_open 3.0" in meters.text()
    refused["limit"] = 5
    assert b'tinkex_connections_refused_total{reason="limit"} 5.0' in meters.text()


def test_two_servers_in_one_process_count_apart() -> None:
    one, two = Meters(), Meters()
    one.request("healthz", 200, 0.1)
    assert b'route="healthz"' in one.text()
    assert b'route="healthz"' not in two.text()
    one.engine_restarted()
    assert b"tinkex_engine_restarts_total 1.0" in one.text()

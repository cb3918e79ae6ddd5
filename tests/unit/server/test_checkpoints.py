"""Saved weights: resume, overwrite, expiry, publishing, copies, downloads."""

from __future__ import annotations

import io
import tarfile
from dataclasses import replace
from typing import Any

import anyio
import anyio.lowlevel
import msgspec
import pytest

from tinkex.errors import EngineDiedError
from tinkex.server.store.memory import MemoryStore
from tinkex.server.store.records import StoredCheckpoint
from tinkex.types import AdamOptimizerConfig, LoraConfig
from tinkex.types.bounds import LISTED_RECORDS

from .conftest import Api

pytestmark = pytest.mark.anyio


async def save(api: Api, model: str, seq: int, name: str | None = "one", **members: Any) -> Any:
    body = {"model_id": model, "seq_id": seq, "path": name, "type": "save_weights", **members}
    return await api.outcome(await api.post("/save_weights", body))


async def trained(api: Api) -> tuple[str, str]:
    """A model after one step, and its session."""
    session = await api.session()
    model = await api.model(session)
    await api.train(model, 1)
    await api.result(await api.step(model, 2))
    return session, model


async def load(api: Api, session: str, number: int, path: str, *, optimizer: bool) -> Any:
    body = {
        "session_id": session,
        "model_seq_id": number,
        "path": path,
        "optimizer": optimizer,
        "type": "load_weights",
    }
    return await api.post("/load_weights", body)


async def continue_run(api: Api, model: str, seq: int) -> list[float]:
    losses = []
    for offset in range(0, 4, 2):
        losses.append(await api.loss(await api.train(model, seq + offset)))
        await api.step(model, seq + offset + 1)
    return losses


@pytest.mark.req("B16")
async def test_a_run_resumed_with_its_optimizer_equals_the_unbroken_one(api: Api) -> None:
    session, model = await trained(api)
    path = (await save(api, model, 3))["path"]
    assert path == f"tinker://{model}/weights/one"
    unbroken = await continue_run(api, model, 4)
    future = await load(api, session, 1, path, optimizer=True)
    resumed = (await api.result(future))["model_id"]
    assert resumed == f"{session}:train:1"
    assert await continue_run(api, resumed, 1) == unbroken


async def test_without_the_optimizer_only_the_weights_are_restored(api: Api) -> None:
    session, model = await trained(api)
    path = (await save(api, model, 3))["path"]
    unbroken = await continue_run(api, model, 4)
    resumed = (await api.result(await load(api, session, 1, path, optimizer=False)))["model_id"]
    losses = await continue_run(api, resumed, 1)
    assert losses[0] == unbroken[0]
    assert losses[1] != unbroken[1]


async def test_the_legacy_way_of_resuming_gives_the_same_model(api: Api) -> None:
    session, model = await trained(api)
    path = (await save(api, model, 3))["path"]
    unbroken = await continue_run(api, model, 4)
    info = await api.post("/weights_info", {"tinker_path": path})
    assert info["lora_rank"] == 8
    assert info["train_unembed"] is True
    other = await api.model(session, 1, base_model=info["base_model"])
    body = {"model_id": other, "seq_id": 1, "path": path, "optimizer": True}
    assert (await api.result(await api.post("/load_weights", body)))["path"] == path
    assert await continue_run(api, other, 2) == unbroken


async def test_an_existing_name_is_kept_unless_overwriting_is_asked_for(api: Api) -> None:
    _, model = await trained(api)
    await save(api, model, 3, user_metadata={"a": "1"})
    refused = await save(api, model, 4)
    assert refused["category"] == "user"
    assert "overwrite" in refused["error"]
    await save(api, model, 5, overwrite=True, user_metadata={"b": "2"})
    (listed,) = (await api.get(f"/training_runs/{model}/checkpoints"))["checkpoints"]
    assert listed["user_metadata"] == {"b": "2"}


async def test_a_sampler_of_an_overwritten_checkpoint_keeps_what_it_had(api: Api) -> None:
    session, model = await trained(api)
    path = (await save(api, model, 3))["path"]
    sampler = await api.sampler(session, model_path=path)
    before = await api.sampled(await api.sample(sampler, 0, prompt_logprobs=True))
    await api.train(model, 4)
    await api.step(model, 5)
    await save(api, model, 6, overwrite=True)
    after = await api.sampled(await api.sample(sampler, 1, prompt_logprobs=True))
    assert after.prompt_logprobs == before.prompt_logprobs
    newer = await api.sampler(session, 1, model_path=path)
    fresh = await api.sampled(await api.sample(newer, 0, prompt_logprobs=True))
    assert fresh.prompt_logprobs != before.prompt_logprobs


@pytest.mark.parametrize("name", ["a/b", "../x", "", ".hidden", "x" * 129, "a b"])
async def test_names_that_could_leave_their_folder_are_refused(api: Api, name: str) -> None:
    _, model = await trained(api)
    outcome = await save(api, model, 3, name)
    if name == "":
        assert outcome["path"].endswith("/000003")
    else:
        assert "not possible" in outcome["error"]


@pytest.mark.parametrize("ttl", [0, 3599, 10 * 366 * 86400, -5])
async def test_lifetimes_outside_an_hour_to_ten_years_are_refused(api: Api, ttl: int) -> None:
    _, model = await trained(api)
    assert "ttl_seconds" in (await save(api, model, 3, ttl_seconds=ttl))["error"]


async def test_a_checkpoint_expires_at_its_time(api: Api) -> None:
    session, model = await trained(api)
    path = (await save(api, model, 3, ttl_seconds=3600))["path"]
    listed = await api.get("/checkpoints")
    assert listed["checkpoints"][0]["expires_at"]
    for _ in range(36):
        await api.clock.sleep(100)
        await api.post("/session_heartbeat", {"session_id": session})
    assert (await api.get("/checkpoints"))["cursor"]["total_count"] == 0
    assert (await api.call("POST", "/weights_info", {"tinker_path": path})).status == 404
    await api.clock.sleep(31)
    assert "delete_saved" in [call.name for call in api.server.engine.calls]


async def test_a_lifetime_can_be_set_and_removed(api: Api) -> None:
    _, model = await trained(api)
    await save(api, model, 3)
    url = f"/training_runs/{model}/checkpoints/weights/one/ttl"
    assert (await api.call("PUT", url, {"ttl_seconds": 7200})).status == 200
    assert "expires_at" in (await api.get("/checkpoints"))["checkpoints"][0]
    assert (await api.call("PUT", url, {"ttl_seconds": None})).status == 200
    assert "expires_at" not in (await api.get("/checkpoints"))["checkpoints"][0]
    assert (await api.call("PUT", url, {"ttl_seconds": 5})).status == 400


async def test_publishing_lets_others_read_and_nothing_else(api: Api) -> None:
    _, model = await trained(api)
    path = (await save(api, model, 3))["path"]
    url = f"/training_runs/{model}/checkpoints/weights/one"
    other = api.other()
    info = {"tinker_path": path}
    assert (await other.call("POST", "/weights_info", info)).status == 404
    for _ in range(2):
        assert (await api.call("POST", f"{url}/publish")).status == 200
    assert (await other.call("POST", "/weights_info", info)).status == 200
    theirs = await other.session()
    await other.result(await load(other, theirs, 0, path, optimizer=True))
    assert (await other.call("DELETE", url)).status == 404
    assert (await other.call("DELETE", f"{url}/publish")).status == 404
    assert (await api.call("DELETE", f"{url}/publish")).status == 200
    assert (await other.call("POST", "/weights_info", info)).status == 404
    assert (await api.get("/checkpoints"))["checkpoints"][0]["public"] is False


async def test_an_access_token_opens_somebody_else_s_weights(api: Api) -> None:
    _, model = await trained(api)
    path = (await save(api, model, 3))["path"]
    other = api.other()
    body = {
        "session_id": await other.session(),
        "model_seq_id": 0,
        "path": path,
        "optimizer": False,
    }
    assert (await other.call("POST", "/load_weights", body)).status == 404
    body["weights_access_token"] = api.key
    await other.result(await other.post("/load_weights", body))


async def test_a_deleted_checkpoint_is_gone_for_everybody_but_its_samplers(api: Api) -> None:
    session, model = await trained(api)
    path = (await save(api, model, 3))["path"]
    sampler = await api.sampler(session, model_path=path)
    url = f"/training_runs/{model}/checkpoints/weights/one"
    assert (await api.call("DELETE", url)).status == 200
    assert (await api.call("DELETE", url)).status == 404
    await api.result(await api.sample(sampler))
    body = {"model_id": model, "seq_id": 4, "path": path, "optimizer": False}
    failed = await api.outcome(await api.post("/load_weights", body))
    assert path in failed["error"]


@pytest.mark.req("B19")
async def test_training_and_sampling_checkpoints_serve_each_other_where_they_can(
    api: Api,
) -> None:
    session, model = await trained(api)
    state = (await save(api, model, 3))["path"]
    body = {"model_id": model, "seq_id": 4, "path": "samp"}
    sampler_path = (await api.result(await api.post("/save_weights_for_sampler", body)))["path"]
    assert sampler_path == f"tinker://{model}/sampler_weights/samp"
    for number, path in enumerate([state, sampler_path]):
        sampler = await api.sampler(session, number, model_path=path)
        await api.result(await api.sample(sampler))
    await api.result(await load(api, session, 1, sampler_path, optimizer=False))
    reply = await api.call(
        "POST",
        "/load_weights",
        {"session_id": session, "model_seq_id": 2, "path": sampler_path, "optimizer": True},
    )
    assert reply.status == 400
    assert b"save_state" in reply.body


async def test_a_checkpoint_of_another_base_model_does_not_load(api: Api) -> None:
    session, model = await trained(api)
    path = (await save(api, model, 3))["path"]
    other = await api.model(session, 1, base_model="tinkex/tiny-2")
    body = {"model_id": other, "seq_id": 1, "path": path, "optimizer": False}
    failed = await api.outcome(await api.post("/load_weights", body))
    assert "tinkex/tiny-2" in failed["error"]


async def test_a_copy_leaves_no_open_model_and_an_open_one_stays_open(api: Api) -> None:
    session, model = await trained(api)
    path = (await save(api, model, 3))["path"]
    open_before = [m.model_id for m in await api.server.store.open_models()]
    await api.post("/copy_weights", {"source_path": path})
    place = {"session_id": session, "model_seq_id": 5}
    await api.post("/copy_weights", {"source_path": path, **place})
    assert [m.model_id for m in await api.server.store.open_models()] == open_before
    assert len((await api.get("/training_runs"))["training_runs"]) == 3


async def test_a_copy_is_made_once_per_key_and_outlives_its_source(api: Api) -> None:
    session, model = await trained(api)
    path = (await save(api, model, 3, ttl_seconds=3600))["path"]
    body = {"source_path": path, "destination_project_id": "p2"}
    headers = {"x-idempotency-key": "0b2c"}
    first = await api.post("/copy_weights", body, headers=headers)
    assert await api.post("/copy_weights", body, headers=headers) == first
    copy = first["tinker_path"]
    assert copy != path
    listed = {c["tinker_path"]: c for c in (await api.get("/checkpoints"))["checkpoints"]}
    assert "expires_at" in listed[path]
    assert "expires_at" not in listed[copy]
    await api.call("DELETE", f"/training_runs/{model}/checkpoints/weights/one")
    await api.result(await load(api, session, 1, copy, optimizer=True))


async def test_an_export_is_downloaded_by_signed_links_without_a_key(api: Api) -> None:
    _, model = await trained(api)
    body = {"model_id": model, "seq_id": 3, "path": "out"}
    saved = await api.result(await api.post("/save_weights_external", body))
    assert saved["size_bytes"] > 0
    url = f"/training_runs/{model}/checkpoints/external_weights/out/external_weights_urls"
    links = await api.get(url)
    assert set(links["urls"]) == {"adapter_config.json", "adapter_model.safetensors"}
    stranger = Api(api.server, api.clock, key="")
    path = links["urls"]["adapter_config.json"].split("/api/v1", 1)[1]
    reply = await stranger.call("GET", path)
    assert msgspec.json.decode(reply.body)["r"] == 8
    assert (await stranger.call("GET", path.replace("/files/", "/files/x"))).status == 404
    assert (await stranger.call("GET", path + "x")).status == 404
    await api.clock.sleep(4000)
    assert (await stranger.call("GET", path)).status == 403


async def test_only_exports_have_links(api: Api) -> None:
    _, model = await trained(api)
    await save(api, model, 3)
    url = f"/training_runs/{model}/checkpoints/weights/one/external_weights_urls"
    assert (await api.call("GET", url)).status == 400


@pytest.mark.parametrize("ckpt", ["one", "onne/one"])
@pytest.mark.parametrize(
    ("method", "rest"),
    [
        ("DELETE", ""),
        ("GET", "/archive"),
        ("GET", "/external_weights_urls"),
        ("POST", "/publish"),
        ("DELETE", "/publish"),
        ("PUT", "/ttl"),
    ],
)
async def test_a_checkpoint_without_its_kind_is_told_what_an_id_looks_like(
    api: Api, method: str, rest: str, ckpt: str
) -> None:
    _, model = await trained(api)
    await save(api, model, 3)
    body = {"ttl_seconds": None} if method == "PUT" else None
    url = f"/training_runs/{model}/checkpoints/{ckpt}{rest}"
    refused = await api.call(method, url, body)
    assert refused.status == 400
    assert b"weights/NAME or sampler_weights/NAME" in refused.body
    assert len((await api.get("/checkpoints"))["checkpoints"]) == 1


async def test_checkpoints_named_like_a_part_of_a_path_are_found(api: Api) -> None:
    _, model = await trained(api)
    for seq, name in enumerate(("publish", "archive", "ttl"), 3):
        await save(api, model, seq, name)
        url = f"/training_runs/{model}/checkpoints/weights/{name}"
        assert (await api.call("GET", f"{url}/archive")).status == 200
        assert (await api.call("DELETE", url)).status == 200
    assert (await api.get("/checkpoints"))["checkpoints"] == []


async def test_older_clients_download_an_archive(api: Api) -> None:
    _, model = await trained(api)
    body = {"model_id": model, "seq_id": 3, "path": "samp"}
    await api.result(await api.post("/save_weights_for_sampler", body))
    url = f"/training_runs/{model}/checkpoints/sampler_weights/samp/archive"
    redirect = await api.call("GET", url, headers={"accept": "application/gzip"})
    assert redirect.status == 302
    link = (await api.get(url))["url"]
    for found in (redirect.headers["location"], link):
        reply = await Api(api.server, api.clock, key="").call("GET", found.split("/api/v1", 1)[1])
        with tarfile.open(fileobj=io.BytesIO(reply.body)) as tar:
            assert tar.getnames() == ["adapter_config.json", "adapter_model.safetensors"]


async def test_all_checkpoints_are_paged_newest_first(api: Api) -> None:
    _, model = await trained(api)
    for seq in range(3, 6):
        await save(api, model, seq, f"c{seq}")
        await api.clock.sleep(1)
    page = await api.get("/checkpoints", query="limit=2")
    assert [c["checkpoint_id"] for c in page["checkpoints"]] == ["weights/c5", "weights/c4"]
    assert page["cursor"] == {"offset": 0, "limit": 2, "total_count": 3}
    assert (await api.other().get("/checkpoints"))["checkpoints"] == []
    old = await api.get(f"/models/{model}/checkpoints")
    assert len(old["checkpoints"]) == 3


# -- changed by two at once ------------------------------------------------------------------------


class YieldingStore(MemoryStore):
    """Lets others run between a read and what is done with it, as a database does."""

    async def get_checkpoint(self, path: str) -> StoredCheckpoint | None:
        found = await super().get_checkpoint(path)
        await anyio.lowlevel.checkpoint()
        return found


def stored(location: str) -> StoredCheckpoint:
    return StoredCheckpoint(
        path="tinker://m/weights/one",
        owner="a",
        model_id="m",
        kind="weights",
        name="one",
        location=location,
        base_model="tinkex/tiny",
        lora=LoraConfig(rank=8),
        optimizer=AdamOptimizerConfig(),
        has_optimizer=True,
        created_at=0.0,
        size_bytes=1,
    )


@pytest.mark.parametrize("overwritten_first", [True, False])
async def test_publishing_never_brings_back_what_is_being_overwritten(
    overwritten_first: bool,
) -> None:
    store = YieldingStore()
    old, new = stored("old"), stored("new")
    await store.put_checkpoint(old)

    async def publish() -> None:
        await store.change_checkpoint(old, public=True)

    async def overwrite() -> None:
        await store.put_checkpoint(new)

    async with anyio.create_task_group() as group:
        for do in (overwrite, publish) if overwritten_first else (publish, overwrite):
            group.start_soon(do)
    assert await store.get_checkpoint(new.path) == new
    assert not await store.delete_checkpoint(old)
    assert await store.delete_checkpoint(new)


async def test_a_deleted_checkpoint_is_gone_at_once_and_its_files_when_the_engine_can(
    api: Api,
) -> None:
    _, model = await trained(api)
    path = (await save(api, model, 3))["path"]
    api.server.engine.fail_next("delete_saved", EngineDiedError("it died"))
    url = f"/training_runs/{model}/checkpoints/weights/one"
    assert (await api.call("DELETE", url)).status == 200
    assert (await api.call("DELETE", url)).status == 404
    assert (await api.get("/checkpoints"))["checkpoints"] == []
    before = [call.name for call in api.server.engine.calls].count("delete_saved")
    await api.clock.sleep(31)
    assert [call.name for call in api.server.engine.calls].count("delete_saved") > before
    assert await api.server.store.get_checkpoint(path) is None


async def test_the_name_of_a_deleted_or_expired_checkpoint_is_free_again(api: Api) -> None:
    _, model = await trained(api)
    await save(api, model, 3)
    api.server.engine.fail_next("delete_saved", EngineDiedError("it died"))
    await api.call("DELETE", f"/training_runs/{model}/checkpoints/weights/one")
    assert "path" in await save(api, model, 4)
    await api.clock.sleep(31)
    assert len((await api.get("/checkpoints"))["checkpoints"]) == 1


async def test_runs_with_something_published_are_listed_on_request(api: Api) -> None:
    _, model = await trained(api)
    await save(api, model, 3, "shown")
    await save(api, model, 4, "hidden")
    await api.call("POST", f"/training_runs/{model}/checkpoints/weights/shown/publish")
    other = api.other()
    own = await other.model()
    assert [r["training_run_id"] for r in await runs(other, "")] == [own]
    listed = {r["training_run_id"]: r for r in await runs(other, "access_scope=accessible")}
    assert set(listed) == {own, model}
    assert listed[model]["last_checkpoint"]["checkpoint_id"] == "weights/shown"
    shown = await other.get(f"/training_runs/{model}/checkpoints")
    assert [c["checkpoint_id"] for c in shown["checkpoints"]] == ["weights/shown"]
    reply = await other.call("GET", "/training_runs", query="access_scope=everything")
    assert reply.status == 400


async def test_every_published_run_is_found_in_pages(api: Api) -> None:
    """Also those behind more checkpoints than a listing reads at once."""
    _, model = await trained(api)
    await save(api, model, 3, "shown")
    await api.call("POST", f"/training_runs/{model}/checkpoints/weights/shown/publish")
    store, other = api.server.store, api.other()
    (known,) = await store.checkpoints(public=True)
    own = await other.model()
    newer = replace(known, model_id="many", created_at=known.created_at + 1)
    for number in range(LISTED_RECORDS + 1):
        await store.put_checkpoint(replace(newer, path=f"{known.path}-{number}"))
    run = await store.get_model(model)
    assert run is not None
    await store.add_model(replace(run, model_id="many"))
    found = []
    for offset in range(4):
        query = f"access_scope=accessible&limit=1&offset={offset}"
        reply = await other.get("/training_runs", query=query)
        assert reply["cursor"]["total_count"] == 3
        found += [each["training_run_id"] for each in reply["training_runs"]]
    assert found == ["many", own, model]


async def runs(api: Api, query: str) -> Any:
    return (await api.get("/training_runs", query=query))["training_runs"]

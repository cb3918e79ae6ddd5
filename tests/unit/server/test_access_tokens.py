"""Reading somebody else's weights with a token of theirs, in every way clients do it."""

from __future__ import annotations

from typing import Any

import pytest

from tinkex.server.api.identity import make_key

from .conftest import Api, Start

pytestmark = pytest.mark.anyio

HEADER = "x-tinker-weights-access-token"


async def saved(api: Api) -> str:
    """The path of a checkpoint after a step."""
    model = await api.model()
    await api.train(model, 1)
    await api.step(model, 2)
    future = await api.post("/save_weights", {"model_id": model, "seq_id": 3, "path": "one"})
    return (await api.result(future))["path"]


def create(session: str, path: str, **members: Any) -> dict[str, Any]:
    return {"session_id": session, "model_seq_id": 0, "path": path, "optimizer": True, **members}


@pytest.mark.parametrize("kind", ["key", "token"])
async def test_a_run_is_resumed_from_somebody_else_s_checkpoint(api: Api, kind: str) -> None:
    path = await saved(api)
    token = api.key if kind == "key" else (await api.post("/auth/token"))["jwt"]
    other = api.other()
    body = create(await other.session(), path, weights_access_token=token)
    await other.result(await other.post("/load_weights", body))


@pytest.mark.parametrize("kind", ["key", "token"])
async def test_the_legacy_way_uses_the_token_as_the_key_of_a_second_connection(
    api: Api, kind: str
) -> None:
    path = await saved(api)
    second = api
    if kind == "token":
        second = Api(api.server, api.clock, (await api.post("/auth/token"))["jwt"])
    info = await second.post("/weights_info", {"tinker_path": path})
    other = api.other()
    model = await other.model(base_model=info["base_model"])
    body = {"model_id": model, "seq_id": 1, "path": path, "optimizer": True}
    failed = await other.outcome(await other.post("/load_weights", body))
    assert path in failed["error"]
    body = {**body, "seq_id": 2, "weights_access_token": second.key}
    assert (await other.result(await other.post("/load_weights", body)))["path"] == path


async def test_a_copy_made_with_a_token_is_the_copier_s_own(api: Api) -> None:
    path = await saved(api)
    other = api.other()
    body = {"source_path": path, "destination_project_id": "p"}
    copy = (await other.post("/copy_weights", body, headers={HEADER: api.key}))["tinker_path"]
    run = copy.removeprefix("tinker://").partition("/")[0]
    assert (
        await other.call("DELETE", f"/training_runs/{run}/checkpoints/weights/one")
    ).status == 200
    assert (await api.get("/checkpoints"))["cursor"]["total_count"] == 1


async def test_a_token_that_is_worth_nothing_is_named_as_such(start: Start) -> None:
    async with start(key_mode="stored") as api:
        store = api.server.store
        theirs, kept = await make_key(store, api.clock.wall(), owner="alice")
        mine, _ = await make_key(store, api.clock.wall(), owner="bob")
        alice, bob = (Api(api.server, api.clock, key) for key in (theirs, mine))
        path = await saved(alice)
        session = await bob.session()
        token = (await alice.post("/auth/token"))["jwt"]
        await store.revoke_key(kept.key_id, api.clock.wall())
        await api.clock.sleep(2.0)
        for worthless in (theirs, token, "tml-made-up", "eyJ.made.up"):
            body = create(session, path, weights_access_token=worthless)
            reply = await bob.call("POST", "/load_weights", body)
            assert reply.status == 403
            assert b"weights access token" in reply.body
            assert worthless.encode() not in reply.body


async def test_the_token_is_kept_nowhere(api: Api) -> None:
    path = await saved(api)
    other = api.other()
    session = await other.session()
    future = await other.post("/load_weights", create(session, path, weights_access_token=api.key))
    model = (await other.result(future))["model_id"]
    body = {"model_id": model, "seq_id": 1, "path": path, "optimizer": False}
    future = await other.post("/load_weights", {**body, "weights_access_token": api.key})
    await other.result(future)
    operations = await api.server.store.operations(session)
    assert [op.kind for op in operations] == ["load_weights", "load_weights"]
    for op in operations:
        assert api.key.encode() not in op.body
        assert api.key not in repr(op)
    assert api.key not in repr(await other.get("/audit"))

"""Which weights a name stands for, and for whom."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

import pytest

from tests.unit.server.conftest import Api
from tinkex.testing import FakeClock, FakeEngine, FakeServer

from .conftest import V1

pytestmark = pytest.mark.anyio


@pytest.fixture
async def saved(v1: V1) -> str:
    """The path of sampler weights that differ from the base model's."""
    api = v1.api
    model = await api.model()
    for step in range(3):
        await api.train(model, 1 + 2 * step)
        await api.result(await api.step(model, 2 + 2 * step, learning_rate=1.0))
    body = {"model_id": model, "seq_id": 7, "path": "final"}
    return (await api.result(await api.post("/save_weights_for_sampler", body)))["path"]


async def scores(v1: V1, model: str) -> list[float | None]:
    answer = await v1.complete(model=model, echo=True, logprobs=0, max_tokens=0)
    return answer["choices"][0]["logprobs"]["token_logprobs"]


async def test_base_models_and_own_checkpoints_are_listed(v1: V1, saved: str) -> None:
    listed = await v1.get("/models")
    assert listed["object"] == "list"
    found = {model["id"]: model for model in listed["data"]}
    assert list(found) == ["tinkex/tiny", "tinkex/tiny-2", saved]
    assert found[saved]["parent"] == "tinkex/tiny"
    assert found["tinkex/tiny"]["object"] == "model"
    assert await v1.get(f"/models/{quote(saved, safe='')}") == found[saved]
    assert await v1.get("/models/tinkex/tiny") == found["tinkex/tiny"]
    theirs = await V1(v1.api.other()).get("/models")
    assert [model["id"] for model in theirs["data"]] == ["tinkex/tiny", "tinkex/tiny-2"]


async def test_a_path_samples_the_saved_weights(v1: V1, saved: str) -> None:
    base, tuned = await scores(v1, "tinkex/tiny"), await scores(v1, saved)
    assert tuned != base
    api = v1.api
    sampler = await api.sampler(await api.session(), model_path=saved)
    prompt = {"chunks": [{"type": "encoded_text", "tokens": list(b"hello")}]}
    future = await api.sample(sampler, prompt=prompt, prompt_logprobs=True)
    assert tuned == (await api.sampled(future)).prompt_logprobs
    assert (await v1.chat(model=saved))["model"] == saved


async def test_training_weights_can_be_sampled_too(v1: V1) -> None:
    api = v1.api
    model = await api.model()
    body = {"model_id": model, "seq_id": 1, "path": "state"}
    path = (await api.result(await api.post("/save_weights", body)))["path"]
    assert await scores(v1, path) == await scores(v1, "tinkex/tiny")


async def unknown(v1: V1, name: str) -> dict[str, Any]:
    status, error = await v1.refused("/completions", model=name)
    assert status == 404
    assert error["param"] == "model"
    assert error["code"] == "model_not_found"
    return error


async def test_others_are_told_nothing_until_the_weights_are_published(v1: V1, saved: str) -> None:
    other = V1(v1.api.other())
    told = await unknown(other, saved)
    never = await unknown(other, "tinker://nothing/sampler_weights/x")
    assert told["message"].replace(saved, "X") == never["message"].replace(
        "tinker://nothing/sampler_weights/x", "X"
    )
    run, checkpoint = saved.removeprefix("tinker://").split("/", 1)
    await v1.api.post(f"/training_runs/{run}/checkpoints/{checkpoint}/publish")
    assert await scores(other, saved) == await scores(v1, saved)


async def test_unknown_models_are_named(v1: V1) -> None:
    assert "gpt-4" in (await unknown(v1, "gpt-4"))["message"]
    reply = await v1.call("GET", "/models/gpt-4")
    assert reply.status == 404


async def test_an_engine_that_has_not_started_is_a_503() -> None:
    clock = FakeClock()
    async with (
        clock.running(),
        FakeServer(clock=clock, engine=FakeEngine(clock, models=())) as server,
    ):
        v1 = V1(Api(server, clock))
        status, error = await v1.refused("/completions")
        assert (status, error["type"]) == (503, "server_error")
        assert (await v1.get("/models"))["data"] == []

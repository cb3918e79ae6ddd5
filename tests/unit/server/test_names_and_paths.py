"""Names and paths that try to leave their folder get a refusal, and nothing is touched."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import pytest

from tinkex.wire.routes import ROUTES

from .conftest import Api

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    Send = Callable[["Guarded", str, int], Awaitable[Any]]

pytestmark = pytest.mark.anyio

NAMES = [
    "..",
    ".",
    "../../etc/passwd",
    "/etc/passwd",
    "a/b",
    "a\\b",
    "..\\..\\x",
    "a\x00b",
    "a\nb",
    "a b",
    "%2e%2e%2fx",
    "-flag",
    "a" * 129,
    "ﬁle",  # one letter that looks like two
    "e\u0301",  # a letter and an accent
    "\u2024\u2024",  # one-dot leaders
    "a\uff0fb",  # a full-width slash
    "\u202efdp.exe",  # written from right to left
    "a\u200bb",  # with a space of no width
    "Ⅷ",
    "٣",  # a digit, elsewhere
    "",
]
RUN = "session-0:train:0"
PATHS = [
    "",
    "tinker:",
    "tinker://",
    "tinker:///",
    "tinker://x",
    "tinker://../weights/final",
    f"tinker://{RUN}/weights/../weights/final",
    f"tinker://{RUN}/weights/final/",
    f"tinker://{RUN}//weights/final",
    f"tinker://{RUN}/weights/final\x00",
    f"tinker://{RUN}/weights/FINAL",
    f"tinker://{RUN}/weights/ﬁnal",
    f"TINKER://{RUN}/weights/final",
    f" tinker://{RUN}/weights/final",
    f"tinker://user@{RUN}/weights/final",
    f"tinker://{RUN}/weights/final@1",
    f"tinker://{RUN}/weights/final?x=1",
    f"tinker://{RUN}/weights%2ffinal",
    "file:///etc/passwd",
    "/etc/passwd",
    "s3://bucket/key",
    "tinker://" + "a" * 100_000,
    "' OR 1=1 --",
]


class Guarded:
    """A server with one checkpoint, and everything that could be touched by accident."""

    def __init__(self, api: Api, model: str, session: str) -> None:
        self.api, self.model, self.session = api, model, session

    async def state(self) -> Any:
        store, engine = self.api.server.store, self.api.server.engine
        checkpoints = await store.checkpoints()
        return checkpoints, sorted(engine._saved), await store.samplers()


@pytest.fixture
async def guarded(api: Api) -> Guarded:
    session = await api.session()
    model = await api.model(session)
    assert model == RUN
    await api.result(
        await api.post("/save_weights", {"model_id": model, "seq_id": 1, "path": "final"})
    )
    return Guarded(api, model, session)


@pytest.mark.parametrize(
    "route", ["save_weights", "save_weights_for_sampler", "save_weights_external"]
)
async def test_a_name_that_is_no_plain_name_fails_by_itself(guarded: Guarded, route: str) -> None:
    before = await guarded.state()
    # An empty name stands for none, except in an export, which needs one.
    names = [name for name in NAMES if name or route == "save_weights_external"]
    for seq, name in enumerate(names, 2):
        body = {"model_id": guarded.model, "seq_id": seq, "path": name}
        outcome = await guarded.api.outcome(await guarded.api.post(f"/{route}", body))
        assert outcome["category"] == "user", name
        assert "name" in outcome["error"], name
    assert await guarded.state() == before


@pytest.mark.parametrize("kind", ["weights", "sampler_weights", "external_weights"])
async def test_a_url_that_names_no_checkpoint_is_refused_by_every_route(
    guarded: Guarded, kind: str
) -> None:
    before = await guarded.state()
    routes = [route for route in ROUTES if "ckpt" in route.parameters]
    assert len(routes) == 6
    for route in routes:
        for name in NAMES:
            for written in (quote(name, safe=""), quote(name, safe="/.")):
                path = route.path.replace("{run}", RUN).replace("{ckpt}", f"{kind}/{written}")
                body = {"ttl_seconds": 7200} if route.request is not None else None
                reply = await guarded.api.call(route.method, path.removeprefix("/api/v1"), body)
                # Without its last part the path is that of another route, or of none.
                assert reply.status in (400, 404, 405), (route.name, name, reply)
    assert await guarded.state() == before


@pytest.mark.parametrize("run", ["..", "%2e%2e", "a%2fb", "%00", "session-0", RUN + "%2f"])
async def test_a_run_that_is_none_is_refused_by_every_route(guarded: Guarded, run: str) -> None:
    before = await guarded.state()
    for route in [route for route in ROUTES if "run" in route.parameters]:
        path = route.path.replace("{run}", run).replace("{ckpt}", "weights/final")
        body = {"ttl_seconds": 7200} if route.request is not None else None
        reply = await guarded.api.call(route.method, path.removeprefix("/api/v1"), body)
        assert reply.status in (404, 405), (route.name, reply)
    assert await guarded.state() == before


async def load(guarded: Guarded, path: str, number: int) -> Any:
    body = {"model_id": guarded.model, "seq_id": number + 2, "path": path, "optimizer": False}
    return await guarded.api.outcome(await guarded.api.post("/load_weights", body))


async def create_from(guarded: Guarded, path: str, number: int) -> Any:
    body = {"session_id": guarded.session, "model_seq_id": number + 5, "path": path}
    return await guarded.api.call("POST", "/load_weights", {**body, "optimizer": False})


async def info(guarded: Guarded, path: str, number: int) -> Any:
    return await guarded.api.call("POST", "/weights_info", {"tinker_path": path})


async def copy(guarded: Guarded, path: str, number: int) -> Any:
    return await guarded.api.call("POST", "/copy_weights", {"source_path": path})


async def sampler(guarded: Guarded, path: str, number: int) -> Any:
    body = {"session_id": guarded.session, "sampling_session_seq_id": number, "model_path": path}
    return await guarded.api.call("POST", "/create_sampling_session", body)


async def sample(guarded: Guarded, path: str, number: int) -> Any:
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [1]}]}
    body = {"prompt": prompt, "sampling_params": {}, "model_path": path, "num_samples": 1}
    return await guarded.api.call("POST", "/asample", body)


@pytest.mark.parametrize("send", [load, create_from, info, copy, sampler, sample])
async def test_a_path_of_an_odd_shape_names_nothing(guarded: Guarded, send: Send) -> None:
    before = await guarded.state()
    for number, path in enumerate(PATHS):
        answer = await send(guarded, path, number)
        if isinstance(answer, dict):
            assert answer["category"] == "user", path
        else:
            assert answer.status in (400, 404), (path, answer)
    assert await guarded.state() == before


async def test_a_download_link_opens_its_own_files_only(guarded: Guarded) -> None:
    api = guarded.api
    body = {"model_id": guarded.model, "seq_id": 2, "path": "out"}
    await api.result(await api.post("/save_weights_external", body))
    path = f"/training_runs/{RUN}/checkpoints/external_weights/out/external_weights_urls"
    url = next(iter((await api.get(path))["urls"].values()))
    folder, _, _ = url.split("/api/v1", 1)[1].rpartition("/")
    nobody = Api(api.server, api.clock, key="")
    for name in [*NAMES, "../final", "%2e%2e/x", "adapter_model.safetensors/..", "a" * 5000]:
        reply = await nobody.call("GET", f"{folder}/{quote(name)}")
        assert reply.status == 404, (name, reply)
    for token in ("", "x", ".", "a.b", "é", folder.rpartition("/")[2] + "x", "e30." + "A" * 43):
        reply = await nobody.call("GET", f"/files/{quote(token)}/adapter_config.json")
        assert reply.status == 404, (token, reply)

"""What belongs to one tenant does not exist for another, on any route.

Every route has a case here, so that a new route without one fails the first test.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from tinkex.transport.base import HttpRequest, Pool
from tinkex.wire.proto_training import encode_forward_backward
from tinkex.wire.routes import ROUTES

from .conftest import PROTOBUF, Api, datum

if TYPE_CHECKING:
    from tinkex.transport.base import Reply

pytestmark = pytest.mark.anyio

TOKEN = "x-tinker-weights-access-token"


@dataclass(frozen=True)
class Things:
    """Names of somebody's things; `mine` is the session of whoever asks for them."""

    session: str
    model: str
    sampler: str
    operation: str
    sample: str
    loss: str
    state: str
    export: str
    mine: str = ""

    @property
    def path(self) -> str:
        return f"tinker://{self.model}/weights/{self.state}"

    @property
    def exported(self) -> str:
        return f"/training_runs/{self.model}/checkpoints/external_weights/{self.export}"

    @property
    def saved(self) -> str:
        return f"/training_runs/{self.model}/checkpoints/weights/{self.state}"


ABSENT = Things(
    session="no-session",
    model="no-session:train:0",
    sampler="no-session:sample:0",
    operation="no-session:train:0:1",
    sample="no-session:sample:0:0",
    loss="no-session:loss:0",
    state="nothing",
    export="no-export",
)

Ask = Callable[[Things], tuple[str, str, Any]]
PROMPT = {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]}
DONE = {"reason": {"type": "success"}, "detail": None}
JSON_BATCH = {
    "data": [
        {
            "model_input": PROMPT,
            "loss_fn_inputs": {"target_tokens": {"data": [2], "dtype": "int64", "shape": [1]}},
        }
    ],
    "loss_fn": "cross_entropy",
}


LOSS = {
    "custom_loss_seq_id": 0,
    "name": "mine",
    "inputs": [{"name": "x", "rank": 1}],
    "graph": {"nodes": [{"op": "placeholder", "name": "x", "target": "x"}]},
}


def post(url: str, /, **members: Any) -> tuple[str, str, Any]:
    return "POST", url, members


def train(model: str, seq_id: int = 9, **options: Any) -> tuple[str, str, Any]:
    options.setdefault("loss_fn", "cross_entropy")
    body = encode_forward_backward(model_id=model, seq_id=seq_id, data=[datum()], **options)
    return "POST", "/forward_backward", body


def create(t: Things, session: str, path: str) -> tuple[str, str, Any]:
    return post("/load_weights", session_id=session, model_seq_id=7, path=path, optimizer=False)


def sampling(session: str, **members: Any) -> tuple[str, str, Any]:
    return post(
        "/create_sampling_session", session_id=session, sampling_session_seq_id=7, **members
    )


def sample(**members: Any) -> tuple[str, str, Any]:
    params = {"max_tokens": 1}
    return post("/asample", num_samples=1, prompt=PROMPT, sampling_params=params, **members)


BASE = "tinkex/tiny"

# Requests that name somebody's thing. They are answered as if there were no such thing.
HIDDEN: dict[str, list[Ask]] = {
    "session_heartbeat": [lambda t: post("/session_heartbeat", session_id=t.session)],
    "finish_session": [lambda t: post(f"/sessions/{t.session}/finish", **DONE)],
    "set_session_project": [
        lambda t: ("PUT", f"/sessions/{t.session}/project", {"project_id": "p"})
    ],
    "export_trace": [lambda t: ("GET", f"/sessions/{t.session}/trace_export", None)],
    "get_session": [
        lambda t: ("GET", f"/sessions/{t.session}", None),
        lambda t: ("GET", f"/sessions/{t.session}?access_scope=accessible", None),
    ],
    "create_model": [
        lambda t: post("/create_model", session_id=t.session, model_seq_id=0, base_model=BASE),
        lambda t: post("/create_model", session_id=t.session, model_seq_id=5, base_model=BASE),
    ],
    "forward_backward": [
        lambda t: train(t.model),
        lambda t: post("/forward_backward", model_id=t.model, seq_id=9),
    ],
    "forward": [
        lambda t: post("/forward", forward_input=JSON_BATCH, model_id=t.model, seq_id=9),
        lambda t: post("/forward", forward_input=JSON_BATCH, model_id=t.model),
    ],
    "optim_step": [
        lambda t: post("/optim_step", model_id=t.model, seq_id=9, adam_params={}),
        # Known already to its owner, not to anybody else.
        lambda t: post("/optim_step", model_id=t.model, seq_id=1, adam_params={}),
    ],
    "create_custom_loss": [lambda t: post("/create_custom_loss", session_id=t.session, **LOSS)],
    "get_info": [lambda t: post("/get_info", model_id=t.model)],
    "save_weights": [lambda t: post("/save_weights", model_id=t.model, seq_id=9, path="x")],
    "save_weights_for_sampler": [
        lambda t: post("/save_weights_for_sampler", model_id=t.model, seq_id=9, path="x")
    ],
    "save_weights_external": [
        lambda t: post("/save_weights_external", model_id=t.model, seq_id=9, path="x")
    ],
    "load_weights": [
        lambda t: post("/load_weights", model_id=t.model, seq_id=9, path=t.path, optimizer=False),
        lambda t: create(t, t.session, t.path),
        lambda t: create(t, t.mine, t.path),
    ],
    "weights_info": [lambda t: post("/weights_info", tinker_path=t.path)],
    "copy_weights": [
        lambda t: post("/copy_weights", source_path=t.path, destination_project_id="p"),
        lambda t: post("/copy_weights", source_path=t.path, session_id=t.session, model_seq_id=0),
    ],
    "create_sampling_session": [
        lambda t: sampling(t.session, base_model=BASE),
        lambda t: sampling(t.mine, model_path=t.path),
    ],
    "join_sampling_session": [
        lambda t: post("/join_sampling_session", sampling_session_id=t.sampler)
    ],
    "asample": [
        lambda t: sample(sampling_session_id=t.sampler, seq_id=9),
        lambda t: sample(sampling_session_id=t.sampler, seq_id=0),
        lambda t: sample(model_path=t.path),
    ],
    "get_sampler": [lambda t: ("GET", f"/samplers/{t.sampler}", None)],
    "retrieve_future": [
        lambda t: post("/retrieve_future", request_id=t.operation),
        lambda t: post("/retrieve_future", request_id=t.sample),
        lambda t: post("/retrieve_future", request_id=t.loss),
        # Never sent, but of a model and a sampler that the owner would be told were restarted.
        lambda t: post("/retrieve_future", request_id=f"{t.model}:999"),
        lambda t: post("/retrieve_future", request_id=f"{t.sampler}:999"),
    ],
    "retrieve_futures": [
        lambda t: post(
            "/retrieve_futures",
            target={
                "type": "sampling_session",
                "sampling_session_id": t.sampler,
                "cloned_sampler_id": 0,
            },
            prev_cursor=0,
            retrieved_request_ids=[t.sample],
        )
    ],
    "release_numbers": [
        lambda t: post("/tinkex/release_numbers", model_id=t.model, seq_ids=[9]),
    ],
    "attach_model": [
        lambda t: post("/tinkex/attach_model", model_id=t.model, session_id=t.mine),
        lambda t: post("/tinkex/attach_model", model_id=t.model, session_id=t.session),
    ],
    "cancel_future": [
        lambda t: post("/cancel_future", request_id=t.operation),
        lambda t: post("/cancel_future", request_id=t.sample),
    ],
    "list_run_checkpoints": [lambda t: ("GET", f"/training_runs/{t.model}/checkpoints", None)],
    "list_model_checkpoints": [lambda t: ("GET", f"/models/{t.model}/checkpoints", None)],
    "get_training_run": [
        lambda t: ("GET", f"/training_runs/{t.model}", None),
        lambda t: ("GET", f"/training_runs/{t.model}?access_scope=accessible", None),
    ],
    "publish_checkpoint": [lambda t: ("POST", f"{t.saved}/publish", None)],
    "unpublish_checkpoint": [lambda t: ("DELETE", f"{t.saved}/publish", None)],
    "set_checkpoint_ttl": [lambda t: ("PUT", f"{t.saved}/ttl", {"ttl_seconds": 3600})],
    "get_external_weights_urls": [
        lambda t: ("GET", f"{t.exported}/external_weights_urls", None),
        lambda t: ("GET", f"{t.saved}/external_weights_urls", None),
    ],
    "get_checkpoint_archive": [lambda t: ("GET", f"{t.saved}/archive", None)],
    "delete_checkpoint": [lambda t: ("DELETE", t.saved, None)],
    "unload_model": [lambda t: post("/unload_model", model_id=t.model)],
}

# Requests that are accepted and fail in their turn, as if there were no such thing.
IN_TURN: dict[str, list[Callable[[Things, str], tuple[str, str, Any]]]] = {
    "load_weights": [
        lambda t, own: post("/load_weights", model_id=own, seq_id=1, path=t.path, optimizer=False)
    ],
    "forward_backward": [
        lambda t, own: train(own, 1, loss_fn="custom", loss_fn_config={"loss_id": t.loss})
    ],
}

# Requests that list or sum up things. Somebody else's are not among them.
WEEK = "starting_on=2025-06-10T00:00:00Z&ending_before=2025-06-20T00:00:00Z"
LISTS: dict[str, list[Ask]] = {
    "list_sessions": [
        lambda t: ("GET", "/sessions", None),
        lambda t: ("GET", "/sessions?access_scope=accessible", None),
    ],
    "search_sessions": [
        lambda t: post("/sessions/search"),
        lambda t: post("/sessions/search", session_id=t.session),
        lambda t: post("/sessions/search", owner={"type": "accessible"}),
        lambda t: post("/sessions/search", owner={"type": "user", "owner_urns": ["alice"]}),
    ],
    "list_training_runs": [
        lambda t: ("GET", "/training_runs", None),
        lambda t: ("GET", "/training_runs?access_scope=accessible", None),
    ],
    "list_checkpoints": [lambda t: ("GET", "/checkpoints", None)],
    "get_audit_log": [lambda t: ("GET", "/audit", None)],
    "get_billing_usage": [lambda t: ("GET", f"/billing/usage/events?{WEEK}", None)],
    "get_checkpoint_storage_usage": [
        lambda t: ("GET", "/billing/usage/checkpoints/current", None),
        lambda t: ("GET", "/billing/usage/checkpoints/current?project_id=secret", None),
    ],
    "get_api_key": [lambda t: ("GET", "/auth/apikey/me", None)],
}

# Routes that know no things of tenants at all, but for the key they are called with.
NOTHING = {
    "client_config",
    "client_dynamic_config",
    "auth_token",
    "delete_api_key",
    "create_session",
    "telemetry",
    "get_server_capabilities",
    "healthz",
    "get_tokenizer",
    "import_weights",
}


def test_every_route_says_how_it_keeps_tenants_apart() -> None:
    covered = HIDDEN.keys() | LISTS.keys() | NOTHING
    assert covered == {route.name for route in ROUTES}


@pytest.fixture
async def alice(api: Api) -> Things:
    """One of everything, of the tenant that `api` is."""
    session = await api.session(display_name="secret", project_id="secret")
    model = await api.model(session)
    done = await api.step(model, 1)
    await api.result(done)
    await api.result(await api.post("/save_weights", {"model_id": model, "seq_id": 2, "path": "s"}))
    body = {"model_id": model, "seq_id": 3, "path": "x"}
    await api.result(await api.post("/save_weights_external", body))
    sampler = await api.sampler(session)
    sampled = await api.sample(sampler)
    await api.result(sampled)
    await api.post("/create_custom_loss", {"session_id": session, **LOSS})
    return Things(
        session=session,
        model=model,
        sampler=sampler,
        operation=done["request_id"],
        sample=sampled["request_id"],
        loss=f"{session}:loss:0",
        state="s",
        export="x",
    )


async def ask(api: Api, request: tuple[str, str, Any], **headers: str) -> Reply:
    method, url, body = request
    path, _, query = url.partition("?")
    media = {"content-type": PROTOBUF} if isinstance(body, bytes) else {}
    return await api.call(method, path, body, query=query, headers={**media, **headers})


def neutral(reply: Reply, things: Things) -> tuple[int, str]:
    """A reply with the names of things replaced by what they are names of."""
    text = reply.body.decode()
    names = [(getattr(things, f.name), f.name) for f in fields(things) if f.name != "mine"]
    # The longest first: the id of a session is a part of the others.
    for name, what in sorted(names, key=lambda pair: -len(pair[0])):
        text = text.replace(name, f"<{what}>") if len(name) > 1 else text
    return reply.status, text.replace(f"/{things.state}", "/<state>").replace(
        f"/{things.export}", "/<export>"
    )


def cases(table: dict[str, Any]) -> list[Any]:
    return [
        pytest.param(case, id=f"{route}-{number}")
        for route, rows in table.items()
        for number, case in enumerate(rows)
    ]


@pytest.fixture
async def mallory(api: Api) -> tuple[Api, str]:
    """Somebody else, and a session of theirs."""
    other = api.other()
    return other, await other.session()


def of(things: Things, mine: str) -> Things:
    values = {f.name: getattr(things, f.name) for f in fields(things)}
    return Things(**{**values, "mine": mine})


@pytest.mark.parametrize("case", cases(HIDDEN))
async def test_a_stranger_is_told_what_somebody_is_told_who_made_the_name_up(
    case: Ask, alice: Things, mallory: tuple[Api, str]
) -> None:
    stranger, mine = mallory
    theirs, absent = of(alice, mine), of(ABSENT, mine)
    found = neutral(await ask(stranger, case(theirs)), theirs)
    made_up = neutral(await ask(stranger, case(absent)), absent)
    assert found == made_up
    assert found[0] == 404


async def test_strangers_change_nothing(api: Api, alice: Things, mallory: tuple[Api, str]) -> None:
    async def state() -> Any:
        return [
            await api.get(f"/sessions/{alice.session}"),
            await api.get(f"/training_runs/{alice.model}/checkpoints"),
            await api.get("/audit"),
            await api.result(alice.operation),
            await api.result(alice.sample),
            (await api.post("/sessions/search"))["sessions"],
        ]

    before = await state()
    for rows in HIDDEN.values():
        for case in rows:
            await ask(mallory[0], case(of(alice, mallory[1])))
    assert await state() == before
    # A join that had been counted would have taken the first number.
    joined = await api.post("/join_sampling_session", {"sampling_session_id": alice.sampler})
    assert joined["client_counter"] == 1


@pytest.mark.parametrize("case", cases(IN_TURN))
async def test_what_fails_in_its_turn_fails_like_a_name_that_was_made_up(
    case: Callable[[Things, str], tuple[str, str, Any]], alice: Things, mallory: tuple[Api, str]
) -> None:
    stranger, mine = mallory
    texts: list[tuple[int, str]] = []
    for number, things in enumerate((alice, ABSENT)):
        model = await stranger.model(mine, number)
        future = msgspec.json.decode((await ask(stranger, case(things, model))).body)
        reply = await stranger.poll(future)
        assert b'"user"' in reply.body
        texts.append(neutral(reply, things))
    ours, absent = ((status, text.split("request_id")[0]) for status, text in texts)
    assert ours == absent


@pytest.mark.parametrize("case", cases(LISTS))
async def test_lists_are_of_ones_own_things(
    case: Ask, api: Api, alice: Things, mallory: tuple[Api, str]
) -> None:
    own = (await ask(api, case(alice))).body
    theirs = (await ask(mallory[0], case(alice))).body
    for secret in (alice.session.encode(), b"secret", api.owner.encode()):
        assert secret not in theirs
    if b"owner_urns" not in msgspec.json.encode(case(alice)[2]):
        assert any(text.encode() in own for text in (alice.session, "secret", api.owner))


READS = {
    "load_weights-2",
    "weights_info-0",
    "copy_weights-0",
    "create_sampling_session-1",
    "asample-2",
    "get_external_weights_urls-0",
    "get_checkpoint_archive-0",
}


@pytest.mark.parametrize("case", cases(HIDDEN))
async def test_an_access_token_opens_checkpoints_for_reading_and_nothing_else(
    case: Ask, api: Api, alice: Things, mallory: tuple[Api, str], request: pytest.FixtureRequest
) -> None:
    stranger, mine = mallory
    reply = await ask(stranger, case(of(alice, mine)), **{TOKEN: api.key})
    name = request.node.callspec.id
    if name in READS:
        assert reply.status == 200, reply
    elif name == "get_external_weights_urls-1":
        assert reply.status == 400  # may be read, but is no export
    else:
        assert reply.status == 404, reply


@pytest.mark.parametrize("case", cases(HIDDEN))
async def test_publishing_opens_a_checkpoint_for_reading_and_nothing_else(
    case: Ask, api: Api, alice: Things, mallory: tuple[Api, str], request: pytest.FixtureRequest
) -> None:
    assert (await ask(api, ("POST", f"{alice.saved}/publish", None))).status == 200
    stranger, mine = mallory
    reply = await ask(stranger, case(of(alice, mine)))
    name = request.node.callspec.id
    # The export was not published; a run that has something published can be seen if asked for.
    shown = {"list_run_checkpoints-0", "list_model_checkpoints-0", "get_training_run-1"}
    if name in READS - {"get_external_weights_urls-0"} | shown:
        assert reply.status == 200, reply
        assert b"secret" not in reply.body
        assert b"external_weights" not in reply.body
    elif name == "get_external_weights_urls-1":
        assert reply.status == 400
    else:
        assert reply.status == 404, reply


# -- the OpenAI-compatible routes ------------------------------------------------------------------


async def ask_openai(api: Api, method: str, path: str, body: Any = None, **headers: str) -> Reply:
    data = None if body is None else msgspec.json.encode(body)
    sent = {"authorization": f"Bearer {api.key}", **headers}
    return await api.transport.send(
        HttpRequest(method, f"/v1{path}", Pool.REST, 60, "", sent, data)
    )


OPENAI: list[Ask] = [
    lambda t: ("GET", f"/models/{t.path}", None),
    lambda t: post("/completions", model=t.path, prompt=[1, 2, 3], max_tokens=1),
    lambda t: post("/chat/completions", model=t.path, messages=[{"role": "user", "content": "x"}]),
]


@pytest.mark.parametrize("case", OPENAI)
async def test_openai_clients_cannot_name_somebody_else_s_weights(
    case: Ask, alice: Things, mallory: tuple[Api, str]
) -> None:
    found = neutral(await ask_openai(mallory[0], *case(alice)), alice)
    assert found == neutral(await ask_openai(mallory[0], *case(ABSENT)), ABSENT)
    assert found[0] == 404


async def test_openai_clients_list_their_own_weights(
    api: Api, alice: Things, mallory: tuple[Api, str]
) -> None:
    assert alice.path.encode() in (await ask_openai(api, "GET", "/models")).body
    assert alice.model.encode() not in (await ask_openai(mallory[0], "GET", "/models")).body
    shown = await ask_openai(mallory[0], "GET", f"/models/{alice.path}", **{TOKEN: api.key})
    assert shown.status == 200


async def test_a_prompt_of_another_tenant_is_never_found_in_the_prefix_cache(
    api: Api, mallory: tuple[Api, str]
) -> None:
    async def hits(asking: Api, session: str, seq: int = 0) -> tuple[int, Any]:
        future = await asking.sample(await asking.sampler(session), seq)
        found = (await asking.sampled(future)).prompt_cache_hit_tokens
        usage = (await asking.poll(future)).headers["x-tinkex-usage"]
        return found, msgspec.json.decode(usage)["cached_tokens"]

    mine = await api.session()
    assert await hits(api, mine) == (0, 0)
    assert await hits(*mallory) == (0, 0)
    assert await hits(api, mine, 1) == (2, 2)


@pytest.mark.parametrize("path", ["/completions", "/chat/completions"])
async def test_openai_clients_never_find_a_prompt_of_another_tenant_in_the_prefix_cache(
    api: Api, mallory: tuple[Api, str], path: str
) -> None:
    message = {"messages": [{"role": "user", "content": "a secret"}]}
    asked = message if "chat" in path else {"prompt": "a secret"}
    body = {"model": "tinkex/tiny", "max_tokens": 1, **asked}

    async def hits(asking: Api) -> int:
        reply = await ask_openai(asking, "POST", path, body)
        assert reply.status == 200, reply.body
        usage = msgspec.json.decode(reply.body)["usage"]
        return usage["prompt_tokens_details"]["cached_tokens"]

    assert [await hits(api), await hits(mallory[0])] == [0, 0]
    assert await hits(api) > 0

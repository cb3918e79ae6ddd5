"""What belongs to one tenant does not exist for another, on any route.

The requests are in `tests/cross_tenant.py`; a new route without one fails the first test.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from tests.cross_tenant import (
    ABSENT,
    HIDDEN,
    IN_TURN,
    LISTS,
    LOSS,
    NOTHING,
    OPENAI,
    Ask,
    Things,
    neutral,
    of,
)
from tinkex.transport.base import HttpRequest, Pool
from tinkex.wire.routes import ROUTES

from .conftest import PROTOBUF, Api

if TYPE_CHECKING:
    from collections.abc import Callable

    from tinkex.transport.base import Reply

pytestmark = pytest.mark.anyio

TOKEN = "x-tinker-weights-access-token"


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


def told(reply: Reply, things: Things) -> tuple[int, str]:
    return neutral(reply.status, reply.body, things)


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


@pytest.mark.parametrize("case", cases(HIDDEN))
async def test_a_stranger_is_told_what_somebody_is_told_who_made_the_name_up(
    case: Ask, alice: Things, mallory: tuple[Api, str]
) -> None:
    stranger, mine = mallory
    theirs, absent = of(alice, mine), of(ABSENT, mine)
    found = told(await ask(stranger, case(theirs)), theirs)
    made_up = told(await ask(stranger, case(absent)), absent)
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
        texts.append(told(reply, things))
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


@pytest.mark.parametrize("case", OPENAI)
async def test_openai_clients_cannot_name_somebody_else_s_weights(
    case: Ask, alice: Things, mallory: tuple[Api, str]
) -> None:
    found = told(await ask_openai(mallory[0], *case(alice)), alice)
    assert found == told(await ask_openai(mallory[0], *case(ABSENT)), ABSENT)
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

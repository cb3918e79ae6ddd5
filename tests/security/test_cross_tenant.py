"""Nothing of the neighbour exists for the attacker, on any route of a real server."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from tests.cross_tenant import ABSENT, HIDDEN, IN_TURN, LISTS, LOSS, OPENAI, Things, neutral, of

if TYPE_CHECKING:
    from tests.security.world import Answer, Tenant, World

# In everything that the neighbour names itself; no answer to the attacker may contain it.
MARK = "neighbour-only-4f1d"
CASES = [
    (f"{route}-{number}", prefix, case)
    for prefix, table in (("/api/v1", HIDDEN), ("/v1", {"openai": OPENAI}))
    for route, cases in table.items()
    for number, case in enumerate(cases)
]
KINDS = ("session", "model", "sampler", "operation", "sample", "loss")
# Of the same form as the real ones, so that not the form decides.
_NO_ID = "00000000-0000-4000-8000-000000000000"


@pytest.fixture
def theirs(world: World) -> Things:
    """One of everything, of the neighbour."""
    them = world.neighbour
    session = them.made(
        "create_session",
        tags=[MARK],
        user_metadata={"about": MARK},
        sdk_version="0.36.0",
        project_id=MARK,
        display_name=MARK,
    )["session_id"]
    model = them.model(session)
    stepped = them.made("optim_step", model_id=model, seq_id=1, adam_params={})
    them.result(stepped["request_id"])
    for seq_id, route, name in ((2, "save_weights", "s"), (3, "save_weights_external", "x")):
        saved = them.made(route, model_id=model, seq_id=seq_id, path=f"{name}-{MARK}")
        assert "error" not in them.result(saved["request_id"])
    sampler = them.sampler(session)
    them.sample(sampler, 0)
    loss = them.post("create_custom_loss", {"session_id": session, **LOSS})
    assert loss.status == 200, loss
    return Things(
        session=session,
        model=model,
        sampler=sampler,
        operation=stepped["request_id"],
        sample=f"{sampler}:0",
        loss=f"{session}:loss:0",
        state=f"s-{MARK}",
        export=f"x-{MARK}",
    )


def absent(mine: str) -> Things:
    """Names of nothing, of the form that real names have."""
    values = {name: value.replace("no-session", _NO_ID) for name, value in vars(ABSENT).items()}
    return replace(ABSENT, **{**values, "mine": mine})


def shifted(things: Things, places: int) -> Things:
    """The same names, each in the place of another."""
    names = [getattr(things, kind) for kind in KINDS]
    return replace(things, **dict(zip(KINDS, names[places:] + names[:places], strict=True)))


def ask(tenant: Tenant, request: tuple[str, str, Any], prefix: str = "/api/v1") -> Answer:
    method, url, body = request
    media = "application/x-protobuf" if isinstance(body, bytes) else "application/json"
    data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    headers = {"content-type": media, "authorization": f"Bearer {tenant.key}"}
    return tenant.request(method, prefix + url, data, headers)


def secrets(world: World, things: Things) -> list[bytes]:
    """What no answer may contain once the names that the request itself had are taken out."""
    # The id of the session is a part of all others.
    return [text.encode() for text in (MARK, things.session, world.neighbour.key, "neighbour")]


def state(world: World, things: Things) -> list[Any]:
    """Everything that the neighbour can see of its own things."""
    them = world.neighbour
    paths = [f"sessions/{things.session}", f"training_runs/{things.model}/checkpoints", "audit"]
    return [them.get(path).json for path in paths] + [them.result(things.operation)]


def test_a_name_of_the_neighbour_s_is_answered_like_one_of_nothing(
    world: World, theirs: Things
) -> None:
    mine = world.attacker.session()
    before = state(world, theirs)
    for name, prefix, case in CASES:
        found = ask(world.attacker, case(of(theirs, mine)), prefix)
        made_up = ask(world.attacker, case(absent(mine)), prefix)
        told = neutral(found.status, found.body, theirs)
        assert told == neutral(made_up.status, made_up.body, absent(mine)), name
        assert found.status == 404, (name, found)
        for secret in secrets(world, theirs):
            assert secret not in told[1].encode(), name
    assert state(world, theirs) == before
    world.assert_well()


@pytest.mark.parametrize("places", range(1, len(KINDS)))
def test_a_name_of_another_kind_tells_nothing_either(
    world: World, theirs: Things, places: int
) -> None:
    """A session's name where a model's belongs, and so on."""
    mine = world.attacker.session()
    before = state(world, theirs)
    for name, prefix, case in CASES:
        found, made_up = (
            neutral(answer.status, answer.body, things)
            for things in (shifted(of(theirs, mine), places), shifted(absent(mine), places))
            for answer in [ask(world.attacker, case(things), prefix)]
        )
        assert found == made_up, name
        assert found[0] in (400, 404), (name, found)
    assert state(world, theirs) == before


def test_what_fails_in_its_turn_fails_like_a_name_of_nothing(world: World, theirs: Things) -> None:
    mine = world.attacker.session()
    number = 0
    for route, cases in IN_TURN.items():
        for case in cases:
            texts: list[str] = []
            for things in (theirs, absent(mine)):
                model = world.attacker.model(mine, number)
                number += 1
                accepted = ask(world.attacker, case(things, model)).json
                result = world.attacker.result(accepted["request_id"])
                assert result["category"] == "user", (route, result)
                texts.append(neutral(200, result["error"].encode(), things)[1])
            assert texts[0] == texts[1], route


def test_lists_have_nothing_of_the_neighbour_s(world: World, theirs: Things) -> None:
    world.attacker.session()
    for route, cases in LISTS.items():
        for case in cases:
            answer = ask(world.attacker, case(theirs))
            assert answer.status == 200, (route, answer)
            for secret in secrets(world, theirs):
                assert secret not in answer.body, (route, secret)


@pytest.mark.parametrize(
    "path",
    [
        f"training_runs?project_id={MARK}",
        f"billing/usage/checkpoints/current?project_id={MARK}",
        f"training_runs?project_id={MARK}&access_scope=accessible",
    ],
)
def test_the_neighbour_s_project_is_empty_for_others(
    world: World, theirs: Things, path: str
) -> None:
    found = world.attacker.get(path)
    made_up = world.attacker.get(path.replace(MARK, "x" * len(MARK)))
    assert found.status == made_up.status == 200
    assert found.body.replace(MARK.encode(), b"x" * len(MARK)) == made_up.body


def test_a_download_link_opens_its_own_file_and_no_other(world: World, theirs: Things) -> None:
    them, us = world.neighbour, world.attacker
    mine = us.session()
    model = us.model(mine)
    us.result(us.made("save_weights", model_id=model, seq_id=1, path="own")["request_id"])
    own = us.get(f"training_runs/{model}/checkpoints/weights/own/archive").json["url"]
    link = them.get(f"{theirs.saved[1:]}/archive").json["url"]
    for url in (own, link):
        assert us.get(_path(url)).status == 200  # a link needs no key, whoever has it
    head, _, signature = _path(own).split("/")[4].rpartition(".")
    their_head, _, their_signature = _path(link).split("/")[4].rpartition(".")
    for token in (
        f"{their_head}.{signature}",
        f"{head}.{their_signature}",
        f"{their_head}.",
        f".{their_signature}",
        their_head,
        f"{their_head}.{their_signature[:-2]}AA",
        f"{their_head}A.{their_signature}",
    ):
        forged = us.get(f"/api/v1/files/{token}/archive.tar")
        assert forged.status == 404, token
        assert MARK.encode() not in forged.body


def _path(url: str) -> str:
    return "/" + url.split("/", 3)[3]


def test_a_key_can_neither_see_nor_end_the_neighbour_s_key(world: World) -> None:
    before = world.neighbour.get("auth/apikey/me")
    for headers in ({}, {"x-owner": "neighbour"}, {"x-forwarded-user": "neighbour"}):
        seen = world.attacker.request("GET", "auth/apikey/me?owner=neighbour", None, headers)
        assert b"neighbour" not in seen.body
    assert world.neighbour.get("auth/apikey/me").body == before.body

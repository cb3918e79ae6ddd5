"""Who gets in: the key modes, revoked keys, tokens, and what bad keys are told."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tinkex.errors import APIStatusError, InputError
from tinkex.server import Settings
from tinkex.server.api.identity import LOCAL, Identity, fingerprint, make_key
from tinkex.server.store.memory import MemoryStore
from tinkex.server.store.ownership import Node
from tinkex.testing import FakeClock

from .conftest import Api, Start

pytestmark = pytest.mark.anyio

SECRET = b"s" * 32


def identity(
    mode: str, *, store: MemoryStore | None = None, clock: FakeClock | None = None, **settings: Any
) -> Identity:
    settings.setdefault("secret", SECRET)
    made = Settings(key_mode=mode, **settings)
    return Identity(made, clock or FakeClock(), store or MemoryStore())


async def refused(who: Identity, credential: str | None, address: str = "") -> APIStatusError:
    with pytest.raises(APIStatusError) as caught:
        await who.owner(credential, address)
    return caught.value


# -- modes -----------------------------------------------------------------------------------------


async def test_an_open_server_makes_a_tenant_of_every_key() -> None:
    who = identity("open")
    first, second = await who.owner("tml-a"), await who.owner("tml-b")
    assert first != second
    assert await who.owner("tml-a") == first


@pytest.mark.parametrize("key", ["tml-a", "anything", "eyJ.no.token"])
async def test_a_server_with_one_tenant_takes_any_key(key: str) -> None:
    assert await identity("single").owner(key) == LOCAL


@pytest.mark.parametrize("mode", ["open", "single", "stored"])
async def test_without_a_key_nobody_gets_in(mode: str) -> None:
    for nothing in (None, ""):
        error = await refused(identity(mode), nothing)
        assert error.status_code == 401
        assert "X-API-Key" in str(error)


async def test_fixed_keys_are_one_tenant_and_the_only_keys() -> None:
    who = identity("fixed", keys=frozenset({"tml-a", "tml-b"}))
    assert await who.owner("tml-a") == await who.owner("tml-b") == LOCAL
    assert (await refused(who, "tml-c")).status_code == 401


def test_keys_and_their_mode_belong_together() -> None:
    for wrong in ({"keys": frozenset({"tml-a"})}, {"key_mode": "fixed"}):
        with pytest.raises(InputError, match="keys"):
            Settings(**wrong)


# -- stored keys -----------------------------------------------------------------------------------


async def test_a_stored_key_is_its_owner_and_only_its_hash_is_kept() -> None:
    store = MemoryStore()
    key, kept = await make_key(store, 1.0, owner="alice", name="laptop", note="mine")
    assert key.startswith("tml-")
    assert len(key) > 40
    assert kept.key_hash == fingerprint(key)
    assert key not in repr(await store.keys())
    assert await identity("stored", store=store).owner(key) == "alice"


async def test_two_keys_can_share_an_owner_and_without_one_a_key_is_a_new_tenant() -> None:
    store = MemoryStore()
    who = identity("stored", store=store)
    keys = [(await make_key(store, 1.0, owner=owner))[0] for owner in ("bob", "bob", None, None)]
    owners = [await who.owner(key) for key in keys]
    assert owners[:2] == ["bob", "bob"]
    assert len(set(owners)) == 3


@pytest.mark.parametrize(
    "wrong",
    [{"owner": ""}, {"owner": "a b"}, {"owner": "../x"}, {"owner": "x" * 65}, {"name": "a\x1b"}],
)
async def test_names_that_would_confuse_are_refused(wrong: dict[str, str]) -> None:
    store = MemoryStore()
    with pytest.raises(InputError, match=next(iter(wrong))):
        await make_key(store, 1.0, **wrong)
    assert not await store.keys()


async def test_a_new_key_works_at_once_even_if_it_was_tried_before() -> None:
    store, clock = MemoryStore(), FakeClock()
    who = identity("stored", store=store, clock=clock)
    other = MemoryStore()
    key, kept = await make_key(other, 1.0, owner="alice")
    await refused(who, key)
    await store.add_key(kept)
    assert await who.owner(key) == "alice"


async def test_a_key_that_another_process_revokes_is_out_within_two_seconds() -> None:
    store, clock = MemoryStore(), FakeClock()
    who = identity("stored", store=store, clock=clock)
    key, kept = await make_key(store, 1.0, owner="alice")
    await who.owner(key)
    await store.revoke_key(kept.key_id, 2.0)
    await clock.advance(2.0)
    assert (await refused(who, key)).status_code == 401


async def test_using_a_key_all_the_time_does_not_keep_it_alive() -> None:
    store, clock = MemoryStore(), FakeClock()
    who = identity("stored", store=store, clock=clock)
    key, kept = await make_key(store, 1.0, owner="alice")
    await who.owner(key)
    await store.revoke_key(kept.key_id, 2.0)
    for _ in range(3):
        await clock.advance(0.5)
        await who.owner(key)
    await clock.advance(0.5)
    assert (await refused(who, key)).status_code == 401


async def test_a_key_that_another_node_revokes_is_out_when_it_is_heard_of() -> None:
    store = MemoryStore()
    other = store.beside()
    for name, each in (("a", store), ("b", other)):
        await each.join("c", Node(node_id=name, name=name, url="", version=1), 60.0)
    who = identity("stored", store=store)
    key, kept = await make_key(store, 1.0, owner="o")
    spare, _ = await make_key(store, 1.0, owner="o")
    for each in (key, spare):
        assert await who.owner(each) == "o"
    await other.revoke_key(kept.key_id, 2.0)
    await refused(who, key)
    assert await who.owner(spare) == "o"


async def test_an_unknown_and_a_revoked_key_are_told_the_same() -> None:
    store = MemoryStore()
    who = identity("stored", store=store)
    key, kept = await make_key(store, 1.0, owner="alice")
    await store.revoke_key(kept.key_id, 2.0)
    unknown, revoked = await refused(who, "tml-nobody"), await refused(who, key)
    assert str(unknown) == str(revoked)
    assert "tinkex key create" in str(unknown)
    assert "alice" not in str(unknown)


async def test_whether_there_is_any_key_is_known() -> None:
    store = MemoryStore()
    assert not await store.any_key(2.0)
    _, kept = await make_key(store, 1.0)
    assert await store.any_key(2.0)
    await store.revoke_key(kept.key_id, 2.0)
    assert not await store.any_key(2.0)


# -- tokens ----------------------------------------------------------------------------------------


async def test_a_token_ends_with_its_key() -> None:
    store, clock = MemoryStore(), FakeClock()
    who = identity("stored", store=store, clock=clock)
    key, kept = await make_key(store, 1.0, owner="alice")
    other, _ = await make_key(store, 1.0, owner="alice")
    token, second = await who.make_jwt(key), await who.make_jwt(other)
    assert await who.owner(token) == "alice"
    await store.revoke_key(kept.key_id, 2.0)
    await clock.advance(2.0)
    assert (await refused(who, token)).status_code == 401
    assert await who.owner(second) == "alice"


async def test_tokens_and_links_survive_a_restart_with_the_same_secret() -> None:
    store, clock = MemoryStore(), FakeClock()
    before = identity("stored", store=store, clock=clock)
    key, _ = await make_key(store, 1.0, owner="alice")
    token, (link, _) = await before.make_jwt(key), before.make_link({"kind": "file"})
    after = identity("stored", store=store, clock=clock)
    assert await after.owner(token) == "alice"
    assert await after.open_link(link) == {"kind": "file"}
    elsewhere = identity("stored", store=store, clock=clock, secret=b"t" * 32)
    assert (await refused(elsewhere, token)).status_code == 401
    with pytest.raises(APIStatusError, match="nothing to download"):
        await elsewhere.open_link(link)


async def test_a_token_of_one_mode_is_worth_nothing_in_another() -> None:
    store = MemoryStore()
    opened = await identity("open", store=store).make_jwt("tml-a")
    fixed = await identity("fixed", store=store, keys=frozenset({"tml-a"})).make_jwt("tml-a")
    for token in (opened, fixed):
        assert (await refused(identity("stored", store=store), token)).status_code == 401
    others = identity("fixed", store=store, keys=frozenset({"tml-b"}))
    for token in (opened, fixed):
        assert (await refused(others, token)).status_code == 401
    assert (await refused(identity("open", store=store), fixed)).status_code == 401


async def test_a_link_is_no_token_and_a_token_no_link() -> None:
    who = identity("open")
    link, _ = who.make_link({"sub": "user-x", "key": "open"})
    assert link.startswith("eyJ")
    assert (await refused(who, link)).status_code == 401
    with pytest.raises(APIStatusError, match="nothing to download"):
        await who.open_link(await who.make_jwt("tml-a"))


# -- bad keys --------------------------------------------------------------------------------------


async def test_many_bad_keys_are_put_off_without_locking_out_good_ones() -> None:
    store, clock = MemoryStore(), FakeClock()
    who = identity("stored", store=store, clock=clock, max_bad_keys_per_s=2.0)
    key, _ = await make_key(store, 1.0, owner="alice")
    codes = [(await refused(who, f"tml-{n}", "10.0.0.1")).status_code for n in range(25)]
    assert codes == [401] * 20 + [429] * 5
    assert await who.owner(key, "10.0.0.1") == "alice"
    error = await refused(who, "tml-bad", "10.0.0.1")
    assert error.response.headers["retry-after"] == "1"
    assert (await refused(who, "tml-bad", "10.0.0.2")).status_code == 401
    await clock.advance(0.5)
    assert (await refused(who, "tml-bad", "10.0.0.1")).status_code == 401


async def test_a_key_of_absurd_length_is_a_bad_key() -> None:
    assert (await refused(identity("open"), "tml-" + "x" * 10_000)).status_code == 401


# -- the routes ------------------------------------------------------------------------------------


async def test_a_key_shows_and_revokes_itself(start: Start) -> None:
    async with start(key_mode="stored") as api:
        key, kept = await make_key(
            api.server.store, api.clock.wall(), owner="alice", name="laptop", note="mine"
        )
        spare, _ = await make_key(api.server.store, api.clock.wall(), owner="alice")
        me, other = Api(api.server, api.clock, key), Api(api.server, api.clock, spare)
        session = await me.session()
        shown = await me.get("/auth/apikey/me")
        assert (shown["key_id"], shown["name"], shown["note"]) == (kept.key_id, "laptop", "mine")
        assert shown["details"]["user_details"]["email"].startswith("alice")
        token = (await me.post("/auth/token"))["jwt"]
        assert (await me.call("DELETE", "/auth/apikey/me")).status == 200
        for gone in (key, token):
            reply = await Api(api.server, api.clock, gone).call("GET", "/sessions")
            assert reply.status == 401
        assert (await other.get("/sessions"))["sessions"] == [session]
        events = [entry["event"] for entry in (await other.get("/audit"))["entries"]]
        assert "api_key_revoked" in events


async def test_a_token_can_revoke_the_key_it_was_made_from(start: Start) -> None:
    async with start(key_mode="stored") as api:
        key, _ = await make_key(api.server.store, api.clock.wall())
        me = Api(api.server, api.clock, key)
        token = (await me.post("/auth/token"))["jwt"]
        holder = Api(api.server, api.clock, token)
        assert (await holder.call("DELETE", "/auth/apikey/me")).status == 200
        assert (await me.call("GET", "/sessions")).status == 401


@pytest.mark.parametrize(
    "settings", [{"key_mode": "open"}, {"key_mode": "single"}, {"key_mode": "fixed"}]
)
async def test_keys_that_are_not_stored_cannot_be_deleted(
    start: Start, settings: dict[str, Any]
) -> None:
    if settings["key_mode"] == "fixed":
        settings = {**settings, "keys": frozenset({"tml-one"})}
    async with start(**settings) as api:
        assert type((await api.get("/auth/apikey/me"))["key_id"]) is int
        reply = await api.call("DELETE", "/auth/apikey/me")
        assert reply.status == 501
        assert settings["key_mode"] in msgspec.json.decode(reply.body)["detail"]

"""`tinkex key`: keys are made and revoked in the store, beside a server that runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio
import anyio.to_thread
import pytest

from tinkex.errors import AuthenticationError
from tinkex.server import Settings
from tinkex.server.api.identity import Identity
from tinkex.server.store.sql import SqlStore
from tinkex.testing import FakeClock

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from conftest import Ran


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def test_a_new_key_is_alone_on_standard_output(run: Callable[..., Ran], tmp_path: Path):
    made = run("key", "create", "--data-dir", tmp_path / "new", "--owner", "alice")
    assert made.status == 0
    assert made.out.startswith("tml-")
    assert len(made.out.split()) == 1
    assert "only time" in made.err
    assert made.out.strip() not in made.err


def test_listed_keys_show_everything_but_the_key(run: Callable[..., Ran], tmp_path: Path):
    words = ("--data-dir", tmp_path)
    key = run("key", "create", *words, "--owner", "a", "--name", "n", "--note", "o").out.strip()
    made = run("key", "create", *words, "-f", "json").json
    assert made["key"].startswith("tml-")
    listed = run("key", "list", *words)
    for text in ("a", "n", "o", made["owner"], "just now"):
        assert text in listed.out
    for secret in (key, made["key"]):
        assert secret not in listed.out
    first, second = run("key", "list", *words, "-f", "json").json
    assert (first["owner"], first["name"], first["note"]) == ("a", "n", "o")
    assert second == {k: v for k, v in made.items() if k != "key"}
    assert "key_hash" not in first
    assert run("key", "list", *words, "--owner", "a", "-f", "json").json == [first]


def test_a_key_is_revoked_once(run: Callable[..., Ran], tmp_path: Path):
    words = ("--data-dir", tmp_path)
    number = run("key", "create", *words, "-f", "json").json["key_id"]
    assert run("key", "revoke", number, *words).status == 0
    (listed,) = run("key", "list", *words, "-f", "json").json
    assert listed["revoked_at"]
    for again in (number, 999):
        failed = run("key", "revoke", again, *words)
        assert failed.status == 1
        assert "tinkex key list" in failed.err


def test_where_no_server_was_nothing_is_listed_or_made(run: Callable[..., Ran], tmp_path: Path):
    for words in (("list",), ("revoke", 1)):
        failed = run("key", *words, "--data-dir", tmp_path / "none")
        assert failed.status == 2
        assert "--data-dir" in failed.err
    assert not (tmp_path / "none").exists()


def test_a_database_can_be_named_by_its_address(run: Callable[..., Ran], tmp_path: Path):
    words = ("--database", f"sqlite:///{tmp_path}/other.db")
    made = run("key", "create", *words, "-f", "json").json
    assert [k["key_id"] for k in run("key", "list", *words, "-f", "json").json] == [made["key_id"]]


@pytest.mark.parametrize("words", [("--owner", "a b"), ("--name", "x" * 201), ("--note", "\n")])
def test_bad_names_are_a_misuse(run: Callable[..., Ran], tmp_path: Path, words: tuple[str, str]):
    failed = run("key", "create", "--data-dir", tmp_path, *words)
    assert failed.status == 2
    assert words[0].removeprefix("--") in failed.err
    assert run("key", "list", "--data-dir", tmp_path, "-f", "json").json == []


@pytest.mark.anyio
async def test_a_running_server_learns_of_new_and_of_revoked_keys(
    run: Callable[..., Ran], tmp_path: Path
):
    async def beside(*words: object) -> Ran:
        return await anyio.to_thread.run_sync(run, "key", *words, "--data-dir", tmp_path)

    clock = FakeClock()
    async with SqlStore.open(tmp_path / "tinkex.db") as store:
        await store.lock()
        who = Identity(Settings(key_mode="stored"), clock, store)
        made = (await beside("create", "--owner", "alice", "-f", "json")).json
        assert await who.owner(made["key"]) == "alice"
        assert (await beside("revoke", made["key_id"])).status == 0
        await clock.advance(2.0)
        with pytest.raises(AuthenticationError):
            await who.owner(made["key"])


def test_a_limited_key_is_listed_with_its_limits(run: Callable[..., Ran], tmp_path: Path):
    words = ("--data-dir", tmp_path)
    limits = ("--read-only", "--project", "p", "--routes", "checkpoints,usage", "--expires", "30d")
    made = run("key", "create", *words, "--owner", "a", *limits, "-f", "json").json
    assert (made["read_only"], made["project_id"]) == (True, "p")
    assert made["routes"] == ["checkpoints", "usage"]
    assert made["expires_at"] > made["created_at"]
    run("key", "create", *words, "--owner", "b")
    listed = run("key", "list", *words)
    assert "read checkpoints+usage in p" in listed.out
    assert "in 4 weeks" in listed.out
    assert max(map(len, listed.out.splitlines())) <= 80


@pytest.mark.parametrize(
    ("limits", "named"),
    [
        (("--expires", "soon"), "30d"),
        (("--expires", "0d"), "30d"),
        (("--expires", "999999d"), "ten years"),
        (("--routes", "everything"), "checkpoints"),
        (("--routes", ","), "checkpoints"),
        (("--project", ""), "printable"),
    ],
)
def test_limits_that_mean_nothing_make_no_key(
    run: Callable[..., Ran], tmp_path: Path, limits: tuple[str, ...], named: str
):
    failed = run("key", "create", "--data-dir", tmp_path / "new", *limits)
    assert failed.status in (1, 2)
    assert named in failed.err
    assert not (tmp_path / "new").exists()

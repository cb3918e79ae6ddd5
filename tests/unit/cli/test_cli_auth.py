"""Signing in and out, and saying honestly whether that works."""

from __future__ import annotations

import io
import json
import socket
import stat
from typing import TYPE_CHECKING

import pytest

from tinkex.cli.commands import DONE, FAILED
from tinkex.credentials import (
    CredentialStore,
    StoredKey,
    credentials_path,
    read_store,
    write_store,
)
from tinkex.testing import API_KEY, FakeServer, faults
from tinkex.types import ClientConfigResponse

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from conftest import Ran

    Run = Callable[..., Ran]


@pytest.fixture
def no_key(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> FakeServer:
    monkeypatch.delenv("TINKER_API_KEY")
    return server


def type_in(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(text))


def test_a_key_is_checked_and_stored_for_its_owner_only(
    run: Run, no_key: FakeServer, home: Path, monkeypatch: pytest.MonkeyPatch
):
    type_in(monkeypatch, f"  {API_KEY}\n")
    ran = run("auth", "login")
    assert ran.status == DONE
    assert API_KEY not in ran.out + ran.err
    path = credentials_path(home)
    assert read_store(path).default_key == API_KEY
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert json.loads(path.read_text())["keys"].popitem()[1]["type"] == "manual"
    assert [seen.route for seen in no_key.requests] == ["get_api_key"]
    assert run("model", "list").status == DONE


class Terminal(io.StringIO):
    """Standard input that is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.usefixtures("no_key")
def test_on_a_terminal_the_key_is_asked_for_unseen(
    run: Run, home: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("sys.stdin", Terminal())
    monkeypatch.setattr("getpass.getpass", lambda prompt: API_KEY)
    ran = run("auth", "login", "-f", "json")
    assert (ran.status, ran.json["path"]) == (DONE, str(credentials_path(home)))
    assert "/keys?new_key=true" in ran.err


@pytest.mark.usefixtures("no_key")
def test_leaving_the_prompt_is_a_failure(run: Run, monkeypatch: pytest.MonkeyPatch):
    def leave(prompt: str) -> str:
        raise EOFError

    monkeypatch.setattr("sys.stdin", Terminal())
    monkeypatch.setattr("getpass.getpass", leave)
    ran = run("auth", "login")
    assert (ran.status, ran.err.splitlines()[-1]) == (FAILED, "Error: No key was given")


@pytest.mark.usefixtures("no_key")
@pytest.mark.parametrize("typed", ["", "\n", "sk-other\n", "tml-two words\n"])
def test_what_is_no_key_is_not_stored(
    run: Run, home: Path, monkeypatch: pytest.MonkeyPatch, typed: str
):
    type_in(monkeypatch, typed)
    ran = run("auth", "login")
    assert ran.status == FAILED
    assert "not an API key" in ran.err
    assert not credentials_path(home).exists()


def test_a_key_that_the_server_refuses_is_not_stored(
    run: Run, no_key: FakeServer, home: Path, monkeypatch: pytest.MonkeyPatch
):
    no_key.faults.on("get_api_key", faults.reply(401, {"detail": "revoked"}))
    type_in(monkeypatch, "tml-revoked\n")
    ran = run("auth", "login")
    assert ran.status == FAILED
    assert "Authentication failed" in ran.err
    assert not credentials_path(home).exists()


def test_signing_in_twice_is_refused(run: Run, home: Path):
    store(home, StoredKey(key="tml-old", name="old"))
    ran = run("auth", "login")
    assert ran.status == FAILED
    assert "tinkex auth logout" in ran.err


def store(home: Path, key: StoredKey) -> None:
    write_store(credentials_path(home), CredentialStore().with_key("7", key))


def test_signing_out_forgets_a_pasted_key_and_says_that_it_still_works(run: Run, home: Path):
    store(home, StoredKey(key="tml-old", name="laptop"))
    ran = run("auth", "logout")
    assert ran.status == DONE
    assert "laptop" in ran.out
    assert "/keys/7" in ran.err
    assert read_store(credentials_path(home)).keys == {}
    again = run("auth", "logout")
    assert again.status == FAILED
    assert "No key is stored" in again.err


def test_signing_out_deletes_a_generated_key_on_the_server(
    run: Run, no_key: FakeServer, home: Path
):
    store(home, StoredKey(key="tml-made", name="made", type="generated"))
    no_key.faults.on("delete_api_key", faults.reply(200, {}))
    ran = run("auth", "logout", "-f", "json")
    assert (ran.status, ran.json["deleted_on_server"]) == (DONE, True)
    assert [seen.route for seen in no_key.requests] == ["delete_api_key"]


def test_signing_out_forgets_the_key_even_if_the_server_keeps_it(
    run: Run, no_key: FakeServer, home: Path
):
    store(home, StoredKey(key="tml-made", name="made", type="generated"))
    no_key.faults.on("delete_api_key", faults.reply(403, {"detail": "not yours"}))
    ran = run("auth", "logout")
    assert ran.status == FAILED
    assert "not yours" in ran.err
    assert read_store(credentials_path(home)).keys == {}


@pytest.mark.usefixtures("server")
def test_the_status_of_a_good_key_is_a_success(run: Run):
    ran = run("auth", "status")
    assert (ran.status, ran.out) == (DONE, "Credentials available: yes\nTinker accessible: yes\n")
    data = run("auth", "status", "-f", "json").json
    assert data == {"credentials_available": True, "accessible": True}


@pytest.mark.req("B20")
@pytest.mark.usefixtures("no_key")
def test_the_status_without_a_key_fails_and_says_how_to_get_one(run: Run):
    ran = run("auth", "status")
    assert (ran.status, ran.out) == (FAILED, "Credentials available: no\nTinker accessible: no\n")
    assert "tinkex auth login" in ran.err


def test_the_status_of_a_refused_key_fails_with_the_cause(run: Run, server: FakeServer):
    server.faults.on("get_server_capabilities", faults.reply(401, {"detail": "revoked"}))
    ran = run("auth", "status", "-f", "json")
    assert (ran.status, ran.json["accessible"]) == (FAILED, False)
    assert "revoked" in ran.err


@pytest.mark.usefixtures("server")
def test_whoami_with_a_plain_key_looks_the_key_up(run: Run):
    ran = run("auth", "whoami")
    assert ran.status == DONE
    assert "Email:" in ran.out
    assert run("auth", "whoami", "-f", "json").json["organization"] == "tinkex"


def test_whoami_reads_the_token_where_the_server_gives_one(
    run: Run, server: FakeServer, monkeypatch: pytest.MonkeyPatch
):
    flags = ClientConfigResponse(pjwt_auth_enabled=True)
    server.faults.on("client_config", faults.reply(200, flags.model_dump(mode="json")), times=2)
    assert "tml:organization:tinkex" in run("auth", "whoami").out
    assert run("auth", "whoami", "-f", "json").json["user_urn"].startswith("user-")


@pytest.mark.req("B20")
def test_an_unreachable_server_is_called_unreachable(run: Run, monkeypatch: pytest.MonkeyPatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and not listening: connections are refused
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        monkeypatch.setenv("TINKER_BASE_URL", url)
        # Signing in asks once; other commands would try again for half a minute.
        type_in(monkeypatch, f"{API_KEY}\n")
        ran = run("auth", "login")
    assert ran.status == FAILED
    assert "Connection failed" in ran.err
    assert url.removeprefix("http://") in ran.err

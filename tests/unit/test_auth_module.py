"""tinkex.auth: credentials are found, and an unusable server is named within seconds."""

from __future__ import annotations

import http.server
import json
import socket
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from tests.patience import PATIENCE_S
from tinkex import auth
from tinkex.credentials import (
    CredentialStore,
    StoredKey,
    credentials_path,
    write_store,
)
from tinkex.errors import (
    APIConnectionError,
    APITimeoutError,
    AuthenticationError,
    BillingError,
    CredentialError,
    InputError,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty home and no settings."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("API_KEY", "BASE_URL", "CREDENTIAL_CMD", "PROJECT_ID", "LOG"):
        monkeypatch.delenv(f"TINKER_{name}", raising=False)
    return tmp_path


def store(home: Path, key: str) -> None:
    write_store(
        credentials_path(home), CredentialStore().with_key("1", StoredKey(key=key, name="n"))
    )


def test_without_anything_there_is_no_token():
    assert auth.get_tinker_token() is None
    assert not auth.tinker_has_credentials()


def test_the_environment_comes_before_the_stored_key(home: Path, monkeypatch: pytest.MonkeyPatch):
    store(home, "tml-stored")
    assert auth.get_tinker_token() == "tml-stored"
    monkeypatch.setenv("TINKER_API_KEY", "tml-env")
    assert auth.get_tinker_token() == "tml-env"
    assert auth.tinker_has_credentials()


def test_a_malformed_key_is_no_token(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TINKER_API_KEY", "sk-other")
    assert auth.get_tinker_token() is None
    assert not auth.tinker_has_credentials()


def test_a_damaged_store_is_no_token(home: Path):
    path = credentials_path(home)
    path.parent.mkdir()
    path.write_text("{")
    assert auth.get_tinker_token() is None
    assert not auth.tinker_has_credentials()


def test_a_credential_command_counts_and_is_never_run(home: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TINKER_CREDENTIAL_CMD", f"touch {home}/ran; echo tml-cmd")
    assert auth.tinker_has_credentials()
    assert auth.get_tinker_token() is None
    store(home, "tml-stored")
    assert auth.get_tinker_token() == "tml-stored"
    assert not (home / "ran").exists()


@contextmanager
def server(status: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """A server that answers the capabilities request with `status`."""
    asked: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def answer(self) -> None:
            self.rfile.read(int(self.headers.get("content-length") or 0))
            asked.append(self.path.removeprefix("/api/v1/"))
            ready = "client" in self.path
            body = json.dumps({} if ready else {"detail": "no", "supported_models": []}).encode()
            self.send_response(200 if ready else status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST = answer

        def log_message(self, format: str, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
        thread = threading.Thread(target=listening.serve_forever, args=(0.01,))
        thread.start()
        monkeypatch.setenv("TINKER_BASE_URL", f"http://127.0.0.1:{listening.server_address[1]}")
        monkeypatch.setenv("TINKER_API_KEY", "tml-key")
        try:
            yield asked
        finally:
            listening.shutdown()
            thread.join()


def test_a_server_that_takes_the_key_is_accessible(monkeypatch: pytest.MonkeyPatch):
    with server(200, monkeypatch) as asked:
        auth.raise_if_tinker_not_accessible(timeout=PATIENCE_S)
    assert asked == ["client/config", "client/dynamic_config", "get_server_capabilities"]


@pytest.mark.parametrize(("status", "kind"), [(401, AuthenticationError), (402, BillingError)])
def test_a_refusal_is_raised_at_once_and_not_waited_out(
    status: int, kind: type[Exception], monkeypatch: pytest.MonkeyPatch
):
    with server(status, monkeypatch) as asked, pytest.raises(kind):
        auth.raise_if_tinker_not_accessible(timeout=PATIENCE_S)
    assert asked.count("get_server_capabilities") == 1


def test_without_a_credential_nothing_is_asked():
    with pytest.raises(CredentialError, match="TINKER_API_KEY"):
        auth.raise_if_tinker_not_accessible()


def test_a_malformed_setting_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TINKER_BASE_URL", "localhost:8000")
    with pytest.raises(InputError, match="TINKER_BASE_URL"):
        auth.raise_if_tinker_not_accessible()


@pytest.mark.req("B7")
def test_a_closed_port_is_named_within_the_time_given(monkeypatch: pytest.MonkeyPatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and not listening: connections are refused
        monkeypatch.setenv("TINKER_BASE_URL", f"http://127.0.0.1:{taken.getsockname()[1]}")
        monkeypatch.setenv("TINKER_API_KEY", "tml-key")
        with pytest.raises(APIConnectionError) as caught:
            auth.raise_if_tinker_not_accessible(timeout=0.4)
    assert "127.0.0.1" in str(caught.value)


@pytest.mark.req("B7")
def test_a_server_that_takes_the_connection_and_says_nothing_is_named_too(
    monkeypatch: pytest.MonkeyPatch,
):
    with socket.create_server(("127.0.0.1", 0)) as mute:
        monkeypatch.setenv("TINKER_BASE_URL", f"http://127.0.0.1:{mute.getsockname()[1]}")
        monkeypatch.setenv("TINKER_API_KEY", "tml-key")
        with pytest.raises(APITimeoutError, match=r"127\.0\.0\.1"):
            auth.raise_if_tinker_not_accessible(timeout=0.4)

"""What may be said outside the process, and what never is."""

from __future__ import annotations

import pytest

from tinkex.clients.redaction import Redactor, chain, is_user_error
from tinkex.errors import (
    APIConnectionError,
    APIStatusError,
    InputError,
    RequestFailedError,
    ResponseInfo,
    status_error,
)


def raised(error: Exception, cause: Exception | None = None) -> Exception:
    try:
        raise error from cause
    except type(error) as caught:
        return caught


@pytest.mark.req("B1")
@pytest.mark.parametrize(
    "text",
    [
        "key tml-abc-DEF_123 refused",
        "token eyJhbGciOi.eyJzdWIi.c2ln expired",
        "Authorization: Bearer s3cr3t-value",
        "proxy http://user:s3cr3t-value@host/ failed",
        "own key my-own-key-42 refused",
    ],
)
def test_credentials_are_removed_from_text(text: str) -> None:
    cleaned = Redactor(lambda: ["my-own-key-42"]).text(text)
    for secret in ("tml-abc", "DEF_123", "eyJ", "c2ln", "s3cr3t", "my-own-key"):
        assert secret not in cleaned
    assert "[redacted]" in cleaned


def test_an_empty_secret_removes_nothing() -> None:
    assert Redactor(lambda: [""]).text("plain") == "plain"


@pytest.mark.req("S34")
def test_headers_prompts_and_tokens_are_dropped_at_any_depth() -> None:
    data = {
        "request_id": "r",
        "headers": {"X-API-Key": "k"},
        "Request-Headers": 1,
        "inner": {"prompt": "p", "tokens": [1, 2], "kept": 1, "list": [{"api_key": "k", "n": 2}]},
    }
    assert Redactor().members(data) == {
        "request_id": "r",
        "inner": {"kept": 1, "list": [{"n": 2}]},
    }


def test_only_plain_json_values_remain() -> None:
    class Odd:
        def __repr__(self) -> str:
            return "a prompt"

    cleaned = Redactor().members(
        {"a": Odd(), "b": float("nan"), "c": None, "d": True, "e": (1, 2.5), "f": b"bytes"}
    )
    assert cleaned == {"a": "Odd", "b": "nan", "c": None, "d": True, "e": [1, 2.5], "f": "bytes"}


def test_size_and_depth_are_bounded() -> None:
    nested: dict[str, object] = {}
    top = nested
    for _ in range(100):
        inner: dict[str, object] = {}
        nested["n"] = inner
        nested = inner
    cleaned = Redactor().members({"deep": top, "long": "x" * 10_000, "many": list(range(10_000))})
    assert len(str(cleaned)) < 2000


@pytest.mark.req("S34")
@pytest.mark.parametrize(
    ("error", "message"),
    [
        (status_error(ResponseInfo(422), {"input": "my prompt"}), "HTTP status 422"),
        (InputError("got 'my prompt'", "data[3].model_input"), "bad value of data[3].model_input"),
        (InputError("got 'my prompt'"), "bad value"),
        (KeyError("my prompt"), ""),
        (APIConnectionError(message="refused tml-abc"), "refused [redacted]"),
        (RequestFailedError("out of memory", "r", "server"), "out of memory"),
    ],
)
def test_an_error_says_only_what_its_author_is_known_to_say(error: Exception, message: str) -> None:
    assert Redactor().message(error) == message


@pytest.mark.req("B1")
def test_frames_name_code_and_hold_neither_values_nor_source_lines() -> None:
    def innermost(value: str) -> None:
        raise KeyError(value)

    try:
        innermost("tml-canary-in-a-value")
    except KeyError as error:
        frames = Redactor().frames(raised(ValueError("tml-canary-in-a-message"), error))
    assert frames is not None
    assert "test_redaction.py:" in frames
    assert "in innermost" in frames
    assert "ValueError" in frames
    assert "KeyError" in frames
    assert "canary" not in frames


def test_an_error_that_was_never_raised_has_no_frames() -> None:
    assert Redactor().frames(ValueError()) is None


@pytest.mark.parametrize("status", [400, 401, 402, 403, 404, 409, 422, 429])
def test_client_errors_are_the_users(status: int) -> None:
    assert is_user_error(status_error(ResponseInfo(status), None))


@pytest.mark.parametrize("status", [408, 500, 503])
def test_timeouts_and_server_errors_are_not_the_users(status: int) -> None:
    assert not is_user_error(status_error(ResponseInfo(status), None))


def test_a_user_error_is_found_anywhere_in_the_chain() -> None:
    cause = RequestFailedError("bad", None, "user")
    assert is_user_error(raised(RuntimeError("wrapper"), cause))
    assert not is_user_error(raised(RuntimeError(), RequestFailedError("bad", None, "server")))


def test_a_chain_that_bites_its_tail_ends() -> None:
    first, second = ValueError(), KeyError()
    first.__cause__, second.__cause__ = second, first
    assert list(chain(first)) == [first, second]


def test_a_suppressed_context_is_not_part_of_the_chain() -> None:
    error = APIStatusError("x", ResponseInfo(500))
    error.__context__ = InputError("hidden")
    error.__suppress_context__ = True
    assert list(chain(error)) == [error]

"""What may be said outside the process, and what never is."""

from __future__ import annotations

import pytest

from tinkex.errors import (
    APIConnectionError,
    APIStatusError,
    InputError,
    InputTypeError,
    RequestFailedError,
    ResponseInfo,
    status_error,
)
from tinkex.telemetry.redaction import Redactor, chain, is_user_error
from tinkex.wire import json_codec


def raised(error: Exception, cause: Exception | None = None) -> Exception:
    try:
        raise error from cause
    except type(error) as caught:
        return caught


@pytest.mark.req("S34")
@pytest.mark.parametrize(
    ("error", "facts"),
    [
        (
            status_error(ResponseInfo(422), {"input": "my prompt"}),
            {"error_type": "UnprocessableEntityError", "code": "unprocessable", "status_code": 422},
        ),
        (
            InputError("got 'my prompt'", 'data[3].loss_fn_inputs["my prompt"]'),
            {"error_type": "InputError", "code": "bad_input"},
        ),
        (
            RequestFailedError("cannot continue 'my prompt'", "s:1", "server"),
            {
                "error_type": "RequestFailedError",
                "code": "request_failed",
                "category": "server",
                "request_id": "s:1",
            },
        ),
        (APIConnectionError(), {"error_type": "APIConnectionError", "code": "connection"}),
        (KeyError("my prompt"), {"error_type": "KeyError"}),
    ],
)
def test_an_error_says_its_type_code_status_category_and_request(
    error: Exception, facts: dict[str, object]
) -> None:
    assert Redactor().facts(error) == facts


def test_the_message_is_made_of_the_same_facts() -> None:
    error = RequestFailedError("my prompt", "s:1", "server")
    assert Redactor().message(error) == "code request_failed, request_id s:1, category server"
    assert Redactor().message(KeyError("my prompt")) == ""


@pytest.mark.req("B1")
@pytest.mark.parametrize(
    "text",
    ["my prompt", "1,2,3", "", "x" * 129, "tml-abc", "eyJhbGci.eyJz", "k-own-key", "ö", 7, None],
)
def test_what_does_not_look_like_an_id_or_holds_a_credential_is_none(text: object) -> None:
    assert Redactor(lambda: ["own-key"]).identifier(text) is None


@pytest.mark.parametrize("text", ["session-0:train:1:3", "0b4d0a8e-1c2f-4f37-9d6f", "req_1.2"])
def test_ids_are_kept_and_an_empty_secret_hides_none(text: str) -> None:
    assert Redactor(lambda: [""]).identifier(text) == text


@pytest.mark.req("B1")
def test_frames_name_lines_of_tinkex_and_nothing_of_other_code() -> None:
    def canary_function(value: str) -> None:
        json_codec.encode(object())

    try:
        canary_function("canary value")
    except InputTypeError as error:
        frames = Redactor().frames(raised(ValueError("canary message"), error))
    assert frames is not None
    lines = frames.splitlines()
    assert lines[:2] == ["ValueError", "  (code outside of tinkex)"]
    assert lines[2] == "tinkex.errors.InputTypeError"
    assert lines[3] == "  (code outside of tinkex)"
    assert lines[4].startswith("  tinkex/wire/json_codec.py:")
    assert "canary" not in frames
    assert "test_redaction" not in frames


def test_the_members_of_a_group_are_looked_at_too() -> None:
    group = ExceptionGroup("g", [KeyError(), ExceptionGroup("h", [InputError("x")])])
    assert [type(link).__name__ for link in chain(group)] == [
        "ExceptionGroup",
        "KeyError",
        "ExceptionGroup",
        "InputError",
    ]
    assert is_user_error(group)


def test_a_group_of_very_many_errors_is_looked_at_for_a_moment_only() -> None:
    group = ExceptionGroup("g", [raised(KeyError(n)) for n in range(1000)])
    frames = Redactor().frames(group)
    assert frames is not None
    assert len(frames.splitlines()) <= 50


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

"""Every refusal below `/v1` has OpenAI's shape and the right status."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from tinkex.errors import EngineDiedError, RequestFailedError, StorageError
from tinkex.transport.base import HttpRequest, Pool

from .conftest import V1

if TYPE_CHECKING:
    from tests.unit.server.conftest import Start

pytestmark = pytest.mark.anyio


def error_of(body: bytes) -> dict[str, Any]:
    found = msgspec.json.decode(body)
    assert set(found) == {"error"}
    assert set(found["error"]) == {"message", "type", "param", "code"}
    return found["error"]


async def test_a_missing_key_is_a_401(v1: V1) -> None:
    reply = await v1.call("GET", "/models", accept="application/json")
    assert reply.status == 401
    assert error_of(reply.body)["code"] == "invalid_api_key"


async def test_a_key_may_come_as_a_bearer_or_in_the_products_own_header(v1: V1) -> None:
    for headers in ({"authorization": "Bearer tml-a"}, {"x-api-key": "tml-a"}):
        assert (await v1.call("GET", "/models", **headers)).status == 200
    assert (await v1.call("GET", "/models", authorization="Basic dG1sLWE=")).status == 401


async def test_a_wrong_key_is_a_401(start: Start) -> None:
    async with start(key_mode="fixed", keys=frozenset({"tml-right"})) as api:
        wrong = await V1(api).call("GET", "/models", authorization="Bearer tml-wrong")
        assert wrong.status == 401
        assert error_of(wrong.body)["type"] == "invalid_request_error"
        right = await V1(api).call("GET", "/models", authorization="Bearer tml-right")
        assert right.status == 200


@pytest.mark.parametrize(("method", "path"), [("GET", "/embeddings"), ("PUT", "/completions")])
async def test_what_is_not_there_is_a_404(v1: V1, method: str, path: str) -> None:
    reply = await v1.call(method, path)
    assert reply.status == 404
    assert error_of(reply.body)["message"] == f"{method} /v1{path} is not part of this API."


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff"])
async def test_a_body_that_is_no_object_is_a_400(v1: V1, body: bytes) -> None:
    headers = {"authorization": "Bearer tml-a"}
    request = HttpRequest("POST", "/v1/completions", Pool.REST, 60, "", headers, body)
    reply = await v1.api.transport.send(request)
    assert reply.status == 400
    assert "not a JSON object" in error_of(reply.body)["message"]


async def test_a_body_that_is_too_large_is_a_413(start: Start) -> None:
    async with start(max_body_bytes=100) as api:
        status, error = await V1(api).refused("/completions", prompt="x" * 100)
        assert status == 413
        assert "100 bytes" in error["message"]


@pytest.mark.parametrize(
    ("raised", "status"),
    [
        (EngineDiedError("/secret/path"), 503),
        (RequestFailedError("too many pictures", None, "user"), 400),
        (RequestFailedError("out of memory", None, "server"), 500),
        (StorageError("/data is full"), 507),
        (ValueError("/secret/path"), 500),
    ],
)
async def test_what_the_engine_runs_into_keeps_its_meaning(
    v1: V1, raised: Exception, status: int
) -> None:
    v1.api.server.engine.fail_next("sample", raised)
    reply = await v1.call("POST", "/completions", {"model": "tinkex/tiny", "prompt": "x"})
    assert reply.status == status
    error = error_of(reply.body)
    assert error["type"] == ("invalid_request_error" if status == 400 else "server_error")
    assert "secret" not in error["message"]
    assert ("retry-after" in reply.headers) == (status in (503, 507))


async def test_too_many_samples_at_once_are_a_429(start: Start) -> None:
    async with start(max_samples_in_flight=0) as api:
        reply = await V1(api).call("POST", "/completions", {"model": "tinkex/tiny", "prompt": "x"})
        assert reply.status == 429
        assert error_of(reply.body)["code"] == "rate_limit_exceeded"
        assert "retry-after" in reply.headers


async def test_one_bad_prompt_of_several_fails_the_request(v1: V1) -> None:
    status, error = await v1.refused("/completions", prompt=[[1], [5000]])
    assert status == 400
    assert error["message"]

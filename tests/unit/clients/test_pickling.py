"""What travels between processes: errors as they are, samplers without their credentials."""

from __future__ import annotations

import asyncio
import base64
import copy
import json
import pickle
from typing import TYPE_CHECKING, Any

import pytest

from tests.patience import PATIENCE_S
from tests.unit.clients.world import MODEL, World
from tinkex import (
    Config,
    CredentialError,
    DataError,
    InputError,
    ModelInput,
    SamplingClient,
    SamplingParams,
    ServiceClient,
    TinkerError,
)
from tinkex import errors as tree
from tinkex.errors import (
    APIConnectionError,
    APIError,
    APIResponseValidationError,
    APIStatusError,
    DataProblem,
    InputTypeError,
    MissingPackageError,
    ProxyError,
    RequestFailedError,
    RequestInfo,
    ResponseInfo,
    status_error,
)
from tinkex.testing import FakeServer

if TYPE_CHECKING:
    from collections.abc import Iterator

PROMPT = ModelInput.from_ints([1, 2, 3])
PARAMS = SamplingParams(max_tokens=3, seed=1)
KEY = "tml-canary-of-the-pickles"


def _every_class() -> Iterator[type[TinkerError]]:
    todo = [TinkerError]
    while todo:
        kind = todo.pop()
        if kind.__module__.startswith("tinkex"):
            yield kind
        todo.extend(kind.__subclasses__())


def _example(kind: type[TinkerError]) -> TinkerError:
    request = RequestInfo("POST", "http://server.invalid/api/v1/asample")
    response = ResponseInfo(418, {"retry-after": "1"}, "no", request)
    if issubclass(kind, APIResponseValidationError):
        return kind(response, {"a": 1}, "broken")
    if issubclass(kind, APIStatusError):
        return kind("refused", response, {"detail": "no"})
    if issubclass(kind, APIConnectionError):
        return kind(request, "gone")
    if issubclass(kind, ProxyError):
        return kind("refused", request, status_code=407)
    if issubclass(kind, APIError):
        return kind("odd", request, body=[1])
    if issubclass(kind, RequestFailedError):
        return kind("failed", "r-1", "server")
    if issubclass(kind, MissingPackageError):
        return kind("tokenizers are needed", "tokenizers")
    if issubclass(kind, InputError):
        return kind("is wrong", "data[3]")
    if issubclass(kind, DataError):
        return kind("data.jsonl", [DataProblem(3, "is no JSON")])
    return kind("something")


@pytest.mark.req("B8")
@pytest.mark.parametrize("kind", sorted(set(_every_class()), key=lambda kind: kind.__name__))
def test_every_error_pickles_and_copies_with_everything_it_says(kind: type[TinkerError]):
    error = _example(kind)
    error.request_id = "req-7"
    error.add_note("a note")
    for twin in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(twin) is kind
        assert str(twin) == str(error)
        assert (twin.code, twin.retryable, twin.request_id) == (
            error.code,
            error.retryable,
            error.request_id,
        )
        assert vars(twin) == vars(error)


@pytest.mark.req("B8")
def test_every_error_has_a_code_of_its_own_and_is_in_the_tree():
    kinds = set(_every_class())
    codes = [kind.code for kind in kinds]
    assert len(codes) == len(set(codes))
    listed = {name for name in vars(tree) if isinstance(getattr(tree, name), type)}
    for kind in kinds:
        if kind.__module__ == tree.__name__:
            assert kind.__name__ in listed
            assert kind.__name__ in (tree.__doc__ or "")


@pytest.mark.req("B8")
def test_errors_of_arguments_are_also_what_the_standard_library_calls_them():
    assert issubclass(InputError, ValueError)
    assert issubclass(InputTypeError, TypeError)
    for status in (400, 401, 402, 403, 404, 409, 410, 418, 422, 429, 500, 503):
        error = status_error(ResponseInfo(status), None)
        assert pickle.loads(pickle.dumps(error)).status_code == status


@pytest.mark.req("B9")
@pytest.mark.req("B1")
def test_a_sampler_travels_without_any_credential():
    headers = {"X-Team": "blue", "Authorization": f"Bearer {KEY}", "X-Secret-Token": KEY}

    async def scenario(world: World) -> None:
        world.config = Config(base_url="http://fake.invalid", api_key=KEY, headers=headers)
        async with world.service() as service:
            sampler = await service.create_sampling_client_async(base_model=MODEL)
            handle = sampler.get_sampler_handle()
            decoded = base64.urlsafe_b64decode(handle).decode()
            assert KEY not in decoded
            assert json.loads(decoded)["headers"] == {"X-Team": "blue"}
            assert KEY.encode() not in pickle.dumps(sampler)
            assert KEY not in repr(sampler)

    World().run(scenario)


@pytest.mark.req("B9")
def test_a_copy_in_the_same_process_shares_the_connections_and_samples_the_same():
    async def scenario(world: World) -> None:
        async with world.service() as service:
            sampler = await service.create_sampling_client_async(base_model=MODEL)
            for twin in (
                pickle.loads(pickle.dumps(sampler)),
                SamplingClient.from_sampler_handle(sampler.get_sampler_handle()),
            ):
                assert twin.holder is sampler.holder
                mine, other = await asyncio.gather(
                    sampler.sample(PROMPT, 2, PARAMS), twin.sample(PROMPT, 2, PARAMS)
                )
                assert [s.tokens for s in mine.sequences] == [s.tokens for s in other.sequences]

    world = World()
    world.run(scenario)
    assert len(world.server.seen("create_session")) == 1


@pytest.mark.req("B9")
@pytest.mark.parametrize(
    "handle", ["", "not base64!", "e30=", base64.urlsafe_b64encode(b"[1]").decode(), None, 7, "ü"]
)
def test_a_damaged_handle_is_an_error_that_says_what_to_pass(handle: Any):
    with pytest.raises(InputError, match="get_sampler_handle") as caught:
        SamplingClient.from_sampler_handle(handle)
    assert caught.value.path == "handle"


@pytest.mark.req("B9")
@pytest.mark.req("S30")
def test_a_handle_opened_with_a_key_of_its_own_uses_that_key_and_leaves_the_session_alone(
    monkeypatch: pytest.MonkeyPatch,
):
    with FakeServer().serve() as server:
        with ServiceClient(base_url=server.url, api_key=KEY) as service:
            handle = service.create_sampling_client(base_model=MODEL).get_sampler_handle()
            copied = SamplingClient.from_sampler_handle(handle, api_key=KEY)
            assert copied.holder is not service.holder
            assert len(copied.sample(PROMPT, 1, PARAMS).result(PATIENCE_S).sequences) == 1
            monkeypatch.delenv("TINKER_API_KEY", raising=False)
        # The session above is over, so a copy needs a credential of its own; there is none.
        monkeypatch.setenv("HOME", "/nonexistent")
        alone = SamplingClient.from_sampler_handle(handle)
        error = alone.sample(PROMPT, 1, PARAMS).exception(PATIENCE_S)
        assert isinstance(error, CredentialError)
        assert "TINKER_API_KEY" in str(error)
        assert [seen.path.split("/")[-2] for seen in server.seen("finish_session")] == [
            service.holder.session_id
        ]


@pytest.mark.req("B9")
def test_clients_that_belong_to_their_process_say_so_when_pickled():
    async def scenario(world: World) -> None:
        async with world.service() as service:
            with pytest.raises(TypeError, match="SamplingClient"):
                pickle.dumps(service)
            training = await service.create_lora_training_client_async(MODEL, rank=2)
            with pytest.raises(TypeError, match="process"):
                pickle.dumps(training)

    World().run(scenario)

"""Both colours of every client: twins, futures that can be awaited, context managers."""

from __future__ import annotations

import asyncio
import concurrent.futures
import inspect
import logging
import queue
from typing import TYPE_CHECKING, Any

import pytest

from tests.patience import PATIENCE_S
from tests.unit.clients.world import MODEL, World, datum
from tinkex import (
    AdamParams,
    AdminClient,
    APIFuture,
    APIStatusError,
    ClosedError,
    InputError,
    ModelInput,
    RestClient,
    SamplingClient,
    SamplingParams,
    ServiceClient,
    TrainingClient,
)
from tinkex.testing import API_KEY, FakeServer, faults

if TYPE_CHECKING:
    from collections.abc import Iterator

CLIENTS = [ServiceClient, TrainingClient, SamplingClient, RestClient, AdminClient]
PROMPT = ModelInput.from_ints([1, 2, 3])
PARAMS = SamplingParams(max_tokens=3, seed=1)

# What answers at once and sends nothing, or belongs to the clients among themselves.
# Methods that the official clients do not have. They return a coroutine and are no coroutine
# functions themselves.
OURS = {
    "TrainingClient": ("get_tokenizer_async", "withdraw_async"),
    "SamplingClient": ("get_tokenizer_async",),
}
OFFICIAL_ASYNC = {
    "compute_logprobs_async",
    "create_sampling_client_async",
    "forward_async",
    "forward_backward_async",
    "forward_backward_custom_async",
    "get_base_model_async",
    "get_info_async",
    "load_state_async",
    "load_state_with_optimizer_async",
    "optim_step_async",
    "sample_async",
    "save_state_async",
    "save_weights_and_get_sampling_client_async",
    "save_weights_external_async",
    "save_weights_for_sampler_async",
}
ONE_COLOUR = {
    "get_telemetry",
    "get_console_url",
    "on_queue_state_change",
    "get_sampler_handle",
    "from_sampler_handle",
    "usage",
    "create_rest_client",
    "over",
    "open",
    "load",
}
# python-api §9.4: replaced on the class by programs that record what is called.
PATCHED = {
    TrainingClient: [
        "forward_async",
        "forward_backward",
        "forward_backward_async",
        "forward_backward_custom_async",
        "get_info_async",
        "optim_step",
        "optim_step_async",
        "save_state_async",
        "load_state_async",
        "load_state_with_optimizer_async",
        "save_weights_for_sampler",
        "save_weights_for_sampler_async",
        "save_weights_external_async",
        "save_weights_and_get_sampling_client_async",
        "create_sampling_client_async",
    ],
    SamplingClient: ["sample", "sample_async", "compute_logprobs_async", "get_base_model_async"],
}


def public_methods(kind: type) -> dict[str, Any]:
    return {
        name: value
        for name, value in inspect.getmembers(kind)
        if not name.startswith("_") and (inspect.isfunction(value) or inspect.ismethod(value))
    }


def shape(method: Any) -> list[tuple[str, Any, Any]]:
    return [
        (p.name, p.kind, p.default)
        for p in inspect.signature(method).parameters.values()
        if p.name != "self"
    ]


@pytest.mark.req("B11")
@pytest.mark.parametrize("kind", CLIENTS)
def test_every_method_has_a_twin_with_the_same_parameters(kind: type):
    methods = public_methods(kind)
    for name, method in methods.items():
        if name in ONE_COLOUR:
            continue
        twin = name.removesuffix("_async") if name.endswith("_async") else f"{name}_async"
        assert twin in methods, f"{kind.__name__}.{name} has no {twin}"
        assert shape(method) == shape(methods[twin]), f"{kind.__name__}.{name}"
        assert method.__name__ == name
        assert method.__doc__, f"{kind.__name__}.{name} has no docstring"


@pytest.mark.req("B11")
@pytest.mark.parametrize("kind", CLIENTS)
def test_async_methods_are_coroutine_functions_and_the_others_are_not(kind: type):
    for name, method in public_methods(kind).items():
        if name in ("open", *OURS.get(kind.__name__, ())):
            continue
        assert inspect.iscoroutinefunction(method) == name.endswith("_async"), name


@pytest.mark.parametrize("kind", [TrainingClient, SamplingClient])
def test_coroutine_functions_are_those_of_the_official_client(kind: type):
    """The cookbook wraps every coroutine function of these clients, and knows no others."""
    assert not any(name in OFFICIAL_ASYNC for name in OURS.get(kind.__name__, ()))
    found = {n for n, m in public_methods(kind).items() if inspect.iscoroutinefunction(m)}
    assert found <= OFFICIAL_ASYNC


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind, names in PATCHED.items() for name in names]
)
def test_a_method_replaced_on_the_class_is_the_one_that_is_called(
    kind: type, name: str, monkeypatch: pytest.MonkeyPatch
):
    called: list[tuple[Any, ...]] = []

    def stand_in(self: Any, *args: Any, **kwargs: Any) -> str:
        called.append(args)
        return "replaced"

    async def async_stand_in(self: Any, *args: Any, **kwargs: Any) -> str:
        return stand_in(self, *args)

    is_async = name.endswith("_async")
    assert inspect.isfunction(inspect.getattr_static(kind, name))
    monkeypatch.setattr(kind, name, async_stand_in if is_async else stand_in)

    async def scenario(world: World) -> None:
        async with world.service() as service:
            client: Any
            if kind is TrainingClient:
                client = await service.create_lora_training_client_async(MODEL, rank=2)
            else:
                client = await service.create_sampling_client_async(base_model=MODEL)
            answer = getattr(client, name)("an argument")
            assert (await answer if is_async else answer) == "replaced"

    World().run(scenario)
    assert called == [("an argument",)]


# -- blocking code on a real server -----------------------------------------------------------


@pytest.fixture
def service() -> Iterator[ServiceClient]:
    with (
        FakeServer().serve() as server,
        ServiceClient(base_url=server.url, api_key=API_KEY) as client,
    ):
        yield client


@pytest.mark.req("S23")
@pytest.mark.req("B10")
def test_the_same_call_gives_a_future_in_blocking_and_in_async_code(service: ServiceClient):
    training = service.create_lora_training_client(MODEL, rank=2)
    sampler = training.save_weights_and_get_sampling_client()
    rest = RestClient(service.holder)
    futures: list[Any] = [
        training.forward([datum()], "cross_entropy"),
        training.forward_backward([datum()], "cross_entropy"),
        training.optim_step(AdamParams()),
        training.save_state("a"),
        training.save_weights_for_sampler("b"),
        training.save_weights_external("c"),
        sampler.sample(PROMPT, 1, PARAMS),
        sampler.compute_logprobs(PROMPT),
        rest.list_training_runs(),
    ]
    assert all(isinstance(future, APIFuture) for future in futures)
    assert all(isinstance(future, concurrent.futures.Future) for future in futures)
    values = [future.result(PATIENCE_S) for future in futures]

    async def again() -> list[Any]:
        submitted = await training.forward_async([datum()], "cross_entropy")
        assert isinstance(submitted, APIFuture)
        # Finished futures can be awaited from any loop, as often as one likes.
        return [await future for future in futures] + [await submitted, await submitted]

    *same, third, fourth = asyncio.run(again())
    assert all(one is other for one, other in zip(values, same, strict=True))
    assert third is fourth


@pytest.mark.req("B10")
def test_futures_work_with_the_standard_library(service: ServiceClient):
    sampler = service.create_sampling_client(base_model=MODEL)
    futures = [sampler.sample(PROMPT, 1, PARAMS) for _ in range(5)]
    heard: queue.SimpleQueue[bool] = queue.SimpleQueue()
    futures[0].add_done_callback(lambda future: heard.put(future.done()))
    done, pending = concurrent.futures.wait(futures, timeout=PATIENCE_S)
    assert (len(done), len(pending)) == (5, 0)
    assert len(list(concurrent.futures.as_completed(futures, timeout=1))) == 5
    assert heard.get(timeout=PATIENCE_S)  # callbacks run after waiters were woken
    assert heard.empty()
    assert futures[0].future() is futures[0]
    assert futures[0].exception() is None
    assert not futures[0].cancel()


@pytest.mark.req("S23")
def test_errors_come_out_of_the_future_and_never_out_of_the_call(service: ServiceClient):
    training = service.create_lora_training_client(MODEL, rank=2)
    sampler = service.create_sampling_client(base_model=MODEL)
    bad: list[Any] = [
        training.forward([], "cross_entropy"),
        training.forward_backward([datum()], "no such loss"),
        training.optim_step("fast"),
        training.save_state(7),
        sampler.sample("a prompt", 1, PARAMS),
        sampler.compute_logprobs(None),
        RestClient(service.holder).get_training_run(""),
    ]
    for future in bad:
        assert isinstance(future.exception(PATIENCE_S), InputError)
    service.close().result(PATIENCE_S)
    late: list[Any] = [
        training.forward([datum()], "cross_entropy"),
        sampler.sample(PROMPT, 1, PARAMS),
        RestClient(service.holder).list_training_runs(),
    ]
    for future in late:
        assert isinstance(future.exception(PATIENCE_S), ClosedError)


@pytest.mark.req("B11")
def test_both_context_managers_finish_the_session_and_say_how_it_went():
    with FakeServer().serve() as server:

        def reason() -> str:
            return server.seen("finish_session")[-1].json["reason"]["type"]

        def client() -> ServiceClient:
            return ServiceClient(base_url=server.url, api_key=API_KEY)

        with client() as plain:
            plain.create_sampling_client(base_model=MODEL)
        assert reason() == "success"

        async def inside(error: BaseException | None) -> None:
            async with client() as service:
                await service.create_sampling_client_async(base_model=MODEL)
                if error is not None:
                    raise error

        asyncio.run(inside(None))
        assert reason() == "success"
        with pytest.raises(ZeroDivisionError):
            asyncio.run(inside(ZeroDivisionError()))
        assert reason() == "errored"
        with pytest.raises(KeyboardInterrupt):
            asyncio.run(inside(KeyboardInterrupt()))
        assert reason() == "interrupted"
        with pytest.raises(ClosedError), plain:
            pass


@pytest.mark.req("B11")
def test_close_needs_no_argument_can_be_repeated_and_needs_no_connection():
    unused = ServiceClient(base_url="http://127.0.0.1:9", api_key=API_KEY)
    assert unused.close() is unused.close()
    assert unused.close().result(PATIENCE_S) is None

    async def scenario(world: World) -> None:
        service = world.service()
        await service.create_sampling_client_async(base_model=MODEL)
        await service.close_async()
        await service.close_async("errored", "too late")

    world = World()
    world.run(scenario)
    (finished,) = world.server.seen("finish_session")
    assert finished.json["reason"] == {"type": "success"}


def test_a_blocking_call_in_a_running_loop_works_and_hints_at_its_twin(
    service: ServiceClient, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.WARNING, logger="tinkex")

    async def main() -> None:
        service.create_sampling_client(base_model=MODEL)

    asyncio.run(main())
    assert "create_sampling_client_async()" in caplog.text


@pytest.mark.req("B8")
@pytest.mark.parametrize("status", [401, 402, 403, 404])
def test_a_refusal_while_a_result_is_fetched_is_an_error_of_the_tree(status: int):
    async def scenario(world: World) -> None:
        async with world.service() as service:
            training = await service.create_lora_training_client_async(MODEL, rank=2)
            world.server.faults.on("retrieve_future", faults.reply(status), times=None)
            with pytest.raises(APIStatusError) as caught:
                await training.optim_step(AdamParams())
            assert caught.value.status_code == status

    World().run(scenario)

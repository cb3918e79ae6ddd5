"""Nothing hangs: every endpoint times every way in which it can fail.

Each case breaks one route for good and makes a call that needs it. The call's future must end,
with a typed error or, where the fault does no harm, with its result, before a deadline of virtual
time; and once the fault is gone, the same client must work again.
"""

from __future__ import annotations

import datetime as dt
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from tests.unit.clients.world import MODEL, World, datum
from tinkex import (
    AdamParams,
    AdminClient,
    ExperimentalWarning,
    ModelInput,
    RestClient,
    SamplingClient,
    SamplingParams,
    TinkerError,
)
from tinkex.testing import faults
from tinkex.types import SessionSearchRequest

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from tinkex import ServiceClient, TrainingClient

PROMPT = ModelInput.from_ints([1, 2, 3])
PARAMS = SamplingParams(max_tokens=3, seed=1)
PATH = "tinker://session-0:train:0/weights/first"
EXPORT = "tinker://session-0:train:0/external_weights/first"


@dataclass
class Cast:
    """The clients of a scenario, made before anything breaks."""

    service: ServiceClient
    training: TrainingClient
    sampler: SamplingClient
    rest: RestClient


def _refused() -> Any:
    async def refused(exchange: Any) -> None:
        raise ConnectionRefusedError("nobody listens")

    return refused


FAULTS: dict[str, Callable[[], Any]] = {
    "refused": _refused,
    "dropped": faults.drop,
    "dropped after handling": lambda: faults.drop(handled=True),
    "dropped midway": faults.drop_midway,
    "hangs": faults.hang,
    "slow": lambda: faults.slow(20.0),
    "garbage": faults.garbage,
    "not an object": lambda: faults.garbage(b"[1, 2]"),
    "wrong media type": faults.wrong_media_type,
    "empty 400": lambda: faults.empty(400, content_length=False),
    **{
        str(status): lambda status=status: faults.reply(status)
        for status in (204, 302, 400, 401, 402, 403, 404, 408, 409, 410, 413, 418, 422, 429)
    },
    **{str(status): lambda status=status: faults.reply(status) for status in (500, 502, 503, 504)},
}

# Calls that need no client, only a fresh service.
FIRST_CALLS: dict[str, tuple[str, ...]] = {
    "capabilities": (
        "client_config",
        "auth_token",
        "client_dynamic_config",
        "get_server_capabilities",
    ),
    "create model": ("create_session", "create_model", "retrieve_future"),
    "create sampler": ("create_sampling_session",),
}

CALLS: dict[str, tuple[tuple[str, ...], Callable[[Cast], Awaitable[Any]]]] = {
    "forward": (
        ("forward_backward", "retrieve_future"),
        lambda cast: cast.training.forward([datum()], "cross_entropy"),
    ),
    "forward_backward": (
        ("forward_backward", "retrieve_future"),
        lambda cast: cast.training.forward_backward([datum()], "cross_entropy"),
    ),
    "optim_step": (
        ("optim_step", "retrieve_future"),
        lambda cast: cast.training.optim_step(AdamParams()),
    ),
    "save_state": (
        ("save_weights", "retrieve_future"),
        lambda cast: cast.training.save_state("again"),
    ),
    "save_weights_for_sampler": (
        ("save_weights_for_sampler",),
        lambda cast: cast.training.save_weights_for_sampler("again"),
    ),
    "sampler from weights": (
        ("save_weights_for_sampler", "retrieve_future"),
        lambda cast: cast.training.save_weights_and_get_sampling_client_async(),
    ),
    "save_weights_external": (
        ("save_weights_external",),
        lambda cast: cast.training.save_weights_external("again"),
    ),
    "get_info": (("get_info",), lambda cast: cast.training.get_info_async()),
    "resume": (
        ("weights_info", "create_model", "load_weights"),
        lambda cast: cast.service.create_training_client_from_state_async(PATH),
    ),
    "sample": (
        ("asample", "retrieve_future"),
        lambda cast: cast.sampler.sample(PROMPT, 1, PARAMS),
    ),
    "compute_logprobs": (
        ("asample",),
        lambda cast: cast.sampler.compute_logprobs(PROMPT),
    ),
    "get_base_model": (("get_sampler",), lambda cast: cast.sampler.get_base_model_async()),
    "training run": (
        ("get_training_run",),
        lambda cast: cast.rest.get_training_run(cast.training.model_id),
    ),
    "training runs": (("list_training_runs",), lambda cast: cast.rest.list_training_runs()),
    "run checkpoints": (
        ("list_run_checkpoints",),
        lambda cast: cast.rest.list_checkpoints(cast.training.model_id),
    ),
    "checkpoints": (("list_checkpoints",), lambda cast: cast.rest.list_user_checkpoints()),
    "publish": (
        ("publish_checkpoint",),
        lambda cast: cast.rest.publish_checkpoint_from_tinker_path(PATH),
    ),
    "unpublish": (
        ("unpublish_checkpoint",),
        lambda cast: cast.rest.unpublish_checkpoint_from_tinker_path(PATH),
    ),
    "ttl": (
        ("set_checkpoint_ttl",),
        lambda cast: cast.rest.set_checkpoint_ttl_from_tinker_path(PATH, None),
    ),
    "urls": (
        ("get_external_weights_urls",),
        lambda cast: cast.rest.get_external_weights_urls(EXPORT),
    ),
    "delete": (
        ("delete_checkpoint",),
        lambda cast: cast.rest.delete_checkpoint_from_tinker_path(PATH),
    ),
    "weights info": (
        ("weights_info",),
        lambda cast: cast.rest.get_weights_info_by_tinker_path(PATH),
    ),
    "copy": (("copy_weights",), lambda cast: cast.rest.copy_weights(PATH, "project")),
    "session": (("get_session",), lambda cast: cast.rest.get_session("session-0")),
    "sessions": (("list_sessions",), lambda cast: cast.rest.list_sessions()),
    "project": (
        ("set_session_project",),
        lambda cast: cast.rest.assign_session_project("session-0", "p"),
    ),
    "trace": (("export_trace",), lambda cast: cast.rest.export_session_trace("session-0")),
    "sampler info": (
        ("get_sampler",),
        lambda cast: cast.rest.get_sampler(cast.sampler.sampling_session_id),
    ),
}


def _search(cast: Cast) -> Awaitable[Any]:
    with pytest.warns(ExperimentalWarning):
        return cast.rest.search_sessions(SessionSearchRequest())


def _custom_loss(cast: Cast) -> Awaitable[Any]:
    def loss(logprobs: Any) -> Any:
        return -logprobs.sum(), {}

    # A loss can be uploaded once in a session, and each fault gets a try.
    cast.service.holder.custom_losses.clear()
    return cast.service.create_custom_loss(loss, {"logprobs": 1})


async def _first_sample(cast: Cast) -> Any:
    # A sampler whose feed has failed for good polls alone from then on, so each try has its own.
    sampler = await cast.service.create_sampling_client_async(base_model=MODEL)
    return await sampler.sample(PROMPT, 1, PARAMS)


HOUR = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
CALLS |= {
    "first sample": (("create_sampling_session", "retrieve_futures"), _first_sample),
    "search": (("search_sessions",), _search),
    "custom loss": (("create_custom_loss", "retrieve_future"), _custom_loss),
    "sample by a copy": (
        ("join_sampling_session",),
        lambda cast: SamplingClient.from_sampler_handle(cast.sampler.get_sampler_handle()).sample(
            PROMPT, 1, PARAMS
        ),
    ),
    "archive": (
        ("get_checkpoint_archive",),
        lambda cast: cast.rest.get_checkpoint_archive_url_from_tinker_path(PATH),
    ),
    "audit": (("get_audit_log",), lambda cast: AdminClient(cast.service.holder).get_audit_log()),
    "usage": (
        ("get_billing_usage",),
        lambda cast: AdminClient(cast.service.holder).get_billing_usage(
            HOUR, HOUR + dt.timedelta(hours=1)
        ),
    ),
    "storage": (
        ("get_checkpoint_storage_usage",),
        lambda cast: AdminClient(cast.service.holder).get_current_checkpoint_storage_usage(),
    ),
}
# What the server must offer for a call or a route to be used at all.
FLAGS: dict[str, dict[str, bool]] = {
    "auth_token": {"pjwt_auth_enabled": True},
    "retrieve_futures": {"sample_use_retrieve_futures": True},
    "custom loss": {"custom_loss_server_side": True},
    "join_sampling_session": {"sample_join_sampling_session": True},
}

# Background traffic that must never reach a caller, whatever becomes of it.
BACKGROUND = ("session_heartbeat", "client_dynamic_config", "cancel_future", "telemetry")

# The longest patience in the protocol is the pause for an account that cannot pay (3,600 s). A
# call may meet it, and a submission's own 300 s, once for each request it makes.
DEADLINE_S = 2 * 3600.0


async def _cast(world: World) -> Cast:
    service = world.service()
    training = await service.create_lora_training_client_async(MODEL, rank=2)
    await training.save_state("first")
    await training.save_weights_external("first")
    sampler = await service.create_sampling_client_async(base_model=MODEL)
    return Cast(service, training, sampler, RestClient(service.holder))


async def _ends(world: World, call: Awaitable[Any]) -> None:
    """Await `call`: a result or a typed error, in time."""
    started, text = world.clock.now(), "a result"
    try:
        await call
    except TinkerError as error:
        text = str(error)
    assert text
    assert world.clock.now() - started <= DEADLINE_S


def each_fault(world: World, route: str) -> Iterator[str]:
    """Break `route` in one way after the other; a failure says in which."""
    for name, make in FAULTS.items():
        world.server.faults.on(route, make(), times=None)
        try:
            yield name
        finally:
            world.server.faults.clear()


@contextmanager
def during(fault: str) -> Iterator[None]:
    """Names the fault in whatever goes wrong inside."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"the fault was: {fault}")
        raise


@pytest.mark.req("S22")
@pytest.mark.parametrize(
    ("call", "route"), [(call, route) for call, (routes, _) in CALLS.items() for route in routes]
)
def test_a_call_ends_and_the_client_goes_on(call: str, route: str):
    flags = FLAGS.get(call, {}) | FLAGS.get(route, {})

    async def scenario(world: World) -> None:
        cast = await _cast(world)
        for fault in each_fault(world, route):
            with during(fault):
                struck = len(world.server.faults.fired)
                await _ends(world, CALLS[call][1](cast))
                assert len(world.server.faults.fired) > struck, f"{route} was not called"
                world.server.faults.clear()
                # B3, S25: whatever happened, the next operations have their turn.
                await cast.training.optim_step(AdamParams())
                await cast.sampler.sample(PROMPT, 1, PARAMS)
        world.server.faults.on(route, faults.finish_session(), times=None)
        await _ends(world, CALLS[call][1](cast))
        await cast.service.close_async()

    World(flags, total_deadline_s=3000.0).run(scenario)


@pytest.mark.req("S22")
@pytest.mark.parametrize(
    ("call", "route"), [(call, route) for call, routes in FIRST_CALLS.items() for route in routes]
)
def test_a_first_call_ends_and_may_be_made_again(call: str, route: str):
    calls: dict[str, Callable[[ServiceClient], Awaitable[Any]]] = {
        "capabilities": lambda service: service.get_server_capabilities_async(),
        "create model": lambda service: service.create_lora_training_client_async(MODEL),
        "create sampler": lambda service: service.create_sampling_client_async(base_model=MODEL),
    }

    async def scenario(world: World) -> None:
        for fault in each_fault(world, route):
            service = world.service()
            with during(fault):
                struck = len(world.server.faults.fired)
                await _ends(world, calls[call](service))
                assert len(world.server.faults.fired) > struck, f"{route} was not called"
                world.server.faults.clear()
                await calls[call](service)
                await service.close_async()

    World(FLAGS.get(route), total_deadline_s=3000.0).run(scenario)


@pytest.mark.parametrize("route", BACKGROUND)
def test_trouble_in_the_background_reaches_no_caller(route: str):
    async def scenario(world: World) -> None:
        for fault, make in FAULTS.items():
            with during(fault):
                cast = await _cast(world)
                world.server.faults.on(route, make(), times=None)
                abandoned = cast.sampler.sample(PROMPT, 1, PARAMS)
                await world.clock.sleep(0.0)
                abandoned.cancel()
                # Less than the time after which the server gives a silent session up.
                await world.clock.sleep(200.0)
                await cast.training.optim_step(AdamParams())
                await cast.service.close_async()
                world.server.faults.clear()

    World().run(scenario)


@pytest.mark.req("S22")
def test_closing_ends_whatever_the_server_does():
    async def scenario(world: World) -> None:
        for fault in each_fault(world, "finish_session"):
            with during(fault):
                cast = await _cast(world)
                started = world.clock.now()
                await cast.service.close_async()
                assert world.clock.now() - started <= 30.0

    World().run(scenario)


@pytest.mark.req("S22")
@pytest.mark.parametrize("route", ["forward_backward", "retrieve_future", "asample"])
def test_closing_in_flight_ends_every_pending_future(route: str):
    async def scenario(world: World) -> None:
        cast = await _cast(world)
        world.server.faults.on(route, faults.hang(), times=None)
        pending = [
            cast.training.forward_backward([datum()], "cross_entropy"),
            cast.training.optim_step(AdamParams()),
            cast.sampler.sample(PROMPT, 1, PARAMS),
            cast.rest.export_session_trace("session-0"),
        ]
        await world.clock.sleep(1.0)
        await cast.service.close_async()
        for future in pending:
            assert future.done()
        late = cast.training.optim_step(AdamParams())
        assert isinstance(late.exception(), TinkerError)

    World().run(scenario)

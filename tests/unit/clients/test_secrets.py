"""No credential leaves the process except in its header: a canary through every error path.

Nor does a prompt that a server's error quotes reach telemetry.
"""

from __future__ import annotations

import asyncio
import logging
import pickle
import traceback
from typing import Any

import pytest

from tests.unit.clients.test_fault_matrix import CALLS, FAULTS, FIRST_CALLS, Cast
from tests.unit.clients.world import MODEL, World, datum
from tinkex import Config, RestClient, ServiceClient, TinkerError
from tinkex.testing import faults

pytestmark = [pytest.mark.req("B1"), pytest.mark.req("S34")]

KEY = "tml-canary-Zq9xKtLw"
HEADER = "header-canary-8Hs2"
PROMPT = "a canary of a prompt"
QUOTED = {
    "detail": f"The key {KEY} is not good enough for '{PROMPT}'.",
    "error": f"api_key={KEY}: {PROMPT}",
    "queue_state_reason": PROMPT,
    "headers": {"x-api-key": KEY, "x-secret": HEADER},
}
# What a server may say in its own words, the key included, and what happens to connections.
SAYING = {
    **{
        f"{status} quoting the key": lambda status=status: faults.reply(status, QUOTED)
        for status in (200, 302, 400, 401, 402, 403, 404, 409, 410, 422, 429, 500, 503)
    },
    "text quoting the key": lambda: faults.reply(400, f"bad key {KEY}: {PROMPT}".encode()),
    **{name: FAULTS[name] for name in ("refused", "dropped midway", "hangs", "garbage")},
}


def world(**flags: Any) -> World:
    made = World(flags)
    made.config = Config(
        base_url="http://fake.invalid",
        api_key=KEY,
        headers={"CF-Access-Client-Secret": HEADER},
        bootstrap_deadline_s=5.0,
        submit_deadline_s=5.0,
        silence_deadline_s=10.0,
        total_deadline_s=20.0,
    )
    return made


def everything_about(error: BaseException) -> str:
    """All that a program could print, log, store or send of an error."""
    chain: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in chain:
        chain.append(link)
        link = link.__cause__ or link.__context__
    parts = ["".join(traceback.format_exception(error))]
    for each in chain:
        parts += [repr(each), str(each), repr(vars(each)), repr(each.args)]
        parts += getattr(each, "__notes__", [])
    parts.append(repr(pickle.dumps(error)))
    return "\n".join(parts)


async def fails_with(call: Any) -> str:
    try:
        await call
    except TinkerError as error:
        return everything_about(error)
    return ""


def check(found: str, where: str) -> None:
    for canary in (KEY, HEADER):
        assert canary not in found, f"{canary} is in {where}"


def check_world(used: World, caplog: pytest.LogCaptureFixture) -> None:
    check(caplog.text, "the log")
    check("\n".join(repr(vars(record)) for record in caplog.records), "a log record")
    for seen in used.server.requests:
        check(seen.raw_body.decode("latin-1"), f"the body of {seen.route}")
        check(seen.path + seen.query, f"the address of {seen.route}")
    sent = [seen.raw_body.decode() for seen in used.server.seen("telemetry")]
    assert sent, "telemetry was on"
    assert "canary" not in "".join(sent)


async def cast_of(used: World) -> Cast:
    service = used.service()
    training = await service.create_lora_training_client_async(MODEL, rank=2)
    await training.save_state("first")
    sampler = await service.create_sampling_client_async(base_model=MODEL)
    return Cast(service, training, sampler, RestClient(service.holder))


@pytest.mark.parametrize("call", sorted(CALLS))
def test_no_error_of_a_call_tells_the_key(call: str, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.DEBUG)
    routes, make = CALLS[call]

    async def scenario(used: World) -> None:
        cast = await cast_of(used)
        for route in routes:
            for name, effect in SAYING.items():
                used.server.faults.on(route, effect(), times=None)
                check(await fails_with(make(cast)), f"the error of {call}, {route}: {name}")
                used.server.faults.clear()
        await cast.service.close_async()

    used = world(billing_exception_max_pause_duration_sec=10)
    used.run(scenario)
    check_world(used, caplog)


@pytest.mark.parametrize("exchange", [True, False])
def test_no_error_while_connecting_tells_the_key(exchange: bool, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.DEBUG)
    routes = {route for routes in FIRST_CALLS.values() for route in routes} | {"auth_token"}

    async def scenario(used: World) -> None:
        for route in sorted(routes):
            for name, effect in SAYING.items():
                used.server.faults.on(route, effect(), times=None)
                service = used.service()
                call = service.create_lora_training_client_async(MODEL, rank=2)
                check(await fails_with(call), f"{route}: {name}")
                used.server.faults.clear()
                await service.close_async()
        # Something that is reported as well.
        cast = await cast_of(used)
        used.server.faults.on("forward_backward", faults.reply(400, QUOTED))
        await fails_with(cast.training.forward_backward([datum()], "cross_entropy"))
        await cast.service.close_async()

    used = world(billing_exception_max_pause_duration_sec=10, pjwt_auth_enabled=exchange)
    used.run(scenario)
    check_world(used, caplog)


def test_nothing_a_client_shows_of_itself_tells_the_key():
    async def scenario(used: World) -> None:
        cast = await cast_of(used)
        future = cast.training.forward_backward([datum()], "cross_entropy")
        things = [
            *(cast.service, cast.training, cast.sampler, cast.rest),
            *(cast.service.holder, cast.service.holder.config, cast.service.holder.api),
            *(cast.service.holder.api.auth, cast.service.operations, future, future.status()),
            used.config,
        ]
        for thing in things:
            check(f"{thing!r} {thing!s}", f"repr of {type(thing).__name__}")
        await future
        check(repr(pickle.dumps(used.config)), "a pickled Config")
        check(repr(pickle.dumps(cast.sampler)), "a pickled sampler")
        check(cast.sampler.get_sampler_handle(), "a handle")
        await cast.service.close_async()

    world().run(scenario)


def test_a_bad_key_is_refused_without_being_repeated():
    for key in (f"{KEY}\n", f"{KEY}ä"):
        with pytest.raises(TinkerError) as caught:
            ServiceClient(base_url="http://127.0.0.1:9", api_key=key)
        check(everything_about(caught.value), "the refusal of a malformed key")


@pytest.mark.req("B2")
@pytest.mark.parametrize("route", ["forward_backward", "optim_step"])
def test_a_failing_call_does_not_wait_for_telemetry(route: str):
    async def scenario(used: World) -> None:
        used.server.faults.on("telemetry", faults.hang(), times=None)
        cast = await cast_of(used)
        used.server.faults.on(route, faults.reply(400), times=None)
        started = used.clock.now()
        calls = [CALLS[route][1](cast) for _ in range(20)]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        assert all(isinstance(answer, TinkerError) for answer in answers)
        assert used.clock.now() - started < 0.01
        await cast.service.close_async()

    world().run(scenario)

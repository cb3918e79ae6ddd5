"""RestClient: what it sends, what it refuses, and how it ends."""

from __future__ import annotations

import asyncio
import base64
import gc
import inspect
import json
import pickle
import threading
from datetime import UTC, date, datetime
from typing import TYPE_CHECKING, Any

import pytest
from rest_fakes import KEY, Asked, Script, on_loopback

from tests.patience import PATIENCE_S
from tinkex.clients.admin import AdminClient
from tinkex.clients.portal import CurrentLoop
from tinkex.clients.rest import RestClient
from tinkex.clients.service import ServiceClient
from tinkex.config import Config
from tinkex.errors import (
    ClosedError,
    ConflictError,
    ExperimentalWarning,
    InputError,
    InputTypeError,
    NotFoundError,
    ResultError,
    ServerSilentError,
    TinkerError,
)
from tinkex.futures.future import APIFuture
from tinkex.testing.fake_clock import FakeClock
from tinkex.types import SessionSearchRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

RUN = "session-1:train:0"
PATH = f"tinker://{RUN}/weights/a"
EXPORT = f"tinker://{RUN}/external_weights/a"
NOW = "2026-01-02T03:04:05Z"
CHECKPOINT = {
    "checkpoint_id": "weights/a",
    "checkpoint_type": "training",
    "time": NOW,
    "tinker_path": PATH,
}
TRAINING_RUN = {
    "training_run_id": RUN,
    "base_model": "base/model",
    "model_owner": "owner",
    "is_lora": True,
    "last_request_time": NOW,
}
CURSOR = {"offset": 0, "limit": 20, "total_count": 1}
CHECKPOINTS = {"checkpoints": [CHECKPOINT]}
URLS = {"urls": {"adapter_config.json": "http://files/a"}, "expires": NOW}
AT_RUN = f"/training_runs/{RUN}"
AT_CHECKPOINT = f"{AT_RUN}/checkpoints/weights/a"
SCOPE = {"access_scope": "owned"}

# method, arguments, request line, answer, query, body
CALLS: list[tuple[str, tuple[Any, ...], str, Any, dict[str, str], Any]] = [
    ("get_training_run", (RUN,), f"GET {AT_RUN}", TRAINING_RUN, SCOPE, None),
    (
        "get_training_run",
        (RUN, "accessible"),
        f"GET {AT_RUN}",
        TRAINING_RUN,
        {"access_scope": "accessible"},
        None,
    ),
    ("get_training_run_by_tinker_path", (PATH,), f"GET {AT_RUN}", TRAINING_RUN, SCOPE, None),
    (
        "get_weights_info_by_tinker_path",
        (PATH,),
        "POST /weights_info",
        {"base_model": "base/model", "is_lora": True},
        {},
        {"tinker_path": PATH},
    ),
    (
        "list_training_runs",
        (5, 10, "owned", "project-1"),
        "GET /training_runs",
        {"training_runs": [TRAINING_RUN], "cursor": CURSOR},
        {"limit": "5", "offset": "10", "project_id": "project-1", **SCOPE},
        None,
    ),
    ("list_checkpoints", (RUN,), f"GET {AT_RUN}/checkpoints", CHECKPOINTS, {}, None),
    (
        "list_user_checkpoints",
        (),
        "GET /checkpoints",
        {**CHECKPOINTS, "cursor": CURSOR},
        {"limit": "100", "offset": "0"},
        None,
    ),
    (
        "get_external_weights_urls",
        (EXPORT,),
        f"GET {AT_RUN}/checkpoints/external_weights/a/external_weights_urls",
        URLS,
        {},
        None,
    ),
    (
        "get_checkpoint_archive_url_from_tinker_path",
        (PATH,),
        f"GET {AT_CHECKPOINT}/archive",
        {"url": "http://files/a.tar", "expires": NOW},
        {},
        None,
    ),
    ("delete_checkpoint", (RUN, "weights/a"), f"DELETE {AT_CHECKPOINT}", "", {}, None),
    ("delete_checkpoint_from_tinker_path", (PATH,), f"DELETE {AT_CHECKPOINT}", "", {}, None),
    (
        "publish_checkpoint_from_tinker_path",
        (PATH,),
        f"POST {AT_CHECKPOINT}/publish",
        "",
        {},
        None,
    ),
    (
        "unpublish_checkpoint_from_tinker_path",
        (PATH,),
        f"DELETE {AT_CHECKPOINT}/publish",
        "",
        {},
        None,
    ),
    (
        "set_checkpoint_ttl_from_tinker_path",
        (PATH, 3600),
        f"PUT {AT_CHECKPOINT}/ttl",
        "",
        {},
        {"ttl_seconds": 3600},
    ),
    (
        "set_checkpoint_ttl_from_tinker_path",
        (PATH, None),
        f"PUT {AT_CHECKPOINT}/ttl",
        "",
        {},
        {"ttl_seconds": None},
    ),
    (
        "copy_weights",
        (PATH, "project-2"),
        "POST /copy_weights",
        {"tinker_path": "tinker://copy/weights/a"},
        {},
        {"source_path": PATH, "destination_project_id": "project-2"},
    ),
    (
        "get_session",
        ("session-1",),
        "GET /sessions/session-1",
        {"training_run_ids": [RUN], "sampler_ids": []},
        SCOPE,
        None,
    ),
    (
        "list_sessions",
        (3, 6),
        "GET /sessions",
        {"sessions": ["session-1"]},
        {"limit": "3", "offset": "6", **SCOPE},
        None,
    ),
    (
        "assign_session_project",
        ("session-1", "project-1"),
        "PUT /sessions/session-1/project",
        "",
        {},
        {"project_id": "project-1"},
    ),
    (
        "export_session_trace",
        ("session-1",),
        "GET /sessions/session-1/trace_export",
        {"status": "ready", "url": "http://files/t"},
        {},
        None,
    ),
    (
        "get_sampler",
        ("session-1:sample:0",),
        "GET /samplers/session-1:sample:0",
        {"sampler_id": "session-1:sample:0", "base_model": "base/model"},
        {},
        None,
    ),
]
NAMES = [f"{name}-{index}" for index, (name, *_) in enumerate(CALLS)]


def in_one_loop(work: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    return asyncio.run(work())


async def end_of(future: APIFuture[Any]) -> Any:
    """The result, or the error."""
    try:
        return await future
    except TinkerError as error:
        return error


def colours(cls: type) -> tuple[set[str], set[str]]:
    """Names of the public operations of a client: both forms, without the suffix."""
    names = {name for name, value in inspect.getmembers(cls) if inspect.isfunction(value)}
    public = {name for name in names if not name.startswith("_")} - {"get_telemetry"}
    awaited = {name.removesuffix("_async") for name in public if name.endswith("_async")}
    return {name for name in public if not name.endswith("_async")}, awaited


@pytest.mark.req("B11")
@pytest.mark.parametrize("cls", [RestClient, AdminClient])
def test_every_method_has_both_colours_with_one_signature(cls: type):
    at_once, awaited = colours(cls)
    assert at_once == awaited
    for name in at_once:
        plain, async_ = getattr(cls, name), getattr(cls, f"{name}_async")
        assert plain.__name__ == name
        parameters = inspect.signature(plain).parameters.values()
        twin = inspect.signature(async_).parameters.values()
        assert [(p.name, p.default) for p in parameters] == [(p.name, p.default) for p in twin]


@pytest.mark.parametrize(("name", "args", "line", "answer", "query", "body"), CALLS, ids=NAMES)
def test_a_call_sends_exactly_its_request(
    name: str, args: tuple[Any, ...], line: str, answer: Any, query: dict[str, str], body: Any
):
    script = Script({line: answer})

    async def both() -> list[Any]:
        rest = RestClient(script.connection(portal=CurrentLoop()))
        future = getattr(rest, name)(*args)
        assert isinstance(future, APIFuture)
        return [await future, await getattr(rest, f"{name}_async")(*args)]

    first, second = in_one_loop(both)
    assert first == second
    for asked in script.asked:
        assert f"{asked.method} {asked.path.removeprefix('/api/v1')}" == line
        assert (asked.query, asked.body) == (query, body)
        assert asked.headers["x-sdk-method"] == name
        assert asked.headers["x-sdk-version"]
    assert len(script.asked) == 2


@pytest.mark.req("B11")
def test_the_table_above_covers_every_call():
    at_once, _ = colours(RestClient)
    elsewhere = {"close", "search_sessions", "whoami", *colours(AdminClient)[0]}
    elsewhere |= {"import_adapter"}  # in test_import_adapter.py
    assert at_once - elsewhere == {name for name, *_ in CALLS}


BAD: list[tuple[str, tuple[Any, ...], dict[str, Any], type[InputError], str]] = [
    ("get_training_run", ("",), {}, InputError, "training_run_id"),
    ("get_training_run", (None,), {}, InputTypeError, "training_run_id"),
    ("get_training_run", ("a/b",), {}, InputError, "run"),
    ("get_training_run", (RUN, "mine"), {}, InputError, "access_scope"),
    ("get_training_run_by_tinker_path", ("tinker://x",), {}, InputError, "tinker_path"),
    ("get_training_run_by_tinker_path", ("",), {}, InputError, "tinker_path"),
    ("get_weights_info_by_tinker_path", ("weights/a",), {}, InputError, "tinker_path"),
    ("list_training_runs", (-1,), {}, InputError, "limit"),
    ("list_training_runs", (), {"offset": "0"}, InputTypeError, "offset"),
    ("list_training_runs", (), {"project_id": ""}, InputError, "project_id"),
    ("list_user_checkpoints", (True,), {}, InputTypeError, "limit"),
    ("list_checkpoints", ("",), {}, InputError, "training_run_id"),
    ("delete_checkpoint", (RUN, ""), {}, InputError, "checkpoint_id"),
    ("delete_checkpoint", (RUN, "final"), {}, InputError, "ckpt"),
    ("delete_checkpoint", ("..", "weights/a"), {}, InputError, "run"),
    ("set_checkpoint_ttl_from_tinker_path", (PATH, "1h"), {}, InputTypeError, "ttl_seconds"),
    ("set_checkpoint_ttl_from_tinker_path", (PATH, True), {}, InputTypeError, "ttl_seconds"),
    ("set_checkpoint_ttl_from_tinker_path", (PATH, 0), {}, InputError, "ttl_seconds"),
    ("copy_weights", (PATH,), {}, InputError, "destination_project_id"),
    ("copy_weights", (PATH, "p"), {"weights_access_token": ""}, InputError, "weights_access_token"),
    ("get_external_weights_urls", (PATH,), {}, InputError, "tinker_path"),
    ("get_session", ("",), {}, InputError, "session_id"),
    ("assign_session_project", ("session-1", ""), {}, InputError, "project_id"),
    ("export_session_trace", ("",), {}, InputError, "session_id"),
    ("get_sampler", ("",), {}, InputError, "sampler_id"),
    ("search_sessions", ({"limit": 3},), {}, InputTypeError, "request"),
]


@pytest.mark.filterwarnings("ignore::tinkex.errors.ExperimentalWarning")
@pytest.mark.parametrize(("name", "args", "kwargs", "kind", "path"), BAD)
def test_bad_arguments_come_out_of_the_future_and_send_nothing(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any], kind: type[InputError], path: str
):
    script = Script()

    async def call() -> Any:
        rest = RestClient(script.connection(portal=CurrentLoop()))
        with pytest.raises(kind):
            await getattr(rest, f"{name}_async")(*args, **kwargs)
        return await end_of(getattr(rest, name)(*args, **kwargs))

    error = in_one_loop(call)
    assert isinstance(error, kind)
    assert error.path == path
    assert script.asked == []


def test_copying_sends_one_idempotency_key_and_the_token_in_a_header():
    busy: Any = (503, {"detail": "busy"})
    script = Script({"POST /copy_weights": [busy, {"tinker_path": "tinker://c/weights/a"}]})

    async def copy() -> str:
        clock = FakeClock()
        async with clock.running():
            rest = RestClient(script.connection(clock=clock, portal=CurrentLoop()))
            return await rest.copy_weights(PATH, "p", weights_access_token="tml-other")

    assert in_one_loop(copy) == "tinker://c/weights/a"
    keys = [asked.headers["x-idempotency-key"] for asked in script.asked]
    assert len(keys) == 2
    assert keys[0] == keys[1]
    assert all("weights_access_token" not in asked.body for asked in script.asked)
    assert script.asked[0].headers["x-tinker-weights-access-token"] == "tml-other"


def test_a_copy_goes_to_the_configured_project_by_default():
    script = Script({"POST /copy_weights": {"tinker_path": "tinker://c/weights/a"}})

    async def copy() -> None:
        connection = script.connection(portal=CurrentLoop())
        connection.config = Config(base_url="http://test", api_key=KEY, project_id="mine")
        await RestClient(connection).copy_weights_async(PATH)

    in_one_loop(copy)
    assert script.asked[0].body["destination_project_id"] == "mine"


def test_the_servers_refusal_comes_out_of_the_future():
    script = Script({f"POST {AT_CHECKPOINT}/publish": (409, {"detail": "already public"})})

    async def publish() -> Any:
        clock = FakeClock()
        async with clock.running():
            rest = RestClient(script.connection(clock=clock, portal=CurrentLoop()))
            return await end_of(rest.publish_checkpoint_from_tinker_path(PATH))

    error = in_one_loop(publish)
    assert isinstance(error, ConflictError)
    assert "already public" in str(error)


# -- sessions ------------------------------------------------------------------------------------


def exported(*answers: Any) -> tuple[Any, float, int]:
    """How an export ends, how long it takes and how often it asks."""
    script = Script({"GET /sessions/s/trace_export": list(answers)})

    async def export() -> tuple[Any, float]:
        clock = FakeClock()
        async with clock.running():
            rest = RestClient(script.connection(clock=clock, portal=CurrentLoop()))
            return await end_of(rest.export_session_trace("s")), clock.now()

    end, seconds = in_one_loop(export)
    return end, seconds, len(script.asked)


def test_a_trace_export_is_asked_for_every_five_seconds_until_ready():
    pending = {"status": "pending"}
    end, seconds, asked = exported(pending, pending, {"status": "ready", "url": "http://files/t"})
    assert (end, seconds, asked) == ("http://files/t", 10.0, 3)


def test_a_failed_trace_export_says_why():
    end, _, asked = exported({"status": "pending"}, {"status": "failed", "error": "disk full"})
    assert isinstance(end, ResultError)
    assert "disk full" in str(end)
    assert asked == 2


@pytest.mark.req("S22")
def test_a_trace_export_that_never_ends_is_given_up():
    end, seconds, _ = exported({"status": "pending"})
    assert isinstance(end, ServerSilentError)
    assert seconds == 3600


def test_a_ready_trace_without_a_link_breaks_the_protocol():
    end, _, _ = exported({"status": "ready"})
    assert isinstance(end, ResultError)


def test_searching_sessions_warns_that_it_is_experimental_and_sends_the_filter():
    script = Script({"POST /sessions/search": {"sessions": []}})

    async def search() -> None:
        rest = RestClient(script.connection(portal=CurrentLoop()))
        request = SessionSearchRequest(display_name="my run")
        with pytest.warns(ExperimentalWarning) as seen:
            future = rest.search_sessions(request)
        assert (await future).sessions == []
        with pytest.warns(ExperimentalWarning) as seen_async:
            assert (await rest.search_sessions_async(request)).sessions == []
        assert {warning.filename for warning in [*seen, *seen_async]} == {__file__}

    in_one_loop(search)
    body = {"display_name": "my run", "user_metadata": {}, "owner": {"type": "own"}, "limit": 50}
    assert [asked.body for asked in script.asked] == [body, body]


# -- identity ------------------------------------------------------------------------------------


def token(**claims: Any) -> str:
    def pack(value: Any) -> str:
        return base64.urlsafe_b64encode(json.dumps(value).encode()).rstrip(b"=").decode()

    return f"{pack({'alg': 'none'})}.{pack(claims)}.x"


def asked_who(jwt: str | None) -> tuple[Any, list[Asked]]:
    script = Script({"POST /client/config": {"pjwt_auth_enabled": jwt is not None}})
    if jwt is not None:
        script.answers["POST /auth/token"] = {"jwt": jwt}

    async def who() -> Any:
        rest = RestClient(script.connection(portal=CurrentLoop()))
        return await end_of(rest.whoami())

    return in_one_loop(who), script.asked


def test_whoami_reads_the_token_and_asks_nothing_more():
    expires = datetime(2100, 1, 1, tzinfo=UTC).timestamp()
    who, asked = asked_who(token(sub="tml:user:1", org_id="7", email="", exp=expires))
    assert (who.user_urn, who.org_urn, who.email) == ("tml:user:1", "tml:organization:7", None)
    assert [one.path for one in asked] == ["/api/v1/auth/token"]


def test_whoami_with_a_plain_key_says_why_it_cannot_know():
    error, _ = asked_who(None)
    assert isinstance(error, RuntimeError)
    assert "plain API key" in str(error)


def test_whoami_refuses_a_token_without_an_owner():
    error, _ = asked_who(token(exp=4e9))
    assert isinstance(error, ResultError)


# -- moved to AdminClient ------------------------------------------------------------------------


def test_calls_that_moved_warn_and_still_work():
    script = Script(
        {
            "GET /audit": {"entries": []},
            "GET /billing/usage/events": {"data": []},
            "GET /billing/usage/checkpoints/current": {"data": []},
        }
    )
    window = ("2026-01-01T00:00:00Z", "2026-01-02T00:00:00Z")

    async def call() -> None:
        rest = RestClient(script.connection(portal=CurrentLoop()))
        for name, args in (
            ("get_audit_log", ("checkpoints", date(2026, 1, 2))),
            ("get_billing_usage", window),
            ("get_current_checkpoint_storage_usage", ("project-1",)),
        ):
            with pytest.warns(FutureWarning, match="AdminClient") as seen:
                future = getattr(rest, name)(*args)
            with pytest.warns(FutureWarning, match="AdminClient") as seen_async:
                assert await getattr(rest, f"{name}_async")(*args) == await future
            assert {warning.filename for warning in [*seen, *seen_async]} == {__file__}

    in_one_loop(call)
    assert len(script.asked) == 6


# -- beginning and end ---------------------------------------------------------------------------


def test_constructing_a_client_connects_to_nothing():
    # Threads of clients that other tests have dropped may end meanwhile.
    before = set(threading.enumerate())
    client = RestClient(base_url="http://127.0.0.1:9", api_key=KEY)
    assert set(threading.enumerate()) <= before
    client.close().result(PATIENCE_S)
    assert set(threading.enumerate()) <= before


def test_a_holder_and_a_server_of_ones_own_exclude_each_other():
    script = Script()
    with pytest.raises(ValueError, match="not both"):
        RestClient(script.connection(), base_url="http://test")
    with pytest.raises(ValueError, match="not both"):
        AdminClient(script.connection(), api_key=KEY)


@pytest.mark.req("B11")
def test_a_client_of_its_own_works_as_a_context_manager_and_is_closed_after():
    script = Script({f"GET {AT_RUN}": TRAINING_RUN})
    with on_loopback(script) as url:
        with RestClient(base_url=url, api_key=KEY) as rest:
            assert rest.get_training_run(RUN).result(PATIENCE_S).base_model == "base/model"
        with pytest.raises(ClosedError):
            rest.get_training_run(RUN).result(PATIENCE_S)
        with pytest.raises(ClosedError, match="RestClient is closed"):
            rest.__enter__()
        rest.close().result(PATIENCE_S)


@pytest.mark.req("B11")
def test_a_client_of_its_own_works_as_an_async_context_manager():
    script = Script({f"GET {AT_RUN}": TRAINING_RUN})

    async def use(url: str) -> None:
        async with RestClient(base_url=url, api_key=KEY) as rest:
            assert (await rest.get_training_run_async(RUN)).training_run_id == RUN
        with pytest.raises(ClosedError):
            await rest.get_training_run_async(RUN)

    with on_loopback(script) as url:
        asyncio.run(use(url))


@pytest.mark.filterwarnings("ignore:create_rest_client is deprecated")
def test_a_client_made_by_a_service_client_shares_its_connection():
    script = Script({f"GET {AT_RUN}": TRAINING_RUN})
    with on_loopback(script) as url, ServiceClient(base_url=url, api_key=KEY) as service:
        rest = service.create_rest_client()
        assert rest.holder is service.holder
        with rest:
            rest.get_training_run(RUN).result(PATIENCE_S)
        assert service.holder.session_id is None
        assert (
            service.create_rest_client().get_training_run(RUN).result(PATIENCE_S).lora_rank is None
        )


def test_closing_a_borrowing_client_leaves_the_connection_open():
    script = Script({f"GET {AT_RUN}": TRAINING_RUN})

    async def use() -> None:
        connection = script.connection(portal=CurrentLoop())
        async with RestClient(connection) as first:
            await first.get_training_run(RUN)
        with pytest.raises(ClosedError, match="RestClient is closed"):
            await first.get_training_run(RUN)
        assert (await RestClient(connection).get_training_run(RUN)).training_run_id == RUN

    in_one_loop(use)
    assert not script.closed.is_set()


@pytest.mark.req("S22")
def test_closing_ends_calls_under_way_with_a_typed_error():
    arrived, go_on = threading.Event(), threading.Event()

    class Slow(Script):
        def answer(self, asked: Asked) -> tuple[int, bytes]:
            if asked.method == "GET":
                arrived.set()
                go_on.wait(PATIENCE_S)
            return super().answer(asked)

    with on_loopback(Slow()) as url:
        rest = RestClient(base_url=url, api_key=KEY)
        pending = rest.get_training_run(RUN)
        assert arrived.wait(PATIENCE_S)
        rest.close().result(PATIENCE_S)
        with pytest.raises(ClosedError):
            pending.result(PATIENCE_S)
        go_on.set()


def test_a_dropped_client_lets_go_of_its_thread_once_its_calls_are_done():
    script = Script({f"GET {AT_RUN}": TRAINING_RUN})
    with on_loopback(script) as url:
        others = set(threading.enumerate())
        future = RestClient(base_url=url, api_key=KEY).get_training_run(RUN)
        # Before the result: the thread may end as soon as it is there.
        started = set(threading.enumerate()) - others
        loops = [thread for thread in started if thread.name == "tinkex"]
        assert len(loops) == 1
        gc.collect()
        # The pending call keeps the connection, although nobody holds the client.
        assert future.result(PATIENCE_S).training_run_id == RUN
        del future
        gc.collect()
        for thread in loops:
            thread.join(PATIENCE_S)
            assert not thread.is_alive()


def test_an_unknown_run_is_a_not_found_error():
    with on_loopback(Script()) as url, RestClient(base_url=url, api_key=KEY) as rest:
        future = rest.get_training_run("nobody")
        with pytest.raises(NotFoundError):
            future.result(PATIENCE_S)


@pytest.mark.req("B9")
def test_a_client_does_not_pickle_and_says_what_to_do():
    rest = RestClient(base_url="http://127.0.0.1:9", api_key=KEY)
    with pytest.raises(TypeError, match="make a new one"):
        pickle.dumps(rest)

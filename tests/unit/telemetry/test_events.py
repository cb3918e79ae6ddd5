"""Telemetry is batched, bounded, redacted, and never in the way."""

from __future__ import annotations

import asyncio
import os
import threading
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from tinkex.clients.portal import CurrentLoop
from tinkex.errors import (
    APIConnectionError,
    APIResponseValidationError,
    ClosedError,
    DataError,
    DataProblem,
    InputError,
    MissingPackageError,
    RequestFailedError,
    ResponseInfo,
    ServerSilentError,
    StorageError,
    status_error,
)
from tinkex.telemetry.events import Telemetry, process_uuid
from tinkex.testing.fake_clock import FakeClock
from tinkex.wire import json_codec, routes

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tinkex.types import TelemetrySendRequest

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Server:
    """The telemetry route of a server that may be down or hang."""

    def __init__(self) -> None:
        self.batches: list[TelemetrySendRequest] = []
        self.calls = 0
        self.error: Exception | None = None
        self.hangs = False

    async def call(self, route: object, request: TelemetrySendRequest) -> None:
        assert route is routes.TELEMETRY
        self.calls += 1
        json_codec.encode(request)
        if self.hangs:
            await anyio.sleep_forever()
        if self.error is not None:
            raise self.error
        self.batches.append(request)

    @property
    def events(self) -> list[Any]:
        return [event for batch in self.batches for event in batch.events]

    @property
    def names(self) -> list[str]:
        return [getattr(event, "event_name", event.event) for event in self.events]


class Setup:
    def __init__(self, session_id: str | None = "s1") -> None:
        self.server = Server()
        self.clock = FakeClock()
        self.telemetry = Telemetry(
            lambda: self.server,  # type: ignore[arg-type, return-value]
            self.clock,
            CurrentLoop().post,
            session_id=session_id,
            secrets=lambda: ["canary-key-of-our-own"],
        )

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Setup]:
        task = asyncio.create_task(self.telemetry.run())
        await anyio.wait_all_tasks_blocked()
        yield self
        task.cancel()
        await asyncio.wait([task])


@pytest.mark.req("S34")
async def test_events_are_sent_together_every_ten_seconds() -> None:
    async with Setup().running() as s:
        s.telemetry.session_start()
        s.telemetry.event("queue_state_changed", {"request_id": "r"}, "WARNING")
        await s.clock.advance(9.9)
        assert s.server.calls == 0
        await s.clock.advance(0.2)
        assert s.server.calls == 1
    (batch,) = s.server.batches
    assert batch.session_id == "s1"
    assert batch.process_uuid == process_uuid()
    start, event = batch.events
    assert (start.event, start.event_session_index, start.severity) == ("SESSION_START", 0, "INFO")
    assert (event.event_session_index, event.severity) == (1, "WARNING")
    assert s.server.events[1].event_data == {"request_id": "r"}
    assert start.event_id != event.event_id
    assert event.timestamp.isoformat() == "2025-06-15T15:06:40+00:00"


@pytest.mark.req("S34")
async def test_a_full_batch_is_sent_without_waiting() -> None:
    async with Setup().running() as s:
        for _ in range(250):
            s.telemetry.event("queue_state_changed")
        await anyio.wait_all_tasks_blocked()
    assert [len(batch.events) for batch in s.server.batches] == [100, 100, 50]


@pytest.mark.req("S34")
async def test_an_exception_is_sent_at_once() -> None:
    async with Setup().running() as s:
        s.telemetry.event("queue_state_changed")
        s.telemetry.exception(RuntimeError("bug"))
        await anyio.wait_all_tasks_blocked()
        assert s.clock.now() == 0.0
    event = s.server.events[1]
    assert (event.event, event.error_type, event.severity) == (
        "UNHANDLED_EXCEPTION",
        "RuntimeError",
        "ERROR",
    )


async def test_a_users_mistake_is_a_warning_that_does_not_quote_it() -> None:
    async with Setup().running() as s:
        s.telemetry.exception(InputError("got 'my prompt'", "data[0]"))
        await anyio.wait_all_tasks_blocked()
    (event,) = s.server.events
    assert (event.event_name, event.severity) == ("user_error", "WARNING")
    assert event.event_data == {
        "error_type": "InputError",
        "code": "bad_input",
    }


@pytest.mark.parametrize("error", [ClosedError("x"), KeyboardInterrupt(), asyncio.CancelledError()])
async def test_the_ways_programs_end_are_not_reported(error: BaseException) -> None:
    async with Setup().running() as s:
        s.telemetry.exception(error)
        await anyio.wait_all_tasks_blocked()
        await s.clock.advance(60)
    assert s.server.calls == 0


@pytest.mark.req("S34")
async def test_the_queue_is_bounded_and_what_does_not_fit_is_counted() -> None:
    s = Setup()
    for _ in range(10_005):
        s.telemetry.event("queue_state_changed")
    assert s.telemetry.dropped == 5
    await s.telemetry.flush()
    assert len(s.server.events) == 10_000
    s.telemetry.event("queue_state_changed")
    await s.telemetry.flush()
    assert len(s.server.events) == 10_001


@pytest.mark.req("S34")
async def test_names_are_a_fixed_set_whatever_somebody_puts_into_them() -> None:
    s = Setup()
    s.telemetry.event("queue_state_changed")
    for i in range(10):
        s.telemetry.event(f"retry of {i}")  # type: ignore[arg-type]
    await s.telemetry.flush()
    assert set(s.server.names) == {"queue_state_changed", "other"}


CANARY = "canary prompt"
KEYS = ("canary-key-of-our-own", "tml-canary", "eyJcanary")


def errors_with(text: str) -> list[Exception]:
    """Errors of every kind that hold `text` wherever an error can hold one."""
    response = ResponseInfo(400, {"k": text}, text)
    made: list[Exception] = [
        RuntimeError(text),
        type(text, (Exception,), {"code": text, "status_code": text, "request_id": text})(text),
        type(text, (RequestFailedError,), {"code": text})(text, text, "user"),
        APIConnectionError(message=text),
        APIResponseValidationError(response, text, text),
        status_error(response, {"e": text}),
        status_error(ResponseInfo(500, {"k": text}, text), text),
        RequestFailedError(text, text, "server"),
        RequestFailedError(text, text, text),  # type: ignore[arg-type]
        InputError(text, f'data[0].loss_fn_inputs["{text}"]'),
        MissingPackageError(text, text),
        StorageError(text, text),
        DataError(text, [DataProblem(1, text)]),
        ServerSilentError(text),
        ExceptionGroup(text, [KeyError(text), ExceptionGroup(text, [InputError(text)])]),
    ]
    raised: list[Exception] = []
    for error in made:
        error.add_note(text)
        code = compile(f"def f(error, cause):\n raise error from cause # {text}", text, "exec")
        names: dict[str, Any] = {"prompt": text}
        exec(code, names)
        try:
            names["f"](error, KeyError(text))
        except Exception as caught:  # noqa: BLE001
            raised.append(caught)
    return raised


@pytest.mark.req("B1")
@pytest.mark.req("S34")
@pytest.mark.parametrize("canary", [CANARY, *KEYS])
async def test_nothing_of_an_error_s_texts_is_in_what_is_sent(canary: str) -> None:
    s = Setup()
    errors = errors_with(canary)
    for error in errors:
        s.telemetry.exception(error)
    await s.telemetry.flush()
    assert len(s.server.events) == len(errors)
    sent = b"".join(json_codec.encode(batch) for batch in s.server.batches)
    assert canary.encode() not in sent
    assert b"canary" not in sent


@pytest.mark.req("B1")
@pytest.mark.req("S34")
@pytest.mark.parametrize("canary", [CANARY, *KEYS])
async def test_nothing_of_an_event_s_data_is_sent_but_ids_and_known_words(canary: str) -> None:
    s = Setup()
    data = {"headers": {"k": canary}, "prompt": canary, canary: 1, "reason": canary}
    s.telemetry.event("queue_state_changed", {"request_id": "r-1", **data})
    s.telemetry.event("queue_state_changed", {"request_id": canary, "queue_state": canary})
    s.telemetry.event(canary, {"queue_state": "active", "tokens": [1, 2, 3]})  # type: ignore[arg-type]
    await s.telemetry.flush()
    assert [event.event_data for event in s.server.events] == [
        {"request_id": "r-1"},
        {},
        {"queue_state": "active"},
    ]
    sent = b"".join(json_codec.encode(batch) for batch in s.server.batches)
    assert b"canary" not in sent


async def test_an_error_is_reported_once_however_many_calls_and_wrappers_it_ends() -> None:
    s = Setup()
    error = APIConnectionError()
    s.telemetry.exception(error)
    s.telemetry.exception(error)
    try:
        raise RuntimeError("while training") from error
    except RuntimeError as wrapper:
        s.telemetry.exception(wrapper)
    s.telemetry.exception(APIConnectionError())
    await s.telemetry.flush()
    assert [event.error_type for event in s.server.events] == ["APIConnectionError"] * 2


async def test_an_error_that_cannot_be_looked_at_breaks_nothing() -> None:
    class Odd(status_error(ResponseInfo(400), None).__class__):  # type: ignore[misc]
        status_code = property(lambda self: 1 // 0, lambda self, value: None)

    s = Setup()
    s.telemetry.exception(Odd("x", ResponseInfo(400)))
    s.telemetry.exception(RuntimeError())
    await s.telemetry.flush()
    assert [event.error_type for event in s.server.events] == ["RuntimeError"]


@pytest.mark.req("B2")
@pytest.mark.parametrize("down", ["hangs", "refuses"])
async def test_recording_returns_at_once_when_the_route_is_down(down: str) -> None:
    async with Setup().running() as s:
        s.server.hangs = down == "hangs"
        s.server.error = APIConnectionError() if down == "refuses" else None
        s.telemetry.exception(RuntimeError())
        await anyio.wait_all_tasks_blocked()
        assert s.server.calls == 1
        for _ in range(500):
            s.telemetry.exception(RuntimeError())
        assert s.clock.now() == 0.0


@pytest.mark.req("B2")
async def test_flushing_a_hanging_route_ends_at_the_limit_and_keeps_the_events() -> None:
    s = Setup()
    s.server.hangs = True
    s.telemetry.event("queue_state_changed")
    async with s.clock.running():
        await s.telemetry.flush(2.0)
    assert s.clock.now() == 2.0
    s.server.hangs = False
    await s.telemetry.flush()
    assert s.server.names == ["queue_state_changed"]


async def test_a_failed_batch_is_tried_three_times_and_then_dropped() -> None:
    s = Setup()
    s.server.error = APIConnectionError()
    for _ in range(150):
        s.telemetry.event("queue_state_changed")
    async with s.clock.running():
        await s.telemetry.flush(60)
    assert s.server.calls == 3
    assert s.clock.now() == 3.0
    assert s.telemetry.dropped == 100
    s.server.error = None
    await s.telemetry.flush()
    assert len(s.server.events) == 50


async def test_an_answer_that_will_not_change_is_not_asked_for_again() -> None:
    s = Setup()
    s.server.error = status_error(ResponseInfo(403), None)
    s.telemetry.event("queue_state_changed")
    await s.telemetry.flush()
    assert (s.server.calls, s.telemetry.dropped) == (1, 1)


async def test_a_server_without_the_route_is_left_alone() -> None:
    async with Setup().running() as s:
        s.server.error = status_error(ResponseInfo(404), None)
        s.telemetry.exception(RuntimeError())
        await anyio.wait_all_tasks_blocked()
        s.telemetry.exception(RuntimeError())
        await anyio.wait_all_tasks_blocked()
        await s.clock.advance(60)
    assert s.server.calls == 1


async def test_a_bug_while_sending_breaks_nothing() -> None:
    async with Setup().running() as s:
        s.server.error = ZeroDivisionError()
        s.telemetry.exception(RuntimeError())
        await anyio.wait_all_tasks_blocked()
        s.server.error = None
        s.telemetry.exception(RuntimeError())
        await anyio.wait_all_tasks_blocked()
    assert len(s.server.events) == 1


async def test_data_that_cannot_be_read_breaks_nothing() -> None:
    class Broken(dict[str, object]):
        def get(self, *_: object) -> Any:
            raise RuntimeError("bug")

    s = Setup()
    s.telemetry.event("queue_state_changed", Broken(a=1))
    s.telemetry.event("queue_state_changed")
    await s.telemetry.flush()
    assert len(s.server.events) == 1


@pytest.mark.req("S34")
async def test_events_come_from_any_thread_and_each_has_its_own_index() -> None:
    async with Setup().running() as s:

        def record() -> None:
            for _ in range(100):
                s.telemetry.event("queue_state_changed")

        threads = [threading.Thread(target=record) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            await asyncio.to_thread(thread.join)
        await anyio.wait_all_tasks_blocked()
        await s.clock.advance(10)
    assert sorted(event.event_session_index for event in s.server.events) == list(range(400))


async def test_what_was_on_its_way_when_the_loop_was_cancelled_is_flushed() -> None:
    s = Setup()
    s.server.hangs = True
    async with s.running():
        s.telemetry.exception(RuntimeError("first"))
        s.telemetry.event("second")
        await anyio.wait_all_tasks_blocked()
    s.server.hangs = False
    s.telemetry.session_end()
    await s.telemetry.flush()
    assert [event.event for event in s.server.events] == [
        "UNHANDLED_EXCEPTION",
        "GENERIC_EVENT",
        "SESSION_END",
    ]


async def test_the_end_says_how_long_the_session_was() -> None:
    s = Setup()
    await s.clock.advance(12.345678)
    s.telemetry.session_end()
    await s.telemetry.flush()
    assert s.server.events[0].duration == "0:00:12.345678"


async def test_events_without_a_session_share_an_id_that_says_so() -> None:
    s = Setup(session_id=None)
    for _ in range(2):
        s.telemetry.event("queue_state_changed")
        await s.telemetry.flush()
    first, second = s.server.batches
    assert first.session_id == second.session_id
    assert first.session_id.startswith("sessionless-")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform has no fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_has_a_name_of_its_own_and_leaves_the_parents_queue_alone() -> None:
    async def make() -> Telemetry:
        return Setup().telemetry

    telemetry = asyncio.run(make())
    reader, writer = os.pipe()
    parent = process_uuid()
    pid = os.fork()
    if pid == 0:
        telemetry.event("queue_state_changed")
        os.write(writer, f"{process_uuid()} {len(telemetry._queue)}".encode())
        os._exit(0)
    os.close(writer)
    child, queued = os.read(reader, 100).decode().split()
    os.waitpid(pid, 0)
    os.close(reader)
    assert len(child) == 36
    assert child != parent
    assert parent == process_uuid()
    assert queued == "0"


async def test_an_idle_client_has_no_timer() -> None:
    async with Setup().running() as s:
        assert s.clock.sleepers == 0
        s.telemetry.event("queue_state_changed")
        await anyio.wait_all_tasks_blocked()
        assert s.clock.sleepers == 1
        await s.clock.advance(10)
        assert s.server.names == ["queue_state_changed"]
        assert s.clock.sleepers == 0


async def test_what_is_left_after_a_failed_round_is_tried_again_later() -> None:
    async with Setup().running() as s:
        s.server.error = status_error(ResponseInfo(403), None)
        for _ in range(150):
            s.telemetry.event("queue_state_changed")
        await anyio.wait_all_tasks_blocked()
        s.server.error = None
        await s.clock.advance(10)
    assert len(s.server.events) == 50

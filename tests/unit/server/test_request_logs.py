"""Every request has an id, one log line, and a span below the client's."""

from __future__ import annotations

import io
import logging
import re
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tinkex.errors import EngineDiedError, RequestFailedError, StorageError
from tinkex.server.observability.logs import LineFormatter, install
from tinkex.server.observability.requests import current_request_id, owner_hash
from tinkex.testing.fake_engine import Delays

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .conftest import Api, Start

pytestmark = pytest.mark.anyio

LOG = "tinkex.server.requests"


def lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    return [record.fields for record in caplog.records if record.name == LOG]  # type: ignore[attr-defined]


async def test_a_sane_request_id_comes_back_and_any_other_is_replaced(api: Api) -> None:
    for given in ("abc-123", "a" * 128, "trace:1.2_3"):
        reply = await api.call("GET", "/healthz", headers={"x-request-id": given})
        assert reply.headers["x-request-id"] == given
    for given in ("", "a" * 129, "two words", 'quo"te', "-dash", "é"):
        reply = await api.call("GET", "/healthz", headers={"x-request-id": given})
        assert re.fullmatch("[0-9a-f]{32}", reply.headers["x-request-id"]), given


async def test_errors_have_a_request_id_too(api: Api) -> None:
    for path in ("/sessions/none", "/nothing/here"):
        reply = await api.call("GET", path, headers={"x-request-id": "mine"})
        assert reply.headers["x-request-id"] == "mine"


async def test_one_line_per_request_says_what_and_nothing_secret(
    api: Api, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    model = await api.model()
    caplog.clear()
    headers = {"x-request-id": "r1", "x-other": "secret header"}
    await api.call("POST", "/get_info", {"model_id": model}, query="a=secret", headers=headers)
    (fields,) = lines(caplog)
    assert fields == {
        "request_id": "r1",
        "route": "get_info",
        "method": "POST",
        "status": 200,
        "ms": 0.0,
        "owner": owner_hash(next(iter(await api.server.store.sessions())).owner),
        "model_id": model,
    }
    assert api.key not in caplog.text
    assert "secret" not in caplog.text


async def test_probes_are_quiet(api: Api, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    await api.call("GET", "/healthz")
    assert lines(caplog) == []
    caplog.set_level(logging.DEBUG, logger=LOG)
    await api.call("GET", "/healthz")
    assert len(lines(caplog)) == 1


async def test_a_slow_request_is_a_warning_and_a_poll_may_take_its_time(
    start: Start, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    async with start(delays=Delays(train_s=20.0), slow_request_s=3.0) as api:
        model = await api.model()
        await api.result(await api.train(model, 1))
        assert {record.levelname for record in caplog.records if record.name == LOG} == {"INFO"}
        caplog.clear()
        usual = api.server.store.get_model

        async def slow(model_id: str) -> Any:
            await api.clock.sleep(3.5)
            return await usual(model_id)

        monkeypatch.setattr(api.server.store, "get_model", slow)
        await api.call("GET", f"/training_runs/{model}")
        (record,) = [record for record in caplog.records if record.name == LOG]
        assert record.levelname == "WARNING"
        assert record.getMessage().startswith("slow request ")
        assert lines(caplog)[0]["ms"] == 3500.0


@pytest.mark.parametrize(
    ("error", "status", "text"),
    [
        (
            StorageError("the folder /data is read-only", "/data"),
            507,
            "its disk is full, read-only or failing",
        ),
        (EngineDiedError("killed by signal 9, pid 77"), 503, "started again"),
        (RequestFailedError("cannot be done", None, "server"), 500, "cannot be done"),
        (RequestFailedError("your own mistake", None, "user"), 400, "your own mistake"),
        (LookupError("/etc/internal/path"), 500, "request id r-1"),
    ],
)
async def test_whatever_goes_wrong_becomes_a_reply_with_a_detail(
    api: Api,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
    status: int,
    text: str,
) -> None:
    async def fail(*args: object) -> None:
        raise error

    monkeypatch.setattr(api.server.store, "get_session", fail)
    reply = await api.call("GET", "/sessions/s", headers={"x-request-id": "r-1"})
    assert reply.status == status
    assert int(reply.headers["content-length"]) == len(reply.body)
    body = msgspec.json.decode(reply.body)
    assert text in body["detail"]
    assert "internal" not in body["detail"]
    assert "pid" not in body["detail"]
    if isinstance(error, LookupError):
        assert body["request_id"] == "r-1"
        assert "get_session failed request_id=r-1" in caplog.text
        assert "/etc/internal/path" in caplog.text


async def test_a_database_out_of_reach_is_a_503(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*args: object) -> None:
        raise StorageError("the database cannot be reached") from ConnectionRefusedError("x")

    monkeypatch.setattr(api.server.store, "get_session", fail)
    reply = await api.call("GET", "/sessions/s")
    assert (reply.status, reply.headers["retry-after"]) == (503, "1")


async def test_an_error_outside_of_every_handler_is_answered_in_our_form(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> dict[str, int]:
        raise LookupError("bug")

    monkeypatch.setattr(api.server._parts.worker, "queue_lengths", fail)
    from .test_operations_pages import page

    reply = await page(api, "/metrics")
    assert reply.status == 500
    assert reply.headers["x-request-id"] in msgspec.json.decode(reply.body)["detail"]


# The lines themselves.


def record(message: str, **extra: Any) -> logging.LogRecord:
    made = logging.LogRecord("tinkex.x", logging.WARNING, "f", 1, message, (), None)
    made.created = 1_750_000_000.25
    for name, value in extra.items():
        setattr(made, name, value)
    return made


def test_json_lines_hold_time_level_and_fields() -> None:
    line = LineFormatter("json").format(record("hello", fields={"status": 200, "x": None}))
    assert msgspec.json.decode(line) == {
        "time": "2025-06-15T15:06:40.250Z",
        "level": "warning",
        "logger": "tinkex.x",
        "message": "hello",
        "status": 200,
        "x": None,
    }


def test_text_lines_quote_what_is_not_plain_and_never_break() -> None:
    line = LineFormatter("text").format(record('two\nlines "quoted"', fields={"a": "b", "c": ""}))
    assert line == (
        "time=2025-06-15T15:06:40.250Z level=warning logger=tinkex.x "
        'message="two\\nlines \\"quoted\\"" a=b c=""'
    )


def test_a_traceback_stays_on_the_line() -> None:
    made = record("failed")
    try:
        raise LookupError("why")
    except LookupError as error:
        made.exc_info = (type(error), error, error.__traceback__)
    line = LineFormatter("json").format(made)
    assert "\n" not in line
    assert "LookupError: why" in msgspec.json.decode(line)["exception"]


@pytest.fixture
def own_root() -> Iterator[None]:
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = before, level


@pytest.mark.usefixtures("own_root")
def test_a_host_installs_one_handler_and_lines_know_their_request() -> None:
    stream = io.StringIO()
    install("json", stream)
    install("json", stream)
    token = current_request_id.set("r9")
    logging.getLogger("tinkex.y").info("inside %s", "it")
    current_request_id.reset(token)
    logging.getLogger("tinkex.y").debug("not shown")
    (line,) = stream.getvalue().splitlines()
    assert msgspec.json.decode(line)["request_id"] == "r9"
    assert msgspec.json.decode(line)["message"] == "inside it"


# Spans.


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    return exporter


CLIENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


async def test_the_server_s_spans_join_the_client_s_trace(
    start: Start, exported: InMemorySpanExporter
) -> None:
    async with start(delays=Delays(train_s=2.0)) as api:
        model = await api.model()
        exported.clear()
        body = {"model_id": model, "seq_id": 1, "adam_params": {"learning_rate": 0.1}}
        future = await api.post("/optim_step", body, headers={"traceparent": CLIENT})
        await api.outcome(future)
        spans = {span.name: span for span in exported.get_finished_spans()}
        request, queue, compute = (
            spans[name] for name in ("server.optim_step", "optim_step queue", "optim_step compute")
        )
        assert f"{request.context.trace_id:032x}" == CLIENT.split("-")[1]
        assert f"{request.parent.span_id:016x}" == CLIENT.split("-")[2]
        assert request.attributes["http.response.status_code"] == 200
        assert request.attributes["tinkex.model_id"] == model
        for child in (queue, compute):
            assert child.context.trace_id == request.context.trace_id
            assert child.parent.span_id == request.context.span_id
            assert child.attributes["tinkex.request_id"] == future["request_id"]
        assert queue.end_time == compute.start_time


async def test_a_broken_traceparent_starts_a_trace_of_its_own(
    api: Api, exported: InMemorySpanExporter
) -> None:
    await api.call("GET", "/sessions/none", headers={"traceparent": "00-zz-1"})
    (span,) = exported.get_finished_spans()
    assert span.parent is None
    assert span.name == "server.get_session"


async def test_a_failed_operation_s_span_says_so_without_its_text(
    api: Api, exported: InMemorySpanExporter
) -> None:
    model = await api.model()
    exported.clear()
    await api.outcome(await api.train(model, 1, loss_fn="nonsense"))
    (compute,) = [s for s in exported.get_finished_spans() if s.name.endswith(" compute")]
    assert not compute.status.is_ok
    assert compute.status.description is None

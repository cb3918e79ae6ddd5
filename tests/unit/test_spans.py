"""Spans follow the code they surround and reach whoever listens."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF

from tests.own_thread import in_own_thread, own_records
from tinkex.spans import Span, current_span, current_traceparent, span, subscribe

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def ended() -> Iterator[list[Span]]:
    spans: list[Span] = []
    stop = subscribe(in_own_thread(spans.append))
    yield spans
    stop()


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    """A program that has set up OpenTelemetry."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    # A provider can be set once per process, so a test installs its own in place.
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    return exporter


def sampled(traceparent: str) -> bool:
    """The lowest bit of the flags; the others say other things."""
    return bool(int(traceparent.rpartition("-")[2], 16) & 1)


@pytest.mark.req("S35")
def test_a_listener_hears_name_ids_duration_and_parent(ended: list[Span]) -> None:
    with (
        span("training.forward_backward", model_id="m") as outer,
        span("training.submit", seq_id=3) as inner,
    ):
        inner.note(request_id="r")
    assert [one.name for one in ended] == ["training.submit", "training.forward_backward"]
    assert ended[0].ids == {"seq_id": 3, "request_id": "r"}
    assert ended[0].parent is outer
    assert ended[0].error is None
    assert ended[0].duration_s is not None
    assert ended[1].duration_s is not None
    assert 0 <= ended[0].duration_s <= ended[1].duration_s


def test_a_failure_is_recorded_and_passes_through(ended: list[Span]) -> None:
    with pytest.raises(LookupError), span("sampling.sample"):
        raise LookupError("x")
    assert isinstance(ended[0].error, LookupError)
    assert current_span() is None


def test_a_listener_that_raises_harms_nobody(
    ended: list[Span], caplog: pytest.LogCaptureFixture
) -> None:
    def broken(_: Span) -> None:
        raise RuntimeError("bug")

    stop = subscribe(broken)
    heard: list[Span] = []
    stop_last = subscribe(heard.append)
    with span("step"):
        pass
    stop()
    stop_last()
    assert len(heard) == 1
    assert "a listener failed on step" in caplog.text


def test_unsubscribing_twice_removes_one_listener() -> None:
    heard: list[Span] = []
    stop_first = subscribe(heard.append)
    stop_second = subscribe(heard.append)
    stop_first()
    stop_first()
    with span("step"):
        pass
    stop_second()
    assert heard == []


@pytest.mark.req("S35")
def test_the_current_span_follows_a_task_and_not_its_sibling() -> None:
    async def child(seen: list[Span | None]) -> None:
        seen.append(current_span())

    async def main() -> tuple[Span, list[Span | None]]:
        seen: list[Span | None] = []
        with span("outer") as outer:
            inside = asyncio.create_task(child(seen))
        outside = asyncio.create_task(child(seen))
        await asyncio.gather(inside, outside)
        return outer, seen

    outer, seen = asyncio.run(main())
    assert seen == [outer, None]


@pytest.mark.req("S35")
def test_the_current_span_follows_a_copied_context_into_a_thread() -> None:
    seen: list[Span | None] = []
    with span("outer") as outer:
        context = contextvars.copy_context()
    thread = threading.Thread(target=lambda: context.run(lambda: seen.append(current_span())))
    thread.start()
    thread.join()
    assert seen == [outer]


def test_spans_of_concurrent_tasks_do_not_mix(ended: list[Span]) -> None:
    async def one(name: str, go: asyncio.Event, done: asyncio.Event) -> None:
        with span(name):
            go.set()
            await done.wait()
            with span(f"{name}.inner"):
                pass

    async def main() -> None:
        a, b = asyncio.Event(), asyncio.Event()
        await asyncio.gather(one("a", a, b), one("b", b, a))

    asyncio.run(main())
    parents = {one.name: one.parent.name for one in ended if one.parent is not None}
    assert parents == {"a.inner": "a", "b.inner": "b"}


def test_a_span_that_ends_in_another_context_restores_its_parent_there() -> None:
    step = span("step")
    contextvars.copy_context().run(step.__enter__)
    step.__exit__(None, None, None)
    assert current_span() is None


def test_the_debug_log_tells_start_end_and_failure(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="tinkex.spans")
    with span("good", model_id="m", seq_id=None):
        pass
    with pytest.raises(KeyError), span("bad"):
        raise KeyError("secret detail")
    lines = [record.getMessage() for record in own_records(caplog)]
    assert lines[0] == "good started model_id=m"
    assert lines[1].startswith("good ended after ")
    assert lines[3].startswith("bad failed (KeyError) after ")
    assert "secret detail" not in caplog.text


def test_without_open_telemetry_s_spans_there_is_no_traceparent(ended: list[Span]) -> None:
    with span("heard by a listener only"):
        assert current_traceparent() is None


@pytest.mark.req("S35")
def test_spans_reach_open_telemetry_with_parents_ids_and_failures(
    exported: InMemorySpanExporter,
) -> None:
    def run() -> None:
        with span("sampling.sample", sampling_session_id="s", clone_id=None) as outer:
            outer.note(attempts=2)
            with span("sampling.wait"):
                raise LookupError("gone")

    with pytest.raises(LookupError):
        run()
    inner, outer = exported.get_finished_spans()
    assert (outer.name, inner.name) == ("sampling.sample", "sampling.wait")
    assert dict(outer.attributes or {}) == {
        "tinkex.sampling_session_id": "s",
        "tinkex.attempts": 2,
        "error.type": "LookupError",
    }
    assert inner.parent is not None
    assert inner.parent.span_id == outer.context.span_id
    assert inner.status.status_code is trace.StatusCode.ERROR
    assert (inner.attributes or {})["error.type"] == "LookupError"


@pytest.mark.req("S34")
def test_the_text_of_an_error_does_not_reach_open_telemetry(
    exported: InMemorySpanExporter,
) -> None:
    with pytest.raises(LookupError), span("sampling.sample"):
        raise LookupError("canary prompt")
    (recorded,) = exported.get_finished_spans()
    assert "canary" not in recorded.to_json()


def test_the_traceparent_is_open_telemetrys_own_when_it_records(
    exported: InMemorySpanExporter,
) -> None:
    with span("step"):
        sent = current_traceparent()
    (recorded,) = exported.get_finished_spans()
    ids = f"00-{recorded.context.trace_id:032x}-{recorded.context.span_id:016x}"
    assert sent is not None
    assert sent.rpartition("-")[0] == ids
    assert sampled(sent)
    assert current_traceparent() is None


def test_a_span_that_has_ended_is_nobody_s_parent(exported: InMemorySpanExporter) -> None:
    with span("step"):
        context = contextvars.copy_context()
        assert context.run(current_traceparent) is not None
    assert context.run(current_traceparent) is None


def test_a_span_that_a_sampler_left_out_tells_the_server_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    provider = TracerProvider(sampler=ALWAYS_OFF)
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    with span("step"):
        sent = current_traceparent()
    assert sent is not None
    assert not sampled(sent)


def test_a_span_around_a_thread_hop_stays_one_open_telemetry_trace(
    exported: InMemorySpanExporter,
) -> None:
    def work() -> None:
        with span("inner"):
            pass

    with span("outer"):
        context = contextvars.copy_context()
        thread = threading.Thread(target=lambda: context.run(work))
        thread.start()
        thread.join()
    inner, outer = exported.get_finished_spans()
    assert inner.context.trace_id == outer.context.trace_id


@pytest.mark.req("S35")
def test_importing_and_using_spans_does_not_import_open_telemetry() -> None:
    code = (
        "import sys; from tinkex.spans import span\n"
        "with span('step', n=1): pass\n"
        "assert not [m for m in sys.modules if m.startswith('opentelemetry')]"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

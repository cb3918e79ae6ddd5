"""One trace from a client's call to the server's work: every request says whose child it is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tests.unit.clients.world import MODEL, World, datum
from tinkex import ModelInput, SamplingParams
from tinkex.spans import span, subscribe
from tinkex.testing import Delays, faults

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from opentelemetry.sdk.trace import ReadableSpan

    from tinkex import ServiceClient

pytestmark = pytest.mark.req("S35")

PROMPT = ModelInput.from_ints([1, 2, 3])


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    """A program, and a server in the same process, that have set up OpenTelemetry."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    return exporter


def paths(exporter: InMemorySpanExporter) -> set[str]:
    """Every span with the names of those above it."""
    spans = {one.context.span_id: one for one in exporter.get_finished_spans()}

    def path(one: ReadableSpan) -> str:
        above = None if one.parent is None else spans.get(one.parent.span_id)
        return one.name if above is None else f"{path(above)}/{one.name}"

    return {path(one) for one in spans.values()}


def run(work: Callable[[World, ServiceClient], Coroutine[Any, Any, None]]) -> World:
    async def scenario(world: World) -> None:
        async with world.service() as service:
            await work(world, service)

    world = World()
    world.run(scenario)
    return world


def test_the_server_s_spans_are_children_of_the_call_that_caused_them(
    exported: InMemorySpanExporter,
) -> None:
    async def work(world: World, service: ServiceClient) -> None:
        training = await service.create_lora_training_client_async(MODEL)
        sampler = await service.create_sampling_client_async(base_model=MODEL)
        with span("my.step"):
            step = training.forward_backward([datum()], "cross_entropy")
            sample = sampler.sample(PROMPT, 1, SamplingParams(max_tokens=1))
        await step
        await sample

    run(work)
    found = paths(exported)
    submitted = "my.step/training.forward_backward/training.submit/server.forward_backward"
    assert submitted in found
    assert f"{submitted}/forward_backward queue" in found
    assert f"{submitted}/forward_backward compute" in found
    assert "my.step/training.forward_backward/training.wait/server.retrieve_future" in found
    assert "my.step/sampling.sample/sampling.submit/server.asample" in found
    assert "my.step/sampling.sample/sampling.wait/server.retrieve_future" in found


def test_every_attempt_of_a_call_has_the_same_parent(exported: InMemorySpanExporter) -> None:
    async def work(world: World, service: ServiceClient) -> None:
        training = await service.create_lora_training_client_async(MODEL)
        world.server.faults.on("forward_backward", faults.reply(503), times=2)
        await training.forward_backward([datum()], "cross_entropy")

    world = run(work)
    sent = [seen.headers["traceparent"] for seen in world.server.seen("forward_backward")]
    assert len(sent) == 3
    assert len(set(sent)) == 1


def test_heartbeats_and_telemetry_belong_to_no_call(exported: InMemorySpanExporter) -> None:
    async def work(world: World, service: ServiceClient) -> None:
        # Long calls inside a span: also what goes on beside them has a current span around it.
        world.server.engine.delays = Delays(train_s=60.0)
        with span("my.run"):
            training = await service.create_lora_training_client_async(MODEL)
            await training.forward_backward([datum()], "cross_entropy")

    world = run(work)
    for route in ("session_heartbeat", "telemetry"):
        seen = world.server.seen(route)
        assert seen
        assert all("traceparent" not in request.headers for request in seen)
    assert "traceparent" in world.server.seen("forward_backward")[0].headers


def test_nothing_is_sent_where_nobody_records() -> None:
    stop = subscribe(lambda ended: None)

    async def work(world: World, service: ServiceClient) -> None:
        with span("my.step"):
            await service.create_lora_training_client_async(MODEL)

    world = run(work)
    stop()
    assert not any("traceparent" in seen.headers for seen in world.server.requests)


def test_a_traceparent_that_the_user_has_set_is_kept(exported: InMemorySpanExporter) -> None:
    own = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"

    async def scenario(world: World) -> None:
        async with world.service() as service:
            with span("my.step"):
                await service.get_server_capabilities_async()

    world = World(headers={"Traceparent": own})
    world.run(scenario)
    assert {seen.headers["traceparent"] for seen in world.server.requests} == {own}

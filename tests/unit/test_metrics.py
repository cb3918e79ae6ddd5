"""The client's numbers reach whoever wants them, and cost nothing while nobody does."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
from opentelemetry import metrics as otel
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from tests.own_thread import in_own_thread
from tests.unit.clients.world import MODEL, World, datum
from tinkex import AdamParams, ModelInput, SamplingParams
from tinkex.errors import InputError, RequestFailedError, TinkerError
from tinkex.futures.admission import Pause
from tinkex.metrics import (
    FAILURES,
    METRICS,
    QUEUE,
    REQUESTS,
    RESULT,
    RETRIES,
    SUBMIT,
    TOKENS,
    WAIT,
    Measurement,
    Meter,
    meter,
    subscribe,
)
from tinkex.spans import current_span, span
from tinkex.testing import Delays, faults

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator

    from tinkex import SamplingClient, TrainingClient
    from tinkex.metrics import Metric
    from tinkex.types import Usage

pytestmark = pytest.mark.req("S39")

PROMPT = ModelInput.from_ints([1, 2, 3])


@pytest.fixture
def heard() -> Iterator[list[Measurement]]:
    measurements: list[Measurement] = []
    stop = subscribe(in_own_thread(measurements.append))
    yield measurements
    stop()


def run(work: Callable[[World, TrainingClient, SamplingClient], Coroutine[Any, Any, None]]) -> None:
    async def scenario(world: World) -> None:
        async with world.service() as service:
            training = await service.create_lora_training_client_async(MODEL)
            sampler = await service.create_sampling_client_async(base_model=MODEL)
            await work(world, training, sampler)

    World().run(scenario)


async def one_of_each(world: World, training: TrainingClient, sampler: SamplingClient) -> None:
    await training.forward_backward([datum(4)], "cross_entropy")
    await training.forward([datum(3)], "cross_entropy")
    await training.optim_step(AdamParams())
    await sampler.sample(PROMPT, 2, SamplingParams(max_tokens=5))


def total(heard: list[Measurement], metric: Metric) -> Counter[tuple[str, ...]]:
    """The sums of a metric by its labels."""
    sums: Counter[tuple[str, ...]] = Counter()
    for one in heard:
        if one.metric is metric:
            sums[tuple(one.labels[name] for name in metric.labels)] += one.value  # type: ignore[assignment]
    return sums


def test_requests_are_counted_by_route_and_status(heard: list[Measurement]) -> None:
    run(one_of_each)
    requests = total(heard, REQUESTS)
    assert requests["create_session", "200"] == 1
    assert requests["forward_backward", "200"] == 2
    assert requests["optim_step", "200"] == 1
    assert requests["asample", "200"] == 1


def test_tokens_are_those_of_the_session_s_usage(heard: list[Measurement]) -> None:
    used: list[Usage] = []

    async def work(world: World, training: TrainingClient, sampler: SamplingClient) -> None:
        await one_of_each(world, training, sampler)
        used.append(training.holder.usage)

    run(work)
    tokens = total(heard, TOKENS)
    (usage,) = used
    assert tokens["trained",] == usage.trained_tokens == 4
    assert tokens["prompt",] == usage.prompt_tokens == 6
    assert tokens["generated",] == usage.generated_tokens
    assert tokens["cached",] == usage.cached_tokens


@pytest.mark.parametrize("metric", [SUBMIT, RESULT])
def test_latencies_are_told_by_operation(heard: list[Measurement], metric: Metric) -> None:
    run(one_of_each)
    told = Counter(one.labels["operation"] for one in heard if one.metric is metric)
    assert told == {"forward_backward": 2, "optim_step": 1, "sample": 1}


def test_the_server_s_queue_time_is_told_by_operation(heard: list[Measurement]) -> None:
    async def work(world: World, training: TrainingClient, sampler: SamplingClient) -> None:
        world.server.engine.delays = Delays(train_s=2.0)
        first = training.forward_backward([datum()], "cross_entropy")
        second = training.optim_step(AdamParams())
        await first
        await second

    run(work)
    queued = {one.labels["operation"]: one.value for one in heard if one.metric is QUEUE}
    assert queued["forward_backward"] == pytest.approx(0.0)
    assert queued["optim_step"] == pytest.approx(2.0)


def test_retries_and_their_waits_are_told_by_reason(heard: list[Measurement]) -> None:
    async def work(world: World, training: TrainingClient, sampler: SamplingClient) -> None:
        for nth, effect in enumerate([faults.reply(503), faults.drop(), faults.reply(429)]):
            world.server.faults.on("forward_backward", effect, nth=nth)
        await training.forward_backward([datum()], "cross_entropy")

    run(work)
    assert total(heard, RETRIES) == {
        ("forward_backward", "backoff"): 2,
        ("forward_backward", "rate_limit"): 1,
    }
    requests = total(heard, REQUESTS)
    assert requests["forward_backward", "503"] == requests["forward_backward", "429"] == 1
    assert requests["forward_backward", "connection"] == 1
    waits = total(heard, WAIT)
    assert 1.0 < waits["backoff",] < 2.0
    assert waits["rate_limit",] > 0


def test_an_account_that_cannot_pay_is_a_wait_of_its_own(heard: list[Measurement]) -> None:
    async def scenario(world: World) -> None:
        async with world.service() as service:
            world.server.faults.on("get_server_capabilities", faults.reply(402), times=2)
            await service.get_server_capabilities_async()

    World().run(scenario)
    assert total(heard, RETRIES) == {("get_server_capabilities", "billing"): 2}
    assert total(heard, WAIT) == {("billing",): 10.0}


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_shared_pause_tells_each_sample_that_waited(heard: list[Measurement]) -> None:
    world = World()
    pause = Pause(world.clock)
    await pause.wait()
    assert heard == []
    async with world.clock.running():
        pause.request(3.0)
        await pause.wait()
        pause.request(5.0, "billing")
        pause.request(1.0)
        await pause.wait()
    assert total(heard, WAIT) == {("rate_limit",): 3.0, ("billing",): 5.0}


def test_failures_are_counted_by_the_error_s_code(heard: list[Measurement]) -> None:
    async def work(world: World, training: TrainingClient, sampler: SamplingClient) -> None:
        world.server.faults.on("optim_step", faults.reply(400))
        with pytest.raises(TinkerError):
            await training.optim_step(AdamParams())

    run(work)
    assert total(heard, FAILURES) == {("bad_request",): 1}


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InputError("a prompt", "data"), "bad_input"),
        (type("Mine", (RequestFailedError,), {"code": "x"})("m", None, "user"), "request_failed"),
        (KeyError("a prompt"), "other"),
    ],
)
def test_the_code_of_a_failure_is_a_word_of_our_own(
    heard: list[Measurement], error: Exception, code: str
) -> None:
    meter.failed(error)
    assert [one.labels for one in heard] == [{"code": code}]


def test_every_measurement_has_the_labels_that_its_definition_names(
    heard: list[Measurement],
) -> None:
    run(one_of_each)
    meter.retry("asample", "rate_limit", 1.0)
    meter.failed(KeyError())
    assert {one.metric for one in heard} == set(METRICS)
    for one in heard:
        assert tuple(one.labels) == one.metric.labels
        assert all(value.isidentifier() or value.isdigit() for value in one.labels.values())


def test_names_units_and_kinds_follow_open_telemetry() -> None:
    assert len({metric.name for metric in METRICS}) == len(METRICS)
    for metric in METRICS:
        assert metric.name.startswith("tinkex.client.")
        assert metric.unit == ("s" if metric.kind == "histogram" else metric.unit)
        assert metric.name.endswith(".duration") == (metric.kind == "histogram")


def test_a_listener_that_raises_harms_no_call(
    heard: list[Measurement], caplog: pytest.LogCaptureFixture
) -> None:
    def broken(_: Measurement) -> None:
        raise RuntimeError("bug")

    stop = subscribe(broken)
    meter.wait("slot", 1.0)
    stop()
    stop()
    assert len(heard) == 1
    assert "a listener failed on tinkex.client.wait.duration" in caplog.text


def test_while_nobody_listens_nothing_is_on_and_no_span_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, "opentelemetry.trace")
    assert not meter.on
    with span("training.submit"):
        assert current_span() is None
    stop = subscribe(lambda one: None)
    assert meter.on
    with span("training.submit"):
        assert current_span() is not None
    stop()
    assert not meter.on
    with span("training.submit"):
        assert current_span() is None


@pytest.fixture
def reader(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemoryMetricReader]:
    """A program that has set up OpenTelemetry's metrics."""
    made = InMemoryMetricReader()
    provider = MeterProvider([made])
    # A provider can be set once per process, so a test installs its own in place.
    monkeypatch.setattr(otel, "get_meter_provider", lambda: provider)
    yield made
    monkeypatch.undo()
    meter.find_opentelemetry()
    provider.shutdown()


def exported(reader: InMemoryMetricReader) -> dict[str, Any]:
    data = reader.get_metrics_data()
    assert data is not None
    return {
        metric.name: metric
        for resource in data.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
    }


def test_they_reach_open_telemetry_with_units_labels_and_buckets(
    reader: InMemoryMetricReader,
) -> None:
    run(one_of_each)
    found = exported(reader)
    assert set(found) <= {metric.name for metric in METRICS}
    points = found[REQUESTS.name].data.data_points
    counted = {(p.attributes["route"], p.attributes["status"]): p.value for p in points}
    assert counted["forward_backward", "200"] == 2
    assert found[REQUESTS.name].unit == "{request}"
    submits = found[SUBMIT.name]
    assert submits.unit == "s"
    assert {p.attributes["operation"] for p in submits.data.data_points} == {
        "forward_backward",
        "optim_step",
        "sample",
    }
    assert submits.data.data_points[0].explicit_bounds[0] == 0.001


def test_a_provider_that_is_set_up_later_is_found_when_a_client_connects(
    reader: InMemoryMetricReader,
) -> None:
    own = Meter()
    assert not own.on
    own.find_opentelemetry()
    own.find_opentelemetry()
    assert own.on
    own.wait("slot", 2.0)
    (point,) = exported(reader)[WAIT.name].data.data_points
    assert (point.count, point.sum) == (1, 2.0)
    own._stop_spans()  # type: ignore[misc]


def test_a_version_that_takes_no_advice_about_buckets_works_too() -> None:
    told: list[Any] = []

    class Old:
        def create_counter(self, name: str, unit: str = "", description: str = "") -> Any:
            return type("Counter", (), {"add": lambda self, *args: told.append((name, *args))})()

        def create_histogram(self, name: str, unit: str = "", description: str = "") -> Any:
            return type("Hist", (), {"record": lambda self, *args: told.append((name, *args))})()

    from tinkex.metrics import _instruments

    made = _instruments(type("Provider", (), {"get_meter": lambda self, name: Old()})())
    made[WAIT.name](1.0, {"reason": "slot"})
    assert told == [(WAIT.name, 1.0, {"reason": "slot"})]


def test_using_them_does_not_import_open_telemetry() -> None:
    code = (
        "import sys; from tinkex.metrics import meter\n"
        "meter.find_opentelemetry()\n"
        "assert not meter.on\n"
        "assert not [m for m in sys.modules if m.startswith('opentelemetry')]"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

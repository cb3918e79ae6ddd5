"""Whatever is passed to a method of a client, nothing bad is sent and every error names its place.

One client of each kind stands on a fake server, on virtual time. Hypothesis picks a method, one of
its parameters, and junk for it; the other arguments are sound. The call must end with `InputError`
and the path of the argument, without a request, or with what the server makes of a value that
only the server can judge (a name it does not know).
"""

from __future__ import annotations

import asyncio
import inspect
import math
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.patience import PATIENCE_S
from tests.unit.clients.world import MODEL, World, datum
from tinkex import (
    AdminClient,
    APIFuture,
    Config,
    Datum,
    InputError,
    ModelInput,
    RestClient,
    RetryConfig,
    SamplingParams,
    ServiceClient,
    TinkerError,
)
from tinkex.types import SessionSearchRequest

PATH = "tinker://session-0:train:0/weights/nothing-there"
SOUND: dict[str, Any] = {
    "base_model": MODEL,
    "checkpoint_id": "weights/nothing-there",
    "data": [datum()],
    "ending_before": "2026-01-02T00:00:00Z",
    "fn": lambda logprobs: logprobs,
    "folder": "no-such-folder",
    "future": APIFuture(),
    "input_ranks": {},
    "loss_fn": "cross_entropy",
    "model_id": "no-such-run",
    "model_path": "tinker://session-0:train:0/sampler_weights/nothing-there",
    "name": "a-name",
    "num_samples": 1,
    "path": PATH,
    "project_id": "a-project",
    "prompt": ModelInput.from_ints([1, 2, 3]),
    "request": SessionSearchRequest(),
    "sampler_id": "no-such-sampler",
    "sampling_params": SamplingParams(max_tokens=1),
    "session_id": "no-such-session",
    "starting_on": "2026-01-01T00:00:00Z",
    "tinker_path": PATH,
    "training_run_id": "no-such-run",
    "ttl_seconds": 7200,
}
# These take whatever the user's own loss or hook is, or end the client.
LEFT_OUT = {
    "close_async",
    "create_custom_loss_async",
    "forward_backward_custom_async",
    "get_tokenizer_async",
    "search_sessions_async",
}
# Parameters that accept more than their type says.
LOOSE = {
    "name": "the unnamed sampler ignores it, a checkpoint's may be None",
}
# Traffic of the client itself, which has nothing to do with a call.
BACKGROUND = {"telemetry", "session_heartbeat", "client_dynamic_config", "cancel_future"}


@dataclass(frozen=True)
class Target:
    """One parameter of one public method."""

    client: str
    method: str
    parameter: str
    required: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.client}.{self.method}({self.parameter}=)"


def _targets() -> list[Target]:
    from tinkex import SamplingClient, TrainingClient

    kinds = {
        "service": ServiceClient,
        "training": TrainingClient,
        "sampler": SamplingClient,
        "rest": RestClient,
        "admin": AdminClient,
    }
    found: list[Target] = []
    for label, kind in kinds.items():
        for name, method in inspect.getmembers(kind, inspect.isfunction):
            if name.startswith("_") or not name.endswith("_async") or name in LEFT_OUT:
                continue
            parameters = list(inspect.signature(method).parameters.values())[1:]
            required = tuple(p.name for p in parameters if p.default is p.empty)
            found += [Target(label, name, p.name, required) for p in parameters]
    return found


TARGETS = _targets()

# Values that no parameter of any method takes.
wrong_types = st.one_of(
    st.binary(max_size=3),
    st.complex_numbers(),
    st.sampled_from([object(), object, ..., {1, 2}, range(3), np.zeros(3), print]),
    st.sampled_from([math.nan, math.inf, -math.inf, 1.5]),
    st.lists(st.none(), min_size=1, max_size=3),
    st.dictionaries(st.integers(), st.none(), min_size=1, max_size=2),
)
# Values that are never sound, whatever the type: half a character, a negative or huge number.
wrong_values = st.sampled_from(["\ud800", "a\ud800b", -(2**70), 2**70])


class Stage:
    """A world that stays open over all examples."""

    def __init__(self) -> None:
        self.world = World()
        self.runner = asyncio.Runner()
        self.clients: dict[str, Any] = {}

    async def open(self) -> None:
        world = self.world
        service = world.service()
        self.clients = {
            "service": service,
            "training": await service.create_lora_training_client_async(MODEL, rank=2),
            "sampler": await service.create_sampling_client_async(base_model=MODEL),
            "rest": RestClient(service.holder),
            "admin": AdminClient(service.holder),
        }

    async def call(self, target: Target, junk: Any) -> tuple[TinkerError | None, list[str | None]]:
        """The typed error of a call, and what was sent; other errors pass through."""
        args = {name: SOUND[name] for name in target.required if name != target.parameter}
        method = getattr(self.clients[target.client], target.method)
        async with self.world.clock.running():
            before = len(self.world.server.requests)
            error: TinkerError | None = None
            try:
                answer = await asyncio.wait_for(
                    method(**args, **{target.parameter: junk}), PATIENCE_S
                )
                if inspect.isawaitable(answer):
                    await asyncio.wait_for(answer, PATIENCE_S)
            except TinkerError as problem:
                error = problem
            seen = self.world.server.requests[before:]
            return error, [s.route for s in seen if s.route not in BACKGROUND]


@pytest.fixture(scope="module")
def stage() -> Any:
    stage = Stage()
    with stage.runner as runner:

        async def live(ready: asyncio.Event, over: asyncio.Event) -> None:
            async with stage.world.server:
                async with stage.world.clock.running():
                    await stage.open()
                ready.set()
                await over.wait()
                async with stage.world.clock.running():
                    await stage.clients["service"].close_async()

        async def begin() -> tuple[asyncio.Event, asyncio.Task[None]]:
            ready, over = asyncio.Event(), asyncio.Event()
            life = asyncio.create_task(live(ready, over))
            await ready.wait()
            return over, life

        async def end(over: asyncio.Event, life: asyncio.Task[None]) -> None:
            over.set()
            await life

        life = runner.run(begin())
        yield stage
        runner.run(end(*life))


def attempt(stage: Stage, target: Target, junk: Any) -> tuple[TinkerError | None, list[Any]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return stage.runner.run(stage.call(target, junk))


FAST = settings(
    deadline=None,
    max_examples=400,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)


@pytest.mark.req("B14")
@pytest.mark.req("S12")
@FAST
@given(st.sampled_from(TARGETS), wrong_types)
def test_a_value_of_the_wrong_type_is_refused_by_name_and_nothing_is_sent(
    stage: Stage, target: Target, junk: Any
):
    if target.parameter in LOOSE:
        return
    error, sent = attempt(stage, target, junk)
    assert isinstance(error, InputError), f"{target} took {junk!r}: {error!r}"
    assert error.path, f"{target}: {error} names no path"
    assert sent == []


@pytest.mark.req("B14")
@FAST
@given(st.sampled_from(TARGETS), wrong_values)
def test_half_a_character_and_numbers_beyond_64_bits_never_reach_the_server(
    stage: Stage, target: Target, junk: Any
):
    if target.parameter in LOOSE:
        return
    error, sent = attempt(stage, target, junk)
    assert isinstance(error, InputError), f"{target} took {junk!r}: {error!r}"
    assert error.path
    assert sent == []


texts = st.text(st.characters(codec="utf-8"), max_size=30)


@FAST
@given(st.sampled_from([t for t in TARGETS if isinstance(SOUND.get(t.parameter), str)]), texts)
def test_any_text_ends_with_a_result_or_a_typed_error(stage: Stage, target: Target, text: str):
    error, sent = attempt(stage, target, text)
    assert error is None or str(error)
    if isinstance(error, InputError):
        assert error.path
        assert sent == []


# -- data -------------------------------------------------------------------------------------

floats = st.floats(width=32)
ids = st.integers(-5, 2**40)


@st.composite
def raw_datums(draw: st.DrawFn) -> dict[str, Any]:
    """Usually wrong somewhere: lengths, ids, NaN, empty, keys."""
    length = draw(st.integers(0, 5))
    other = draw(st.sampled_from([length, length, length + 1, 0]))
    names = st.sampled_from(["target_tokens", "weights", "advantages", "logprobs", "no_such"])
    inputs: dict[str, Any] = {
        "target_tokens": draw(st.lists(ids, min_size=length, max_size=length)),
        "weights": draw(st.lists(floats, min_size=other, max_size=other)),
    }
    if draw(st.booleans()):
        inputs[draw(names)] = draw(st.lists(floats, max_size=5))
    if draw(st.integers(0, 9)) == 0:
        del inputs[draw(st.sampled_from(sorted(inputs)))]
    return {
        "model_input": draw(st.lists(ids, min_size=length, max_size=length)),
        "loss_fn_inputs": inputs,
    }


batches = st.one_of(
    st.lists(raw_datums(), max_size=3),
    st.sampled_from([None, "data", 7, [], [None], [1], [{}], {"a": 1}]),
)


def _build(batch: Any) -> Any:
    if not isinstance(batch, list):
        return batch
    return [
        Datum(
            model_input=ModelInput.from_ints(raw["model_input"]),
            loss_fn_inputs=raw["loss_fn_inputs"],
        )
        if isinstance(raw, dict) and raw
        else raw
        for raw in batch
    ]


@pytest.mark.req("B14")
@settings(FAST, max_examples=300)
@given(batches, st.sampled_from(["cross_entropy", "importance_sampling", "ppo", "nonsense", 3]))
def test_a_batch_is_sound_or_refused_by_its_path_before_it_is_sent(
    stage: Stage, batch: Any, loss_fn: Any
):
    try:
        data = _build(batch)
    except InputError as refused:
        data, early = None, refused
    else:
        early = None
    if early is not None:
        assert early.path
        return
    target = Target("training", "forward_backward_async", "data", ("loss_fn",))
    SOUND["loss_fn"], before = loss_fn, SOUND["loss_fn"]
    try:
        error, sent = attempt(stage, target, data)
    finally:
        SOUND["loss_fn"] = before
    if isinstance(error, InputError):
        assert error.path.startswith(("data", "loss_fn"))
        assert sent == []
    elif error is not None:
        # Ids beyond the vocabulary: only the server knows it.
        assert "retrieve_future" in sent
        assert "500" not in str(error)


# -- constructors of the client half ----------------------------------------------------------


@pytest.mark.req("S12")
@FAST
@given(
    st.sampled_from(
        [
            "user_metadata",
            "project_id",
            "display_name",
            "base_url",
            "api_key",
            "default_headers_overrides",
            "proxy",
        ]
    ),
    st.one_of(wrong_types, st.sampled_from(["\ud800", 7, True])),
)
def test_a_service_client_is_made_of_sound_settings_or_not_at_all(name: str, junk: Any):
    sound = {"base_url": "http://127.0.0.1:9", "api_key": "tml-x"}
    if name == "project_id" and isinstance(junk, str):
        return
    with pytest.raises(InputError) as caught:
        ServiceClient(**{**sound, name: junk})
    assert caught.value.path


@pytest.mark.req("S12")
@FAST
@given(
    st.sampled_from(sorted(vars(RetryConfig()))),
    st.one_of(wrong_types, st.sampled_from(["x", -1, math.nan])),
)
def test_a_retry_config_is_made_of_sound_numbers_or_not_at_all(name: str, junk: Any):
    if isinstance(junk, float) and junk == 1.5 and name not in ("max_connections",):
        return
    with pytest.raises(InputError) as caught:
        RetryConfig(**{name: junk})
    assert caught.value.path == name


@pytest.mark.req("S30")
@FAST
@given(st.sampled_from([n for n in vars(Config()) if n.endswith("_s")]), st.floats(max_value=0))
def test_a_deadline_is_positive_and_finite(name: str, seconds: float):
    for value in (seconds, math.nan, math.inf):
        with pytest.raises(InputError) as caught:
            Config(**{name: value})
        assert caught.value.path == name


def test_the_table_of_sound_arguments_covers_every_required_parameter():
    required = {name for target in TARGETS for name in target.required}
    assert required <= set(SOUND)
    assert {target.client for target in TARGETS} == {
        "service", "training", "sampler", "rest", "admin"
    }  # fmt: skip

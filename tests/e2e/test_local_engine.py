"""The whole way down: the SDK over HTTP to the server and the PyTorch engine, on the tiny model."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from tests.patience import PATIENCE_S
from tinkex import AdamParams, Datum, ModelInput, RequestFailedError, SamplingParams, ServiceClient
from tinkex.engine.local import LocalEngine
from tinkex.engine.models.loader import load_model
from tinkex.engine.protocol import SampleOp, Weights
from tinkex.errors import ClosedError
from tinkex.testing import API_KEY, FakeServer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MODEL = "tinkex/tiny"
TEXT = list(b"the quick brown fox jumps over the lazy dog")


@pytest.fixture
def service(tmp_path: Path) -> Iterator[ServiceClient]:
    engine: Any = LocalEngine([load_model(MODEL)], tmp_path)
    with (
        FakeServer(engine=engine).serve() as server,
        ServiceClient(base_url=server.url, api_key=API_KEY) as service,
    ):
        yield service
    asyncio.run(engine.close())


def datum() -> Datum:
    weights = [1.0] * (len(TEXT) - 1)
    return Datum(ModelInput.from_ints(TEXT[:-1]), {"target_tokens": TEXT[1:], "weights": weights})


def test_it_learns_samples_what_it_learned_and_agrees_with_itself(service: ServiceClient):
    training = service.create_lora_training_client(MODEL, rank=8, seed=1)
    losses: list[float] = []
    for _ in range(12):
        step = training.forward_backward([datum()], "cross_entropy")
        training.optim_step(AdamParams(learning_rate=1e-2))
        losses.append(step.result(PATIENCE_S).metrics["loss:sum"])
    assert losses[-1] < 0.2 * losses[0]

    sampler = training.save_weights_and_get_sampling_client()
    greedy = SamplingParams(max_tokens=len(TEXT) - 8, temperature=0.0)
    answer = sampler.sample(ModelInput.from_ints(TEXT[:8]), 1, greedy).result(PATIENCE_S)
    assert answer.sequences[0].tokens == TEXT[8:]

    # fp32: the sampler's rows are computed in other shapes than the trainer's, so the last bits
    # may differ; 1e-5 is what the engine promises there.
    scored = sampler.compute_logprobs(ModelInput.from_ints(TEXT)).result(PATIENCE_S)
    trained = training.forward([datum()], "cross_entropy").result(PATIENCE_S)
    logprobs = trained.loss_fn_outputs[0]["logprobs"].tolist()
    assert scored[1:] == pytest.approx(logprobs, abs=1e-5)
    assert answer.sequences[0].logprobs == pytest.approx(scored[8:], abs=1e-5)


def test_a_resumed_run_takes_the_same_next_steps_bit_for_bit(service: ServiceClient):
    training = service.create_lora_training_client(MODEL, rank=4, seed=3)

    def step(client: Any) -> tuple[float, dict[str, float] | None]:
        loss = client.forward_backward([datum()], "cross_entropy").result(PATIENCE_S)
        metrics = client.optim_step(AdamParams(learning_rate=1e-3)).result(PATIENCE_S).metrics
        return loss.metrics["loss:sum"], metrics

    for _ in range(3):
        step(training)
    saved = training.save_state("middle").result(PATIENCE_S).path
    resumed = service.create_training_client_from_state_with_optimizer(saved)
    assert [step(resumed) for _ in range(3)] == [step(training) for _ in range(3)]


def test_an_old_sampling_client_keeps_its_weights_while_training_goes_on(service: ServiceClient):
    training = service.create_lora_training_client(MODEL, rank=4, seed=3)
    sampler = training.save_weights_and_get_sampling_client()
    prompt = ModelInput.from_ints(TEXT[:10])
    before = sampler.compute_logprobs(prompt).result(PATIENCE_S)
    for _ in range(3):
        training.forward_backward([datum()], "cross_entropy")
        training.optim_step(AdamParams(learning_rate=1e-2)).result(PATIENCE_S)
    assert sampler.compute_logprobs(prompt).result(PATIENCE_S) == before
    after = (
        training.save_weights_and_get_sampling_client().compute_logprobs(prompt).result(PATIENCE_S)
    )
    assert after != before


def test_bad_data_fails_alone_and_training_goes_on(service: ServiceClient):
    training = service.create_lora_training_client(MODEL, rank=4)
    wrong = Datum(
        ModelInput.from_ints([1, 100_000]), {"target_tokens": [1, 2], "weights": [1.0, 1.0]}
    )
    bad = training.forward_backward([wrong], "cross_entropy")
    good = training.forward_backward([datum()], "cross_entropy")
    with pytest.raises(RequestFailedError, match="100000") as caught:
        bad.result(PATIENCE_S)
    assert caught.value.category == "user"
    assert good.result(PATIENCE_S).metrics["loss:sum"] > 0


def test_closing_the_engine_ends_whatever_waits(tmp_path: Path):
    async def scenario() -> None:
        engine = LocalEngine([load_model(MODEL)], tmp_path)
        op = SampleOp(
            op_id="o",
            weights=Weights(base_model=MODEL),
            prompt=ModelInput.from_ints([1]),
            params=SamplingParams(max_tokens=5000, stop=[]),
            sequence_ids=["s"],
        )
        heard = asyncio.Event()
        waiting = asyncio.ensure_future(engine.sample(op, lambda *_: heard.set()))
        await heard.wait()
        await engine.close()
        with pytest.raises(ClosedError):
            await waiting
        with pytest.raises(ClosedError):
            await engine.sample(op)

    asyncio.run(scenario())


def test_a_snapshot_stays_valid_while_a_sample_uses_it(tmp_path: Path):
    from tinkex.engine.protocol import AdapterSpec
    from tinkex.types import AdamOptimizerConfig, LoraConfig

    async def scenario() -> None:
        async with LocalEngine([load_model(MODEL)], tmp_path) as engine:
            await engine.create_adapter(
                AdapterSpec(
                    model_id="m",
                    base_model=MODEL,
                    lora=LoraConfig(rank=2),
                    optimizer=AdamOptimizerConfig(),
                )
            )
            await engine.publish("m", "snap")
            op = SampleOp(
                op_id="o",
                weights=Weights(base_model=MODEL, snapshot="snap"),
                prompt=ModelInput.from_ints([1]),
                params=SamplingParams(max_tokens=50, stop=[], seed=1),
                sequence_ids=["s"],
            )
            heard = asyncio.Event()
            running = asyncio.ensure_future(engine.sample(op, lambda *_: heard.set()))
            await heard.wait()
            await engine.drop_snapshot("snap")
            assert (await running).generated_tokens == 50
            with pytest.raises(RequestFailedError, match="not published"):
                await engine.sample(op)

    asyncio.run(scenario())

"""FakeEngine: exact losses and gradients, the same numbers every time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tinkex.engine.protocol import AdapterSpec, Engine, OptimOp, SampleOp, TrainOp, Weights
from tinkex.errors import RequestFailedError
from tinkex.testing import Delays, FakeClock, FakeEngine
from tinkex.testing.toy_losses import LOSSES
from tinkex.types import (
    AdamOptimizerConfig,
    AdamParams,
    Datum,
    LoraConfig,
    ModelInput,
    SamplingParams,
)

pytestmark = pytest.mark.anyio


async def ready(**options: Any) -> FakeEngine:
    engine: Engine = FakeEngine(**options)
    spec = AdapterSpec(
        model_id="m",
        base_model="tinkex/tiny",
        lora=LoraConfig(rank=8),
        optimizer=AdamOptimizerConfig(),
    )
    await engine.create_adapter(spec)
    assert isinstance(engine, FakeEngine)
    return engine


def datum(**inputs: Any) -> Datum:
    inputs = {"target_tokens": np.array([2, 3, 4]), **inputs}
    return Datum(model_input=ModelInput.from_ints([1, 2, 3]), loss_fn_inputs=inputs)


RL = {
    "logprobs": np.array([-7.0, -7.1, -6.9], np.float32),
    "advantages": np.array([1.0, -2.0, 0.5], np.float32),
}


async def run(engine: FakeEngine, data: Datum, loss_fn: str, **options: Any) -> Any:
    op = TrainOp(op_id="o", model_id="m", data=[data], loss_fn=loss_fn, **options)
    (result,) = await engine.train([op])
    if isinstance(result, RequestFailedError):
        raise result
    return result.output


@pytest.mark.parametrize("loss_fn", sorted(LOSSES))
async def test_every_loss_has_the_gradient_of_its_value(loss_fn: str) -> None:
    inputs: dict[str, Any] = {} if loss_fn in ("cross_entropy", "custom") else dict(RL)
    if loss_fn == "gspo":
        # The token's own gradient stands in for the sequence's, so only the value is checked.
        inputs["sequence_ratio_mask"] = np.ones(3, np.float32)
    p = np.array([-7.2, -6.8, -7.0])
    loss, slope = LOSSES[loss_fn](p, inputs, {})
    assert np.isfinite(loss)
    assert slope.shape == p.shape
    if loss_fn in ("gspo", "cispo"):
        return
    for index in range(3):
        step = np.zeros(3)
        step[index] = 1e-6
        up, down = (LOSSES[loss_fn](p + s, inputs, {})[0] for s in (step, -step))
        assert slope[index] == pytest.approx((up - down) / 2e-6, rel=1e-4, abs=1e-4)


async def test_losses_are_plain_sums_and_weights_may_be_negative() -> None:
    engine = await ready()
    plain = await run(engine, datum(), "cross_entropy")
    p = plain.loss_fn_outputs[0]["logprobs"].to_numpy()
    weights = np.array([1.0, -0.5, 0.0], np.float32)
    weighted = await run(engine, datum(weights=weights), "cross_entropy")
    assert plain.metrics["loss:sum"] == pytest.approx(-p.sum(), rel=1e-6)
    assert weighted.metrics["loss:sum"] == pytest.approx(-(weights * p).sum(), rel=1e-6)


async def test_the_gradient_of_the_weights_is_the_one_of_the_loss() -> None:
    engine = await ready()
    await run(engine, datum(), "cross_entropy")
    state = engine._adapters["m"]
    assert state.gradient is not None
    toy = engine._toys["tinkex/tiny"]
    rows = toy.rows([1, 2, 3])

    def loss(bias: Any) -> float:
        return float(-toy.head(bias).logprobs[rows, [2, 3, 4]].sum())

    for token in (0, 2, 4):
        step = toy.zeros.copy()
        step[token] = 1e-6
        slope = (loss(step) - loss(-step)) / 2e-6
        assert state.gradient[token] == pytest.approx(slope, abs=1e-6)


async def test_a_missing_input_is_named_with_its_place() -> None:
    engine = await ready()
    with pytest.raises(RequestFailedError, match=r'data\[0\]\.loss_fn_inputs\["logprobs"\]'):
        await run(engine, datum(), "ppo")


async def test_one_bad_operation_leaves_the_others_of_its_batch_alone() -> None:
    engine = await ready()
    good = TrainOp(op_id="a", model_id="m", data=[datum()], loss_fn="cross_entropy")
    stray = TrainOp(op_id="b", model_id="x", data=[datum()], loss_fn="cross_entropy")
    first, second, third = await engine.train([good, stray, good])
    assert isinstance(second, RequestFailedError)
    assert not isinstance(first, RequestFailedError)
    assert not isinstance(third, RequestFailedError)


@pytest.mark.req("B18")
async def test_a_step_reports_norms_before_and_after_clipping() -> None:
    engine = await ready()
    await run(engine, datum(), "cross_entropy")
    params = AdamParams(learning_rate=0.01, grad_clip_norm=0.5)
    (result,) = await engine.optim_step([OptimOp(op_id="o", model_id="m", params=params)])
    assert not isinstance(result, RequestFailedError)
    assert result.metrics["grad_norm"] > 0.5
    assert result.metrics["grad_norm_clipped"] == pytest.approx(0.5)
    assert result.metrics["update_norm"] > 0
    assert result.metrics["learning_rate"] == 0.01


async def test_delays_are_spent_on_the_clock_and_counted_as_device_time() -> None:
    clock = FakeClock()
    async with clock.running():
        engine = await ready(clock=clock, delays=Delays(train_s=6))
        op = TrainOp(op_id="o", model_id="m", data=[datum()], loss_fn="cross_entropy")
        results = await engine.train([op, op])
    assert clock.now() == 6
    assert [round(r.device_s, 3) for r in results] == [3, 3]  # type: ignore[union-attr]


async def test_tokens_are_handed_out_while_a_sequence_grows() -> None:
    clock, seen = FakeClock(), list[tuple[int, int, float]]()
    async with clock.running():
        engine = await ready(clock=clock, delays=Delays(token_s=1))
        op = SampleOp(
            op_id="o",
            weights=Weights(base_model="tinkex/tiny"),
            prompt=ModelInput.from_ints([1, 2]),
            params=SamplingParams(max_tokens=3, stop=[]),
            sequence_ids=["a", "b"],
        )
        result = await engine.sample(
            op, lambda sample, token, *_: seen.append((sample, token, clock.now()))
        )
    assert [(sample, at) for sample, _, at in seen] == [
        (0, 0.0),
        (1, 0.0),
        (0, 1.0),
        (1, 1.0),
        (0, 2.0),
        (1, 2.0),
    ]
    assert [t for s, t, _ in seen if s == 0] == result.response.sequences[0].tokens

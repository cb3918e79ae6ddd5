"""RL losses report how far the trainer is from the sampler that made their data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.unit.engine.agreement.pair import Pair, sampled
from tests.unit.engine.sampler.kit import answer, drive, op, text, tiny
from tests.unit.engine.training.kit import run, step
from tinkex.engine.protocol import TrainOp
from tinkex.types import Datum, ModelInput

if TYPE_CHECKING:
    from collections.abc import Sequence

LOSSES = ("importance_sampling", "ppo", "cispo", "dro", "gspo")


def roll_out(pair: Pair, loss_fn: str) -> list[Datum]:
    """Samples of two prompts as data of an RL step, with random advantages."""
    sampler = pair.sampler(block_size=4)
    prompts = [text(30), text(7, start=3)]
    runs = [
        sampler.submit(
            op(prompt, num_samples=3, op_id=str(n), temperature=1.0, max_tokens=25, seed=n),
            version="r8",
        )
        for n, prompt in enumerate(prompts)
    ]
    drive(sampler)
    rng = np.random.default_rng(0)
    return [
        _datum(whole, found, rng, masks=loss_fn == "gspo")
        for one, prompt in zip(runs, prompts, strict=True)
        for whole, found in sampled(answer(one), prompt)
    ]


def _datum(whole: Sequence[int], found: Any, rng: np.random.Generator, *, masks: bool) -> Datum:
    count, generated = len(whole) - 1, len(found)
    inputs = {
        "target_tokens": np.array(whole[1:], np.int64),
        "logprobs": np.concatenate([np.zeros(count - generated, np.float32), found]),
        "advantages": np.concatenate(
            [np.zeros(count - generated), rng.choice([-1.0, 1.0, 2.0], generated)]
        ).astype(np.float32),
    }
    if masks:  # otherwise the prompt would take part in the ratio of the sequence
        inputs["sequence_ratio_mask"] = (inputs["advantages"] != 0).astype(np.float32)
    return Datum(ModelInput.from_ints(list(whole[:-1])), inputs)


def metrics(pair: Pair, data: list[Datum], loss_fn: str) -> dict[str, float]:
    operation = TrainOp(op_id="op", model_id="r8", data=data, loss_fn=loss_fn)
    return dict(run(pair.trainer, operation)[0].output.metrics)


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("loss_fn", LOSSES)
def test_on_policy_the_gap_is_exactly_zero_on_a_cpu(loss_fn: str, strict: bool) -> None:
    pair = Pair(tiny(), strict=strict)
    found = metrics(pair, roll_out(pair, loss_fn), loss_fn)
    assert found["active_tokens:sum"] == 6 * 25
    assert found["logprob_gap:sum"] == 0.0
    assert found["logprob_gap_abs:max"] == 0.0
    assert found["ratio:max"] == found["ratio:min"] == 1.0


@pytest.mark.parametrize("loss_fn", LOSSES)
def test_off_policy_the_gap_is_that_of_the_logprobs(loss_fn: str) -> None:
    pair = Pair(tiny())
    data = roll_out(pair, loss_fn)
    metrics(pair, data, loss_fn)
    step(pair.trainer, "r8", learning_rate=1e-2)
    found = metrics(pair, data, loss_fn)
    gaps = np.concatenate([_gaps(pair, datum, loss_fn) for datum in data])
    assert gaps.size == 6 * 25
    assert found["logprob_gap:sum"] == pytest.approx(gaps.sum(), rel=1e-9)
    assert found["logprob_gap_abs:max"] == np.abs(gaps).max() > 1e-3


def _gaps(pair: Pair, datum: Datum, loss_fn: str) -> Any:
    operation = TrainOp(op_id="op", model_id="r8", data=[datum], loss_fn=loss_fn, backward=False)
    (output,) = run(pair.trainer, operation)[0].output.loss_fn_outputs
    inputs = {name: values.to_numpy() for name, values in datum.loss_fn_inputs.items()}
    new = output["logprobs"].to_numpy().astype(np.float64)
    return (new - inputs["logprobs"])[inputs["advantages"] != 0]

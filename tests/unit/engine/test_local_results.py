"""The shape of results: one entry per target, plain sums, nothing normalised."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.unit.engine.local_kit import engine, optim_op, sample_op, spec, train_op, trained
from tinkex.types import Datum, ModelInput, TensorData

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from tinkex.engine.local import LocalEngine
    from tinkex.engine.protocol import OptimResult, TrainResult

IDS = [5, 9, 200, 31, 77, 6]
LOSSES = ("cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "gspo")


def datum(loss: str, shape: tuple[int, ...]) -> Datum:
    rng = np.random.default_rng([len(shape), shape[-1]])
    inputs: dict[str, Any] = {"target_tokens": rng.integers(0, 256, shape)}
    if loss == "cross_entropy":
        inputs["weights"] = rng.normal(size=shape).astype(np.float32)
    else:
        inputs["logprobs"] = (-5 + rng.normal(size=shape)).astype(np.float32)
        inputs["advantages"] = rng.normal(size=shape).astype(np.float32)
    return Datum(ModelInput.from_ints(IDS[: shape[0]]), inputs)


def on_engine(folder: Path, scenario: Callable[[LocalEngine], Awaitable[Any]]) -> Any:
    """Run a scenario on an engine with the adapter "m", which has learned a little."""

    async def whole() -> Any:
        async with engine(folder) as target:
            await target.create_adapter(spec("m"))
            await trained(target, train_op("m", [datum("cross_entropy", (6,))]))
            await target.optim_step([optim_op("m")])
            return await scenario(target)

    return asyncio.run(whole())


@pytest.mark.parametrize("loss", LOSSES)
def test_each_datum_has_logprobs_and_losses_in_the_shape_of_its_targets(tmp_path, loss):
    shapes = [(6,), (1,), (4, 3), (2, 1)]

    async def scenario(target: LocalEngine) -> TrainResult:
        data = [datum(loss, shape) for shape in shapes]
        return (await trained(target, train_op("m", data, loss)))[0]

    result = on_engine(tmp_path, scenario)
    outputs = result.output.loss_fn_outputs
    assert [set(output) for output in outputs] == [{"logprobs", "elementwise_loss"}] * 4
    total = 0.0
    for shape, output in zip(shapes, outputs, strict=True):
        for tensor in output.values():
            assert tensor.dtype == "float32"
            assert tuple(tensor.shape) == tensor.to_numpy().shape == shape
        assert (output["logprobs"].to_numpy() < 0).all()
        total += output["elementwise_loss"].to_numpy().astype(np.float64).sum()
    assert result.output.metrics["loss:sum"] == pytest.approx(total, rel=1e-5)
    assert result.tokens == 6 + 1 + 4 + 2


@pytest.mark.parametrize("loss", LOSSES)
def test_losses_and_gradients_are_sums_that_nothing_divides(tmp_path, loss):
    async def scenario(target: LocalEngine) -> list[tuple[float, float]]:
        found: list[tuple[float, float]] = []
        for times in (1, 2, 5):
            (result,) = await trained(target, train_op("m", [datum(loss, (6,))] * times, loss))
            # A rate of zero: the adapter stays what it is.
            steps = await target.optim_step([optim_op("m", learning_rate=0.0)])
            step: OptimResult = steps[0]  # pyright: ignore[reportAssignmentType]
            found.append((result.output.metrics["loss:sum"], step.metrics["grad_norm"]))
        return found

    once, twice, often = on_engine(tmp_path, scenario)
    assert once[0] != 0
    assert once[1] > 0
    assert twice == pytest.approx((2 * once[0], 2 * once[1]), rel=1e-5)
    assert often == pytest.approx((5 * once[0], 5 * once[1]), rel=1e-5)


def test_a_sparse_matrix_means_what_the_same_one_means_dense(tmp_path):
    crow, columns = [0, 2, 2, 3, 5, 5, 6], [0, 3, 1, 0, 2, 3]
    tokens, weights = [9, 200, 7, 255, 3, 12], [1.0, -0.5, 0.25, 2.0, 0.0, -3.0]
    sparse = {
        "target_tokens": TensorData(tokens, "int64", [6, 4], crow, columns),
        "weights": TensorData(weights, "float32", [6, 4], crow, columns),
    }
    dense = {name: tensor.to_numpy().copy() for name, tensor in sparse.items()}
    assert dense["weights"][0].tolist() == [1.0, 0.0, 0.0, -0.5]

    async def scenario(target: LocalEngine) -> list[Any]:
        found: list[Any] = []
        for inputs in (sparse, dense):
            one = Datum(ModelInput.from_ints(IDS), inputs)
            (result,) = await trained(target, train_op("m", [one]))
            (step,) = await target.optim_step([optim_op("m", learning_rate=0.0)])
            found.append((result.output, step.metrics["grad_norm"]))
        return found

    left, right = on_engine(tmp_path, scenario)
    assert left == right
    assert left[0].loss_fn_outputs[0]["logprobs"].shape == [6, 4]
    assert left[0].metrics["weights:sum"] == pytest.approx(sum(weights))


def test_a_forward_between_two_backward_calls_changes_nothing(tmp_path):
    async def scenario(target: LocalEngine) -> list[Any]:
        found: list[Any] = []
        for forwards in (0, 2):
            for shape in ((6,), (3,)):
                for _ in range(forwards):
                    aside = train_op("m", [datum("ppo", (5,))], "ppo")
                    await trained(target, replace(aside, backward=False))
                await trained(target, train_op("m", [datum("cross_entropy", shape)]))
            (step,) = await target.optim_step([optim_op("m", learning_rate=0.0)])
            found.append(step.metrics["grad_norm"])
        return found

    without, among = on_engine(tmp_path, scenario)
    assert without == among > 0


def test_prompt_logprobs_have_one_entry_per_prompt_token_and_the_first_is_not_computed(tmp_path):
    async def scenario(target: LocalEngine) -> list[Any]:
        await target.publish("m", "now")
        lists: list[Any] = []
        for length in (1, 2, 9):
            prompt = ModelInput.from_ints(list(range(length)))
            op = replace(sample_op(snapshot="now"), prompt=prompt)
            lists.append((await target.sample(op)).response.prompt_logprobs)
        return lists

    for length, found in zip((1, 2, 9), on_engine(tmp_path, scenario), strict=True):
        assert len(found) == length
        assert found[0] is None
        assert all(value < 0 for value in found[1:])


def test_prompt_logprobs_are_those_that_a_forward_pass_gives_the_same_tokens(tmp_path):
    async def scenario(target: LocalEngine) -> tuple[Any, Any, Any]:
        await target.publish("m", "now")
        op = replace(sample_op(snapshot="now"), prompt=ModelInput.from_ints(IDS))
        sampled = await target.sample(op)
        drawn = sampled.response.sequences[0]
        whole = IDS + drawn.tokens
        one = Datum(ModelInput.from_ints(whole[:-1]), {"target_tokens": whole[1:]})
        results = [
            (await trained(target, replace(train_op("m", [one]), backward=backward)))[0]
            for backward in (False, True)
        ]
        scored = sampled.response.prompt_logprobs
        assert scored is not None
        first, second = (
            result.output.loss_fn_outputs[0]["logprobs"].tolist() for result in results
        )
        return [*scored[1:], *drawn.logprobs], first, second

    sampled, forward, both = on_engine(tmp_path, scenario)
    assert forward == both
    assert sampled == forward  # on a CPU to the bit

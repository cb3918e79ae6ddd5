"""AdamW, clipping, and what a step reports."""

from __future__ import annotations

import pytest
import torch

from tests.unit.engine.training.kit import add, datum, gradient, op, run, step, trainer
from tinkex.engine.backends.torch import TORCH
from tinkex.engine.backends.torch.adamw import fresh_moments
from tinkex.engine.protocol import AdapterSpec, OptimOp
from tinkex.engine.training.optim import adamw_step
from tinkex.errors import RequestFailedError
from tinkex.types import AdamParams, DimuonOptimizerConfig, DimuonParams, LoraConfig


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"learning_rate": 0.03, "weight_decay": 0.2},
        {"beta1": 0.0, "beta2": 0.5, "eps": 1e-3},
    ],
    ids=str,
)
def test_steps_follow_torchs_own_adamw(settings):
    params = AdamParams(**settings)
    generator = torch.Generator().manual_seed(0)
    ours = torch.randn(200, generator=generator)
    theirs = ours.double().requires_grad_()
    other = torch.optim.AdamW(
        [theirs],
        lr=params.learning_rate,
        betas=(params.beta1, params.beta2),
        eps=params.eps,
        weight_decay=params.weight_decay,
    )
    moments = fresh_moments(ours)
    for _ in range(20):
        gradient = torch.randn(200, generator=generator)
        ours, moments, _ = adamw_step(ours, gradient, moments, params, TORCH)
        theirs.grad = gradient.double()
        other.step()
    # Twenty float32 updates against float64 ones.
    torch.testing.assert_close(ours.double(), theirs.detach(), rtol=1e-5, atol=1e-6)
    assert moments.step == 20


def test_the_gradient_is_clipped_by_its_global_norm():
    gradient = torch.tensor([3.0, 4.0])
    start = torch.zeros(2)
    params = AdamParams(grad_clip_norm=0.5, beta1=0.0, eps=1e30)
    _, moments, metrics = adamw_step(start, gradient, fresh_moments(start), params, TORCH)
    assert metrics["grad_norm"] == 5.0
    assert metrics["grad_norm_clipped"] == pytest.approx(0.5)
    torch.testing.assert_close(moments.first_P, torch.tensor([0.3, 0.4]))


@pytest.mark.parametrize("limit", [0.0, 5.0, 100.0])
def test_a_norm_within_the_limit_is_left_alone(limit):
    gradient, start = torch.tensor([3.0, 4.0]), torch.zeros(2)
    params = AdamParams(grad_clip_norm=limit)
    _, _, metrics = adamw_step(start, gradient, fresh_moments(start), params, TORCH)
    assert metrics["grad_norm"] == metrics["grad_norm_clipped"] == 5.0


@pytest.mark.req("B18")
def test_a_step_always_reports_norms_rate_and_count():
    made = trainer()
    add(made, "m")
    run(made, op("m", [datum(9)]))
    norm = float(gradient(made, "m").double().norm())
    before = made.adapters["m"].weights.flat_P
    metrics = step(made, "m", learning_rate=0.01)
    moved = made.adapters["m"].weights.flat_P - before
    assert metrics["grad_norm"] == pytest.approx(norm)
    assert metrics["grad_norm_clipped"] == pytest.approx(norm)
    assert metrics["update_norm"] == pytest.approx(float(moved.norm()), rel=1e-4)
    assert metrics["learning_rate"] == 0.01
    assert metrics["step"] == 1.0
    assert step(made, "m")["step"] == 2.0


def test_a_step_without_a_gradient_moves_only_by_momentum():
    made = trainer()
    add(made, "m")
    before = made.adapters["m"].weights.flat_P
    assert step(made, "m")["update_norm"] == 0.0
    assert torch.equal(made.adapters["m"].weights.flat_P, before)


def test_training_lowers_the_loss():
    made = trainer()
    add(made, "m", 8, stir=False)
    example = datum(20, 3)
    example.loss_fn_inputs["weights"].to_numpy()[:] = 1.0
    losses: list[float] = []
    for _ in range(15):
        (result,) = run(made, op("m", [example]))
        losses.append(result.output.metrics["loss:sum"])
        step(made, "m", learning_rate=0.02)
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (AdamParams(learning_rate=-1.0), "optim_params.learning_rate: -1.0 is out of range"),
        (AdamParams(beta2=1.0), "optim_params.beta2"),
        (AdamParams(eps=0.0), "optim_params.eps"),
        (AdamParams(eps=1e-60), "optim_params.eps"),
        (AdamParams(weight_decay=-0.1), "optim_params.weight_decay"),
        (AdamParams(learning_rate=1e300), "not finite"),
        (DimuonParams(learning_rate=0.1), "has not published the whole update rule"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_bad_step_is_refused_and_keeps_the_gradient(params, message):
    made = trainer()
    add(made, "m")
    run(made, op("m", [datum(9)]))
    before = made.adapters["m"]
    (answer,) = made.optim_step([OptimOp(op_id="x", model_id="m", params=params)])
    assert isinstance(answer, RequestFailedError)
    assert message in str(answer)
    assert answer.category == "user"
    assert made.adapters["m"] is before


def test_one_bad_step_of_a_batch_leaves_the_others_alone():
    made = trainer()
    add(made, "m")
    bad, good = made.optim_step(
        [OptimOp(op_id="x", model_id=name, params=AdamParams()) for name in ("nobody", "m")]
    )
    assert "model 'nobody' is not loaded" in str(bad)
    assert not isinstance(good, RequestFailedError)


def test_an_optimizer_that_is_not_there_is_refused_when_the_model_is_made():
    spec = AdapterSpec(
        model_id="m",
        base_model="test/small",
        lora=LoraConfig(rank=2),
        optimizer=DimuonOptimizerConfig(),
    )
    with pytest.raises(
        RequestFailedError, match=r"optimizer_config\.type: 'dimuon' is not offered"
    ):
        trainer().create(spec)


def test_a_model_id_is_made_once_and_dropped_without_fuss():
    made = trainer()
    add(made, "m")
    with pytest.raises(RequestFailedError, match="exists already"):
        add(made, "m")
    made.drop("m")
    made.drop("m")
    assert not made.adapters

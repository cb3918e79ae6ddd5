"""Log-probabilities, losses and gradients against plain float64 autograd.

Tolerance: float32 rounding through the model, 1e-5 of the largest gradient.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.unit.engine.training.kit import (
    CONFIG,
    QWEN,
    QWEN2,
    Reference,
    add,
    column,
    datum,
    gradient,
    op,
    run,
    tokens,
    trainer,
)
from tinkex.types import Datum, ModelInput, TensorData


def plain_cross_entropy(p, example, config):
    return -(column(example, "weights") * p).sum()


def plain_importance_sampling(p, example, config):
    return -(torch.exp(p - column(example, "logprobs")) * column(example, "advantages")).sum()


def _bounds(example, config, low, high):
    bounds = []
    for name, default in (("clip_low_threshold", low), ("clip_high_threshold", high)):
        if name in example.loss_fn_inputs:
            bounds.append(column(example, name))
        else:
            bounds.append(torch.tensor(config.get(name, default), dtype=torch.float64))
    return bounds


def _surrogate(ratio, example, config):
    low, high = _bounds(example, config, 0.8, 1.2)
    advantages = column(example, "advantages")
    bounded = torch.maximum(torch.minimum(ratio, high), low)
    return -torch.minimum(ratio * advantages, bounded * advantages).sum()


def plain_ppo(p, example, config):
    return _surrogate(torch.exp(p - column(example, "logprobs")), example, config)


def plain_cispo(p, example, config):
    low, high = _bounds(example, config, 0.0, 4.0)
    ratio = torch.exp(p - column(example, "logprobs")).detach()
    bounded = torch.maximum(torch.minimum(ratio, high), low)
    return -(bounded * column(example, "advantages") * p).sum()


def plain_dro(p, example, config):
    gap = p - column(example, "logprobs")
    beta = config.get("beta", 0.05)
    return -(p * column(example, "advantages") - beta / 2 * gap**2).sum()


def plain_gspo(p, example, config):
    gap = p - column(example, "logprobs")
    if "sequence_ratio_mask" in example.loss_fn_inputs:
        gap = gap[column(example, "sequence_ratio_mask") != 0]
    s = torch.exp(gap.mean()).detach() if gap.numel() else torch.tensor(1.0).double()
    return _surrogate(s * torch.exp(p - p.detach()), example, config)


def check(loss_fn, plain, data, *, config=None, made=None, rank=4, tolerance=1e-5, **lora):
    """Train one operation and compare everything it answers with the reference."""
    made = made or trainer()
    add(made, "m", rank, **lora)
    settings = config or {}
    (result,) = run(made, op("m", data, loss_fn, loss_fn_config=settings))
    reference = Reference(made, "m")
    logprobs = [reference.logprobs(example) for example in data]
    loss = sum(plain(p, example, settings) for p, example in zip(logprobs, data, strict=True))
    loss.backward()
    expected = reference.flat_P.grad
    assert expected.abs().max() > 0
    assert float((gradient(made, "m") - expected).abs().max() / expected.abs().max()) < tolerance
    scale = 1 + sum(float(p.detach().abs().sum()) for p in logprobs)
    assert abs(result.output.metrics["loss:sum"] - float(loss.detach())) < 1e-5 * scale
    for p, output in zip(logprobs, result.output.loss_fn_outputs, strict=True):
        assert output["logprobs"].to_numpy().dtype == np.float32
        np.testing.assert_allclose(output["logprobs"].to_numpy(), p.detach(), atol=2e-5)
        assert output["elementwise_loss"].to_numpy().shape == tuple(p.shape)
    total = sum(
        float(o["elementwise_loss"].to_numpy().sum()) for o in result.output.loss_fn_outputs
    )
    assert abs(total - float(loss.detach())) < 1e-5 * scale
    return result


@pytest.mark.parametrize("columns", [0, 3], ids=["N", "NxK"])
@pytest.mark.parametrize(
    ("loss_fn", "plain", "config"),
    [
        ("cross_entropy", plain_cross_entropy, {}),
        ("importance_sampling", plain_importance_sampling, {}),
        ("ppo", plain_ppo, {}),
        ("ppo", plain_ppo, {"clip_low_threshold": 0.5, "clip_high_threshold": 1.5}),
        ("cispo", plain_cispo, {}),
        ("cispo", plain_cispo, {"clip_high_threshold": 1.1}),
        ("dro", plain_dro, {}),
        ("dro", plain_dro, {"beta": 0.7}),
        ("gspo", plain_gspo, {}),
    ],
)
def test_every_loss_has_the_reference_gradient(loss_fn, plain, config, columns):
    data = [datum(n, n, columns, loss_fn) for n in (1, 7, 20)]
    check(loss_fn, plain, data, config=config)


def _with(example: Datum, **inputs) -> Datum:
    return Datum(example.model_input, {**example.loss_fn_inputs, **inputs})


@pytest.mark.parametrize(
    ("loss_fn", "plain"), [("ppo", plain_ppo), ("cispo", plain_cispo), ("gspo", plain_gspo)]
)
def test_clip_thresholds_may_be_given_per_token(loss_fn, plain):
    rng = np.random.default_rng(3)
    data = [
        _with(
            datum(9, 1, 0, loss_fn),
            clip_low_threshold=rng.uniform(0, 1, 9),
            clip_high_threshold=rng.uniform(1, 2, 9),
        ),
        datum(5, 2, 0, loss_fn),  # this one takes them from the config
    ]
    check(loss_fn, plain, data, config={"clip_low_threshold": 0.9})


def test_gspo_reads_its_ratio_from_the_masked_tokens_only():
    first, second = datum(9, 1, 0, "gspo"), datum(6, 2, 0, "gspo")
    data = [
        _with(first, sequence_ratio_mask=[0, 0, 0, 1, 1, 2.5, 1, 1, 0]),
        _with(second, sequence_ratio_mask=[0.0] * 6),
        datum(4, 3, 0, "gspo"),
    ]
    check("gspo", plain_gspo, data)


def test_weights_may_be_negative_zero_and_sparse():
    rng = np.random.default_rng(5)
    targets = torch.from_numpy(rng.integers(0, 97, (12, 8)))
    weights = torch.from_numpy(rng.normal(size=(12, 8)).astype(np.float32))
    kept = torch.from_numpy(rng.random((12, 8)) < 0.2)
    sparse = Datum(
        ModelInput.from_ints(tokens(12)),
        {"target_tokens": targets * kept, "weights": weights * kept},
    )
    assert sparse.loss_fn_inputs["weights"].sparse_crow_indices is not None
    result = check("cross_entropy", plain_cross_entropy, [sparse, datum(7)])
    assert result.output.loss_fn_outputs[0]["logprobs"].to_numpy().shape == (12, 8)


def test_all_zero_weights_give_a_zero_gradient_and_still_logprobs():
    made = trainer()
    add(made, "m")
    example = _with(datum(7), weights=[0.0] * 7)
    (result,) = run(made, op("m", [example]))
    assert not gradient(made, "m").any()
    assert result.output.metrics["loss:sum"] == 0
    assert result.output.loss_fn_outputs[0]["logprobs"].to_numpy().min() < -1


def test_a_token_named_twice_in_a_row_counts_twice():
    example = Datum(
        ModelInput.from_ints([5, 6]),
        {"target_tokens": [[9, 9, 3], [4, 4, 4]], "weights": [[1.0, 2.0, -1.0], [0.5, 0.5, 1.0]]},
    )
    check("cross_entropy", plain_cross_entropy, [example])


@pytest.mark.parametrize(
    "flags",
    [
        {"train_attn": False},
        {"train_mlp": False},
        {"train_unembed": False},
        {"train_attn": False, "train_mlp": False},
        {"train_attn": False, "train_unembed": False},
    ],
    ids=str,
)
def test_every_choice_of_targets_has_the_reference_gradient(flags):
    check("cross_entropy", plain_cross_entropy, [datum(7), datum(20)], **flags)


@pytest.mark.parametrize("rank", [1, 3, 64])
def test_any_rank_has_the_reference_gradient(rank):
    # At rank 1 the scale is 32: activations, and with them rounding, are larger.
    check("ppo", plain_ppo, [datum(7, 1, 0, "ppo")], rank=rank, tolerance=3e-5)


@pytest.mark.parametrize("config", [QWEN, QWEN2], ids=["untied head, head norms", "biases"])
def test_every_family_has_the_reference_gradient(config):
    check("ppo", plain_ppo, [datum(20, 1, 0, "ppo")], made=trainer(config))


@pytest.mark.parametrize(
    ("loss_fn", "plain"), [("cross_entropy", plain_cross_entropy), ("dro", plain_dro)]
)
def test_many_small_chunks_of_logits_add_up(loss_fn, plain):
    data = [datum(50, 1, 0, loss_fn), datum(7, 2, 3, loss_fn)]
    check(loss_fn, plain, data, made=trainer(logits_bytes=1))


def test_forward_alone_gives_the_same_answer_and_no_gradient():
    made = trainer()
    add(made, "m")
    data = [datum(7, 1, 0, "ppo"), datum(20, 2, 0, "ppo")]
    (forward,) = run(made, op("m", data, "ppo", backward=False))
    assert made.adapters["m"].gradient_P is None
    (both,) = run(made, op("m", data, "ppo"))
    assert forward.output == both.output
    assert forward.tokens == 27


def test_a_csr_matrix_wider_than_the_vocabulary_is_refused_before_it_is_filled():
    made = trainer()
    add(made, "m")
    wide = TensorData([1], "int64", [1, 10**12], [0, 1], [3])
    example = Datum(ModelInput.from_ints([1]), {"target_tokens": wide, "weights": wide})
    (answer,) = made.train([op("m", [example])])
    assert f"at most {CONFIG.vocab_size} are read" in str(answer)

"""Many operations in one pass do not affect each other, and errors fail only their operation.

What is said to be equal here is equal bit for bit on the CPU.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.unit.engine.training.kit import (
    Reference,
    add,
    column,
    datum,
    gradient,
    op,
    run,
    step,
    tokens,
    trainer,
)
from tinkex.engine.attention.packed import PackedAttention
from tinkex.engine.protocol import TrainResult
from tinkex.engine.training.packing import cut, take_pass
from tinkex.errors import RequestFailedError
from tinkex.types import Datum, ImageChunk, ModelInput

ADAPTERS = {
    "one": {"rank": 4},
    "two": {"rank": 7, "train_attn": False},
    "three": {"rank": 1, "train_mlp": False, "train_unembed": False},
    "four": {"rank": 64, "train_attn": False, "train_mlp": False},
}


def _batch():
    return [
        op("one", [datum(7, 1), datum(30, 2), datum(3, 3)]),
        op("two", [datum(1, 4, 0, "ppo"), datum(40, 5, 0, "ppo")], "ppo"),
        op("three", [datum(5, 6, 3)]),
        op("four", [datum(11, 7, 0, "gspo")], "gspo"),
        op("one", [datum(9, 8, 0, "dro")], "dro"),
    ]


def _made(**kwargs):
    made = trainer(**kwargs)
    for model_id, lora in ADAPTERS.items():
        add(made, model_id, **lora)
    return made


@pytest.mark.parametrize("pass_tokens", [8192, 48, 1])
def test_an_operation_answers_the_same_bits_alone_and_among_others(pass_tokens):
    together, alone = _made(max_pass_tokens=pass_tokens), _made(max_pass_tokens=pass_tokens)
    results = run(together, *_batch())
    for one, result in zip(_batch(), results, strict=True):
        (by_itself,) = run(alone, one)
        assert by_itself.output == result.output
    for model_id in ADAPTERS:
        assert torch.equal(gradient(together, model_id), gradient(alone, model_id))


def test_wider_targets_of_others_do_not_change_a_bit():
    # Sums over a row's targets must not depend on how wide the rows beside it are.
    batch = [
        op("one", [datum(9, 1, 5), datum(6, 2, 33), datum(4, 3)]),
        op("two", [datum(11, 4, 40)]),
        op("three", [datum(8, 5, 7)]),
        op("four", [datum(3, 6, 90)]),
    ]
    together, alone = _made(), _made()
    for one, result in zip(batch, run(together, *batch), strict=True):
        (by_itself,) = run(alone, one)
        assert by_itself.output == result.output
    for model_id in ADAPTERS:
        assert torch.equal(gradient(together, model_id), gradient(alone, model_id))


def test_the_order_of_operations_does_not_change_a_bit():
    forth, back = _made(), _made()
    batch = _batch()[:4]
    first, second = run(forth, *batch), run(back, *reversed(batch))
    assert [r.output for r in first] == [r.output for r in reversed(second)]
    for model_id in ADAPTERS:
        assert torch.equal(gradient(forth, model_id), gradient(back, model_id))


def test_the_size_of_passes_changes_nothing_but_rounding():
    # The rows of an adapter's own products are grouped differently: float32 rounding.
    whole, sliced = _made(), _made(max_pass_tokens=16)
    for left, right in zip(run(whole, *_batch()), run(sliced, *_batch()), strict=True):
        for one, other in zip(
            left.output.loss_fn_outputs, right.output.loss_fn_outputs, strict=True
        ):
            gap = one["logprobs"].to_numpy() - other["logprobs"].to_numpy()
            assert np.abs(gap).max() < 2e-6
    for model_id in ADAPTERS:
        expected = gradient(whole, model_id)
        gap = (gradient(sliced, model_id) - expected).abs().max() / expected.abs().max()
        assert gap < 2e-6


def test_gradients_accumulate_over_calls_and_the_step_clears_them():
    made = trainer()
    add(made, "m")
    run(made, op("m", [datum(7, 1)]))
    first = gradient(made, "m")
    run(made, op("m", [datum(9, 2)]))
    reference = Reference(made, "m")
    total = -sum(
        (column(d, "weights") * reference.logprobs(d)).sum() for d in (datum(7, 1), datum(9, 2))
    )
    total.backward()
    assert not torch.equal(gradient(made, "m"), first)
    expected = reference.flat_P.grad
    gap = (gradient(made, "m").double() - expected).abs().max() / expected.abs().max()
    assert gap < 1e-5  # float32 rounding; libraries differ in the order of summation
    step(made, "m")
    assert made.adapters["m"].gradient_P is None


def test_a_snapshot_never_changes():
    made = trainer()
    add(made, "m")
    frozen = made.adapters["m"]
    before = frozen.weights.flat_P.clone()
    run(made, op("m", [datum(7)]))
    step(made, "m", learning_rate=0.1)
    assert torch.equal(frozen.weights.flat_P, before)
    assert frozen.moments.step == 0
    assert made.adapters["m"].moments.step == 1
    assert not torch.equal(made.weights("m").flat_P, before)


def test_packed_attention_is_each_sequence_by_itself():
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(12, 4, 8, generator=generator)
    k, v = (torch.randn(12, 2, 8, generator=generator) for _ in range(2))
    packed = PackedAttention([5, 1, 6])(0, q, k, v)
    for rows in (slice(0, 5), slice(5, 6), slice(6, 12)):
        count = rows.stop - rows.start
        assert torch.equal(packed[rows], PackedAttention([count])(0, q[rows], k[rows], v[rows]))


def test_slices_keep_to_the_limit_and_lose_nothing():
    lengths = [[5, 5, 5], [30], [2], [9, 9, 2, 9]]
    slices = [cut(number, own, 12) for number, own in enumerate(lengths)]
    waiting = deque(piece for own in slices for piece in own)
    passes = []
    while waiting:
        room = [12]

        def admit(piece, room=room):
            room[0] -= piece.tokens
            return room[0] >= 0

        passes.append(take_pass(waiting, admit))
    seen = [
        (piece.op, index) for p in passes for piece in p for index in range(piece.first, piece.last)
    ]
    assert seen == [(i, j) for i, own in enumerate(lengths) for j in range(len(own))]
    for one in passes:
        assert sum(piece.tokens for piece in one) <= 12 or len(one) == 1
    for number, own in enumerate(lengths):
        assert sum(piece.tokens for piece in slices[number]) == sum(own)


GOOD = {"target_tokens": [1, 2, 3], "weights": [1.0, 1.0, 1.0]}
RL = {"target_tokens": [1, 2, 3], "logprobs": [-1.0] * 3, "advantages": [1.0] * 3}


def _bad(ids=(1, 2, 3), loss_fn="cross_entropy", config=None, **inputs):
    base = GOOD if loss_fn == "cross_entropy" else RL
    kept = {k: v for k, v in {**base, **inputs}.items() if v is not None}
    return [Datum(ModelInput.from_ints(list(ids)), kept)], loss_fn, config or {}


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (_bad(ids=(1, 97, 3)), "data[1].model_input: token 97 at position 1 is outside 0..96"),
        (_bad(ids=()), "data[1].model_input: is empty"),
        (_bad(ids=range(90)), 'data[1].loss_fn_inputs["target_tokens"]: has shape [3]'),
        (_bad(ids=[1] * 129), "data[1].model_input: has 129 tokens; test/small reads at most 128"),
        (_bad(target_tokens=None), 'data[1].loss_fn_inputs["target_tokens"]: is missing'),
        (
            _bad(target_tokens=[1, 2, -1]),
            'data[1].loss_fn_inputs["target_tokens"]: token -1 at [2] is outside',
        ),
        (_bad(target_tokens=np.zeros((3, 0), int)), "must be [3] or [3, K]"),
        (_bad(target_tokens=np.zeros((3, 1, 1), int)), "must be [3] or [3, K]"),
        (_bad(weights=[1.0, 1.0]), 'data[1].loss_fn_inputs["weights"]: has shape [2]'),
        (
            _bad(weights=[1.0, math.nan, 1.0]),
            'data[1].loss_fn_inputs["weights"]: is nan at [1]; give finite numbers',
        ),
        (_bad(wieghts=np.ones(3)), "did you mean weights?"),
        (_bad(loss_fn="ppo", advantages=[1.0, math.inf, 0.0]), '["advantages"]: is inf at [1]'),
        (_bad(loss_fn="ppo", advantages=None), '["advantages"]: is missing; ppo needs it'),
        (_bad(loss_fn="ppo", clip_low_threshold=[2.0] * 3), "is above clip_high_threshold"),
        (_bad(loss_fn="cross_entropie"), "loss_fn: 'cross_entropie' is not a loss"),
        (_bad(loss_fn="stable_reinforce"), "its vendor has not published the whole formula"),
        (_bad(loss_fn="custom"), "no uploaded loss"),
        (
            _bad(loss_fn="ppo", config={"clip_low": 0.1}),
            'loss_fn_config["clip_low"]: ppo has no such setting; did you mean clip_low_threshold?',
        ),
        (_bad(config={"beta": 1.0}), "cross_entropy has no settings"),
        (_bad(loss_fn="dro", config={"beta": "big"}), "expected a number, got text"),
        (_bad(loss_fn="dro", config={"beta": math.nan}), "must be finite"),
        (
            _bad(loss_fn="ppo", config={"clip_low_threshold": 3.0}),
            "is above clip_high_threshold",
        ),
        (_bad(loss_fn="importance_sampling", logprobs=[-1e30] * 3), "not finite"),
    ],
)
def test_bad_input_is_refused_by_its_path_and_disturbs_nothing(bad, message):
    data, loss_fn, config = bad
    made, expected = _made(), _made()
    run(made, op("one", [datum(4)]))
    run(expected, op("one", [datum(4)]))
    fine = {k: v for k, v in (RL | GOOD).items() if k in data[0].loss_fn_inputs or k in RL}
    good = Datum(ModelInput.from_ints([1, 2, 3]), {**fine, "weights": [1.0] * 3})
    answers = made.train(
        [
            op("two", [datum(5)]),
            op("one", [good, *data], loss_fn, loss_fn_config=config),
            op("three", [datum(6)]),
        ]
    )
    run(expected, op("two", [datum(5)]))
    run(expected, op("three", [datum(6)]))
    assert isinstance(answers[1], RequestFailedError)
    assert message in str(answers[1])
    assert answers[1].category == "user"
    assert answers[1].request_id == "op-one"
    assert isinstance(answers[0], TrainResult)
    assert isinstance(answers[2], TrainResult)
    for model_id in ("one", "two", "three"):
        assert torch.equal(gradient(made, model_id), gradient(expected, model_id))


def test_no_data_an_image_and_an_unknown_model_are_refused():
    made = _made()
    image = Datum(ModelInput(chunks=[ImageChunk(data=b"x", format="png")]), GOOD)
    empty, unknown, picture = made.train(
        [op("one", []), op("nobody", [datum(3)]), op("one", [image])]
    )
    assert "data: is empty" in str(empty)
    assert "model 'nobody' is not loaded" in str(unknown)
    assert "data[0].model_input.chunks[0]: test/small reads text only" in str(picture)


class _Fragile:
    """A model that runs out of memory on one token."""

    def __init__(self, decoder):
        self._decoder = decoder

    def __getattr__(self, name):
        return getattr(self._decoder, name)

    def hidden(self, tokens_T, *args):
        if 96 in tokens_T.tolist():
            raise torch.OutOfMemoryError("no room")
        return self._decoder.hidden(tokens_T, *args)


def test_running_out_of_memory_fails_the_culprit_alone():
    made, expected = _made(), _made()
    made._context = replace(made._context, decoder=_Fragile(made._context.decoder))
    heavy = Datum(ModelInput.from_ints([96, 1, 2]), GOOD)
    light = Datum(
        ModelInput.from_ints([t % 90 for t in tokens(9)]),
        {"target_tokens": tokens(9), "weights": [1.0] * 9},
    )
    answers = made.train([op("one", [light]), op("two", [heavy]), op("three", [light])])
    assert isinstance(answers[1], RequestFailedError)
    assert answers[1].category == "server"
    assert "ran out of memory" in str(answers[1])
    assert isinstance(answers[1].__cause__, torch.OutOfMemoryError)
    assert made.adapters["two"].gradient_P is None
    (left, right) = run(expected, op("one", [light]), op("three", [light]))
    assert answers[0].output == left.output
    assert answers[2].output == right.output
    assert torch.equal(gradient(made, "one"), gradient(expected, "one"))


def test_metrics_fold_by_their_names():
    made = trainer()
    add(made, "m")
    (result,) = run(made, op("m", [datum(7, 1, 0, "ppo")], "ppo"))
    metrics = result.output.metrics
    assert set(metrics) >= {"loss:sum", "tokens:sum", "active_tokens:sum", "clipped_tokens:sum"}
    assert all(name.count(":") == 1 for name in metrics)
    assert {name.split(":")[1] for name in metrics} <= {"sum", "mean", "min", "max"}
    assert metrics["ratio:min"] <= metrics["ratio:max"]


def test_without_weights_every_target_counts_once():
    made = trainer()
    add(made, "m")
    whole = datum(5)
    targets = whole.loss_fn_inputs["target_tokens"]
    bare = Datum(whole.model_input, {"target_tokens": targets})
    ones = Datum(whole.model_input, {"target_tokens": targets, "weights": [1.0] * 5})
    first, second = run(made, op("m", [bare], backward=False), op("m", [ones], backward=False))
    assert first.output == second.output

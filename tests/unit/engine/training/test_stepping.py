"""A training batch one pass at a time: what may happen in between, and what it cannot change."""

from __future__ import annotations

import torch

from tests.unit.engine.training.kit import add, datum, gradient, op, run, step, trainer
from tinkex.engine.protocol import TrainResult

LENGTHS = ([30, 7, 12], [40], [5, 5, 5, 5], [9])


def _batch():
    return [
        op(f"m{number}", [datum(length, 10 * number + i) for i, length in enumerate(lengths)])
        for number, lengths in enumerate(LENGTHS)
    ]


def _made():
    made = trainer(max_pass_tokens=40)
    for number in range(len(LENGTHS)):
        add(made, f"m{number}", 2 + number)
    return made


def _drain(passes, between=lambda: None):
    count = 0
    while True:
        try:
            count += 1
            next(passes)
        except StopIteration as end:
            return count, end.value
        between()


def test_a_batch_takes_one_call_for_every_pass():
    count, answers = _drain(_made().passes(_batch()))
    # 30+7 | 12 | 40 | 20+9: cut by operation, then filled.
    assert count == 4
    assert [answer.tokens for answer in answers] == [49, 40, 20, 9]


def test_smaller_passes_change_no_bit():
    whole, small = _made(), _made()
    expected = run(whole, *_batch())
    bounds = iter([1, 40, 13, 1, 29, 1, 1, 1, 1])
    count, found = _drain(small.passes(_batch(), lambda: next(bounds)))
    assert count == 5
    assert [answer.output for answer in found] == [answer.output for answer in expected]
    for number in range(len(LENGTHS)):
        assert torch.equal(gradient(small, f"m{number}"), gradient(whole, f"m{number}"))


def test_other_adapters_live_on_between_passes():
    made, expected = _made(), _made()
    alone = run(expected, *_batch())
    add(made, "other", 3)
    seen = []

    def between():
        number = len(seen)
        add(made, f"new{number}", 1)
        made.drop(f"new{number - 1}")
        seen.append(made.adapters["other"].moments.step)
        (result,) = made.train([op("other", [datum(6, number)])])
        assert isinstance(result, TrainResult)
        step(made, "other")

    _, found = _drain(made.passes(_batch()), between)
    assert seen == [0, 1, 2]
    assert [answer.output for answer in found] == [answer.output for answer in alone]
    for number in range(len(LENGTHS)):
        assert torch.equal(gradient(made, f"m{number}"), gradient(expected, f"m{number}"))


def test_an_operation_is_accumulated_as_soon_as_its_last_pass_has_run():
    made = _made()
    passes = made.passes(_batch())
    next(passes)
    assert made.adapters["m0"].gradient_P is None  # one of its two passes is still to come
    next(passes)
    assert made.adapters["m0"].gradient_P is not None
    assert made.adapters["m1"].gradient_P is None


def test_a_batch_that_is_given_up_leaves_each_operation_done_or_untouched():
    made, expected = _made(), _made()
    passes = made.passes(_batch())
    next(passes)
    next(passes)
    passes.close()
    run(expected, _batch()[0])
    assert torch.equal(gradient(made, "m0"), gradient(expected, "m0"))
    for number in range(1, len(LENGTHS)):
        assert made.adapters[f"m{number}"].gradient_P is None


def test_a_batch_of_nothing_but_mistakes_runs_no_pass():
    made = _made()
    count, answers = _drain(made.passes([op("nobody", [datum(3)]), op("m0", [])]))
    assert count == 1
    assert ["not loaded" in str(answers[0]), "is empty" in str(answers[1])] == [True, True]
    assert _drain(made.passes([]))[1] == []

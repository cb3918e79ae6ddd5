"""Whole requests on `tinkex/tiny`, against plain references without a cache."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from tests.unit.engine.sampler.kit import (
    EOS,
    answer,
    drive,
    greedy,
    logits,
    op,
    sample,
    sampler,
    text,
    tokens,
)
from tinkex.engine.models.tiny import tiny_decoder

if TYPE_CHECKING:
    from tinkex.engine.protocol import SampleOp, SampleResult
    from tinkex.engine.sampler import SampleRun

# Rounding in float32 only. The bits differ because matrix products and attention sum in an
# order that depends on how many rows a pass has and how far the keys reach.
TOLERANCE = 1e-5


def mixed_ops() -> list[SampleOp]:
    """Requests of many shapes, some of which begin alike."""
    return [
        op(text(5), op_id="a", temperature=1.0, seed=1, max_tokens=12, num_samples=3),
        op(text(40), op_id="b", temperature=0.8, top_k=20, seed=2, max_tokens=9),
        op(text(40)[:30] + text(6, 3), op_id="c", temperature=1.2, top_p=0.9, max_tokens=15),
        op(text(17, 5), op_id="d", max_tokens=20, num_samples=2),
        op(text(1), op_id="e", temperature=1.0, seed=-5, max_tokens=30),
        op(text(40), op_id="f", temperature=1.0, seed=3, max_tokens=1, num_samples=4),
    ]


def compare(found: SampleResult, reference: SampleResult) -> None:
    assert tokens(found) == tokens(reference)
    pairs = zip(found.response.sequences, reference.response.sequences, strict=True)
    for left, right in pairs:
        assert left.stop_reason == right.stop_reason
        assert left.sequence_id == right.sequence_id
        assert np.abs(left.logprobs_np - right.logprobs_np).max() < TOLERANCE


@pytest.fixture(scope="module")
def alone() -> dict[str, SampleResult]:
    """Each of the mixed requests, run by itself in a fresh sampler with large blocks."""
    return {one.op_id: sample(sampler(block_size=64, pass_tokens=4096), one) for one in mixed_ops()}


@pytest.mark.parametrize("length", [1, 3, 4, 5, 33])
def test_greedy_equals_recomputing_everything_for_each_token(length: int) -> None:
    result = sample(sampler(), op(text(length), max_tokens=24))
    assert tokens(result) == [greedy(text(length), 24)]


@pytest.mark.parametrize(
    "settings",
    [
        {"block_size": 1},
        {"block_size": 4},
        {"block_size": 7},
        {"block_size": 16, "pass_tokens": 3, "max_sequences": 2},
        {"block_size": 4, "pass_tokens": 16, "max_sequences": 16},
        {"block_size": 8, "max_sequences": 1},
        {"block_size": 4, "logit_rows": 1},
    ],
)
def test_results_do_not_depend_on_batch_chunks_blocks_or_shared_prefixes(
    settings: dict[str, Any], alone: dict[str, SampleResult]
) -> None:
    target = sampler(**settings)
    for _ in range(2):  # the second round finds the prompts in the prefix cache
        runs = [target.submit(one) for one in mixed_ops()]
        drive(target)
        for run in runs:
            compare(answer(run), alone[run.op.op_id])
    # A reused block must lie before the last prompt token, and "b" has 40 of them.
    size = settings["block_size"]
    hits = {run.op.op_id: answer(run).cached_tokens for run in runs}
    assert hits["b"] == 39 // size * size
    assert hits["e"] == 0


def test_results_do_not_depend_on_preemption(alone: dict[str, SampleResult]) -> None:
    target = sampler(cache_tokens=52, block_size=4)
    runs = [target.submit(one) for one in mixed_ops()]
    drive(target)
    assert target.preemptions > 0
    for run in runs:
        compare(answer(run), alone[run.op.op_id])


def test_requests_that_arrive_while_others_run_change_nothing(
    alone: dict[str, SampleResult],
) -> None:
    target = sampler(pass_tokens=20, max_sequences=8)
    runs = []
    for one in mixed_ops():
        runs.append(target.submit(one))
        target.step()
        target.step()
    drive(target)
    for run in runs:
        compare(answer(run), alone[run.op.op_id])


def test_results_do_not_depend_on_owners_that_share_the_passes(
    alone: dict[str, SampleResult],
) -> None:
    target = sampler(pass_tokens=256, max_sequences=16)
    long = [target.submit(op(text(900, 7 + i), extra={"cache_salt": f"z{i}"})) for i in range(2)]
    target.step()
    # Both are computed in pieces, and neither takes a whole pass.
    assert [run.sequences[0].computed for run in long] == [128, 128]
    ops = mixed_ops()
    runs = [target.submit(replace(one, cache_salt=one.op_id)) for one in ops]
    target.step()
    # Prompts of others are complete in one pass, and begin to answer.
    assert all(len(run.sequences[0].generated) == 1 for run in runs)
    drive(target)
    for run in runs:
        compare(answer(run), alone[run.op.op_id])


@pytest.mark.parametrize("schedule", range(6))
def test_any_order_of_arrivals_and_cancellations_leaves_the_other_results_alone(
    schedule: int, alone: dict[str, SampleResult]
) -> None:
    chance = random.Random(schedule)
    target = sampler(
        cache_tokens=chance.choice([56, 100, 400]),
        block_size=chance.choice([1, 2, 4]),
        pass_tokens=chance.choice([6, 16, 64]),
        max_sequences=chance.choice([2, 6]),
    )
    arrivals = [chance.choice(mixed_ops()) for _ in range(15)]
    runs: list[SampleRun] = []
    while arrivals or not target.idle:
        if arrivals and chance.random() < 0.4:
            runs.append(target.submit(arrivals.pop()))
        if runs and chance.random() < 0.05:
            target.cancel(chance.choice(runs))
        target.step()
        target.check()
    kept = [run for run in runs if not run.cancelled]
    assert len(kept) > 5
    for run in kept:
        compare(answer(run), alone[run.op.op_id])
    assert target.free_tokens == target.cache_tokens


@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.0, 2.5])
def test_sampled_logprobs_equal_prompt_logprobs_of_the_same_tokens(temperature: float) -> None:
    prompt = text(11)
    target = sampler()
    drawn = sample(
        target, op(prompt, temperature=temperature, top_k=40, top_p=0.95, seed=4, max_tokens=40)
    ).response.sequences[0]
    scored = sample(
        target,
        op(prompt + drawn.tokens, max_tokens=1, extra={"prompt_logprobs": True}),
    ).response.prompt_logprobs_np
    assert scored is not None
    assert np.abs(scored[len(prompt) :] - drawn.logprobs_np).max() < TOLERANCE
    reference = torch.log_softmax(logits(prompt + drawn.tokens), -1).numpy()
    plain = reference[np.arange(10, 50), drawn.tokens]
    assert np.abs(plain - drawn.logprobs_np).max() < TOLERANCE


@pytest.mark.req("B15")
def test_the_same_call_gives_the_same_tokens_and_its_samples_differ() -> None:
    first = tokens(sample(sampler(), op(text(9), temperature=1.0, seed=7, num_samples=4)))
    again = tokens(sample(sampler(), op(text(9), temperature=1.0, seed=7, num_samples=4)))
    other = tokens(sample(sampler(), op(text(9), temperature=1.0, seed=8, num_samples=4)))
    assert first == again
    assert len({tuple(one) for one in first}) == 4
    assert all(left != right for left, right in zip(first, other, strict=True))


@pytest.mark.req("B15")
def test_fewer_samples_of_a_call_are_the_first_of_more() -> None:
    few = tokens(sample(sampler(), op(text(9), temperature=1.0, seed=7, num_samples=2)))
    many = tokens(sample(sampler(), op(text(9), temperature=1.0, seed=7, num_samples=5)))
    assert many[:2] == few


def test_without_a_seed_calls_differ_by_their_id() -> None:
    a = tokens(sample(sampler(), op(text(9), temperature=1.0, op_id="a")))
    b = tokens(sample(sampler(), op(text(9), temperature=1.0, op_id="b")))
    assert a != b
    assert a == tokens(sample(sampler(), op(text(9), temperature=1.0, op_id="a")))


def test_first_tokens_follow_the_exact_distribution() -> None:
    prompt, count = text(12), 3000
    result = sample(
        sampler(cache_tokens=40_000, max_sequences=500, logit_rows=500),
        op(prompt, temperature=0.7, top_k=12, top_p=0.9, seed=5, max_tokens=1, num_samples=count),
    )
    p = torch.softmax(logits(prompt)[-1].double() / 0.7, -1).numpy()
    order = np.argsort(-p, kind="stable")[:12]
    before = np.cumsum(p[order]) - p[order]
    kept = order[before < 0.9 * p[order].sum()]
    expected = p[kept] / p[kept].sum() * count
    counts = np.bincount([one[0] for one in tokens(result)], minlength=len(p))
    assert counts.sum() == counts[kept].sum() == count
    # At most 11 degrees of freedom; 31.3 is exceeded by chance once in a thousand seeds.
    assert ((counts[kept] - expected) ** 2 / expected).sum() < 31.3


def test_samples_of_one_prompt_share_its_blocks() -> None:
    target = sampler(block_size=4, cache_tokens=400)
    run = target.submit(op(text(41), num_samples=8, max_tokens=3))
    most = 0
    while not target.idle:
        target.step()
        target.check()
        most = max(most, 400 - target.free_tokens)
    # 10 shared blocks, then at most one or two of each sample's own.
    assert most <= 10 * 4 + 8 * 2 * 4
    assert answer(run).cached_tokens == 0


def test_equal_prompts_of_separate_requests_are_computed_once_even_when_sent_together() -> None:
    target = sampler(block_size=4)
    runs = [target.submit(op(text(41), op_id=str(i))) for i in range(5)]
    drive(target)
    assert [answer(run).cached_tokens for run in runs] == [0, 40, 40, 40, 40]
    assert [answer(run).response.prompt_cache_hit_tokens for run in runs] == [0, 40, 40, 40, 40]


def test_a_conversation_finds_its_earlier_turns_and_answers_in_the_cache() -> None:
    target = sampler(block_size=4)
    first = sample(target, op(text(20), max_tokens=12))
    history = text(20) + tokens(first)[0]
    second = sample(target, op(history + text(5, 2)))
    # The last answer token was never fed back, so 31 of 32 are there: 7 full blocks.
    assert second.cached_tokens == 28


def test_another_version_of_the_weights_never_hits() -> None:
    target = sampler(block_size=4)
    sample(target, op(text(20)), version="one")
    assert sample(target, op(text(20)), version="two").cached_tokens == 0
    assert sample(target, op(text(20)), version="one").cached_tokens == 16


def test_a_prompt_is_found_in_the_cache_only_by_requests_of_the_same_salt() -> None:
    target = sampler(block_size=4)
    hits = [
        sample(target, op(text(20), extra={"cache_salt": salt})).cached_tokens
        for salt in ("a", "b", "", "a", "b")
    ]
    assert hits == [0, 0, 0, 16, 16]


def test_a_request_does_not_wait_for_the_same_prompt_of_another_salt() -> None:
    target = sampler(block_size=4, max_sequences=2, pass_tokens=40)
    runs = [target.submit(op(text(20), extra={"cache_salt": salt})) for salt in ("a", "b")]
    target.step()
    assert [run.sequences[0].computed for run in runs] == [20, 20]
    drive(target)
    assert [answer(run).cached_tokens for run in runs] == [0, 0]
    assert tokens(answer(runs[0])) == tokens(answer(runs[1]))


@pytest.mark.parametrize(
    ("stop", "cut"),
    [(None, None), ([], None), ("token", 5), ("string", 5)],
)
def test_the_stopping_token_is_part_of_the_result(stop: Any, cut: int | None) -> None:
    plain = greedy(text(6), 16)
    if stop == "token":
        stop = [plain[4]]
        cut = plain.index(plain[4]) + 1
    elif stop == "string":
        # Letters of a greedy text; latin-1 bytes that are no UTF-8 decode to U+FFFD.
        place = next(i for i, t in enumerate(plain) if t < 128)
        stop, cut = chr(plain[place]), place + 1
    result = sample(sampler(), op(text(6), max_tokens=16, stop=stop)).response.sequences[0]
    assert result.tokens == plain[:cut]
    assert result.stop_reason == ("length" if cut is None else "stop")


def test_end_of_text_stops_by_default_and_is_kept() -> None:
    # With top-p 0.999 and heat, end of text comes up soon; find a seed by asking.
    target = sampler()
    runs = [
        target.submit(op(text(4), op_id=str(i), temperature=2.0, seed=i, stop=None, max_tokens=200))
        for i in range(12)
    ]
    drive(target)
    ended = [answer(run).response.sequences[0] for run in runs]
    stopped = [one for one in ended if one.stop_reason == "stop"]
    assert stopped
    for one in stopped:
        assert one.tokens[-1] == EOS
        assert EOS not in one.tokens[:-1]


def test_the_context_ends_a_sequence() -> None:
    decoder = tiny_decoder()
    decoder.config = replace(decoder.config, max_context=64)
    target = sampler(decoder=decoder)
    result = sample(target, op(text(61), max_tokens=50)).response.sequences[0]
    assert len(result.tokens) == 3
    assert result.stop_reason == "length"
    full = sample(target, op(text(64), max_tokens=1, extra={"prompt_logprobs": True})).response
    assert full.sequences[0].tokens == []
    assert full.prompt_logprobs_np is not None
    assert np.isfinite(full.prompt_logprobs_np[1:]).all()


def test_without_max_tokens_a_sequence_fills_the_cache_and_ends() -> None:
    result = sample(sampler(cache_tokens=32), op(text(10), max_tokens=None)).response.sequences[0]
    assert len(result.tokens) == 23  # the last one needs no room
    assert result.stop_reason == "length"


def test_no_tokens_at_all_can_be_asked_for() -> None:
    target = sampler()
    run = target.submit(op(text(5), max_tokens=0, num_samples=2))
    assert target.step() == [run]
    assert tokens(answer(run)) == [[], []]
    assert target.idle


@pytest.mark.parametrize("length", [3, 8, 11])
def test_all_samples_of_a_prompt_draw_their_first_token_from_its_one_last_row(length: int) -> None:
    seen: list[int] = []
    target = sampler()
    wide = op(text(length), temperature=1.0, num_samples=5, max_tokens=3, seed=4)
    run = target.submit(wide, on_token=lambda sample, *_: seen.append(sample))
    target.step()
    assert seen == [0, 1, 2, 3, 4]
    drive(target)
    one_by_one = sample(sampler(max_sequences=1), wide)
    assert tokens(answer(run)) == tokens(one_by_one)


def test_samples_of_one_token_need_one_pass() -> None:
    target = sampler()
    run = target.submit(op(text(9), num_samples=4, max_tokens=1))
    assert target.step() == [run]
    assert target.idle
    target.check()


def test_tokens_are_streamed_as_they_come() -> None:
    seen: list[tuple[int, int, float]] = []
    target = sampler()
    run = target.submit(
        op(text(7), temperature=1.0, num_samples=2),
        on_token=lambda sample, token, logprob, _: seen.append((sample, token, logprob)),
    )
    target.step()
    assert len(seen) == 2
    drive(target)
    for sample_index, sequence in enumerate(answer(run).response.sequences):
        streamed = [(t, lp) for i, t, lp in seen if i == sample_index]
        assert [t for t, _ in streamed] == sequence.tokens
        assert np.array([lp for _, lp in streamed], np.float32).tolist() == sequence.logprobs


@pytest.mark.req("S24")
def test_cancelling_frees_blocks_at_once_and_leaves_the_others_alone() -> None:
    target = sampler(cache_tokens=256)
    kept = target.submit(op(text(9), max_tokens=20))
    dropped = target.submit(op(text(60, 4), num_samples=3, max_tokens=100, op_id="x"))
    for _ in range(5):
        target.step()
    target.cancel(dropped)
    target.check()
    # Only the kept request's own blocks are in use: 9 prompt and a few generated tokens.
    assert target.free_tokens >= 256 - 16
    assert dropped.done
    assert dropped.result is None
    ended = drive(target)
    assert ended == [kept]
    assert tokens(answer(kept)) == [greedy(text(9), 20)]
    assert target.free_tokens == 256
    target.cancel(dropped)
    target.cancel(kept)
    assert kept.result is not None
    assert not kept.cancelled


def test_cancelling_before_the_first_step_works() -> None:
    target = sampler()
    target.cancel(target.submit(op(text(9))))
    assert target.idle
    target.check()


def test_a_request_may_be_cancelled_from_its_own_callback() -> None:
    target = sampler()
    run = target.submit(op(text(9), num_samples=3), on_token=lambda *_: target.cancel(run))
    other = target.submit(op(text(9, 2), op_id="other"))
    assert drive(target) == [other]
    assert run.cancelled
    assert run.result is None


def test_a_failing_callback_fails_its_own_request_only() -> None:
    def broken(*_: object) -> None:
        raise LookupError("no such stream")

    target = sampler()
    bad = target.submit(op(text(9)), on_token=broken)
    good = target.submit(op(text(9, 2), op_id="good"))
    assert drive(target) == [bad, good]
    assert bad.error is not None
    assert "no such stream" in bad.error.message
    assert isinstance(bad.error.__cause__, LookupError)
    assert answer(good).generated_tokens == 8


def test_sampled_top_k_logprobs_are_the_models_own() -> None:
    prompt = text(9)
    result = sample(
        sampler(),
        op(prompt, temperature=0.5, top_k=2, seed=1, extra={"topk_sample_logprobs": 4}),
    ).response.sequences[0]
    reference = torch.log_softmax(logits(prompt + result.tokens), -1)
    assert result.topk_logprobs is not None
    for i, row in enumerate(result.topk_logprobs):
        values, ids = reference[len(prompt) + i - 1].topk(4)
        assert row is not None
        assert [token for token, _ in row] == ids.tolist()
        assert np.allclose([value for _, value in row], values.numpy(), atol=TOLERANCE)


def test_requests_with_and_without_top_k_logprobs_share_a_pass() -> None:
    target = sampler()
    wide = target.submit(op(text(9), op_id="w", extra={"topk_sample_logprobs": 5}))
    narrow = target.submit(op(text(9, 1), op_id="n", extra={"topk_sample_logprobs": 2}))
    none = target.submit(op(text(9, 2), op_id="0"))
    drive(target)
    best = [answer(run).response.sequences[0].topk_logprobs_np for run in (wide, narrow, none)]
    assert best[0] is not None
    assert best[0].token_ids.shape == (8, 5)
    assert best[1] is not None
    assert best[1].token_ids.shape == (8, 2)
    assert best[2] is None


def test_usage_counts_prompt_cached_and_generated_tokens_and_time() -> None:
    target = sampler(block_size=4)
    sample(target, op(text(13)))
    result = sample(target, op(text(13), num_samples=3, max_tokens=5))
    assert (result.prompt_tokens, result.cached_tokens, result.generated_tokens) == (13, 12, 15)
    assert result.device_s > 0

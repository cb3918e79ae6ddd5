"""Sampling options as a caller meets them, in whole requests."""

from __future__ import annotations

from itertools import product
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
from tinkex.engine.models.tokenizer import byte_tokenizer
from tinkex.types import TensorData

if TYPE_CHECKING:
    from collections.abc import Callable

PROMPT = text(14)


def warm_until_eos() -> tuple[int, list[int]]:
    """A seed whose text contains an end of text before its last token, and that text."""
    for seed in range(50):
        result = sample(sampler(), op(PROMPT, temperature=2.0, seed=seed, max_tokens=60))
        if EOS in tokens(result)[0][:-1]:
            return seed, tokens(result)[0]
    raise AssertionError("no seed of fifty gives an end of text")


def test_an_empty_stop_list_runs_past_the_end_of_text_that_stops_by_default() -> None:
    seed, whole = warm_until_eos()
    params: dict[str, Any] = {"temperature": 2.0, "seed": seed, "max_tokens": 60}
    free = sample(sampler(), op(PROMPT, stop=[], **params)).response.sequences[0]
    default = sample(sampler(), op(PROMPT, stop=None, **params)).response.sequences[0]
    assert (len(free.tokens), free.stop_reason) == (60, "length")
    assert default.tokens == whole[: whole.index(EOS) + 1]
    assert default.stop_reason == "stop"
    assert len(default.logprobs) == len(default.tokens)


def readable() -> tuple[int, list[int], str]:
    """A seed whose text has three ASCII tokens in a row somewhere, and that text."""
    for seed in range(50):
        drawn = tokens(sample(sampler(), op(PROMPT, temperature=1.5, seed=seed, max_tokens=40)))[0]
        for place in range(2, 37):
            piece = drawn[place : place + 3]
            if all(31 < token < 127 for token in piece):
                return seed, drawn, bytes(piece).decode()
    raise AssertionError("no seed of fifty gives three letters in a row")


@pytest.mark.parametrize("as_list", [False, True])
def test_the_token_that_completes_a_stop_string_is_the_last_one(as_list: bool) -> None:
    seed, whole, wanted = readable()
    assert len(byte_tokenizer().encode(wanted)) == 3
    stop = ["never there", wanted] if as_list else wanted
    found = sample(sampler(), op(PROMPT, temperature=1.5, seed=seed, max_tokens=40, stop=stop))
    sequence = found.response.sequences[0]
    ends = [
        end
        for end in range(1, len(whole) + 1)
        if wanted in byte_tokenizer().decode([t for t in whole[:end] if t < 256])
    ]
    assert sequence.tokens == whole[: ends[0]]
    assert bytes(sequence.tokens[-3:]).decode() == wanted
    assert sequence.stop_reason == "stop"


def test_each_sample_of_a_request_stops_by_itself() -> None:
    params: dict[str, Any] = {"temperature": 1.5, "seed": 1, "max_tokens": 40}
    free = tokens(sample(sampler(), op(PROMPT, num_samples=4, **params)))
    stop = [free[2][10]]
    found = sample(sampler(), op(PROMPT, num_samples=4, stop=stop, **params)).response.sequences
    for whole, sequence in zip(free, found, strict=True):
        cut = whole.index(stop[0]) + 1 if stop[0] in whole else 40
        assert sequence.tokens == whole[:cut]
        assert sequence.stop_reason == ("stop" if stop[0] in whole else "length")
    assert len(found[2].tokens) <= 11


def test_pairs_of_tokens_follow_the_exact_joint_distribution() -> None:
    # A generator whose numbers repeat or correlate from position to position passes every test
    # of single tokens.
    count, kept = 4000, 3
    target = sampler(cache_tokens=40_000, max_sequences=500, logit_rows=500)
    result = sample(
        target,
        op(PROMPT, temperature=1.3, top_k=kept, seed=9, max_tokens=2, num_samples=count),
    )
    pairs = [tuple(one) for one in tokens(result)]

    def choices(ids: list[int]) -> dict[int, float]:
        values, best = (logits(ids)[-1].double() / 1.3).topk(kept)
        return dict(zip(best.tolist(), torch.softmax(values, -1).tolist(), strict=True))

    first = choices(PROMPT)
    second = {token: choices([*PROMPT, token]) for token in first}
    expected = {(a, b): first[a] * share * count for a in first for b, share in second[a].items()}
    assert set(pairs) <= set(expected)
    chi2 = sum((pairs.count(pair) - mean) ** 2 / mean for pair, mean in expected.items())
    # 8 degrees of freedom; 26.1 is exceeded by chance once in a thousand seeds.
    assert chi2 < 26.1


# What is asked, and where the answer is.
QUESTIONS: dict[str, tuple[dict[str, Any], Callable[[Any], Any]]] = {
    "prompt logprobs": ({"prompt_logprobs": True}, lambda r: r.prompt_logprobs),
    "likeliest prompt tokens": ({"topk_prompt_logprobs": 4}, lambda r: r.topk_prompt_logprobs),
    "likeliest sampled tokens": (
        {"topk_sample_logprobs": 3},
        lambda r: [sequence.topk_logprobs for sequence in r.sequences],
    ),
    "targets": (
        {"target_prompt_logprobs": TensorData.from_numpy(np.arange(26).reshape(13, 2) * 9 % 264)},
        lambda r: r.target_prompt_logprobs,
    ),
    "alternatives": ({"prompt_alt_tokens_k": 5}, lambda r: r.prompt_alt_tokens),
}


def test_questions_asked_together_have_the_answers_of_each_alone() -> None:
    params: dict[str, Any] = {"temperature": 1.0, "seed": 2, "num_samples": 2}
    every = {key: value for extra, _ in QUESTIONS.values() for key, value in extra.items()}
    together = sample(sampler(), op(PROMPT, extra=every, **params)).response
    plain = sample(sampler(), op(PROMPT, **params)).response
    assert [one.tokens for one in together.sequences] == [one.tokens for one in plain.sequences]
    for name, (extra, read) in QUESTIONS.items():
        alone = sample(sampler(), op(PROMPT, extra=extra, **params)).response
        assert read(alone) not in (None, [None, None]), name
        assert read(plain) in (None, [None, None]), name
        assert read(together) == read(alone), name


def test_greedy_ignores_the_seed_and_every_filter_but_the_context() -> None:
    wanted = greedy(PROMPT, 10)
    for seed, top_k, top_p in product((None, 0, 7), (-1, 1, 5), (1.0, 0.3)):
        found = sample(sampler(), op(PROMPT, max_tokens=10, seed=seed, top_k=top_k, top_p=top_p))
        assert tokens(found) == [wanted]


def test_a_cancelled_request_gives_its_blocks_to_one_that_waits_for_them() -> None:
    target = sampler(cache_tokens=64, block_size=4)
    first = target.submit(op(PROMPT, op_id="first", max_tokens=40))
    for _ in range(5):
        target.step()
    waiting = target.submit(op(text(30, 3), op_id="second", max_tokens=30))
    target.cancel(first)
    assert target.free_tokens == target.cache_tokens
    drive(target)
    assert answer(waiting).generated_tokens == 30
    assert first.result is None

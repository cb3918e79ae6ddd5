"""One text has the same log-probabilities, to the bit, however and in any batch.

Compared are `forward`, `forward_backward`, prompt log-probabilities and sampled ones, over
random mixes of adapters, ranks, lengths, chunk sizes, block sizes and cache hits.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from tests.unit.engine.agreement.pair import PROMPT, RANKS, Asked, Pair, sampled
from tests.unit.engine.sampler.kit import answer, drive, op, tiny
from tests.unit.engine.training.kit import CONFIG, QWEN, QWEN2, add, decoder
from tinkex.engine.sampler import BASE

if TYPE_CHECKING:
    from numpy.random import Generator

    from tests.unit.engine.agreement.pair import Floats
    from tinkex.engine.decoder import Decoder

# Shapes that fit no vector and no tile: torch treats what is left over in another way.
ODD = replace(
    CONFIG, hidden_size=36, intermediate_size=50, num_heads=3, num_kv_heads=1, head_dim=12
)
MODELS = ("tiny", "llama", "qwen2", "qwen3", "odd")
SETTINGS = [
    {"block_size": 16, "pass_tokens": 512},
    {"block_size": 4, "pass_tokens": 64},
    {"block_size": 5, "pass_tokens": 17, "max_sequences": 7},
    # Too small for all of them at once: sequences give up their place and come back.
    {"block_size": 16, "cache_tokens": 288, "pass_tokens": 128},
]


@cache
def pair(name: str) -> Pair:
    configs = {"llama": CONFIG, "qwen2": QWEN2, "qwen3": QWEN, "odd": ODD}
    made: Decoder = tiny() if name == "tiny" else decoder(replace(configs[name], max_context=512))
    return Pair(made)


def tokens(rng: Generator, length: int, vocabulary: int = 97) -> list[int]:
    return [int(token) for token in rng.integers(1, vocabulary, length)]


def texts(rng: Generator, count: int, longest: int = 200) -> list[Asked]:
    """Texts of mixed lengths and adapters; some begin like the one before."""
    chosen = [Asked("r8", tokens(rng, longest))]
    while len(chosen) < count:
        prefix = chosen[-1].tokens[: int(rng.integers(0, 64))] if rng.random() < 0.4 else []
        length = int(rng.integers(2, longest if rng.random() < 0.5 else 20))
        chosen.append(Asked(str(rng.choice(list(RANKS))), [*prefix, *tokens(rng, length)]))
    return chosen


def alone(subject: Pair, batch: list[Asked]) -> list[Floats]:
    return [subject.train([asked], backward=False)[0] for asked in batch]


def assert_same(found: list[Floats], wanted: list[Floats]) -> None:
    assert len(found) == len(wanted)
    for number, (one, other) in enumerate(zip(found, wanted, strict=True)):
        assert one.dtype == other.dtype == np.float32
        assert one.size > 0
        np.testing.assert_array_equal(one, other, err_msg=f"text {number} of {len(found)}")


@pytest.mark.parametrize("name", MODELS)
def test_training_gives_the_bits_of_forward_in_any_batch(name: str) -> None:
    subject, rng = pair(name), np.random.default_rng(1)
    batch = texts(rng, 9)
    wanted = alone(subject, batch)
    assert_same(subject.train(batch, backward=False), wanted)
    assert_same(subject.train(batch, backward=True), wanted)
    turned = subject.train(batch[::-1], backward=True)
    assert_same(turned[::-1], wanted)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_prompt_logprobs_have_the_bits_of_forward(name: str, settings: dict[str, int]) -> None:
    subject, rng = pair(name), np.random.default_rng(2)
    batch = texts(rng, 12)
    assert_same(subject.score(batch, **settings), alone(subject, batch))


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_sampled_logprobs_have_the_bits_of_forward(name: str, settings: dict[str, int]) -> None:
    subject, rng = pair(name), np.random.default_rng(3)
    sampler = subject.sampler(**settings)
    asked = texts(rng, 10, longest=100)
    runs = [
        sampler.submit(
            op(
                one.tokens,
                num_samples=int(rng.integers(1, 4)),
                op_id=f"op-{number}",
                temperature=1.0,
                max_tokens=int(rng.integers(1, 40)),
                seed=number,
            ),
            version=one.model_id,
        )
        for number, one in enumerate(asked)
    ]
    drive(sampler)
    compared = 0
    for run, one in zip(runs, asked, strict=True):
        for whole, found in sampled(answer(run), one.tokens):
            (wanted,) = subject.train([Asked(one.model_id, whole)], backward=False)
            np.testing.assert_array_equal(found, wanted[len(one.tokens) - 1 :])
            compared += found.size
    assert compared > 100
    assert sampler.preemptions > 0 or "cache_tokens" not in settings


def test_sampled_tokens_do_not_depend_on_the_batch() -> None:
    subject = pair("tiny")
    asked = texts(np.random.default_rng(4), 12, longest=60)

    def draw(batch: list[Asked]) -> list[list[list[int]]]:
        sampler = subject.sampler(max_sequences=64)
        runs = [
            sampler.submit(
                op(one.tokens, num_samples=5, temperature=1.0, max_tokens=30, seed=7),
                version=one.model_id,
            )
            for one in batch
        ]
        drive(sampler)
        return [[s.tokens for s in answer(run).response.sequences] for run in runs]

    together = draw(asked)
    assert together == [draw([one])[0] for one in asked]
    assert len({str(tokens) for samples in together for tokens in samples}) > 50


def test_a_prefix_from_the_cache_gives_the_bits_of_one_computed_now() -> None:
    subject = pair("tiny")
    prompt = tokens(np.random.default_rng(5), 100)
    sampler = subject.sampler(block_size=4)
    found: list[list[float]] = []
    for _ in range(2):
        run = sampler.submit(op(prompt, max_tokens=20, temperature=1.0, seed=3), version="r33")
        drive(sampler)
        found.append(list(answer(run).response.sequences[0].logprobs or []))
    assert answer(run).response.prompt_cache_hit_tokens == 96
    assert found[0] == found[1]


def test_the_base_model_has_the_bits_of_an_untouched_adapter() -> None:
    """B is zero at first, and adding zeros changes nothing."""
    subject = pair("tiny")
    subject.trainer.drop("fresh")
    add(subject.trainer, "fresh", 4, stir=False)
    prompt = tokens(np.random.default_rng(6), 70)
    batch = [Asked(BASE, prompt), Asked("fresh", prompt), Asked("r3", prompt)]
    base, fresh, other = subject.score(batch)
    np.testing.assert_array_equal(base, fresh)
    assert (base != other).mean() > 0.9


def test_the_number_of_threads_may_be_any_as_long_as_it_stays() -> None:
    subject, before = pair("tiny"), torch.get_num_threads()
    batch = texts(np.random.default_rng(7), 8)
    try:
        torch.set_num_threads(3)
        wanted = alone(subject, batch)
        assert_same(subject.train(batch, backward=True), wanted)
        assert_same(subject.score(batch, block_size=4, pass_tokens=64), wanted)
    finally:
        torch.set_num_threads(before)


def test_samples_of_one_thread_have_the_bits_of_training_on_two() -> None:
    subject, before = pair("tiny"), torch.get_num_threads()
    batch = texts(np.random.default_rng(9), 8)
    try:
        torch.set_num_threads(2)  # little work takes one of them: see `threads.py`
        wanted = subject.train(batch, backward=True)
        assert_same(subject.score(batch, block_size=4, pass_tokens=64), wanted)
        torch.set_num_threads(1)
        assert_same(subject.train(batch, backward=True), wanted)
    finally:
        torch.set_num_threads(before)


def test_the_comparison_notices_a_single_last_bit() -> None:
    wanted = [np.float32([1.0, 2.0])]
    with pytest.raises(AssertionError):
        assert_same([np.nextafter(wanted[0], np.float32(9))], wanted)


def test_topk_and_target_logprobs_are_those_of_the_prompt() -> None:
    subject = pair("tiny")
    prompt = tokens(np.random.default_rng(8), 40)
    sampler = subject.sampler()
    extra = {**PROMPT, "topk_prompt_logprobs": 97}
    run = sampler.submit(op(prompt, max_tokens=1, extra=extra), version="r8")
    drive(sampler)
    response = answer(run).response
    assert response.prompt_logprobs_np is not None
    assert response.topk_prompt_logprobs_np is not None
    ids, values = (
        response.topk_prompt_logprobs_np.token_ids,
        response.topk_prompt_logprobs_np.logprobs,
    )
    (wanted,) = subject.train([Asked("r8", prompt)], backward=False)
    seen = 0
    for place, token in enumerate(prompt[1:], 1):
        hit = np.flatnonzero(ids[place] == token)
        if hit.size:
            assert values[place, hit[0]] == wanted[place - 1]
            seen += 1
    assert seen > 5

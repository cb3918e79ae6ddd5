"""What a request may ask about its own prompt."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.unit.engine.sampler.kit import answer, drive, logits, op, sample, sampler, text
from tinkex.engine.sampler.prompt import PromptScores
from tinkex.types import TensorData

TOLERANCE = 1e-5
PROMPT = text(23)


def reference() -> np.ndarray:
    return torch.log_softmax(logits(PROMPT), -1).numpy()


def ask(settings: dict[str, Any] | None = None, **extra: Any) -> Any:
    params = extra.pop("params", {})
    operation = op(PROMPT, max_tokens=2, extra=extra, **params)
    return sample(sampler(**(settings or {})), operation).response


CHUNKINGS = [{}, {"pass_tokens": 5, "max_sequences": 5}, {"logit_rows": 3}, {"block_size": 1}]


@pytest.mark.parametrize("settings", CHUNKINGS)
def test_prompt_logprobs_have_one_entry_per_token_and_none_for_the_first(settings: Any) -> None:
    found = ask(settings, prompt_logprobs=True).prompt_logprobs_np
    expected = reference()[np.arange(22), PROMPT[1:]]
    assert found.shape == (23,)
    assert np.isnan(found[0])
    assert np.abs(found[1:] - expected).max() < TOLERANCE


@pytest.mark.parametrize("last_n", [1, 7, 22])
def test_only_the_last_n_are_scored_when_asked(last_n: int) -> None:
    found = ask(prompt_logprobs=True, prompt_logprobs_last_n=last_n).prompt_logprobs_np
    whole = ask(prompt_logprobs=True).prompt_logprobs_np
    assert np.isnan(found[: 23 - last_n]).all()
    assert np.array_equal(found[23 - last_n :], whole[23 - last_n :])


def test_scoring_only_the_end_uses_the_prefix_cache_for_the_rest() -> None:
    target = sampler(block_size=4)
    sample(target, op(PROMPT))
    whole = sample(target, op(PROMPT, extra={"prompt_logprobs": True}))
    assert whole.cached_tokens == 0
    extra = {"prompt_logprobs": True, "prompt_logprobs_last_n": 5}
    end = sample(target, op(PROMPT, extra=extra))
    # Row 17 predicts token 18, the first one wanted: 16 tokens may come from the cache.
    assert end.cached_tokens == 16
    found, expected = end.response.prompt_logprobs_np, whole.response.prompt_logprobs_np
    assert found is not None
    assert expected is not None
    assert np.abs(found[-5:] - expected[-5:]).max() < TOLERANCE


@pytest.mark.parametrize("settings", CHUNKINGS)
def test_top_k_prompt_logprobs_are_the_best_of_each_position(settings: Any) -> None:
    found = ask(settings, topk_prompt_logprobs=3)
    assert found.prompt_logprobs_np is None
    lists = found.topk_prompt_logprobs
    assert lists[0] is None
    values, ids = torch.tensor(reference()).topk(3)
    for i, row in enumerate(lists[1:]):
        assert [token for token, _ in row] == ids[i].tolist()
        assert np.allclose([value for _, value in row], values[i], atol=TOLERANCE)


def test_top_k_beyond_the_vocabulary_gives_the_whole_vocabulary() -> None:
    found = ask(topk_prompt_logprobs=1000).topk_prompt_logprobs_np
    assert found.token_ids.shape == (23, 264)


@pytest.mark.parametrize("settings", CHUNKINGS)
def test_target_logprobs_come_back_in_the_dense_shape_they_were_asked_in(settings: Any) -> None:
    asked = np.arange(44).reshape(22, 2) * 5 % 264
    asked[3, 1] = asked[10] = -1
    found = ask(settings, target_prompt_logprobs=TensorData.from_numpy(asked))
    values = found.target_prompt_logprobs
    assert values.dtype == "float32"
    assert values.shape == [22, 2]
    expected = np.where(asked >= 0, reference()[np.arange(22)[:, None], asked], 0)
    assert np.abs(values.to_numpy() - expected).max() < TOLERANCE


@pytest.mark.parametrize("settings", CHUNKINGS)
def test_target_logprobs_come_back_in_the_sparse_layout_they_were_asked_in(settings: Any) -> None:
    crow = [0] * 5 + [2] * 8 + [5] * 10
    asked = TensorData([9, -1, 7, 0, 263], "int64", [22, 6], crow, [0, 5, 1, 2, 3])
    values = ask(settings, target_prompt_logprobs=asked).target_prompt_logprobs
    assert values.shape == [22, 6]
    assert values.sparse_crow_indices == crow
    assert values.sparse_col_indices == [0, 5, 1, 2, 3]
    ref = reference()
    expected = [ref[4, 9], 0.0, ref[12, 7], ref[12, 0], ref[12, 263]]
    assert np.abs(np.array(values.data) - expected).max() < TOLERANCE


def test_sparse_targets_near_the_end_leave_the_beginning_to_the_cache() -> None:
    crow = [0] * 21 + [1, 1]
    asked = TensorData([9], "int64", [22, 4], crow, [0])
    scores = PromptScores(op(PROMPT, extra={"target_prompt_logprobs": asked}), PROMPT, 0, 264)
    assert scores.next_row == 20
    nothing = TensorData([-1] * 22, "int64", [22, 1])
    scores = PromptScores(op(PROMPT, extra={"target_prompt_logprobs": nothing}), PROMPT, 0, 264)
    assert scores.complete


@pytest.mark.parametrize("settings", CHUNKINGS)
def test_alternatives_do_not_depend_on_chunks_and_carry_the_models_logprobs(settings: Any) -> None:
    params = {"temperature": 1.5, "seed": 3}
    found = ask(settings, prompt_alt_tokens_k=4, params=params).prompt_alt_tokens
    whole = ask(prompt_alt_tokens_k=4, params=params).prompt_alt_tokens
    assert found.tokens == whole.tokens
    ids = found.tokens.to_numpy()
    assert ids.shape == (22, 4)
    expected = reference()[np.arange(22)[:, None], ids]
    assert np.abs(found.logprobs.to_numpy() - expected).max() < TOLERANCE


def test_alternatives_follow_the_requests_temperature() -> None:
    each, seeds = 1_000, range(20)
    asked = [
        ask(prompt_alt_tokens_k=each, params={"temperature": 0.7, "seed": seed, "top_k": 1})
        for seed in seeds
    ]
    ids = np.concatenate([found.prompt_alt_tokens.tokens.to_numpy() for found in asked], axis=1)
    count = each * len(seeds)
    for row in (0, 9, 21):
        p = torch.softmax(logits(PROMPT)[row].double() / 0.7, -1).numpy()
        order = np.argsort(-p)
        # The 15 likeliest tokens, and the rest as one class: 15 degrees of freedom.
        counts = np.bincount(ids[row], minlength=264)[order]
        observed = np.append(counts[:15], counts[15:].sum())
        expected = np.append(p[order][:15], p[order][15:].sum()) * count
        # Exceeded by chance once in a thousand seeds.
        assert ((observed - expected) ** 2 / expected).sum() < 37.7


def test_alternatives_at_temperature_zero_are_the_likeliest_token() -> None:
    ids = ask(prompt_alt_tokens_k=3).prompt_alt_tokens.tokens.to_numpy()
    assert (ids == reference()[:-1].argmax(-1)[:, None]).all()


def test_alternatives_are_independent_of_the_sampled_tokens() -> None:
    plain = sample(sampler(), op(PROMPT, temperature=1.0, seed=3))
    both = sample(sampler(), op(PROMPT, temperature=1.0, seed=3, extra={"prompt_alt_tokens_k": 2}))
    assert plain.response.sequences[0].tokens == both.response.sequences[0].tokens


def test_a_prompt_of_one_token_has_nothing_to_score() -> None:
    extra = {"prompt_logprobs": True, "topk_prompt_logprobs": 2, "prompt_alt_tokens_k": 3}
    asked = TensorData([], "int64", [0, 2])
    result = sample(sampler(), op([5], extra={**extra, "target_prompt_logprobs": asked})).response
    assert result.prompt_logprobs == [None]
    assert result.topk_prompt_logprobs == [None]
    assert result.target_prompt_logprobs is not None
    assert result.target_prompt_logprobs.shape == [0, 2]
    assert result.prompt_alt_tokens is not None
    assert result.prompt_alt_tokens.tokens.shape == [0, 3]


def test_scores_survive_preemption() -> None:
    extra = {"prompt_logprobs": True, "topk_prompt_logprobs": 2}
    expected = sample(sampler(), op(PROMPT, extra=extra)).response
    target = sampler(cache_tokens=40, pass_tokens=4, max_sequences=4)
    older = target.submit(op(text(3, 9), op_id="old", max_tokens=30))
    run = target.submit(op(PROMPT, extra=extra))
    drive(target)
    assert target.preemptions > 0
    assert answer(older).generated_tokens == 30
    found = answer(run).response
    assert found.prompt_logprobs_np is not None
    assert expected.prompt_logprobs_np is not None
    worst = np.nanmax(np.abs(found.prompt_logprobs_np - expected.prompt_logprobs_np))
    assert worst < TOLERANCE
    assert np.isnan(found.prompt_logprobs_np).sum() == 1


def test_scoring_without_drawing_ends() -> None:
    target = sampler(pass_tokens=5, max_sequences=5)
    result = sample(target, op(PROMPT, max_tokens=0, extra={"prompt_logprobs": True}))
    assert result.generated_tokens == 0
    assert result.response.prompt_logprobs_np is not None
    assert np.isfinite(result.response.prompt_logprobs_np[1:]).all()


def test_what_is_scored_may_come_from_the_cache_after_a_preemption() -> None:
    target = sampler(pass_tokens=4, max_sequences=4)
    run = target.submit(op(PROMPT, extra={"prompt_logprobs": True}))
    seen = [run.sequences[0].reusable]
    for _ in range(3):
        target.step()
        seen.append(run.sequences[0].reusable)
    assert seen == [0, 4, 8, 12]

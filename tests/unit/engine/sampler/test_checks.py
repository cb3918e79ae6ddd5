"""Bad requests are refused by name before anything runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from msgspec.structs import force_setattr

from tests.unit.engine.sampler.kit import op, sample, sampler, text, tiny
from tinkex.engine.sampler import Sampler, SamplerSettings
from tinkex.errors import InputError
from tinkex.types import EncodedTextChunk, ImageChunk, ModelInput, SamplingParams, TensorData

TWO_BAD_ROWS = TensorData([1, 2], "int64", [2, 1])


def edited(**changes: Any) -> Any:
    return replace(op(text(6)), **changes)


def with_params(**changes: Any) -> Any:
    """Parameters that the type itself would refuse, as they might come from elsewhere."""
    params = SamplingParams(max_tokens=4)
    for name, value in changes.items():
        force_setattr(params, name, value)
    return edited(params=params)


@pytest.mark.parametrize(
    ("bad", "path", "words"),
    [
        (edited(prompt=ModelInput.empty()), "prompt", "at least one token"),
        (op([3, 264]), "prompt.chunks[0].tokens[1]", "ids end at 263"),
        (
            edited(
                prompt=ModelInput(
                    chunks=[
                        EncodedTextChunk(tokens=[1]),
                        ImageChunk(data=b"x", format="png", expected_tokens=3),
                    ]
                )
            ),
            "prompt.chunks[1]",
            "text only",
        ),
        (op(text(8193)), "prompt", "8193 tokens, tinkex/tiny takes 8192"),
        (edited(sequence_ids=[]), "num_samples", "at least one"),
        (with_params(temperature=float("nan")), "sampling_params.temperature", "0 or more"),
        (with_params(temperature=-1.0), "sampling_params.temperature", "0 or more"),
        (with_params(temperature=float("inf")), "sampling_params.temperature", "0 or more"),
        (with_params(top_p=float("nan")), "sampling_params.top_p", "between 0 and 1"),
        (with_params(top_p=1.5), "sampling_params.top_p", "between 0 and 1"),
        (with_params(top_k=-2), "sampling_params.top_k", "-1"),
        (with_params(max_tokens=-1), "sampling_params.max_tokens", "negative"),
        (with_params(stop=[999]), "sampling_params.stop[0]", "999"),
        (edited(topk_prompt_logprobs=-1), "topk_prompt_logprobs", "negative"),
        (edited(topk_sample_logprobs=-1), "topk_sample_logprobs", "negative"),
        (edited(prompt_alt_tokens_k=-1), "prompt_alt_tokens_k", "negative"),
        (edited(topk_prompt_logprobs=1025), "topk_prompt_logprobs", "1024"),
        (edited(topk_sample_logprobs=10**7), "topk_sample_logprobs", "1024"),
        (edited(prompt_alt_tokens_k=10**7), "prompt_alt_tokens_k", "1024"),
        (
            edited(sequence_ids=["s"] * 4096, topk_sample_logprobs=1024),
            "topk_sample_logprobs",
            "numbers",
        ),
        (edited(prompt_logprobs_last_n=2), "prompt_logprobs_last_n", "needs prompt_logprobs"),
        (
            edited(prompt_logprobs=True, prompt_logprobs_last_n=6),
            "prompt_logprobs_last_n",
            "between 1 and 5",
        ),
        (
            edited(prompt_logprobs=True, prompt_logprobs_last_n=0),
            "prompt_logprobs_last_n",
            "between 1 and 5",
        ),
        (
            edited(target_prompt_logprobs=TensorData([0.5] * 5, "float32", [5, 1])),
            "target_prompt_logprobs",
            "int64",
        ),
        (edited(target_prompt_logprobs=TWO_BAD_ROWS), "target_prompt_logprobs", r"\[5, K\]"),
        (
            edited(target_prompt_logprobs=TensorData([0, 1, 2, 3, 4], "int64")),
            "target_prompt_logprobs",
            r"\[5, K\]",
        ),
        (
            edited(target_prompt_logprobs=TensorData([0, 1, -2, 3, 4], "int64", [5, 1])),
            "target_prompt_logprobs.data[2]",
            "-2",
        ),
        (
            edited(target_prompt_logprobs=TensorData([0, 1, 2, 3, 264], "int64", [5, 1])),
            "target_prompt_logprobs.data[4]",
            "264",
        ),
    ],
)
def test_bad_input_is_refused_with_its_path(bad: Any, path: str, words: str) -> None:
    target = sampler(cache_tokens=10_000)
    with pytest.raises(InputError, match=words) as caught:
        target.submit(bad)
    assert caught.value.path == path
    assert target.idle
    target.check()


def test_a_prompt_that_can_never_fit_is_refused_with_the_number_that_would() -> None:
    with pytest.raises(InputError, match="cache of at least 33 tokens") as caught:
        sampler(cache_tokens=32).submit(op(text(33)))
    assert caught.value.path == "prompt"


def test_too_many_tokens_are_refused_with_the_number_that_fits_and_that_number_does() -> None:
    target = sampler(cache_tokens=32)
    with pytest.raises(InputError, match=r"need a cache of 49 tokens.*at most 23") as caught:
        target.submit(op(text(10), max_tokens=40))
    assert caught.value.path == "sampling_params.max_tokens"
    assert sample(target, op(text(10), max_tokens=23)).generated_tokens == 23


def test_a_refused_request_disturbs_no_other() -> None:
    target = sampler()
    run = target.submit(op(text(9)))
    target.step()
    with pytest.raises(InputError):
        target.submit(op([999]))
    while not target.idle:
        target.step()
    assert run.result is not None


def test_settings_that_cannot_work_are_refused() -> None:
    with pytest.raises(ValueError, match="0 blocks of 16"):
        Sampler(tiny(), SamplerSettings(cache_tokens=15))
    with pytest.raises(ValueError, match="pass of 4 tokens cannot hold 8 sequences"):
        Sampler(tiny(), SamplerSettings(cache_tokens=160, pass_tokens=4, max_sequences=8))

"""Completions: prompts of every form, choices, stops, log-probabilities, usage."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.unit.server.conftest import datum
from tinkex.transport.base import HttpRequest, Pool

if TYPE_CHECKING:
    from .conftest import V1

pytestmark = pytest.mark.anyio


async def sampled(v1: V1, prompt: list[int], **params: Any) -> Any:
    """The same through the sampling API."""
    sampler = await v1.api.sampler(await v1.api.session())
    future = await v1.api.sample(
        sampler,
        prompt={"chunks": [{"type": "encoded_text", "tokens": prompt}]},
        sampling_params=params,
        num_samples=2,
        topk_sample_logprobs=2,
    )
    return await v1.api.sampled(future)


async def test_the_text_is_that_of_the_tokens_the_sampling_api_draws(v1: V1) -> None:
    answer = await v1.complete(n=2, max_tokens=30)
    drawn = await sampled(v1, list(b"hello"), max_tokens=30, seed=1)
    assert answer["object"] == "text_completion"
    assert answer["model"] == "tinkex/tiny"
    texts = [
        bytes(token for token in sequence.tokens if token < 256).decode(errors="replace")
        for sequence in drawn.sequences
    ]
    assert [choice["text"] for choice in answer["choices"]] == texts
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert texts[0] != texts[1]


async def test_a_prompt_is_text_or_tokens_or_a_list_of_either(v1: V1) -> None:
    text = await v1.complete()
    tokens = await v1.complete(prompt=list(b"hello"))
    assert text["choices"] == tokens["choices"]
    several = await v1.complete(prompt=["hello", "other"], n=2)
    assert [choice["index"] for choice in several["choices"]] == [0, 1, 2, 3]
    assert several["choices"][0] == text["choices"][0]
    mixed = await v1.complete(prompt=["hello", list(b"other")], n=2)
    assert mixed["choices"] == several["choices"]
    assert several["usage"]["prompt_tokens"] == 10
    alone = await v1.complete(prompt="other", n=2)
    assert [c["text"] for c in alone["choices"]] == [c["text"] for c in several["choices"][2:]]


async def test_the_default_length_is_openais_and_a_length_of_zero_is_possible(v1: V1) -> None:
    answer = await v1.complete()
    assert answer["usage"]["completion_tokens"] == 16
    assert answer["choices"][0]["finish_reason"] == "length"
    nothing = await v1.complete(max_tokens=0)
    assert nothing["choices"][0]["text"] == ""
    assert nothing["usage"]["completion_tokens"] == 0


async def test_the_same_seed_gives_the_same_text_and_none_gives_another(v1: V1) -> None:
    first, second = await v1.complete(), await v1.complete()
    assert first["choices"] == second["choices"]
    assert first["id"] != second["id"]
    free = [await v1.complete(seed=None, max_tokens=64) for _ in range(2)]
    assert free[0]["choices"] != free[1]["choices"]


async def test_a_stop_string_ends_the_text_and_is_not_part_of_it(v1: V1) -> None:
    whole = (await v1.complete(max_tokens=200))["choices"][0]["text"]
    stop = next(c for c in whole[2:] if c.isascii() and c.isprintable())
    choice = (await v1.complete(max_tokens=200, stop=stop))["choices"][0]
    assert choice["text"] == whole[: whole.index(stop)]
    assert choice["finish_reason"] == "stop"
    listed = await v1.complete(max_tokens=200, stop=["never to be seen", stop, ""])
    assert listed["choices"] == [choice]


async def test_end_of_text_stops_and_is_not_shown(v1: V1) -> None:
    model = await v1.api.model()
    for step in range(5):
        await v1.api.train(model, 1 + 2 * step, datum([1, 2], target_tokens=[256, 256]))
        await v1.api.step(model, 2 + 2 * step, learning_rate=3.0)
    body = {"model_id": model, "seq_id": 11, "path": "ends"}
    path = (await v1.api.result(await v1.api.post("/save_weights_for_sampler", body)))["path"]
    for stop in (None, "x"):
        answer = await v1.complete(model=path, temperature=0, stop=stop, logprobs=0)
        choice = answer["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == ("", "stop")
        assert choice["logprobs"]["tokens"] == []


async def test_logprobs_are_those_of_the_sampling_api(v1: V1) -> None:
    drawn = (await sampled(v1, list(b"hello"), max_tokens=8, seed=1)).sequences[0]
    logprobs = (await v1.complete(max_tokens=8, logprobs=2))["choices"][0]["logprobs"]
    assert logprobs["token_logprobs"] == drawn.logprobs
    assert [len(each) for each in logprobs["top_logprobs"]] == [2] * 8
    best = [max(each.values()) for each in logprobs["top_logprobs"]]
    assert best == [row[0][1] for row in drawn.topk_logprobs]
    assert logprobs["tokens"][0] == f"token_id:{drawn.tokens[0]}"


async def test_echo_scores_the_prompt_as_the_sampling_api_does(v1: V1) -> None:
    sampler = await v1.api.sampler(await v1.api.session())
    prompt = {"chunks": [{"type": "encoded_text", "tokens": list(b"hello")}]}
    future = await v1.api.sample(sampler, prompt=prompt, prompt_logprobs=True)
    scores = (await v1.api.sampled(future)).prompt_logprobs
    choice = (await v1.complete(echo=True, logprobs=1, max_tokens=0))["choices"][0]
    assert choice["text"] == "hello"
    assert choice["logprobs"]["tokens"] == list("hello")
    assert choice["logprobs"]["token_logprobs"] == scores
    assert choice["logprobs"]["text_offset"] == [0, 1, 2, 3, 4]
    assert choice["logprobs"]["top_logprobs"][0] is None
    longer = (await v1.complete(echo=True, logprobs=1, max_tokens=40))["choices"][0]
    alone = (await v1.complete(logprobs=1, max_tokens=40))["choices"][0]
    assert longer["text"] == "hello" + alone["text"]
    offsets = [5 + offset for offset in alone["logprobs"]["text_offset"]]
    assert longer["logprobs"]["text_offset"] == [0, 1, 2, 3, 4, *offsets]


async def test_usage_says_what_was_cached_and_is_counted_for_the_caller(v1: V1) -> None:
    first = await v1.complete(n=2)
    again = await v1.complete(n=2)
    details = {"cached_tokens": 0}
    assert first["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 32,
        "total_tokens": 37,
        "prompt_tokens_details": details,
    }
    assert again["usage"]["prompt_tokens_details"] == {"cached_tokens": 4}
    (hour,) = await v1.api.server.store.usage(v1.api.owner, 0, 1e12)
    assert (hour.kind, hour.base_model) == ("sample", "tinkex/tiny")
    assert (hour.usage.generated_tokens, hour.usage.cached_tokens) == (64, 4)


@pytest.mark.parametrize(
    ("members", "param", "words"),
    [
        ({"prompt": ""}, "prompt", "empty"),
        ({"prompt": []}, "prompt", "at least one"),
        ({"prompt": [[]]}, "prompt", "a string, a list of token ids"),
        ({"prompt": {"text": "x"}}, "prompt", "a string, a list of token ids"),
        ({"prompt": [1, "x"]}, "prompt", "a string, a list of token ids"),
        ({"prompt": [True, False]}, "prompt", "a string, a list of token ids"),
        ({"prompt": [1] * 8193}, "prompt", "context of 8192"),
        ({"prompt": "x" * 200_000}, "prompt", "context of 8192"),
        ({"prompt": ["x"] * 1025}, "prompt", "1024 at most"),
        ({"prompt": None}, "prompt", "missing required field"),
        ({"model": None}, "model", "missing required field"),
        ({"n": 0}, "n", "Expected `int` >= 1"),
        ({"n": 1024, "prompt": ["a", "b"]}, "n", "1024 at most"),
        ({"max_tokens": -1}, "max_tokens", "Expected `int` >= 0"),
        ({"temperature": "hot"}, "temperature", "Expected `float`"),
        ({"top_p": 1.5}, "top_p", "Expected `float` <= 1"),
        ({"logprobs": 21}, "logprobs", "Expected `int` <= 20"),
        ({"stop": ["x"] * 65}, "stop", "length <= 64"),
        ({"stop": [7]}, "stop[0]", "Expected `str`"),
        ({"stop": "x" * 1025}, "stop", "length <= 1024"),
        ({"suffix": "end"}, "suffix", "not supported"),
        ({"best_of": 3}, "best_of", "not supported"),
        ({"logit_bias": {"50256": -100}}, "logit_bias", "not supported"),
        ({"frequency_penalty": 0.5}, "frequency_penalty", "not supported"),
        ({"colour": "red"}, "colour", "Unknown parameter"),
        ({"stream": True, "echo": True, "logprobs": 1}, "echo", "cannot echo"),
    ],
)
async def test_what_cannot_be_done_is_refused_by_name(
    v1: V1, members: dict[str, Any], param: str, words: str
) -> None:
    status, error = await v1.refused("/completions", **members)
    assert status == 400
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert words in error["message"]


async def test_what_changes_nothing_is_accepted(v1: V1) -> None:
    plain = await v1.complete()
    harmless = {
        "user": "me",
        "metadata": {"a": "b"},
        "best_of": 1,
        "suffix": None,
        "frequency_penalty": 0,
        "presence_penalty": 0.0,
        "logit_bias": {},
        "top_k": -1,
    }
    assert (await v1.complete(**harmless))["choices"] == plain["choices"]


@pytest.mark.parametrize("token", [-1, 1024, 2**40])
async def test_a_token_outside_the_vocabulary_is_the_callers_mistake(v1: V1, token: int) -> None:
    status, error = await v1.refused("/completions", prompt=[1, token])
    assert status == 400
    assert error["type"] == "invalid_request_error"


async def test_half_a_character_is_the_callers_mistake(v1: V1) -> None:
    headers = {"authorization": "Bearer tml-one"}
    body = b'{"model": "tinkex/tiny", "prompt": "\\ud800"}'
    request = HttpRequest("POST", "/v1/completions", Pool.REST, 60, "", headers, body)
    assert (await v1.api.transport.send(request)).status == 400

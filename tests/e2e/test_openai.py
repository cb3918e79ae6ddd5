"""The real `openai` client against a real server and engine: SmolLM2-135M and the tiny model."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import openai
import pytest

from tests.patience import PATIENCE_S
from tinkex import AdamParams, Datum, ModelInput, ServiceClient
from tinkex.config import DEFAULT_MODEL
from tinkex.engine.local import LocalEngine
from tinkex.engine.models.loader import load_model
from tinkex.server.openai.tokenization import TextCodec
from tinkex.testing import API_KEY, FakeServer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

TINY = "tinkex/tiny"
PARIS: list[Any] = [{"role": "user", "content": "What is the capital of France? One sentence."}]


def unreachable(name: str) -> Path:
    raise ConnectionError("the model comes from its package")


def serve(engine: LocalEngine) -> Iterator[FakeServer]:
    with FakeServer(engine=engine).serve() as server:  # pyright: ignore[reportArgumentType]
        yield server
    asyncio.run(engine.close())


@pytest.fixture(scope="module")
def tiny_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeServer]:
    yield from serve(LocalEngine([load_model(TINY)], tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module")
def smollm2_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeServer]:
    model = load_model(DEFAULT_MODEL, fetch=unreachable)
    yield from serve(LocalEngine([model], tmp_path_factory.mktemp("smollm2")))


def client_of(server: FakeServer, key: str = API_KEY) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)


@pytest.fixture
def tiny(tiny_server: FakeServer) -> Iterator[openai.OpenAI]:
    with client_of(tiny_server) as client:
        yield client


@pytest.fixture
def smollm2(smollm2_server: FakeServer) -> Iterator[openai.OpenAI]:
    with client_of(smollm2_server) as client:
        yield client


def text_of(server: FakeServer) -> TextCodec:
    spec = server.engine.models[0]
    assert spec.text is not None
    return TextCodec(spec.text, spec.max_context_length)


def scored(server: FakeServer, prompt: list[int], tokens: list[int], **weights: str) -> list[float]:
    """What compute_logprobs says about tokens that follow a prompt."""
    with ServiceClient(base_url=server.url, api_key=API_KEY) as service:
        sampler = service.create_sampling_client(**weights)
        logprobs = sampler.compute_logprobs(ModelInput.from_ints([*prompt, *tokens])).result(
            PATIENCE_S
        )
    return [value for value in logprobs[len(prompt) :] if value is not None]


# -- SmolLM2 ---------------------------------------------------------------------------------------


@pytest.mark.smollm2
def test_a_chat_is_answered_in_english_and_streamed_alike(smollm2: openai.OpenAI):
    asked: Any = {"model": DEFAULT_MODEL, "messages": PARIS, "temperature": 0, "max_tokens": 30}
    answer = smollm2.chat.completions.create(**asked)
    (choice,) = answer.choices
    assert choice.message.content == "The capital of France is Paris."
    assert choice.finish_reason == "stop"
    assert answer.usage is not None
    # Seven tokens of text, and the one that ends it.
    assert answer.usage.completion_tokens == 8
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 8

    options = {"include_usage": True}
    *chunks, last = smollm2.chat.completions.create(**asked, stream=True, stream_options=options)
    assert chunks[0].choices[0].delta.role == "assistant"
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks]
    assert "".join(pieces) == choice.message.content
    assert sum(map(bool, pieces)) > 3
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert last.usage is not None
    assert last.usage.completion_tokens == 8


@pytest.mark.smollm2
def test_logprobs_are_those_that_the_trainers_path_computes(
    smollm2: openai.OpenAI, smollm2_server: FakeServer
):
    text = text_of(smollm2_server)
    ids = {text.pieces.bytes_of(token): token for token in range(49152)}
    prompt = asyncio.run(text.encode("The sky over Paris is", "prompt"))
    answer = smollm2.completions.create(
        model=DEFAULT_MODEL, prompt=prompt, seed=7, max_tokens=12, logprobs=3, n=2
    )
    for choice in answer.choices:
        assert choice.logprobs is not None
        shown = choice.logprobs.tokens or []
        tokens = [ids[token.encode()] for token in shown]
        expected = scored(smollm2_server, prompt, tokens, base_model=DEFAULT_MODEL)
        # fp32: rows computed in other shapes may differ in their last bits; the engine promises
        # 1e-5 there.
        assert choice.logprobs.token_logprobs == pytest.approx(expected, abs=1e-5)
        for own, best in zip(
            choice.logprobs.token_logprobs or [], choice.logprobs.top_logprobs or [], strict=True
        ):
            assert max(best.values()) >= own - 1e-5
    assert answer.choices[0].text != answer.choices[1].text


@pytest.mark.smollm2
def test_the_chat_shape_of_logprobs_spells_the_text_in_bytes(smollm2: openai.OpenAI):
    asked: Any = {"model": DEFAULT_MODEL, "max_tokens": 24, "temperature": 0}
    asked |= {"messages": [{"role": "user", "content": "Repeat: naïve ☃ 🎉 café"}]}
    answer = smollm2.chat.completions.create(**asked, logprobs=True, top_logprobs=2)
    (choice,) = answer.choices
    assert choice.logprobs is not None
    content = choice.logprobs.content or []
    spelled = b"".join(bytes(token.bytes or []) for token in content)
    assert spelled.decode(errors="replace") == choice.message.content
    assert all(len(token.top_logprobs) == 2 for token in content)
    assert all(token.top_logprobs[0].logprob == token.logprob for token in content)


@pytest.mark.smollm2
def test_stop_strings_end_the_text_before_them(smollm2: openai.OpenAI):
    asked: Any = {"model": DEFAULT_MODEL, "prompt": "1 2 3 4 5", "temperature": 0, "max_tokens": 40}
    free = smollm2.completions.create(**asked).choices[0].text
    stopped = smollm2.completions.create(**asked, stop=[" 8", "\n"])
    assert " 8" in free
    assert stopped.choices[0].text == free[: free.index(" 8")]
    assert stopped.choices[0].finish_reason == "stop"
    assert stopped.usage is not None
    assert stopped.usage.completion_tokens < 40
    streamed = smollm2.completions.create(**asked, stop=[" 8", "\n"], stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == stopped.choices[0].text


# -- the tiny model --------------------------------------------------------------------------------


def test_models_are_listed_and_found(tiny: openai.OpenAI):
    assert [model.id for model in tiny.models.list()] == [TINY]
    assert tiny.models.retrieve(TINY).id == TINY


def test_seeds_choices_and_streams_agree(tiny: openai.OpenAI):
    asked: Any = {"model": TINY, "prompt": ["one", "two"], "n": 2, "max_tokens": 60, "seed": 11}
    first, second = (tiny.completions.create(**asked) for _ in range(2))
    assert first.choices == second.choices
    assert len({choice.text for choice in first.choices}) == 4
    other = tiny.completions.create(**{**asked, "seed": 12})
    assert other.choices != first.choices
    joined = [""] * 4
    for chunk in tiny.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            joined[choice.index] += choice.text
    assert joined == [choice.text for choice in first.choices]
    assert first.usage is not None
    assert first.usage.prompt_tokens == 6
    reasons = {choice.finish_reason for choice in first.choices}
    assert first.usage.completion_tokens == 240 or "stop" in reasons


def test_echo_scores_a_prompt_as_compute_logprobs_does(
    tiny: openai.OpenAI, tiny_server: FakeServer
):
    tokens = list(b"a stitch in time")
    answer = tiny.completions.create(model=TINY, prompt=tokens, echo=True, logprobs=0, max_tokens=0)
    (choice,) = answer.choices
    assert choice.text == "a stitch in time"
    assert choice.logprobs is not None
    first, *others = choice.logprobs.token_logprobs or []
    assert first is None
    expected = scored(tiny_server, tokens[:1], tokens[1:], base_model=TINY)
    assert others == pytest.approx(expected, abs=1e-5)  # fp32, as above


def test_a_trained_path_says_what_it_learned_and_only_to_its_owner(tiny_server: FakeServer):
    text = list(b"the quick brown fox jumps over the lazy dog")
    weights = [1.0] * (len(text) - 1)
    inputs = {"target_tokens": text[1:], "weights": weights}
    with ServiceClient(base_url=tiny_server.url, api_key=API_KEY) as service:
        training = service.create_lora_training_client(TINY, rank=8, seed=1)
        for _ in range(12):
            training.forward_backward(
                [Datum(ModelInput.from_ints(text[:-1]), inputs)], "cross_entropy"
            )
            training.optim_step(AdamParams(learning_rate=1e-2)).result(PATIENCE_S)
        path = training.save_weights_for_sampler("learned").result(PATIENCE_S).path
        with client_of(tiny_server) as mine, client_of(tiny_server, "tml-another") as theirs:
            asked: Any = {"model": path, "prompt": "the quic", "max_tokens": 35, "temperature": 0}
            assert mine.completions.create(**asked).choices[0].text == bytes(text[8:]).decode()
            assert path in [model.id for model in mine.models.list()]
            with pytest.raises(openai.NotFoundError) as caught:
                theirs.completions.create(**asked)
            assert caught.value.code == "model_not_found"


def test_refusals_are_the_clients_own_errors(tiny: openai.OpenAI, tiny_server: FakeServer):
    chat: Any = {"model": TINY, "messages": [{"role": "user", "content": "hi"}]}
    with pytest.raises(openai.BadRequestError) as refused:
        tiny.chat.completions.create(**chat, response_format={"type": "json_object"})
    assert refused.value.param == "response_format"
    with pytest.raises(openai.NotFoundError, match="gpt-4"):
        tiny.chat.completions.create(**{**chat, "model": "gpt-4"})
    with pytest.raises(openai.BadRequestError, match="context of 8192") as refused:
        tiny.completions.create(model=TINY, prompt=[1] * 9000, stream=True)
    assert refused.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError):
        tiny.embeddings.create(model=TINY, input="x")


def test_a_stream_that_is_left_gives_its_cache_back(tiny: openai.OpenAI, tiny_server: FakeServer):
    chat: Any = {"model": TINY, "messages": [{"role": "user", "content": "hi"}], "n": 8}
    with tiny.chat.completions.create(**chat, max_tokens=8000, stream=True) as chunks:
        assert next(iter(chunks)).choices[0].delta.role == "assistant"
    stats = {"samples_running": 1.0}
    while stats["samples_running"]:  # the time limit of the test is the limit
        tiny.models.list()
        stats = dict(asyncio.run(tiny_server.engine.stats()))
    assert stats["tokens_generated_total"] < 8 * 8000


def test_the_async_client_asks_for_many_at_once(tiny_server: FakeServer):
    async def one(client: openai.AsyncOpenAI, seed: int) -> str:
        chunks: AsyncIterator[Any] = await client.chat.completions.create(
            model=TINY,
            messages=[{"role": "user", "content": "hi"}],
            seed=seed,
            max_tokens=40,
            stream=True,
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])

    async def many() -> list[str]:
        url = f"{tiny_server.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key=API_KEY) as client:
            return list(await asyncio.gather(*(one(client, seed) for seed in (1, 2, 3, 1))))

    first, second, third, again = asyncio.run(many())
    assert first == again
    assert len({first, second, third}) == 3

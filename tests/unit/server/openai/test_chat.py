"""Chat: messages, the model's template, the shape of answers."""

from __future__ import annotations

from typing import Any

import pytest

from .conftest import HELLO, V1

pytestmark = pytest.mark.anyio

PROMPT = b"user\nhello"


def prompt(*turns: tuple[str, str]) -> list[int]:
    """What the toy model's template makes of a conversation."""
    tokens: list[int] = []
    for role, content in turns:
        tokens += [257, *f"{role}\n{content}".encode(), 258, 10]
    return [*tokens, 257, *b"assistant\n"]


async def test_a_chat_continues_what_the_models_template_says(v1: V1) -> None:
    answer = await v1.chat()
    same = await v1.complete(prompt=prompt(("user", "hello")))
    assert answer["object"] == "chat.completion"
    choice = answer["choices"][0]
    assert choice["message"]["role"] == "assistant"
    assert choice["message"]["content"] == same["choices"][0]["text"]
    assert choice["finish_reason"] == "length"
    assert choice["logprobs"] is None
    assert answer["usage"] == same["usage"] | {
        "prompt_tokens_details": answer["usage"]["prompt_tokens_details"]
    }


@pytest.mark.parametrize(
    ("messages", "turns"),
    [
        ([{"role": "developer", "content": "be brief"}, *HELLO], ("system", "be brief")),
        (
            [{"role": "system", "content": [{"type": "text", "text": "a"}] * 2}, *HELLO],
            ("system", "a\na"),
        ),
        ([{"role": "assistant", "content": None}, *HELLO], ("assistant", "")),
    ],
)
async def test_messages_reach_the_template_with_plain_roles_and_text(
    v1: V1, messages: list[Any], turns: tuple[str, str]
) -> None:
    answer = await v1.chat(messages=messages)
    same = await v1.complete(prompt=prompt(turns, ("user", "hello")))
    assert answer["choices"][0]["message"]["content"] == same["choices"][0]["text"]


async def test_logprobs_are_those_of_the_completion_with_bytes(v1: V1) -> None:
    answer = await v1.chat(logprobs=True, top_logprobs=2)
    same = await v1.complete(prompt=prompt(("user", "hello")), logprobs=2)
    content = answer["choices"][0]["logprobs"]["content"]
    expected = same["choices"][0]["logprobs"]
    assert [each["logprob"] for each in content] == expected["token_logprobs"]
    assert [each["token"] for each in content] == expected["tokens"]
    assert all(len(each["top_logprobs"]) == 2 for each in content)
    assert all(
        each["bytes"] is None or bytes(each["bytes"]).decode(errors="replace") for each in content
    )
    assert any(each["bytes"] for each in content)
    plain = await v1.chat(logprobs=True)
    assert plain["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []


async def test_the_newer_name_of_max_tokens_counts(v1: V1) -> None:
    answer = await v1.chat(max_completion_tokens=3)
    assert answer["usage"]["completion_tokens"] == 3


async def test_without_a_limit_an_answer_may_fill_the_context(v1: V1) -> None:
    answer = await v1.chat(max_tokens=None)
    used = answer["usage"]
    ended = answer["choices"][0]["finish_reason"] == "stop"
    assert ended or used["total_tokens"] == 8192
    assert used["completion_tokens"] > 100


async def test_a_model_without_a_template_says_so(v1: V1) -> None:
    status, error = await v1.refused("/chat/completions", model="tinkex/tiny-2")
    assert (status, error["code"]) == (400, "model_without_template")
    assert "/v1/completions" in error["message"]


@pytest.mark.parametrize(
    ("members", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [*HELLO, {"role": "oracle", "content": "x"}]}, "messages[1].role"),
        ({"messages": [{"role": "user", "content": 7}]}, "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0]",
        ),
        ({"messages": ["hello"]}, "messages[0]"),
        ({"messages": HELLO * 8193}, "messages"),
        ({"messages": [{"role": "user", "content": "x" * 9000}]}, "messages"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": 3}, "logprobs"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"stream_options": {"include_usage": "yes"}}, "stream_options.include_usage"),
    ],
)
async def test_what_cannot_be_done_is_refused_by_name(
    v1: V1, members: dict[str, Any], param: str
) -> None:
    status, error = await v1.refused("/chat/completions", **members)
    assert (status, error["param"]) == (400, param)


async def test_what_changes_nothing_is_accepted(v1: V1) -> None:
    harmless = {
        "store": False,
        "tools": [],
        "tool_choice": "none",
        "parallel_tool_calls": True,
        "response_format": {"type": "text"},
        "modalities": ["text"],
        "chat_template_kwargs": {"enable_thinking": False},
    }
    assert (await v1.chat(**harmless))["choices"] == (await v1.chat())["choices"]

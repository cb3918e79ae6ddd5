"""A renderer: the prompt is what `transformers` makes, and only answers are trained."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Any

import pytest
from chat_kit import (
    BOS,
    CHATML,
    CLOSED,
    EOS,
    EOT,
    HEADERS,
    IM_END,
    THINKING,
    chat,
    ours,
    theirs,
)

from tinkex.chat import (
    ChatExample,
    CompletionExample,
    PreferenceExample,
    Rendered,
    Renderer,
)
from tinkex.clock import SystemClock
from tinkex.errors import InputError
from tinkex.testing import FakeClock

if TYPE_CHECKING:
    from collections.abc import Callable

STYLES = [CHATML, HEADERS, THINKING, CLOSED]
CHATS = [
    chat("hello"),
    chat("hello there", "how are you?", "I am well, ☃ 🎉"),
    chat("What is the capital of France?", system="Be brief.\n\nVery."),
]


def trained_texts(rendered: Rendered, tokenizer: Any) -> list[str]:
    """The runs of trained tokens, as text."""
    pairs = zip(rendered.tokens, rendered.weights, strict=True)
    runs = [(weight, list(run)) for weight, run in groupby(pairs, lambda pair: pair[1])]
    return [tokenizer.decode([token for token, _ in run]) for weight, run in runs if weight]


@pytest.mark.parametrize("messages", CHATS)
@pytest.mark.parametrize("template", STYLES)
def test_a_prompt_is_what_transformers_makes_of_the_messages(
    template: str, messages: list[dict[str, str]]
):
    tokenizer = theirs(template)
    expected = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False
    )
    assert Renderer.of(tokenizer).prompt(messages) == expected
    assert Renderer.of(ours(template)).prompt(messages) == expected


@pytest.mark.parametrize("template", STYLES)
@pytest.mark.parametrize("system", [None, "Be brief."])
def test_an_example_is_what_transformers_makes_of_it_up_to_the_end_of_the_answer(
    template: str, system: str | None
):
    tokenizer, messages = theirs(template), chat("hello", "the cat sat", system=system)
    whole = tokenizer.apply_chat_template(messages, return_dict=False)
    made = Renderer.of(tokenizer).example(ChatExample(messages)).tokens
    assert list(made) == whole[: len(made)]
    # What is left out comes after the answer has ended.
    assert tokenizer.decode(whole[len(made) :]).strip() in ("", "<|end_of_text|>")


@pytest.mark.parametrize("library", [ours, theirs])
def test_the_mask_is_the_one_that_marked_templates_give(library: Callable[[str], Any]):
    messages = chat("hello", "how are you?", "well, é", "the cat sat on the mat ")
    marked = theirs(CHATML).apply_chat_template(
        messages, return_assistant_tokens_mask=True, return_dict=True
    )
    made = Renderer.of(library(CHATML)).example(ChatExample(messages))
    count = len(made.tokens)
    assert list(made.tokens) == marked["input_ids"][:count]
    assert list(made.weights) == marked["assistant_masks"][:count]
    assert not any(marked["assistant_masks"][count:])


@pytest.mark.parametrize("template", [CHATML, HEADERS, CLOSED])
def test_every_answer_begins_where_the_sampling_prompt_ends(template: str):
    renderer = Renderer.of(ours(template))
    messages = chat("hello", "there", "how are you?", "well", "the dog", "and the cat")
    made = renderer.example(ChatExample(messages))
    for turn in (1, 3, 5):
        prompt = renderer.prompt(messages[:turn])
        assert list(made.tokens[: len(prompt)]) == prompt
        assert made.weights[len(prompt) - 1 : len(prompt) + 1] == (0.0, 1.0)


@pytest.mark.parametrize(
    ("template", "end"), [(CHATML, IM_END), (HEADERS, EOT), (THINKING, IM_END), (CLOSED, EOT)]
)
def test_the_token_that_ends_an_answer_is_trained_and_stops_sampling(template: str, end: int):
    renderer = Renderer.of(ours(template))
    made = renderer.example(ChatExample(chat("hello", "there")))
    assert (made.tokens[-1], made.weights[-1]) == (end, 1.0)
    assert renderer.stop == [end, EOS]


def test_a_model_without_a_template_stops_at_the_end_of_a_text():
    assert Renderer.of(ours(None)).stop == [EOS]
    assert Renderer.of(ours(None, eos_token=None)).stop == []


def test_all_answers_are_trained_or_only_the_last():
    tokenizer = ours(CHATML)
    example = ChatExample(chat("a", "one", "b", "two", "c", "three"))
    every = Renderer.of(tokenizer).example(example)
    assert trained_texts(every, tokenizer) == ["one<|im_end|>", "two<|im_end|>", "three<|im_end|>"]
    last = Renderer.of(tokenizer, train_on="last").example(example)
    assert trained_texts(last, tokenizer) == ["three<|im_end|>"]
    assert last.tokens == every.tokens


def test_an_answer_of_weight_zero_is_context():
    tokenizer = ours(CHATML)
    messages: list[dict[str, Any]] = [*chat("a", "one", "b", "two")]
    messages[1]["weight"] = 0
    made = Renderer.of(tokenizer).example(ChatExample(messages))
    assert trained_texts(made, tokenizer) == ["two<|im_end|>"]
    assert "weight" not in tokenizer.decode(made.tokens)


def test_what_follows_the_last_trained_answer_is_left_out():
    renderer = Renderer.of(ours(CHATML))
    asked, answered = chat("a", "one", "b"), chat("a", "one")
    assert renderer.example(ChatExample(asked)) == renderer.example(ChatExample(answered))


def test_tools_reach_the_template_and_arguments_are_objects_there():
    tokenizer = ours(THINKING)
    call = {"function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
    ]
    example = ChatExample(messages, tools=[{"name": "add"}])
    made = Renderer.of(tokenizer).example(example)
    assert tokenizer.decode(made.tokens).startswith('<|im_start|>system\n{"name": "add"}')
    assert trained_texts(made, tokenizer)[0].endswith('<call>add {"a": 1}</call><|im_end|>')


def test_options_reach_the_template():
    messages = chat("hello")
    quiet = Renderer.of(ours(THINKING), options={"enable_thinking": False})
    assert quiet.text(quiet.prompt(messages)).endswith("<think>\n\n</think>\n\n")


def test_content_in_parts_is_one_text():
    renderer = Renderer.of(ours(CHATML))
    parts = [{"type": "text", "text": "hello"}, {"type": "text", "text": "there"}]
    assert renderer.prompt([{"role": "user", "content": parts}]) == renderer.prompt(
        chat("hello\nthere")
    )


def test_the_day_in_a_template_stays_that_of_the_renderer():
    class Days(FakeClock):
        def wall(self) -> float:
            self._now += 86400.0
            return self._now + 1.7e9

    renderer = Renderer.of(ours(HEADERS), clock=Days())
    assert renderer.prompt(chat("hello")) == renderer.prompt(chat("hello"))


def test_a_template_that_writes_the_day_gets_it_from_the_machine():
    import datetime

    renderer = Renderer.of(ours(HEADERS))
    now = datetime.datetime.fromtimestamp(SystemClock().wall())
    year = [now - datetime.timedelta(days=1), now]  # midnight may have passed in between
    assert any(f"{day:%d %B}" in renderer.text(renderer.prompt(chat("a"))) for day in year)


# -- raw text ------------------------------------------------------------------------------------


def test_a_completion_is_raw_text_that_ends_with_the_text():
    tokenizer = ours(CHATML)
    made = Renderer.of(tokenizer).example(CompletionExample("hello", " there"))
    assert list(made.tokens) == [*tokenizer.encode("hello there"), EOS]
    assert trained_texts(made, tokenizer) == [" there<|end_of_text|>"]


def test_a_completion_that_ends_the_text_itself_gets_no_second_end():
    tokenizer = ours(None)
    made = Renderer.of(tokenizer).example(CompletionExample("hello", " there<|end_of_text|>"))
    assert made.tokens.count(EOS) == 1


def test_a_prompt_of_text_is_encoded_as_it_is():
    tokenizer = ours(CHATML)
    assert Renderer.of(tokenizer).prompt("hello the") == tokenizer.encode("hello the")


def test_an_empty_prompt_trains_all_but_the_first_token():
    made = Renderer.of(ours(None)).example(CompletionExample("", "hello there"))
    assert made.trained == len(made.tokens) - 1


def test_text_is_decoded_without_the_tokens_that_end_it():
    tokenizer = ours(CHATML)
    renderer = Renderer.of(tokenizer)
    assert renderer.text([*tokenizer.encode("hello there"), IM_END, BOS]) == "hello there"


# -- pairs ---------------------------------------------------------------------------------------


def test_both_answers_of_a_pair_follow_the_same_prompt():
    tokenizer = ours(CHATML)
    renderer = Renderer.of(tokenizer)
    prompt, answer = chat("a", "one", "b"), {"role": "assistant", "content": "two"}
    worse = {"role": "assistant", "content": "three"}
    chosen, rejected = renderer.pair(PreferenceExample(prompt, [answer], [worse]))
    count = len(renderer.prompt(prompt))
    assert list(chosen.tokens[:count]) == list(rejected.tokens[:count]) == renderer.prompt(prompt)
    assert trained_texts(chosen, tokenizer) == ["two<|im_end|>"]
    assert trained_texts(rejected, tokenizer) == ["three<|im_end|>"]


def test_a_pair_of_texts_is_raw():
    tokenizer = ours(CHATML)
    chosen, rejected = Renderer.of(tokenizer).pair(PreferenceExample("hello", " there", " dog"))
    assert tokenizer.decode(chosen.tokens) == "hello there<|end_of_text|>"
    assert tokenizer.decode(rejected.tokens) == "hello dog<|end_of_text|>"


def test_a_pair_of_messages_and_text_is_refused():
    with pytest.raises(InputError, match="chosen: the prompt and the answers are all"):
        Renderer.of(ours(CHATML)).pair(PreferenceExample("hello", chat("a", "b"), " dog"))


# -- what is sent --------------------------------------------------------------------------------


def test_a_datum_has_every_token_as_the_target_of_the_one_before():
    datum = Rendered((5, 6, 7, 8), (0.0, 0.0, 1.0, 1.0)).datum()
    assert datum.model_input.to_ints() == [5, 6, 7]
    assert datum.loss_fn_inputs["target_tokens"].tolist() == [6, 7, 8]
    assert datum.loss_fn_inputs["weights"].tolist() == [0.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("tokens", "weights", "words"),
    [
        ((1, 2), (1.0,), "1 weights for 2 tokens"),
        ((1, 2), (1.0, 0.0), "no token after the first"),
        ((), (), "no token after the first"),
    ],
)
def test_tokens_that_cannot_be_trained_are_no_example(
    tokens: tuple[int, ...], weights: tuple[float, ...], words: str
):
    with pytest.raises(InputError, match=words):
        Rendered(tokens, weights)

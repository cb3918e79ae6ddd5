"""The tokenizers of the base models, loaded when text is first asked for.

What is large runs in a thread: the tokenizer of a big vocabulary takes a second to load, and a
long prompt as much to encode. Neither may hold up the heartbeats of others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import anyio
import anyio.to_thread
import tokenizers

from tinkex.chat.template import ChatTemplate
from tinkex.errors import TokenizerError
from tinkex.server.openai.errors import problem
from tinkex.server.openai.pieces import Detokenizer, Pieces

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tinkex.engine.protocol import ModelSpec, ModelText

T = TypeVar("T")

# Up to this size work takes a few milliseconds at most, and a thread would cost more.
_SMALL_JSON_BYTES = 100_000
_SMALL_TEXT = 4_000


class Text:
    """Text to tokens of one base model and back."""

    def __init__(self, source: ModelText, max_context: int) -> None:
        fast = tokenizers.Tokenizer.from_buffer(source.tokenizer_json)
        # Some files ask for both; a prompt is taken as it is.
        fast.no_truncation()
        fast.no_padding()
        self._fast = fast
        self._max_context = max_context
        longest = max(map(len, fast.get_vocab(with_added_tokens=True)), default=1)
        self._most_characters = max_context * longest
        self.pieces = Pieces(fast, source.tokenizer_json)
        self.eos_token_ids = frozenset(source.eos_token_ids)
        self.template = _template(source)

    @property
    def eos_texts(self) -> list[str]:
        """The tokens that end a text, as the engine's stop strings see them."""
        pieces = self.pieces
        return [pieces.shown(each) for each in sorted(self.eos_token_ids) if pieces.bytes_of(each)]

    async def encode(self, text: str, param: str, *, add_special_tokens: bool = True) -> list[int]:
        """The tokens of a prompt; raises a 400 for one that cannot fit the model's context."""
        if len(text) > self._most_characters:
            raise self.too_long(param)

        def encode() -> list[int]:
            return self._fast.encode(text, add_special_tokens=add_special_tokens).ids

        return await off_the_loop(encode, aside=len(text) > _SMALL_TEXT)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of a whole sequence, without special tokens."""
        detokenizer = Detokenizer(self.pieces)
        return "".join(map(detokenizer.feed, tokens)) + detokenizer.end()

    def check_prompt(self, tokens: Sequence[int], param: str) -> None:
        """Refuse a prompt of no tokens, or of too many."""
        if not tokens:
            raise problem(400, "The prompt is empty: it must have a token.", param=param)
        if len(tokens) > self._max_context:
            raise self.too_long(param)

    def too_long(self, param: str) -> Exception:
        """The refusal of a prompt that does not fit."""
        return problem(
            400,
            f"The prompt is longer than this model's context of {self._max_context} tokens.",
            param=param,
            code="context_length_exceeded",
        )


class Texts:
    """The texts of a server's base models."""

    def __init__(self) -> None:
        # Mutable state: what has been loaded, by the name of the base model.
        self._loaded: dict[str, Text] = {}
        self._loading = anyio.Lock()

    async def of(self, spec: ModelSpec) -> Text:
        """A base model's text; raises a 400 where there is none."""
        async with self._loading:
            if spec.name not in self._loaded:
                self._loaded[spec.name] = await _load(spec)
            return self._loaded[spec.name]


async def _load(spec: ModelSpec) -> Text:
    source = spec.text
    if source is None:
        raise problem(
            400,
            f"{spec.name} has no tokenizer here and serves tokens only: use the sampling API.",
            param="model",
            code="model_without_text",
        )
    try:
        return await off_the_loop(
            lambda: Text(source, spec.max_context_length),
            aside=len(source.tokenizer_json) > _SMALL_JSON_BYTES,
        )
    except TokenizerError as error:
        text = f"The tokenizer of {spec.name} cannot be used here: {error}."
        raise problem(400, text, param="model", code="model_without_text") from error


def _template(source: ModelText) -> ChatTemplate | None:
    if source.chat_template is None:
        return None
    return ChatTemplate(source.chat_template, source.bos_token, source.eos_token)


async def off_the_loop(work: Callable[[], T], *, aside: bool) -> T:
    """Do the work, in a thread when it is large enough to be done `aside`."""
    return await anyio.to_thread.run_sync(work) if aside else work()

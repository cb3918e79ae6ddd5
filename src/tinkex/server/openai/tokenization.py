"""The tokenizers of the base models: text to tokens, and tokens back to text one at a time.

Loading the tokenizer of a big vocabulary takes a second, and so does encoding a long prompt. Both
run in a thread, so that other requests do not wait.

The text of a sequence is the bytes of its tokens, read as UTF-8. So a character that is spread over
several tokens appears with the last of them, and a token's space is part of the token.
"""

from __future__ import annotations

import codecs
import re
from typing import TYPE_CHECKING, Any, TypeVar

import anyio
import anyio.to_thread
import msgspec
import tokenizers

from tinkex.chat.template import ChatTemplate
from tinkex.errors import TokenizerError
from tinkex.server.openai.errors import problem

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tinkex.engine.protocol import ModelSpec, ModelText

T = TypeVar("T")

# Up to this size work takes a few milliseconds at most, and a thread would cost more.
_SMALL_JSON_BYTES = 100_000
_SMALL_TEXT = 4_000

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
_SPACE = "\u2581"


class TextCodec:
    """Text to tokens of one base model, and back."""

    def __init__(self, source: ModelText, max_context: int) -> None:
        fast = tokenizers.Tokenizer.from_buffer(source.tokenizer_json)
        # Some files ask for both; a prompt is taken as it is.
        fast.no_truncation()
        fast.no_padding()
        self._fast = fast
        self.max_context = max_context
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
        if len(tokens) > self.max_context:
            raise self.too_long(param)

    def too_long(self, param: str) -> Exception:
        """The refusal of a prompt that does not fit."""
        return problem(
            400,
            f"The prompt is longer than this model's context of {self.max_context} tokens.",
            param=param,
            code="context_length_exceeded",
        )


class TextCodecs:
    """The texts of a server's base models."""

    def __init__(self) -> None:
        # Mutable state: what has been loaded, by the name of the base model.
        self._loaded: dict[str, TextCodec] = {}
        self._loading = anyio.Lock()

    async def of(self, spec: ModelSpec) -> TextCodec:
        """A base model's text; raises a 400 where there is none."""
        async with self._loading:
            if spec.name not in self._loaded:
                self._loaded[spec.name] = await _load(spec)
            return self._loaded[spec.name]


async def _load(spec: ModelSpec) -> TextCodec:
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
            lambda: TextCodec(source, spec.max_context_length),
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


class _AddedToken(msgspec.Struct):
    id: int
    content: str
    special: bool = False


class _Layout(msgspec.Struct):
    decoder: dict[str, Any] | None = None
    added_tokens: list[_AddedToken] = []


class Pieces:
    """The bytes of each token of a tokenizer."""

    def __init__(self, fast: tokenizers.Tokenizer, json: bytes) -> None:
        layout = msgspec.json.decode(json, type=_Layout)
        self._fast = fast
        self._special = {token.id for token in layout.added_tokens if token.special}
        self._written = {token.id: token.content.encode() for token in layout.added_tokens}
        kinds = _kinds(layout.decoder or {})
        if "ByteLevel" in kinds:
            self._bytes_of = _byte_level
        elif kinds & {"Metaspace", "ByteFallback"}:
            self._bytes_of = _sentence_piece
        else:
            names = ", ".join(sorted(kinds)) or "null"
            raise TokenizerError(f"its decoder ({names}) is neither byte-level nor SentencePiece's")

    def bytes_of(self, token: int) -> bytes:
        """The bytes of a token; none for an id that the tokenizer does not know."""
        if token in self._written:
            return self._written[token]
        name = self._fast.id_to_token(token)
        return b"" if name is None else self._bytes_of(name)

    def text_bytes(self, token: int) -> bytes:
        """The bytes that a token adds to a text: those of special tokens are not shown."""
        return b"" if token in self._special else self.bytes_of(token)

    def shown(self, token: int) -> str:
        """A token by itself; one that is no whole character is written as its bytes.

        Models have ids that their tokenizer does not know, to fill up a table.
        """
        raw = self.bytes_of(token)
        if not raw:
            return f"token_id:{token}"
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


class Detokenizer:
    """One sequence of tokens as text; never gives a part of a character."""

    def __init__(self, pieces: Pieces) -> None:
        self._pieces = pieces
        # Mutable state: bytes that are the beginning of a character.
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token: int) -> str:
        """The characters that this token completes."""
        return self._decoder.decode(self._pieces.text_bytes(token))

    def end(self) -> str:
        """What is left: a broken character becomes U+FFFD."""
        return self._decoder.decode(b"", final=True)


def _kinds(decoder: dict[str, Any]) -> set[str]:
    inner = [_kinds(each) for each in decoder.get("decoders", ())]
    own = {str(decoder["type"])} if "type" in decoder else set[str]()
    return own.union(*inner) - {"Sequence"}


def _byte_alphabet() -> dict[str, int]:
    """The characters that stand for bytes in a byte-level vocabulary.

    Printable Latin-1 stands for itself; the others take the characters from 256 on, in order.
    """
    itself = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in itself]
    return {chr(b): b for b in itself} | {chr(256 + i): b for i, b in enumerate(others)}


_ALPHABET = _byte_alphabet()


def _byte_level(name: str) -> bytes:
    try:
        return bytes(_ALPHABET[character] for character in name)
    except KeyError:  # a token outside the alphabet is written as it is
        return name.encode()


def _sentence_piece(name: str) -> bytes:
    byte = _BYTE_TOKEN.fullmatch(name)
    if byte is not None:
        return bytes([int(byte[1], 16)])
    return name.replace(_SPACE, " ").encode()

"""The tokenizer a base model brings: from its folder, from a GGUF file, or bytes.

All three are a `tokenizers.Tokenizer` inside, so each can be written as `tokenizer.json`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast

import msgspec
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from tinkex.engine.models.byte_text import byte_text
from tinkex.engine.models.hf_config import read_json
from tinkex.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from tinkex.engine.models.gguf_file import GgufFile

TOKENIZER = "tokenizer.json"
_SETTINGS = "tokenizer_config.json"
_TEMPLATE = "chat_template.jinja"

# Kinds of token in GGUF metadata: markers of the model, and texts never to be split.
_CONTROL, _USER_DEFINED = 3, 4


@dataclass(frozen=True, slots=True)
class ModelTokenizer:
    """Text to ids and back, the way a base model was trained on."""

    fast: tokenizers.Tokenizer
    chat_template: str | None = None
    """The model's Jinja text that turns messages into a prompt, if it brings one."""
    bos_token: str | None = None
    """The two markers that a template may name."""
    eos_token: str | None = None

    @property
    def json(self) -> str:
        """The content of its `tokenizer.json`."""
        return self.fast.to_str()

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The ids of `text`; special tokens written in it become their ids."""
        return self.fast.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """The text of `token_ids`; bytes that are no whole character become U+FFFD."""
        return self.fast.decode(list(token_ids), skip_special_tokens=skip_special_tokens)


def byte_tokenizer() -> ModelTokenizer:
    """The tokenizer of models over bytes."""
    text = byte_text()
    fast = tokenizers.Tokenizer.from_buffer(text.tokenizer_json)
    return ModelTokenizer(fast, text.chat_template, eos_token=text.eos_token)


def folder_tokenizer(folder: Path) -> ModelTokenizer | None:
    """The tokenizer in a Hugging Face folder, or None where there is no `tokenizer.json`."""
    file = folder / TOKENIZER
    if not file.is_file():
        return None
    try:
        fast = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        raise ModelError(f"{file}: is no readable tokenizer: {error}") from error
    described = (folder / _SETTINGS).is_file()
    settings = read_json(folder / _SETTINGS, _Settings) if described else _Settings()
    return ModelTokenizer(
        fast,
        _folder_template(folder, settings),
        bos_token=_content(settings.bos_token),
        eos_token=_content(settings.eos_token),
    )


def gguf_tokenizer(file: GgufFile) -> ModelTokenizer:
    """The byte-level BPE tokenizer described by a GGUF file's metadata."""
    kind = file.get("tokenizer.ggml.model", str)
    if kind != "gpt2":
        raise ModelError(
            f"{file.path}: the tokenizer {kind!r} is not supported; supported is byte-level "
            "BPE ('gpt2')"
        )
    style = file.get("tokenizer.ggml.pre", str, "gpt-2")
    if style not in _STYLES:
        raise ModelError(
            f"{file.path}: the pre-tokenizer {style!r} is not supported; supported are "
            f"{', '.join(_STYLES)}"
        )
    tokens = file.strings("tokenizer.ggml.tokens")
    merges = [_merge(text, file) for text in file.strings("tokenizer.ggml.merges")]
    vocab = {token: number for number, token in enumerate(tokens)}
    try:
        bpe = models.BPE(vocab=vocab, merges=merges, ignore_merges=style == "llama-bpe")
    except Exception as error:  # the library raises bare Exception
        raise ModelError(
            f"{file.path}: the vocabulary and its merges do not fit: {error}"
        ) from error
    fast = tokenizers.Tokenizer(bpe)
    if style == "qwen2":
        fast.normalizer = normalizers.NFC()
    fast.pre_tokenizer = _STYLES[style]()
    fast.decoder = decoders.ByteLevel()
    _add_marked(fast, tokens, file)
    if file.get("tokenizer.ggml.add_bos_token", bool, False):
        _begin_with(fast, tokens, file.get("tokenizer.ggml.bos_token_id", int), file)
    return ModelTokenizer(
        fast,
        file.get("tokenizer.chat_template", str, "") or None,
        bos_token=_marker(tokens, file, "tokenizer.ggml.bos_token_id"),
        eos_token=_marker(tokens, file, "tokenizer.ggml.eos_token_id"),
    )


def _add(fast: tokenizers.Tokenizer, tokens: Sequence[str], *, special: bool) -> None:
    added = [AddedToken(token, special=special, normalized=False) for token in tokens]
    fast.add_tokens(added)  # pyright: ignore[reportUnknownMemberType]  # its stub says `list`


def _merge(text: str, file: GgufFile) -> tuple[str, str]:
    left, space, right = text.partition(" ")
    if not space:
        raise ModelError(f"{file.path}: the merge {text!r} does not name two tokens")
    return left, right


def _add_marked(fast: tokenizers.Tokenizer, tokens: list[str], file: GgufFile) -> None:
    kinds = file.get("tokenizer.ggml.token_type", list, [1] * len(tokens))
    if len(kinds) != len(tokens):
        raise ModelError(f"{file.path}: {len(kinds)} token types for {len(tokens)} tokens")
    marked = list(zip(tokens, kinds, strict=True))
    _add(fast, [token for token, kind in marked if kind == _CONTROL], special=True)
    _add(fast, [token for token, kind in marked if kind == _USER_DEFINED], special=False)


def _begin_with(fast: tokenizers.Tokenizer, tokens: list[str], bos: int, file: GgufFile) -> None:
    if not 0 <= bos < len(tokens):
        raise ModelError(f"{file.path}: the begin-of-text id {bos} is not in the vocabulary")
    fast.post_processor = TemplateProcessing(
        single=[tokens[bos], "$A"], special_tokens=[(tokens[bos], bos)]
    )


def _marker(tokens: list[str], file: GgufFile, key: str) -> str | None:
    number = file.get(key, int, -1)
    return tokens[number] if 0 <= number < len(tokens) else None


class _NamedTemplate(msgspec.Struct):
    name: str
    template: str


class _Settings(msgspec.Struct):
    chat_template: str | list[_NamedTemplate] | None = None
    # A string, or an object with the string as its content; files have other things here, too.
    bos_token: Any = None
    eos_token: Any = None


def _content(marker: Any) -> str | None:
    found: Any = (
        cast("dict[str, Any]", marker).get("content") if isinstance(marker, dict) else marker
    )
    return found if isinstance(found, str) else None


def _folder_template(folder: Path, settings: _Settings) -> str | None:
    # Newer folders keep the template in a file of its own.
    try:
        if (folder / _TEMPLATE).is_file():
            return (folder / _TEMPLATE).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{folder}: the chat template cannot be read: {error}") from error
    found = settings.chat_template
    if isinstance(found, list):
        return next((entry.template for entry in found if entry.name == "default"), None)
    return found


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _words(digits: Literal[r"\p{N}", r"\p{N}{1,3}"]) -> pre_tokenizers.PreTokenizer:
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
        + digits
        + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


_STYLES: Mapping[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "gpt-2": _gpt2,
    "smollm": lambda: pre_tokenizers.Sequence([pre_tokenizers.Digits(True), _gpt2()]),
    "llama-bpe": lambda: _words(r"\p{N}{1,3}"),
    "qwen2": lambda: _words(r"\p{N}"),
}
"""How text is cut before merging, by llama.cpp's name for it."""

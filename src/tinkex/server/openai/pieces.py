"""Tokens back to text, one at a time: the bytes of each token, and characters out of bytes.

The text of a sequence is the bytes of its tokens, read as UTF-8. So a character that is spread
over several tokens appears with the last of them, and a token's space is part of the token.
"""

from __future__ import annotations

import codecs
import re
from typing import TYPE_CHECKING, Any

import msgspec

from tinkex.errors import TokenizerError

if TYPE_CHECKING:
    import tokenizers

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
_SPACE = "\u2581"


class _AddedToken(msgspec.Struct):
    id: int
    content: str
    special: bool = False


class _Layout(msgspec.Struct):
    decoder: dict[str, Any] | None = None
    added_tokens: list[_AddedToken] = []


class Pieces:
    """What each token of a tokenizer stands for."""

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

"""Tokens to text: pieces, characters, stops, and where each token's text is."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tinkex.engine.models.byte_text import byte_text
from tinkex.engine.protocol import ModelText
from tinkex.errors import TokenizerError
from tinkex.server.openai.choice import Choice, Delta
from tinkex.server.openai.tokenization import TextCodec

SNOWMAN = list("☃".encode())


def text_of(fast: Tokenizer, **others: Any) -> TextCodec:
    return TextCodec(ModelText(tokenizer_json=fast.to_str().encode(), **others), 100)


def sentence_pieces() -> Tokenizer:
    """A tokenizer as Llama 2's: spaces as a character, single bytes as tokens of their own."""
    words = ["<s>", "▁the", "▁sky", "sky", *(f"<0x{byte:02X}>" for byte in range(256))]
    fast = Tokenizer(models.BPE(vocab={w: i for i, w in enumerate(words)}, merges=[]))
    fast.add_special_tokens([AddedToken("<s>", special=True)])  # pyright: ignore[reportUnknownMemberType]
    fast.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return fast


@pytest.fixture(scope="module")
def toy() -> TextCodec:
    return TextCodec(byte_text(), 100)


def read(choice: Choice, tokens: list[int], reason: Any = "length") -> list[Delta]:
    """What each token adds, and the end."""
    return [*(choice.feed(token, -1.0) for token in tokens), choice.end(reason)]


def texts(deltas: list[Delta]) -> list[str]:
    return [delta.text for delta in deltas]


def test_a_character_comes_with_its_last_token(toy: TextCodec):
    deltas = read(Choice(toy), [65, *SNOWMAN, 66])
    assert texts(deltas) == ["A", "", "", "☃", "B", ""]
    assert [[token.id for token in delta.tokens] for delta in deltas][1:4] == [[], [], SNOWMAN]
    offsets = [token.offset for delta in deltas for token in delta.tokens]
    assert offsets == [0, 1, 1, 1, 2]


def test_a_broken_character_is_shown_as_one_when_it_is_clear_that_it_is(toy: TextCodec):
    assert texts(read(Choice(toy), [*SNOWMAN[:2], 65])) == ["", "", "\ufffdA", ""]
    assert texts(read(Choice(toy), [65, *SNOWMAN[:2]])) == ["A", "", "", "\ufffd"]


def test_special_and_unknown_tokens_have_no_text_but_are_there(toy: TextCodec):
    deltas = read(Choice(toy), [257, 65, 999, 258])
    assert "".join(texts(deltas)) == "A"
    assert [token.id for delta in deltas for token in delta.tokens] == [257, 65, 999, 258]
    assert toy.pieces.shown(257) == "<|im_start|>"
    assert toy.pieces.shown(999) == "token_id:999"
    assert toy.pieces.shown(0xE2) == "bytes:\\xe2"


def test_what_may_be_a_stop_string_is_held_back(toy: TextCodec):
    deltas = read(Choice(toy, ["END", "\n\n"]), list(b"EN ENX EEND of"))
    assert texts(deltas)[:4] == ["", "", "EN ", ""]
    assert "".join(texts(deltas)) == "EN ENX E"
    assert [delta.finish for delta in deltas if delta.finish] == ["stop"]
    assert [token.id for delta in deltas for token in delta.tokens] == list(b"EN ENX E")


def test_what_was_held_back_comes_out_at_the_end(toy: TextCodec):
    deltas = read(Choice(toy, ["END"]), list(b"THE EN"))
    assert "".join(texts(deltas)) == "THE EN"
    assert deltas[-1].text == "EN"
    assert deltas[-1].finish == "length"


def test_the_stop_string_that_is_complete_first_counts(toy: TextCodec):
    for chunks in (["abcd"], list("abcd")):
        fast = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(chunks)}, merges=[]))
        fast.decoder = decoders.ByteLevel()
        deltas = read(Choice(text_of(fast), ["abcd", "bc"]), list(range(len(chunks))))
        assert "".join(texts(deltas)) == "a"


def test_the_token_that_ends_a_text_is_no_part_of_it(toy: TextCodec):
    deltas = read(Choice(toy), [65, *SNOWMAN[:1], 256, 66])
    assert texts(deltas) == ["A", "", "\ufffd", "", ""]
    assert deltas[2].finish == "stop"
    assert [token.id for delta in deltas for token in delta.tokens] == [65, *SNOWMAN[:1]]


def test_a_token_that_a_stop_string_cuts_is_listed(toy: TextCodec):
    fast = Tokenizer(models.BPE(vocab={"Hi": 0, ".Ċ": 1}, merges=[]))
    fast.decoder = decoders.ByteLevel()
    deltas = read(Choice(text_of(fast), ["\n"]), [0, 1])
    assert "".join(texts(deltas)) == "Hi."
    assert [token.id for delta in deltas for token in delta.tokens] == [0, 1]


def test_spaces_of_sentence_pieces_are_kept_also_at_the_beginning():
    text = text_of(sentence_pieces())
    byte = [4 + value for value in SNOWMAN]
    assert text.decode([0, 1, 2, 3, *byte]) == " the skysky☃"
    assert text.pieces.bytes_of(byte[0]) == b"\xe2"


def test_a_decoder_of_another_kind_is_refused():
    fast = Tokenizer(models.WordPiece(vocab={"[UNK]": 0}, unk_token="[UNK]"))
    fast.decoder = decoders.WordPiece()
    with pytest.raises(TokenizerError, match="WordPiece"):
        text_of(fast)


@pytest.mark.anyio
async def test_truncation_and_padding_of_a_tokenizer_are_ignored():
    fast = Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    fast.enable_truncation(2)
    fast.enable_padding(length=8)
    assert await text_of(fast).encode("aaaa", "prompt") == [0] * 4


def test_the_ends_of_text_are_named_for_the_engine(toy: TextCodec):
    assert toy.eos_texts == ["<|endoftext|>"]

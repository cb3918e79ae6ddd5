"""Streams of any tokens: joined pieces are the whole text, cut before its first stop."""

from __future__ import annotations

from functools import cache

from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models

from tinkex.engine.protocol import ModelText
from tinkex.server.openai.choice import Choice, Delta, first_stop
from tinkex.server.openai.tokenization import TextCodec

EOS = 0


@cache
def tokenizer() -> Tokenizer:
    """Byte-level, with words, parts of characters, and special and plain added tokens."""
    alphabet = decoders.ByteLevel()
    from tinkex.engine.models.byte_text import byte_text

    single = Tokenizer.from_buffer(byte_text().tokenizer_json)
    letters = [single.id_to_token(byte) or "" for byte in range(256)]
    parts = [" the", "END", "\n\n", "é", "☃"[:1], "🎉", " \n", "EN", "D"]
    merged = ["".join(letters[byte] for byte in part.encode()) for part in parts]
    halves = [letters[0xF0] + letters[0x9F], letters[0x8E] + letters[0x89], letters[0xA9] + "x"]
    words = ["<eos>", *letters, *merged, *halves]
    fast = Tokenizer(models.BPE(vocab={w: i for i, w in enumerate(words)}, merges=[]))
    fast.add_special_tokens([AddedToken("<eos>"), AddedToken("<turn>")])  # pyright: ignore[reportUnknownMemberType]
    fast.add_tokens([AddedToken("<tool é>")])  # pyright: ignore[reportUnknownMemberType]
    fast.decoder = alphabet
    return fast


@cache
def text() -> TextCodec:
    return TextCodec(
        ModelText(tokenizer_json=tokenizer().to_str().encode(), eos_token_ids=(EOS,)), 100
    )


# A few more ids than there are tokens: models have such.
tokens = st.lists(st.integers(1, 275), max_size=40)
stops = st.lists(st.text("END\n thé☃", min_size=1, max_size=4), max_size=3)


def read(choice: Choice, ids: list[int]) -> list[Delta]:
    return [*(choice.feed(token, -1.0) for token in ids), choice.end("length")]


@given(tokens, stops)
@example([*range(1, 257)], [])
@example([0xE2 + 1, 0x98 + 1], ["\ufffd"])
def test_joined_pieces_are_the_decoded_text_before_its_first_stop(
    ids: list[int], stops: list[str]
) -> None:
    deltas = read(Choice(text(), stops), ids)
    whole = tokenizer().decode(ids, skip_special_tokens=True)
    cut = first_stop(whole, stops)
    assert "".join(delta.text for delta in deltas) == whole[:cut]
    finished = [delta.finish for delta in deltas if delta.finish is not None]
    assert finished == (["length"] if cut is None else ["stop"])


@given(tokens, stops, st.integers(0, 40))
def test_nothing_is_given_out_that_the_next_tokens_could_take_back(
    ids: list[int], stops: list[str], at: int
) -> None:
    whole = "".join(delta.text for delta in read(Choice(text(), stops), ids))
    choice = Choice(text(), stops)
    begun = "".join(choice.feed(token, -1.0).text for token in ids[:at])
    assert whole.startswith(begun)


@given(tokens, stops)
def test_every_token_is_given_out_once_in_order_and_with_its_place(
    ids: list[int], stops: list[str]
) -> None:
    deltas = read(Choice(text(), stops), ids)
    given_out = [token for delta in deltas for token in delta.tokens]
    assert [token.id for token in given_out] == ids[: len(given_out)]
    length = sum(len(delta.text) for delta in deltas)
    stopped = deltas[-1].finish is None or any(delta.finish == "stop" for delta in deltas)
    assert stopped or len(given_out) == len(ids)
    offsets = [token.offset for token in given_out]
    assert offsets == sorted(offsets)
    assert all(offset <= length for offset in offsets)


@given(tokens, tokens)
def test_nothing_counts_after_the_end_of_text(before: list[int], after: list[int]) -> None:
    ended = read(Choice(text()), [*before, EOS, *after])
    alone = read(Choice(text()), before)
    assert "".join(d.text for d in ended) == "".join(d.text for d in alone)
    assert [d.finish for d in ended if d.finish] == ["stop"]

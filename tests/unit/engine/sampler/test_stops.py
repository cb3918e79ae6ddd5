"""Every way a sequence ends by its content."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tinkex.engine.models.tokenizer import byte_tokenizer
from tinkex.engine.sampler.stops import stop_rule
from tinkex.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence

EOS = 256
TOKENIZER = byte_tokenizer()


def rule(stop: Any, decode: Any = TOKENIZER.decode) -> Any:
    return stop_rule(stop, eos_token_ids=(EOS, 258), vocab_size=264, decode=decode)


def ends_after(stops: Any, tokens: Sequence[int], start: int = 0) -> int | None:
    """The number of generated tokens at which the rule says stop."""
    for end in range(start + 1, len(tokens) + 1):
        if stops(tokens[:end], start):
            return end - start
    return None


def test_without_a_rule_any_end_of_text_token_stops() -> None:
    assert ends_after(rule(None), [1, 2, EOS, 3]) == 3
    assert ends_after(rule(None), [1, 258, 3]) == 2


def test_an_empty_list_never_stops() -> None:
    assert ends_after(rule([]), [1, EOS, 258, 0]) is None


def test_listed_tokens_stop_and_end_of_text_then_does_not() -> None:
    assert ends_after(rule([5, 9]), [EOS, 1, 9, 5]) == 3


@pytest.mark.parametrize("stop", ["wor", ["zzz", "wor"], "o w", "d"])
def test_a_string_stops_with_the_token_that_completes_it(stop: Any) -> None:
    text = "hello world"
    wanted = stop if isinstance(stop, str) else stop[1]
    assert ends_after(rule(stop), TOKENIZER.encode(text)) == text.index(wanted) + len(wanted)


def test_a_string_inside_one_long_token_stops() -> None:
    words = {0: "one ", 1: "two|three", 2: " four"}
    stops = rule("|", decode=lambda ids: "".join(words[i] for i in ids))
    assert ends_after(stops, [0, 1, 2]) == 2


def test_a_string_of_several_byte_characters_stops_at_its_last_byte() -> None:
    text = "naïve — 日本語 done"
    ids = TOKENIZER.encode(text)
    assert ends_after(rule("日本"), ids) == len("naïve — 日本".encode())


def test_the_prompt_does_not_count() -> None:
    ids = TOKENIZER.encode("stop" + "st" + "op" + "stop")
    # The prompt ends with "st"; only "op" of the first match lies in the generated part.
    assert ends_after(rule("stop"), ids, start=6) == 6


def test_a_string_is_found_far_into_a_long_text_and_not_before() -> None:
    text = "abc " * 500 + "END and more"
    assert ends_after(rule("END"), TOKENIZER.encode(text)) == text.index("END") + 3


def test_tokens_without_text_do_not_hide_a_string() -> None:
    # Ids above the tokenizer's own decode to nothing.
    filler = [263] * 50
    ids = [*TOKENIZER.encode("a" * 30 + "S"), *filler, *TOKENIZER.encode("T"), *filler, 79, 80]
    assert ends_after(rule("STOP"), ids) == len(ids)


def test_a_long_sequence_decodes_only_its_end() -> None:
    longest = 0

    def decode(ids: Sequence[int]) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return TOKENIZER.decode(ids)

    assert not rule("never there", decode)([120] * 10_000, 0)
    assert longest < 100
    # However long the string is, as long as its last character does not come.
    assert not rule("x" * 1_023 + "y", decode)([120] * 10_000, 0)
    assert longest < 100


def test_a_very_long_string_stops_at_its_last_character() -> None:
    stop = "abcdefgh" * 100 + "é"
    ids = TOKENIZER.encode("x" * 50 + stop + "more")
    assert ends_after(rule([stop, "z" * 200]), ids) == 50 + len(stop.encode())


@pytest.mark.parametrize(
    ("stop", "path", "words"),
    [
        ("", "sampling_params.stop", "empty"),
        (["a", ""], "sampling_params.stop[1]", "empty"),
        ([3, 264], "sampling_params.stop[1]", "264"),
        ([3, "a"], "sampling_params.stop[1]", "mixed"),
    ],
)
def test_a_rule_that_cannot_be_is_refused_by_its_path(stop: Any, path: str, words: str) -> None:
    with pytest.raises(InputError, match=words) as caught:
        rule(stop)
    assert caught.value.path == path


def test_strings_without_a_tokenizer_are_refused() -> None:
    with pytest.raises(InputError, match="token ids") as caught:
        rule("x", decode=None)
    assert caught.value.path == "sampling_params.stop"

"""When a sequence ends: stop tokens and stop strings.

The token that stops a sequence, or that completes a stop string, belongs to the result.
The sampler checks the length. No tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

from tinkex.errors import InputError

_LONG = 32
_NEAR = 12

Decode = Callable[[Sequence[int]], str]
"""Token ids to text; ids that end inside a character may give replacement characters there."""

Stops = Callable[[Sequence[int], int], bool]
"""Whether the last of these tokens ends the sequence; called after each generated token. These
start at the given index."""


def stop_rule(
    stop: str | Sequence[str | int] | None,
    *,
    eos_token_ids: Sequence[int],
    vocab_size: int,
    decode: Decode | None,
    path: str = "sampling_params.stop",
) -> Stops:
    """The rule of `SamplingParams.stop`; raises `InputError` for an invalid one."""
    if stop is None:
        return _stop_at_tokens(eos_token_ids)
    choices = [stop] if isinstance(stop, str) else list(stop)
    if not all(isinstance(choice, str) for choice in choices):
        return _stop_at_tokens(_token_choices(choices, vocab_size, path))
    strings = cast("list[str]", choices)
    if not strings:
        return _never
    for i, string in enumerate(strings):
        if not string:
            where = path if isinstance(stop, str) else f"{path}[{i}]"
            raise InputError("an empty string would stop before the first token", where)
    if decode is None:
        raise InputError("this model has no tokenizer here: give token ids instead", path)
    return _stop_at_strings(strings, decode)


def _token_choices(choices: Sequence[str | int], vocab_size: int, path: str) -> list[int]:
    ids: list[int] = []
    for i, choice in enumerate(choices):
        if isinstance(choice, str):
            raise InputError("strings and token ids cannot be mixed", f"{path}[{i}]")
        if not 0 <= choice < vocab_size:
            problem = f"{choice} is not a token of this model: ids end at {vocab_size - 1}"
            raise InputError(problem, f"{path}[{i}]")
        ids.append(choice)
    return ids


def _never(tokens: Sequence[int], start: int) -> bool:
    return False


def _stop_at_tokens(ids: Sequence[int]) -> Stops:
    known = frozenset(ids)
    return lambda tokens, start: tokens[-1] in known


def _stop_at_strings(strings: list[str], decode: Decode) -> Stops:
    longest = max(len(string) for string in strings)
    ends = {string[-1] for string in strings}

    def stops(tokens: Sequence[int], start: int) -> bool:
        # Few tokens complete the last character of a string, and looking further back takes long.
        if longest > _LONG and ends.isdisjoint(decode(tokens[max(start, len(tokens) - _NEAR) :])):
            return False
        text = _tail(tokens, start, longest, decode)
        return any(string in text for string in strings)

    return stops


def _tail(tokens: Sequence[int], start: int, length: int, decode: Decode) -> str:
    """The end of the text, with room for a string of `length` that the last token completes.

    Decodes few tokens, so that a long sequence does not take quadratic time.
    """
    # The first tokens of a window may decode differently than in place (a broken character, a
    # space that some tokenizers drop): the margin keeps the string clear of them. The last
    # token may itself be long, so the room is measured without it.
    margin = 4
    window = length + 2 * margin
    while window < len(tokens) - start:
        tail = tokens[-window:]
        if len(decode(tail[margin:-1])) >= length + margin:
            return decode(tail)
        window *= 2
    return decode(tokens[start:])

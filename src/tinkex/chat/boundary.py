"""Does a training example begin with what a sampler would be given, token by token?

If it does not, training teaches an answer to something that is never asked. That happens when a
template writes earlier turns differently once more follow (most drop their thinking), when it
begins an answer with something the answer lacks, or when tokens merge over the boundary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tinkex.errors import ChatTemplateError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tinkex.chat.turns import Written

_TOKENS_SHOWN = 6


@dataclass(frozen=True, slots=True)
class Difference:
    """What an example is compared with, and what to do where it begins differently."""

    other: str
    advice: str


EARLIER_TURN = Difference(
    "what the model answers",
    "its template writes this message differently once others follow: train only on the last "
    'answer (train_on="last", --train-on last), or give each answer a line of its own',
)
PROMPT = Difference(
    "what the model is asked with",
    "its template begins an answer in another way than this one begins (with thinking, for "
    "example): write the answer as the model would",
)
_MERGED = (
    "tokens merge where the prompt ends: let the prompt end at the end of a word, and the answer "
    "begin with the space or line break between them"
)


def first_difference(whole: Sequence[int], beginning: Sequence[int]) -> int | None:
    """Where `whole` stops to begin with `beginning`; None if it begins with all of it."""
    if whole[: len(beginning)] == beginning:
        return None
    pairs = zip(whole, beginning, strict=False)
    return next((i for i, (one, other) in enumerate(pairs) if one != other), len(whole))


def check_beginning(
    whole: Written,
    beginning: Written,
    decode: Callable[[Sequence[int]], str],
    where: str,
    difference: Difference,
) -> None:
    """Raise ChatTemplateError where `whole` does not begin with `beginning`."""
    at = first_difference(whole.tokens, beginning.tokens)
    if at is None:
        return
    advice = _MERGED if whole.text.startswith(beginning.text) else difference.advice
    trained, other = (decode(one.tokens[at : at + _TOKENS_SHOWN]) for one in (whole, beginning))
    raise ChatTemplateError(
        f"{where}: at token {at} what is trained ({trained!r}) differs from {difference.other} "
        f"({other!r}); {advice}"
    )

"""Whether two computations of the same adapter agree, by the log-probabilities of fixed texts.

Two programs that compute the same thing differ by rounding: another precision, another order of
operations. The size of that difference is measured on the base model without the adapter, whose
weights both sides have. With the adapter, the two must not differ more than that allows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from tinkex.errors import ResultError

if TYPE_CHECKING:
    from collections.abc import Sequence

    Scores = Sequence[Sequence[float]]

TEXTS: Final = (
    "The quick brown fox jumps over the lazy dog, and 17 + 25 = 42.",
    "def area(radius: float) -> float:\n    return 3.14159 * radius ** 2\n",
    "User: Where do rivers end?\nAssistant: Most of them end in the sea, some in a lake.",
    "Grüße aus Köln! Ça va? 日本語もあります。",
)
"""Prose, code, a conversation, and letters beyond ASCII: what adapters are trained on."""

_NOISE_FACTOR: Final = 3.0
"""The adapter's own products are rounded, too, so its noise may be a few times the base model's."""
_FLOOR: Final = 1e-4
"""What float32 loses over a deep model in another order of operations; measured: below 1e-5."""
OTHER_BASE: Final = 0.3
"""No precision moves a base model so far on average: the two sides have different ones."""
_MOST_ROUNDING: Final = 0.05
_SHARE_OF_EFFECT: Final = 0.25
"""Weights that were rounded after the adapter was added lose a part of it: at most this part of
what the adapter does, and never more than the number above it."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """How far two computations are apart: mean absolute differences of log-probabilities."""

    difference: float
    allowed: float
    effect: float
    """What the adapter changes, on the server."""
    base_difference: float
    tokens: int

    @property
    def agrees(self) -> bool:
        """Whether they compute the same."""
        return self.difference <= self.allowed


def compare(
    theirs: Scores, their_base: Scores, ours: Scores, our_base: Scores, *, rounded: bool = False
) -> Comparison:
    """Compare a server's numbers with those of an exported adapter, text by text.

    `rounded` says that the weights were rounded after the adapter was added to them.
    """
    base_difference = mean_difference(their_base, our_base)
    effect = mean_difference(theirs, their_base)
    allowed = _NOISE_FACTOR * base_difference + _FLOOR
    if rounded:
        allowed += min(_SHARE_OF_EFFECT * effect, _MOST_ROUNDING)
    return Comparison(
        difference=mean_difference(theirs, ours),
        allowed=allowed,
        effect=effect,
        base_difference=base_difference,
        tokens=sum(map(len, theirs)),
    )


def known(logprobs: Sequence[float | None] | None) -> list[float]:
    """The log-probabilities of a text without its first token, which has none."""
    return [math.nan if value is None else value for value in (logprobs or ())[1:]]


def mean_difference(left: Scores, right: Scores) -> float:
    """How far two computations of the same texts are apart, on average."""
    texts = zip(left, right, strict=True)
    apart = [abs(a - b) for one, other in texts for a, b in zip(one, other, strict=True)]
    total = math.fsum(apart)
    if not apart or not math.isfinite(total):
        raise ResultError("log-probabilities are missing or are no numbers; nothing is compared")
    return total / len(apart)

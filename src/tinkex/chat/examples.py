"""Training examples: as conversations, completions and preferences, and as tokens.

`line` is the line of the file an example was read from, for messages; 0 for one that was not read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tinkex.errors import InputError
from tinkex.types import Datum, ModelInput

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tinkex.chat.messages import Message


@dataclass(frozen=True, slots=True)
class ChatExample:
    """A conversation; its assistant's messages are trained, but for those with `"weight": 0`."""

    messages: Sequence[Message]
    line: int = 0
    tools: Sequence[Mapping[str, Any]] = ()


@dataclass(frozen=True, slots=True)
class CompletionExample:
    """Raw text and its continuation; no chat template is applied."""

    prompt: str
    completion: str
    line: int = 0


@dataclass(frozen=True, slots=True)
class PreferenceExample:
    """Two answers to one prompt, of which the first is better.

    With messages as the prompt both answers are messages, with text all three are raw text.
    """

    prompt: Sequence[Message] | str
    chosen: Sequence[Message] | str
    rejected: Sequence[Message] | str
    line: int = 0
    tools: Sequence[Mapping[str, Any]] = ()


@dataclass(frozen=True, slots=True)
class Rendered:
    """Tokens, and per token its weight in the loss: 1.0 is trained, 0.0 is context."""

    tokens: tuple[int, ...]
    weights: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.tokens) != len(self.weights):
            counts = f"{len(self.weights)} weights for {len(self.tokens)} tokens"
            raise InputError(f"{counts}; each token has one", "Rendered.weights")
        if not any(self.weights[1:]):
            raise InputError("no token after the first is trained", "Rendered.weights")

    @property
    def trained(self) -> int:
        """How many tokens the loss counts: nothing predicts the first one."""
        return sum(1 for weight in self.weights[1:] if weight)

    def datum(self) -> Datum:
        """The example for `forward_backward`: every token is the target of the one before it."""
        return Datum(
            ModelInput.from_ints(self.tokens[:-1]),
            {"target_tokens": self.tokens[1:], "weights": self.weights[1:]},
        )

"""One training example as tokens, each of them trained or context."""

from __future__ import annotations

from dataclasses import dataclass

from tinkex.errors import InputError
from tinkex.types import Datum, ModelInput


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

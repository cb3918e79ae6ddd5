"""What both sides do: the same tokens, the same number of times."""

from __future__ import annotations

from dataclasses import dataclass

from tinkex.types import Datum, ModelInput

MODEL = "tinkex/tiny"
LORA_RANK = 8


@dataclass(frozen=True)
class Size:
    """How much of everything; part of the JSON line."""

    steps: int = 60
    warm_up: int = 10
    at_once: int = 64
    waves: int = 20
    new_tokens: int = 16
    crowd_samples: int = 2000
    crowd_sessions: int = 200
    crowd_s: float = 60.0
    finished: int = 10_000


@dataclass(frozen=True)
class Figures:
    """What one side took: a step, 64 samples at once, and the caller's CPU for each sample."""

    step_s: float
    samples_s: float
    caller_cpu_ms: float
    server_cpu_ms: float = 0.0

    @property
    def cpu_ms(self) -> float:
        """CPU for each sample outside the engine."""
        return self.caller_cpu_ms + self.server_cpu_ms


def batch() -> list[Datum]:
    """Eight sequences of 64 tokens."""
    made: list[Datum] = []
    for row in range(8):
        tokens = [(row * 31 + position * 7) % 200 + 1 for position in range(65)]
        inputs = {"target_tokens": tokens[1:], "weights": [1.0] * 64}
        made.append(Datum(ModelInput.from_ints(tokens[:-1]), inputs))
    return made


def prompt(number: int) -> ModelInput:
    """32 tokens, different for each number."""
    return ModelInput.from_ints([(number * 13 + i * 5) % 200 + 1 for i in range(32)])

"""What both sides do: the same tokens, the same number of times."""

from __future__ import annotations

import json
import resource
from dataclasses import dataclass

from tinkex.types import Datum, ModelInput

MODEL = "tinkex/tiny"
LORA_RANK = 8


@dataclass(frozen=True)
class Size:
    """How much of everything; part of the JSON line."""

    rounds: int = 16
    """Each measures every side once, in turn; the first does not count."""
    steps: int = 8
    waves: int = 3
    at_once: int = 64
    bare_calls: int = 64
    new_tokens: int = 16
    crowd_samples: int = 2000
    crowd_sessions: int = 200
    crowd_s: float = 60.0
    finished: int = 10_000


def cpu_s() -> float:
    """CPU time of this process so far."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


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


def step_body() -> bytes:
    """What the bare route stores for a step: the tokens, targets and weights of `batch`."""
    rows = [[(row * 31 + position * 7) % 200 + 1 for position in range(65)] for row in range(8)]
    data = [{"tokens": row[:-1], "targets": row[1:], "weights": [1.0] * 64} for row in rows]
    return json.dumps(data).encode()


def sample_body() -> bytes:
    """What the bare route stores for a sample: a prompt and its parameters."""
    return json.dumps({"tokens": [i * 5 % 200 + 1 for i in range(32)], "max_tokens": 16}).encode()

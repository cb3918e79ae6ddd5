"""The learning rate of a step, its examples and its sampling seeds.

All of them are functions of the settings and the number of the step, so that a resumed run does
exactly what an uninterrupted one does. Steps are counted from 1.
"""

from __future__ import annotations

import math
import random
from functools import lru_cache
from hashlib import blake2b
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tinkex.loops.run_settings import Schedule


def learning_rate(step: int, total: int, peak: float, schedule: Schedule, warmup: int) -> float:
    """The rate of a step: up to `peak` in `warmup` steps, then as the schedule says, never 0."""
    if step <= warmup:
        return peak * step / (warmup + 1)
    passed = (step - 1 - warmup) / max(total - warmup, 1)
    if schedule == "linear":
        return peak * (1 - passed)
    if schedule == "cosine":
        return peak * (1 + math.cos(math.pi * passed)) / 2
    return peak


def batch(step: int, size: int, examples: int, seed: int) -> list[int]:
    """The indices of the examples of a step.

    Every epoch has each example once, in its own order; a batch may end one epoch and begin the
    next.
    """
    first = (step - 1) * size
    places = (divmod(place, examples) for place in range(first, first + size))
    return [_order(seed, epoch, examples)[within] for epoch, within in places]


def steps_of(epochs: int, size: int, examples: int) -> int:
    """The steps that it takes to train on every example `epochs` times."""
    return math.ceil(epochs * examples / size)


def held_out(examples: int, fraction: float, seed: int) -> set[int]:
    """The indices of the held-out examples: at least one, and never all."""
    count = min(max(round(examples * fraction), 1), examples - 1)
    return set(_order(seed, -1, examples)[:count])


def sampling_seed(seed: int, step: int, prompt: int) -> int:
    """The seed of one prompt's answers in one step."""
    text = f"{seed}/{step}/{prompt}".encode()
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "little") >> 1


@lru_cache(maxsize=4)
def _order(seed: int, epoch: int, examples: int) -> tuple[int, ...]:
    order = list(range(examples))
    random.Random(f"{seed}/{epoch}").shuffle(order)
    return tuple(order)

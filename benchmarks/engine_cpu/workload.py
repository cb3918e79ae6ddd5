"""The work that both sides do: sizes, tokens, targets. No engine and no peer in here."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from benchmarks.client_cost.setting import cores

RANK = 32
LEARNING_RATE = 1e-4


@dataclass(frozen=True)
class Workload:
    """Sizes of everything that is run; part of the JSON line."""

    threads: int = field(default_factory=cores)
    """Of each side: all the cores that this process may use."""
    train_sequences: int = 4
    train_tokens: int = 256
    adapters: int = 8
    adapter_tokens: int = 64
    prompts: int = 16
    prompt_tokens: tuple[int, int] = (8, 24)
    """Shortest and longest prompt; the lengths in between occur evenly."""
    new_tokens: int = 32
    alone_prompts: int = 4
    """Of the prompts, how many are also sampled one by one; the time is scaled up."""
    warm_up: int = 2
    """Rounds that do not count: memory and caches settle in them. The optimizers' states, which
    are two thirds of an adapter, are first written in one and first replaced in the other."""
    rounds: int = 5


QUICK = Workload(rounds=1)

Sequence = tuple[list[int], list[int]]
"""Tokens, and for each of them the target."""


def sequences(count: int, length: int, vocabulary: int, seed: int) -> list[Sequence]:
    """Random training sequences; the targets are the tokens moved by one."""
    rng = np.random.default_rng([seed, count, length])
    rows = rng.integers(0, vocabulary, (count, length + 1)).tolist()
    return [(row[:-1], row[1:]) for row in rows]


def prompts(work: Workload, count: int, vocabulary: int, seed: int) -> list[list[int]]:
    """Random prompts of different lengths, new ones for every seed."""
    rng = np.random.default_rng([seed, count])
    lengths = np.linspace(*work.prompt_tokens, count).astype(int) if count > 1 else [32]
    return [rng.integers(0, vocabulary, length).tolist() for length in lengths]

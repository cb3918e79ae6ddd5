"""On how many threads of a CPU something is computed.

Waking other threads takes as long as a small product, and while they wait for the next one
they keep a core busy that another process could use.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import torch

if TYPE_CHECKING:
    from collections.abc import Generator

    from tinkex.engine.models.base import DecoderConfig

SAMPLING_ALONE: Final = 2**26
"""Multiplications that one thread does in about a millisecond."""
TRAINING_ALONE: Final = 2**30
"""A training pass gains less: it is cut into more and smaller calls."""


def multiplications(config: DecoderConfig) -> int:
    """What one token takes in a base model, without attention."""
    heads = 2 * config.num_heads + 2 * config.num_kv_heads
    block = heads * config.head_dim + 3 * config.intermediate_size
    return config.hidden_size * (config.num_layers * block + config.vocab_size)


@contextmanager
def threads_for(count: int, few: int) -> Generator[None]:
    """Compute so many multiplications on one thread if they are few."""
    if count > few or not one_will_do():
        yield
        return
    with on_threads(1):
        yield


def one_will_do() -> bool:
    """Whether one thread may compute what usually the two of them do.

    With MKL one thread gives the bits of two, but not those of three: thin products are cut in
    another way there. Nothing is known of other libraries.
    """
    return torch.get_num_threads() == 2 and torch.backends.mkl.is_available()


def threads_in_turn() -> tuple[int, ...]:
    """Numbers of threads that the engine may use from call to call, with the same results."""
    count = torch.get_num_threads()
    return (1, 2) if count <= 2 and torch.backends.mkl.is_available() else (count,)


@contextmanager
def on_threads(count: int) -> Generator[None]:
    """Compute what this thread asks for on so many threads."""
    usual = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(usual)

"""A training pass of several operations on two threads, each with some of the operations.

One thread for each half takes less time than two that share every product: neither waits for the
other between them. Operations do not feel their neighbours, and a pass on one thread has the bits
of one on two, so it does not show in results. Where that is not known (`threads.one_will_do`) they
are computed at once.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol, TypeVar

import torch

from tinkex.engine.threads import on_threads, one_will_do

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_MOST_OF_ALL: Final = 0.55
"""A thread that had more of the tokens than this would keep the other waiting for too long."""


class _Part(Protocol):
    @property
    def tokens(self) -> int: ...

    @property
    def weights(self) -> _Weights: ...


class _Weights(Protocol):
    @property
    def flat_P(self) -> torch.Tensor: ...


P = TypeVar("P", bound=_Part)
F = TypeVar("F")


def compute_abreast(parts: Sequence[P], compute: Callable[[Sequence[P]], list[F]]) -> list[F]:
    """What `compute` finds for each part, at once or half by half."""
    halves = _halves([part.tokens for part in parts])
    if halves is None or parts[0].weights.flat_P.is_cuda or not one_will_do():
        return compute(parts)
    own, others = ([parts[place] for place in places] for places in halves)
    with on_threads(1):
        later = _other.submit(compute, others)
        try:
            found = compute(own)
        finally:
            # Whatever happens here, nobody goes on while the other half still runs.
            error = later.exception()
    if error is not None:
        raise error
    placed = dict(zip((*halves[0], *halves[1]), (*found, *later.result()), strict=True))
    return [placed[place] for place in range(len(parts))]


def _halves(tokens: Sequence[int]) -> tuple[list[int], list[int]] | None:
    """Which parts each thread gets; None where one of them would get too many tokens."""
    halves: tuple[list[int], list[int]] = ([], [])
    sums = [0, 0]
    for place in sorted(range(len(tokens)), key=lambda place: -tokens[place]):
        lighter = 0 if sums[0] <= sums[1] else 1
        halves[lighter].append(place)
        sums[lighter] += tokens[place]
    return halves if max(sums) <= _MOST_OF_ALL * sum(sums) else None


_other = ThreadPoolExecutor(1, "tinkex-half-pass", initializer=partial(torch.set_num_threads, 1))

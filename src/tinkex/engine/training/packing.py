"""Cuts operations into slices of whole sequences, and chooses the slices of a pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections import deque
    from collections.abc import Callable, Sequence

    from torch import Tensor


def positions(lengths: Sequence[int], device: torch.device) -> Tensor:
    """The position of every token within its own sequence."""
    return torch.cat([torch.arange(length) for length in lengths]).to(device)


@dataclass(frozen=True, slots=True)
class Slice:
    """Consecutive sequences of one operation that run in one pass."""

    op: int
    first: int
    last: int
    tokens: int


def cut(op: int, lengths: Sequence[int], max_tokens: int) -> list[Slice]:
    """Cut an operation into slices of at most `max_tokens`; a longer sequence is one alone."""
    slices: list[Slice] = []
    first = tokens = 0
    for index, length in enumerate(lengths):
        if tokens and tokens + length > max_tokens:
            slices.append(Slice(op, first, index, tokens))
            first, tokens = index, 0
        tokens += length
    slices.append(Slice(op, first, len(lengths), tokens))
    return slices


def take_pass(waiting: deque[Slice], admit: Callable[[Slice], bool]) -> list[Slice]:
    """Remove the slices of the next pass: the first, and those after it that are admitted."""
    taken = [waiting.popleft()]
    admit(taken[0])
    while waiting and admit(waiting[0]):
        taken.append(waiting.popleft())
    return taken

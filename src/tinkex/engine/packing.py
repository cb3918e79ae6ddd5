"""Sequences of many operations laid end to end: no padding, segments by adapter.

`plan_passes` decides which sequences share a pass (plain integers, no tensors);
`PackedAttention` is the causal attention within each of them.

How one operation is cut into slices depends on that operation alone, so its sums are added
in the same order whatever else is in the batch.

Shapes: T tokens, N tokens of one sequence, H heads, G key/value heads, d head size, X = H*d.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch
from torch.nn import functional as F

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

MIN_ROWS: Final = 16
"""Fewer rows than this take other matrix kernels, whose results differ in the last bits."""


@dataclass(frozen=True, slots=True)
class Slice:
    """Consecutive sequences of one operation that run in one pass."""

    op: int
    first: int
    last: int
    tokens: int


def plan_passes(lengths: Sequence[Sequence[int]], max_tokens: int) -> list[list[Slice]]:
    """Cut each operation into slices of at most `max_tokens`, then fill passes with them.

    `lengths` has the sequence lengths of each operation. A sequence longer than the limit
    gets a slice of its own. Two slices of one operation never meet in a pass, because
    together they are over the limit.
    """
    passes: list[list[Slice]] = []
    room = 0
    for op, sequence_lengths in enumerate(lengths):
        for piece in _slices(op, sequence_lengths, max_tokens):
            if piece.tokens > room:
                passes.append([])
                room = max_tokens
            passes[-1].append(piece)
            room -= piece.tokens
    return passes


def _slices(op: int, lengths: Sequence[int], max_tokens: int) -> list[Slice]:
    slices: list[Slice] = []
    first = tokens = 0
    for index, length in enumerate(lengths):
        if tokens and tokens + length > max_tokens:
            slices.append(Slice(op, first, index, tokens))
            first, tokens = index, 0
        tokens += length
    slices.append(Slice(op, first, len(lengths), tokens))
    return slices


def positions(lengths: Sequence[int], device: torch.device) -> Tensor:
    """The position of every token within its own sequence."""
    return torch.cat([torch.arange(length) for length in lengths]).to(device)


class PackedAttention:
    """Causal attention within each sequence of a pack; an `Attend` without a cache.

    Every sequence is computed by itself, so it cannot feel its neighbours.
    """

    def __init__(self, lengths: Sequence[int]) -> None:
        self._lengths = list(lengths)

    def __call__(self, layer: int, q_THd: Tensor, k_TGd: Tensor, v_TGd: Tensor) -> Tensor:
        del layer
        parts = zip(*(torch.split(x, self._lengths) for x in (q_THd, k_TGd, v_TGd)), strict=True)
        return torch.cat([_causal(q_NHd, k_NGd, v_NGd) for q_NHd, k_NGd, v_NGd in parts])


def _causal(q_NHd: Tensor, k_NGd: Tensor, v_NGd: Tensor) -> Tensor:
    q, k, v = (x.transpose(0, 1)[None] for x in (q_NHd, k_NGd, v_NGd))
    grouped = q_NHd.shape[1] != k_NGd.shape[1]
    o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
    return o[0].transpose(0, 1).flatten(1)

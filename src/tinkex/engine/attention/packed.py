"""Attention for training: concatenated sequences, no cache, differentiable.

Sequences of about the same length are computed together, but never mixed: see `invariant`.
A block of queries reads only the keys up to its own end, and nothing but the queries, keys and
values is saved for the backward pass. Forward and backward are faster on a CPU than torch's own
attention, which repeats the keys of grouped heads and computes more masked scores.

Shapes: T tokens, H heads, G key/value heads, d head size, X = H*d, M query heads per key
head, N sequences of a group, L their padded length, n = N*G, R query rows (token by
token, its M heads one after the other), S keys, Q queries of a block.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final, cast

import numpy as np
import torch

from tinkex.engine.attention.invariant import KEY_STEP, mix, round_up, scores

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

_QUERIES: Final = 64
"""Queries of a block: a multiple of `KEY_STEP`. Larger blocks compute more masked scores."""
_SCORES: Final = 1 << 20
"""About how many scores exist at the same time; more would not stay in the caches."""


@dataclass(frozen=True, slots=True)
class _Group:
    """Sequences of one padded length: their tokens, and which rows are pads."""

    length: int
    tokens: Tensor
    pads: Tensor
    together: slice | None
    """The range of the tokens, if they are contiguous and there are no pads."""

    def take(self, x: Tensor) -> Tensor:
        """Rows by token to x_NL...; pads are zero, and so are their gradients."""
        if self.together is not None:
            rows = x[self.together]
        else:
            rows = x.index_select(0, self.tokens).index_fill_(0, self.pads, 0.0)
        return rows.view(-1, self.length, *x.shape[1:])


class PackedAttention:
    """Causal attention within each sequence of a pack; an `Attend` without a cache.

    Every sequence is computed separately, so its neighbours do not affect it.
    """

    def __init__(self, lengths: Sequence[int], device: torch.device | str = "cpu") -> None:
        self._groups, self._back_T = _groups(lengths, torch.device(device))
        self._in_order = len(self._groups) == 1 and self._groups[0].together is not None
        self.mask_QQ = torch.full((_QUERIES, _QUERIES), -torch.inf, device=device).triu_(1)
        """Minus infinity where a key comes after the query."""

    def __call__(self, layer: int, q_THd: Tensor, k_TGd: Tensor, v_TGd: Tensor) -> Tensor:
        del layer
        return cast("Tensor", _Attention.apply(self, q_THd, k_TGd, v_TGd))  # pyright: ignore[reportUnknownMemberType] -- torch's own stub

    def split(self, *tensors: Tensor) -> list[list[Tensor]]:
        """Each group's part of every tensor."""
        return [[group.take(tensor) for tensor in tensors] for group in self._groups]

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Put the groups' parts of one tensor back in the order of tokens, without pads."""
        if self._in_order:
            return parts[0].flatten(0, 1)
        return torch.cat([part.flatten(0, 1) for part in parts]).index_select(0, self._back_T)


def _groups(lengths: Sequence[int], device: torch.device) -> tuple[list[_Group], Tensor]:
    """The groups, and the index of each token in their concatenated rows."""
    starts = np.array([0, *accumulate(lengths)], np.int64)
    padded = np.array([round_up(length, KEY_STEP) for length in lengths], np.int64)
    back_T = np.empty(starts[-1], np.int64)
    groups: list[_Group] = []
    before = 0
    for length in sorted({int(width) for width in padded}):
        members = np.flatnonzero(padded == length)
        tokens_NL = starts[members][:, None] + np.arange(length)
        is_token_NL = tokens_NL < starts[members + 1][:, None]
        back_T[tokens_NL[is_token_NL]] = before + np.flatnonzero(is_token_NL)
        before += tokens_NL.size
        pads = np.flatnonzero(~is_token_NL)
        tokens = np.where(is_token_NL, tokens_NL, 0).ravel()
        first, last = int(tokens[0]), int(tokens[-1]) + 1
        together = slice(first, last) if last - first == tokens.size and not pads.size else None
        groups.append(_Group(length, _tensor(tokens, device), _tensor(pads, device), together))
    return groups, _tensor(back_T, device)


def _tensor(array: NDArray[np.int64], device: torch.device) -> Tensor:
    return torch.from_numpy(array).to(device)  # pyright: ignore[reportUnknownMemberType] -- torch's own stub


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, pack: PackedAttention, q_THd: Tensor, k_TGd: Tensor, v_TGd: Tensor
    ) -> Tensor:
        ctx.pack = pack
        ctx.save_for_backward(q_THd, k_TGd, v_TGd)
        parts = pack.split(q_THd, k_TGd, v_TGd)
        return pack.join([_forward(pack.mask_QQ, *part) for part in parts]).flatten(1)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        pack, (q_THd, k_TGd, v_TGd) = ctx.pack, ctx.saved_tensors
        parts = pack.split(q_THd, k_TGd, v_TGd, grad_outputs[0].view(q_THd.shape))
        found = [_backward(pack.mask_QQ, *part) for part in parts]
        return None, *(pack.join(part) for part in zip(*found, strict=True))


def _forward(mask_QQ: Tensor, q_NLHd: Tensor, k_NLGd: Tensor, v_NLGd: Tensor) -> Tensor:
    heads = k_NLGd.shape[2]
    q_nRd, k_nSd, v_nSd = _queries(q_NLHd, heads), _rows(k_NLGd, heads), _rows(v_NLGd, heads)
    o_nRd = torch.empty_like(q_nRd)
    for n, rows, keys in _blocks(q_nRd, k_nSd):
        p_nRS = _weights(q_nRd[n, rows], k_nSd[n, keys], mask_QQ)
        o_nRd[n, rows] = mix(p_nRS, v_nSd[n, keys])
    return _tokens(o_nRd, q_NLHd, heads)


def _backward(
    mask_QQ: Tensor, q_NLHd: Tensor, k_NLGd: Tensor, v_NLGd: Tensor, do_NLHd: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients by queries, keys and values; the attention weights are recomputed."""
    heads = k_NLGd.shape[2]
    q_nRd, k_nSd, v_nSd = _queries(q_NLHd, heads), _rows(k_NLGd, heads), _rows(v_NLGd, heads)
    do_nRd = _rows(do_NLHd, heads)
    dq_nRd, dk_nSd, dv_nSd = (torch.zeros_like(x) for x in (q_nRd, k_nSd, v_nSd))
    for n, rows, keys in _blocks(q_nRd, k_nSd):
        p_nRS = _weights(q_nRd[n, rows], k_nSd[n, keys], mask_QQ)
        dv_nSd[n, keys].baddbmm_(p_nRS.transpose(1, 2), do_nRd[n, rows])
        dp_nRS = torch.bmm(do_nRd[n, rows], v_nSd[n, keys].transpose(1, 2))
        ds_nRS = torch.ops.aten._softmax_backward_data(dp_nRS, p_nRS, -1, p_nRS.dtype)
        dq_nRd[n, rows] = torch.bmm(ds_nRS, k_nSd[n, keys])
        dk_nSd[n, keys].baddbmm_(ds_nRS.transpose(1, 2), q_nRd[n, rows])
    dq_nRd *= q_nRd.shape[2] ** -0.5
    return (
        _tokens(dq_nRd, q_NLHd, heads),
        _tokens(dk_nSd, k_NLGd, heads),
        _tokens(dv_nSd, v_NLGd, heads),
    )


def _rows(x_NLHd: Tensor, heads: int) -> Tensor:
    """By key head: the heads that share one are adjacent, token by token."""
    sequences, length, _, dim = x_NLHd.shape
    x_NGLMd = x_NLHd.reshape(sequences, length, heads, -1, dim).transpose(1, 2)
    return x_NGLMd.flatten(2, 3).flatten(0, 1)


def _queries(q_NLHd: Tensor, heads: int) -> Tensor:
    return _rows(q_NLHd, heads) * q_NLHd.shape[3] ** -0.5


def _tokens(x_nRd: Tensor, like_NLHd: Tensor, heads: int) -> Tensor:
    """The inverse of `_rows`."""
    sequences, length, _, dim = like_NLHd.shape
    return x_nRd.view(sequences, heads, length, -1, dim).transpose(1, 2).flatten(2, 3)


def _blocks(q_nRd: Tensor, k_nSd: Tensor) -> Iterator[tuple[slice, slice, slice]]:
    """Problems, query rows and keys to compute at a time, bounded by `_SCORES`."""
    count, length = k_nSd.shape[:2]
    shared = q_nRd.shape[1] // length
    for start in range(0, length, _QUERIES):
        stop = min(start + _QUERIES, length)
        rows = slice(start * shared, stop * shared)
        most = max(_SCORES // ((rows.stop - rows.start) * stop), 1)
        for first in range(0, count, most):
            yield slice(first, first + most), rows, slice(stop)


def _weights(q_nRd: Tensor, k_nSd: Tensor, mask_QQ: Tensor) -> Tensor:
    """p_nRS, when the queries are those of the last keys."""
    s_nRS = scores(q_nRd, k_nSd)
    queries = (k_nSd.shape[1] - 1) % _QUERIES + 1
    s_nQMS = s_nRS.view(len(s_nRS), queries, -1, s_nRS.shape[2])
    s_nQMS[..., -queries:] += mask_QQ[:queries, None, :queries]
    return s_nRS.softmax(-1)

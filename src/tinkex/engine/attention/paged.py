"""Attention for sampling without kernels of its own: packed tokens over a paged cache.

The cache is `[2, layer, G, slot, d]`: the blocks of one head lie whole, so that a sequence's
keys are brought together block by block and are matrices right away. The products are those
of training, so a token has the same bits there, in a prompt and while decoding: see
`invariant`.

Shapes: T tokens, H heads, G key/value heads, d head size, X = H*d, M query heads per key
head, B spans of one group, Q tokens of each of them, R query rows (token by token, its M heads
one after the other, then pads), S keys that a group reads, n = G*B.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, groupby
from math import gcd
from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from tinkex.engine.attention.invariant import KEY_STEP, ROW_STEP, mix, round_up, scores

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from tinkex.engine.models.base import DecoderConfig

_SCORES: Final = 1 << 22
"""About how many scores exist at the same time."""
_SHORT_CONTEXT: Final = 3
"""Up to 2 to the power of this many blocks."""


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens `start` to `stop` of one sequence, whose keys and values lie in `blocks`."""

    start: int
    stop: int
    blocks: Sequence[int]

    def __len__(self) -> int:
        return self.stop - self.start

    def slots(self, block_size: int) -> NDArray[np.int64]:
        """The cache slots of its own tokens."""
        first = self.start // block_size
        blocks = np.array(self.blocks[first : -(-self.stop // block_size)], np.int64)
        positions = np.arange(self.start, self.stop)
        return blocks[positions // block_size - first] * block_size + positions % block_size

    @property
    def shape(self) -> tuple[int, int]:
        """What spans of one group share: their length, and their context to a power of two.

        Short contexts are all one size: a further group costs more than what it would not read.
        """
        return len(self), max((len(self.blocks) - 1).bit_length(), _SHORT_CONTEXT)


@dataclass(frozen=True, slots=True)
class _Group:
    """Spans of equal length whose contexts have about the same size, attended together."""

    size: int
    length: int
    blocks: Tensor
    """B rows of as many blocks, one after the other."""
    mask_BQ1S: Tensor
    """Minus infinity where a key comes after the query."""


def cache_shape(config: DecoderConfig, slots: int) -> tuple[int, ...]:
    """The cache that this attention reads."""
    return 2, config.num_layers, config.num_kv_heads, slots, config.head_dim


class PagedAttention:
    """`Attend` for one pass: writes the new keys and values, then attends group by group."""

    def __init__(self, cache: Tensor, spans: Sequence[Span], *, block_size: int) -> None:
        self._cache = cache
        self._block_size = block_size
        self._clear_fresh_blocks(spans)
        self._slots_T = self._tensor(np.concatenate([span.slots(block_size) for span in spans]))
        order = sorted(range(len(spans)), key=lambda i: spans[i].shape)
        self._groups = [
            self._group([spans[i] for i in run])
            for _, run in groupby(order, key=lambda i: spans[i].shape)
        ]
        self._turned = self._rows_in_order(spans, order)

    def __call__(self, layer: int, q_THd: Tensor, k_TGd: Tensor, v_TGd: Tensor) -> Tensor:
        keys_GSd, values_GSd = self._cache[0, layer], self._cache[1, layer]
        keys_GSd.index_copy_(1, self._slots_T, k_TGd.transpose(0, 1))
        values_GSd.index_copy_(1, self._slots_T, v_TGd.transpose(0, 1))
        if self._turned is not None:
            q_THd = q_THd[self._turned[0]]
        start, outputs = 0, list[torch.Tensor]()
        for group in self._groups:
            stop = start + group.size * group.length
            outputs.append(self._attend(q_THd[start:stop], keys_GSd, values_GSd, group))
            start = stop
        o_TX = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return o_TX if self._turned is None else o_TX[self._turned[1]]

    def _attend(self, q_THd: Tensor, keys_GSd: Tensor, values_GSd: Tensor, group: _Group) -> Tensor:
        q_GBQMd, shared = _queries(q_THd, group, keys_GSd.shape[0])
        k_nSd, v_nSd = self._gather(keys_GSd, group), self._gather(values_GSd, group)
        parts: list[Tensor] = []
        for block in _blocks(q_GBQMd, k_nSd):
            part_GBQMd = q_GBQMd[:, :, block]
            s_nRS = scores(part_GBQMd.reshape(k_nSd.shape[0], -1, k_nSd.shape[2]), k_nSd)
            s_GBQMS = s_nRS.view(*part_GBQMd.shape[:4], -1)
            s_GBQMS += group.mask_BQ1S[:, block]
            parts.append(mix(s_nRS.softmax(-1), v_nSd).view(part_GBQMd.shape))
        o_GBQMd = parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)
        kept_GBQMd = o_GBQMd[:, :, : group.length, :shared]
        return kept_GBQMd.permute(1, 2, 0, 3, 4).reshape(group.size * group.length, -1)

    def _gather(self, cached_GSd: Tensor, group: _Group) -> Tensor:
        """The keys or values of a group's contexts, x_nSd."""
        heads, _, dim = cached_GSd.shape
        by_block = cached_GSd.view(heads, -1, self._block_size * dim)
        return by_block.index_select(1, group.blocks).view(heads * group.size, -1, dim)

    def _rows_in_order(
        self, spans: Sequence[Span], order: list[int]
    ) -> tuple[Tensor, Tensor] | None:
        """The rows group by group, and back; None when they lie like that."""
        if order == sorted(order):
            return None
        ends: list[int] = [0, *accumulate(map(len, spans))]
        rows = np.concatenate([np.arange(ends[i], ends[i + 1]) for i in order])
        return self._tensor(rows), self._tensor(np.argsort(rows))

    def _tensor(self, array: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(array).to(self._cache.device)  # pyright: ignore[reportUnknownMemberType] -- torch's own stub

    def _group(self, spans: list[Span]) -> _Group:
        size = self._block_size
        tables = [list(span.blocks) for span in spans]
        # Whole steps of keys, whatever the size of a block.
        width = round_up(max(map(len, tables)), KEY_STEP // gcd(KEY_STEP, size))
        # Short rows are filled up with their own first block: masked numbers still take part
        # in the arithmetic, and a NaN of another tenant must not.
        blocks = np.array([t + t[:1] * (width - len(t)) for t in tables], np.int64)
        length = len(spans[0])
        first_B1 = np.array([[span.start] for span in spans])
        # The queries that fill up the last step see as much as the last one.
        positions_BQ = first_B1 + np.minimum(np.arange(_padded_length(length)), length - 1)
        hidden = torch.from_numpy(np.arange(width * size) > positions_BQ[:, :, None, None])  # pyright: ignore[reportUnknownMemberType] -- torch's own stub
        mask_BQ1S = torch.zeros(hidden.shape, dtype=self._cache.dtype, device=self._cache.device)
        mask_BQ1S.masked_fill_(hidden.to(self._cache.device), -torch.inf)
        return _Group(len(spans), length, self._tensor(blocks.ravel()), mask_BQ1S)

    def _clear_fresh_blocks(self, spans: Sequence[Span]) -> None:
        """Wipe blocks that this pass begins and does not fill: see `_group` for why."""
        size = self._block_size
        fresh = [
            span.blocks[span.stop // size]
            for span in spans
            if span.stop % size and span.start <= span.stop - span.stop % size
        ]
        if fresh:
            slots = (np.array(fresh, np.int64)[:, None] * size + np.arange(size)).reshape(-1)
            self._cache.index_fill_(3, self._tensor(slots), 0.0)


def _padded_length(length: int) -> int:
    """How many tokens make whole steps of query rows; a lone token has its heads filled up."""
    return 1 if length == 1 else round_up(length, ROW_STEP)


def _queries(q_THd: Tensor, group: _Group, heads: int) -> tuple[Tensor, int]:
    """The queries by key head, scaled and filled up with zeros to whole steps; and M."""
    dim = q_THd.shape[2]
    q_BQGMd = q_THd.view(group.size, group.length, heads, -1, dim)
    shared = q_BQGMd.shape[3]
    more_heads = -shared % ROW_STEP if group.length == 1 else 0
    q_GBQMd = q_THd.new_zeros(
        heads, group.size, _padded_length(group.length), shared + more_heads, dim
    )
    into_GBQMd = q_GBQMd[:, :, : group.length, :shared]
    torch.mul(q_BQGMd.permute(2, 0, 1, 3, 4), dim**-0.5, out=into_GBQMd)
    return q_GBQMd, shared


def _blocks(q_GBQMd: Tensor, k_nSd: Tensor) -> Iterator[slice]:
    """Queries to compute at a time, bounded by `_SCORES`."""
    per_query = k_nSd.shape[0] * k_nSd.shape[1] * q_GBQMd.shape[3]
    step = max(_SCORES // per_query // ROW_STEP, 1) * ROW_STEP
    for start in range(0, q_GBQMd.shape[2], step):
        yield slice(start, start + step)

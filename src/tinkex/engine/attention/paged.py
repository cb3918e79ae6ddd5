"""Attention for sampling in plain torch: packed tokens over a paged cache.

The cache is `[2, layer, G, slot, d]`: a block of one head is contiguous, so that gathering a
sequence's blocks gives a matrix of keys. The products are those of training, so a token has the
same bits in training, prefill and decoding: see `invariant`.

What does not depend on the layer is computed once per pass: with few tokens, making a view takes as
long as a small sum.

Shapes: T tokens, H heads, G key/value heads, d head size, X = H*d, M query heads per key
head, B spans of one group, Q tokens of each of them, padded to a common length, R query
rows (token by token, its M heads one after the other, then pads), S keys that a group reads,
n = B*G.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, groupby
from math import gcd, prod
from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from tinkex.engine.attention.invariant import KEY_STEP, ROW_STEP, mix, round_up, scores

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from tinkex.engine.decoder import DecoderConfig

_ALIGNMENT: Final = 64
"""In bytes: that of torch's allocator, on which its vectorised code is fastest."""
_SCORES: Final = 1 << 22
"""About how many scores exist at the same time."""
_SHORT_CONTEXT: Final = 3
"""Up to 2 to the power of this many blocks."""
_LENGTH_STEP: Final = 16
"""Spans of several tokens are padded to multiples of this; a multiple of `ROW_STEP`."""


@dataclass(frozen=True, slots=True)
class TokenSpan:
    """Tokens `start` to `stop` of one sequence, whose keys and values are stored in `blocks`."""

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
        """What the spans of a group have in common: their padded length, and their rough context.

        Another group costs more than the padding it would save: contexts are rounded up to powers
        of two, and all short ones have the same size.
        """
        length = len(self)
        return (
            1 if length == 1 else round_up(length, _LENGTH_STEP),
            max((len(self.blocks) - 1).bit_length(), _SHORT_CONTEXT),
        )


def new_cache(config: DecoderConfig, slots: int, like: Tensor) -> Tensor:
    """An empty cache for `slots` tokens, with the device and dtype of `like`."""
    shape = 2, config.num_layers, config.num_kv_heads, slots, config.head_dim
    if like.device.type != "cpu":
        return torch.zeros(shape, dtype=like.dtype, device=like.device)
    return _untouched_zeros(shape, like.dtype)


def _untouched_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeros on the CPU whose pages are not allocated before they are written.

    `torch.zeros` writes all of them: a gigabyte, and seconds of every start, of which a small model
    uses little.
    """
    size_bytes = prod(shape) * dtype.itemsize
    room = torch.from_numpy(np.zeros(size_bytes + _ALIGNMENT, np.uint8))  # pyright: ignore[reportUnknownMemberType] - torch types it loosely
    start = -room.data_ptr() % _ALIGNMENT
    return room[start : start + size_bytes].view(dtype).view(shape)


class PagedAttention:
    """`Attend` for one pass: writes the new keys and values, then attends group by group."""

    def __init__(
        self, cache: Tensor, spans: Sequence[TokenSpan], *, block_size: int, strict: bool = True
    ) -> None:
        del strict  # a token always has the same bits as in packed attention
        self._keys_GSd, self._values_GSd = (side.unbind(0) for side in cache.unbind(0))
        slots_T = np.concatenate([span.slots(block_size) for span in spans])
        self._slots_T = _tensor(slots_T, cache.device)
        clear_fresh_blocks(cache, spans, block_size)
        shapes = [span.shape for span in spans]
        order = sorted(range(len(spans)), key=shapes.__getitem__)
        starts: list[int] = [0, *accumulate(map(len, spans))]
        self._groups = [
            _Group(cache, shape[0], [(starts[i], spans[i]) for i in run], block_size)
            for shape, run in groupby(order, key=shapes.__getitem__)
        ]
        self._back_T: Tensor | None = None
        """The index of each token in the groups' rows; None if these are in token order."""
        if len(self._groups) > 1 or not self._groups[0].in_order:
            rows = _rows_of_tokens(spans, order, [shapes[i][0] for i in order])
            self._back_T = _tensor(rows, cache.device)

    def __call__(self, layer: int, q_THd: Tensor, k_TGd: Tensor, v_TGd: Tensor) -> Tensor:
        keys_GSd, values_GSd = self._keys_GSd[layer], self._values_GSd[layer]
        keys_GSd.index_copy_(1, self._slots_T, k_TGd.transpose(0, 1))
        values_GSd.index_copy_(1, self._slots_T, v_TGd.transpose(0, 1))
        found = [group.attend(q_THd, keys_GSd, values_GSd) for group in self._groups]
        if self._back_T is None:
            return found[0]
        return torch.cat(found).index_select(0, self._back_T)


class _Group:
    """Spans of about the same length and context, attended together.

    `placed` are the spans with the index of their first token in the pass; all are padded to
    `length`.
    """

    def __init__(
        self, cache: Tensor, length: int, placed: list[tuple[int, TokenSpan]], block_size: int
    ) -> None:
        heads, slots, dim = cache.shape[2:]
        self._shape = len(placed), length, heads, -1, dim
        self._rows = len(placed) * length
        starts, spans = zip(*placed, strict=True)
        # The padding of a span repeats its last token.
        steps_BQ = np.minimum(np.arange(length), np.array([[len(s) - 1] for s in spans]))
        tokens = (np.array(starts)[:, None] + steps_BQ).ravel()
        self._first = starts[0]
        self.in_order = np.array_equal(tokens, np.arange(self._rows) + self._first)
        self._tokens = None if self.in_order else _tensor(tokens, cache.device)
        blocks_BC = block_table(spans, block_size)
        # Every head has its own copy of all blocks.
        blocks_BGC = blocks_BC[:, None] + slots // block_size * np.arange(heads)[:, None]
        self._blocks = _tensor(blocks_BGC.ravel(), cache.device)
        self._block_numbers = block_size * dim
        keys = np.arange(int(blocks_BC.shape[1]) * block_size)
        positions_BQ = np.array([[span.start] for span in spans]) + steps_BQ
        hidden = torch.from_numpy(keys > positions_BQ[:, None, :, None, None])  # pyright: ignore[reportUnknownMemberType] -- torch's own stub
        self._mask_B1Q1S = torch.zeros(hidden.shape, dtype=cache.dtype, device=cache.device)
        self._mask_B1Q1S.masked_fill_(hidden.to(cache.device), -torch.inf)
        """Minus infinity where a key comes after the query."""
        # Mutable state: a buffer for the queries of one layer.
        self._queries: _Queries | None = None

    def attend(self, q_THd: Tensor, keys_GSd: Tensor, values_GSd: Tensor) -> Tensor:
        """o_TX of the group's rows, span by span."""
        if self._tokens is None:
            q_THd = q_THd.narrow(0, self._first, self._rows)
        else:
            q_THd = q_THd.index_select(0, self._tokens)
        q_BQGMd = q_THd.view(self._shape)
        if self._queries is None:
            self._queries = _Queries(q_BQGMd, self._mask_B1Q1S)
        k_nSd, v_nSd = self._gather(keys_GSd), self._gather(values_GSd)
        found = [
            mix(_weights(part, k_nSd), v_nSd).view(part.shape_BGQMd)
            for part in self._queries.parts_of(q_BQGMd)
        ]
        o_BGQMd = found[0] if len(found) == 1 else torch.cat(found, dim=2)
        return self._queries.in_order(o_BGQMd).reshape(self._rows, -1)

    def _gather(self, cached_GSd: Tensor) -> Tensor:
        """The keys or values of the group's contexts, x_nSd."""
        by_block = cached_GSd.view(-1, self._block_numbers)
        blocks = by_block.index_select(0, self._blocks)
        return blocks.view(self._shape[0] * self._shape[2], -1, self._shape[4])


@dataclass(frozen=True, slots=True)
class _Part:
    """Some queries of each span, and their mask."""

    q_BGQMd: Tensor
    mask_B1Q1S: Tensor
    shape_BGQMd: tuple[int, ...]


class _Queries:
    """Queries by key head, scaled; the heads of a single token are padded to `ROW_STEP`."""

    def __init__(self, like_BQGMd: Tensor, mask_B1Q1S: Tensor) -> None:
        size, length, heads, self._shared, dim = like_BQGMd.shape
        more = -self._shared % ROW_STEP if length == 1 else 0
        self._scale = dim**-0.5
        q_BGQMd = like_BQGMd.new_zeros(size, heads, length, self._shared + more, dim)
        self._into_BQGMd = self.in_order(q_BGQMd)
        # Some queries at a time, bounded by `_SCORES`.
        per_query = heads * size * (self._shared + more) * mask_B1Q1S.shape[4]
        step = max(_SCORES // per_query // ROW_STEP, 1) * ROW_STEP
        self._parts = [
            _Part(q, mask, tuple(q.shape))
            for q, mask in zip(
                *(torch.split(x, step, 2) for x in (q_BGQMd, mask_B1Q1S)), strict=True
            )
        ]

    def parts_of(self, q_BQGMd: Tensor) -> list[_Part]:
        """The queries of a layer; overwrites those of the previous one."""
        torch.mul(q_BQGMd, self._scale, out=self._into_BQGMd)
        return self._parts

    def in_order(self, x_BGQMd: Tensor) -> Tensor:
        """The same values as x_BQGMd, without the padding."""
        return x_BGQMd.narrow(3, 0, self._shared).transpose(1, 2)


def _weights(part: _Part, k_nSd: Tensor) -> Tensor:
    """p_nRS of the queries of one part."""
    count, keys, dim = k_nSd.shape
    s_nRS = scores(part.q_BGQMd.reshape(count, -1, dim), k_nSd)
    s_nRS.view(*part.shape_BGQMd[:4], keys).add_(part.mask_B1Q1S)
    return s_nRS.softmax(-1)


def _rows_of_tokens(
    spans: Sequence[TokenSpan], order: list[int], lengths: list[int]
) -> NDArray[np.int64]:
    """The row of each token when the spans, padded to `lengths`, are in `order`."""
    first = np.empty(len(spans), np.int64)
    first[order] = [0, *accumulate(lengths)][:-1]
    return np.concatenate(
        [np.arange(len(s)) + start for s, start in zip(spans, first, strict=True)]
    )


def block_table(spans: Sequence[TokenSpan], block_size: int) -> NDArray[np.int64]:
    """Each span's blocks, padded to a multiple of `KEY_STEP` keys."""
    tables = [list(span.blocks) for span in spans]
    width = round_up(max(map(len, tables)), KEY_STEP // gcd(KEY_STEP, block_size))
    # Short rows are padded with their own first block: masked values still take part in the
    # arithmetic, and a NaN of another tenant must not.
    return np.array([t + t[:1] * (width - len(t)) for t in tables], np.int64)


def clear_fresh_blocks(cache: Tensor, spans: Sequence[TokenSpan], block_size: int) -> None:
    """Zero the blocks that this pass starts and does not fill: see `block_table` for why."""
    fresh = [
        span.blocks[span.stop // block_size]
        for span in spans
        if span.stop % block_size and span.start <= span.stop - span.stop % block_size
    ]
    if fresh:
        slots = (np.array(fresh, np.int64)[:, None] * block_size + np.arange(block_size)).ravel()
        cache.index_fill_(3, _tensor(slots, cache.device), 0.0)


def _tensor(array: NDArray[np.int64], device: torch.device) -> Tensor:
    return torch.from_numpy(array).to(device)  # pyright: ignore[reportUnknownMemberType] -- torch's own stub

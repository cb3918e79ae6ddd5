"""Attention for decoding on a CPU: one new token of each sequence over the paged cache.

Gives the bits of `paged`. With so few numbers every call of the library takes longer than its
arithmetic, and so does every view of a tensor. Hence all memory, all views and the tables of
blocks are kept from step to step, until a sequence joins, leaves or takes another block.

Shapes: B sequences, R >= B rows, H heads, G key/value heads, d head size, Y = (H + 2*G)*d, M query
heads per key head, filled up to P; C blocks and S keys of a group, n = B*G.
"""

from __future__ import annotations

from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING

import numpy as np
import torch

from tinkex.engine.attention.invariant import ROW_STEP, mix_blocks, round_up, value_blocks
from tinkex.engine.attention.paged import block_table, clear_fresh_blocks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from tinkex.engine.attention.paged import Span

_shape = attrgetter("shape")


class LoneTokens:
    """Attends within `qkv_RY`, whose rows hold the heads of q, k and v side by side.

    The first rows are those of the sequences given to `begin`; the result is in `o_RX`.
    """

    def __init__(self, cache: Tensor, qkv_RY: Tensor, *, block_size: int) -> None:
        kv_heads, dim = cache.shape[2], cache.shape[4]
        self._cache = cache
        self._layers_2GSd = cache.unbind(1)
        self._block_size = block_size
        self._q_RGMd, self._kv_2GRd = _split(qkv_RY, kv_heads, dim)
        self.o_RX = qkv_RY.new_zeros(len(qkv_RY), self._q_RGMd[0].numel())
        # Mutable state: the spans that would follow the last step, what was laid out for them,
        # and where this step's keys and values come from and go to.
        self._following: list[tuple[Sequence[int], int, int]] = []
        self._groups: list[_Group] = []
        self._kv_2GBd = self._kv_2GRd
        self._slots_B = torch.empty(0, dtype=torch.int64)

    def begin(self, spans: Sequence[Span]) -> None:
        """Take the next token of some sequences; then call it for each layer."""
        size = self._block_size
        clear_fresh_blocks(self._cache, spans, size)
        slots = [s.blocks[s.start // size] * size + s.start % size for s in spans]
        self._slots_B = torch.tensor(slots)
        # A sequence that starts over has a new list, one that grows a longer one.
        same = len(spans) == len(self._following) and all(
            blocks is span.blocks and count == len(span.blocks) and start == span.start
            for span, (blocks, count, start) in zip(spans, self._following, strict=True)
        )
        if not same:
            self._lay_out(spans)
        self._following = [(span.blocks, len(span.blocks), span.stop) for span in spans]
        for group in self._groups:
            group.show(spans)

    def __call__(self, layer: int) -> None:
        """Write the layer's keys and values to the cache, and attend."""
        self._layers_2GSd[layer].index_copy_(2, self._slots_B, self._kv_2GBd)
        for group in self._groups:
            group.attend(layer)

    def _lay_out(self, spans: Sequence[Span]) -> None:
        self._kv_2GBd = self._kv_2GRd[:, :, : len(spans)]
        self._groups = []
        start = 0
        for _, run in groupby(spans, key=_shape):
            members = list(run)
            rows = slice(start, start + len(members))
            q_BGMd = self._q_RGMd[rows]
            o_BGMd = self.o_RX[rows].view(q_BGMd.shape)
            self._groups.append(
                _Group(self._cache, members, start, q_BGMd, o_BGMd, self._block_size)
            )
            start = rows.stop


class _Group:
    """Neighbouring rows, from `first` on, with contexts of about the same length."""

    def __init__(
        self,
        cache: Tensor,
        spans: list[Span],
        first: int,
        q_BGMd: Tensor,
        o_BGMd: Tensor,
        block_size: int,
    ) -> None:
        count, kv_heads, shared, dim = q_BGMd.shape
        self._rows = slice(first, first + count)
        self._q_BGMd, self._o_BGMd = q_BGMd, o_BGMd
        self._scale = dim**-0.5
        rows = round_up(shared, ROW_STEP)
        q_BGPd = q_BGMd.new_zeros(count, kv_heads, rows, dim)
        self._into_BGMd, self._q_nPd = q_BGPd[:, :, :shared], q_BGPd.view(-1, rows, dim)
        table_BC = block_table(spans, block_size)
        self._by_block = cache.view(-1, block_size * dim)
        self._tables = _tables(cache, table_BC, block_size)
        self._gathered = cache.new_empty(len(self._tables[0]), block_size * dim)
        k_nSd, v_nSd = self._gathered.view(2, count * kv_heads, -1, dim).unbind(0)
        self._k_ndS = k_nSd.transpose(1, 2)
        keys = k_nSd.shape[1]
        self._hidden_BGS = np.empty((count, kv_heads, keys), np.float32)
        self._hidden_BGS[:] = [
            [np.where(np.arange(keys) < span.start, 0.0, -np.inf)] for span in spans
        ]
        """Minus infinity where a key comes after the query."""
        self._mask_n1S = torch.from_numpy(self._hidden_BGS).view(-1, 1, keys)  # pyright: ignore[reportUnknownMemberType] -- torch's own stub
        self._s_nPS = cache.new_empty(count * kv_heads, rows, keys)
        self._p_nPS = torch.empty_like(self._s_nPS)
        self._mixed = value_blocks(self._p_nPS, v_nSd)
        self._o_nPd = torch.empty_like(self._q_nPd)
        self._from_BGMd = self._o_nPd.view(q_BGPd.shape)[:, :, :shared]

    def show(self, spans: Sequence[Span]) -> None:
        """Let each query see its own key; it sees those before it already."""
        for hidden_GS, span in zip(self._hidden_BGS, spans[self._rows], strict=True):
            hidden_GS[:, span.start] = 0.0

    def attend(self, layer: int) -> None:
        torch.mul(self._q_BGMd, self._scale, out=self._into_BGMd)
        torch.index_select(self._by_block, 0, self._tables[layer], out=self._gathered)
        torch.bmm(self._q_nPd, self._k_ndS, out=self._s_nPS).add_(self._mask_n1S)
        torch.softmax(self._s_nPS, -1, out=self._p_nPS)
        mix_blocks(self._mixed, self._o_nPd)
        self._o_BGMd.copy_(self._from_BGMd)


def _split(qkv_RY: Tensor, kv_heads: int, dim: int) -> tuple[Tensor, Tensor]:
    """See rows as their queries q_RGMd and their keys and values kv_2GRd."""
    rows, width = qkv_RY.shape
    queries = width - 2 * kv_heads * dim
    q_RGMd = qkv_RY[:, :queries].view(rows, kv_heads, -1, dim)
    return q_RGMd, qkv_RY[:, queries:].view(rows, 2, kv_heads, dim).permute(1, 2, 0, 3)


def _tables(cache: Tensor, table_BC: NDArray[np.int64], block_size: int) -> tuple[Tensor, ...]:
    """For each layer, where the blocks of all keys lie in the cache, then those of all values."""
    sides, layers, heads, slots, _ = cache.shape
    first = np.arange(sides * layers * heads).reshape(sides, layers, 1, heads, 1)
    table = first * (slots // block_size) + table_BC[:, None]
    by_layer = table.swapaxes(0, 1).reshape(layers, -1)
    return torch.from_numpy(by_layer).unbind(0)  # pyright: ignore[reportUnknownMemberType] -- torch's own stub

"""Attention for decoding on a CPU: one new token of each sequence over the paged cache.

Gives the bits of `paged`. With so few numbers every call of a library takes longer than its
arithmetic, and so does every view of a tensor. Hence memory, views and the tables of blocks are
kept from step to step, until a sequence joins, leaves or outgrows its room. Where all keys and
values fit the processor's caches, a copy of them is kept as well, in which those of a sequence
lie together; elsewhere each layer's are brought together at every step. What rounds the same way
everywhere is left to numpy, whose calls take half as long as torch's.

Shapes: B sequences, R >= B rows, H heads, G key/value heads, d head size, Y = (H + 2*G)*d, M query
heads per key head, filled up to P; L layers, C blocks and S keys that there is room for, n = G*B.
"""

from __future__ import annotations

from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from tinkex.engine.attention.invariant import (
    KEY_STEP,
    ROW_STEP,
    mix_blocks,
    round_up,
    value_blocks,
)
from tinkex.engine.attention.paged import block_table, clear_fresh_blocks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from tinkex.engine.attention.paged import Span

    Floats = NDArray[np.float32]
    Place = int | NDArray[np.int64]

_shape = attrgetter("shape")
_KEPT: Final = 2**21
"""Up to so many keys and values are kept as a copy."""
_SPARE: Final = 64
"""Keys that a sequence may take before the copy is made anew."""


class LoneTokens:
    """Attends within `qkv_RY`, whose first `count` rows hold heads of q, k and v side by side.

    The result is in `o_RX`.
    """

    def __init__(self, cache: Tensor, qkv_RY: Tensor, count: int, *, block_size: int) -> None:
        self._cache = cache
        self._layers_2GSd = list(cache.numpy().swapaxes(0, 1))
        self._block_size = block_size
        self._q_BGMd, self._kv_2GBd = _split(qkv_RY.numpy()[:count], *cache.shape[2::2])
        self.o_RX = qkv_RY.new_zeros(len(qkv_RY), self._q_BGMd[0].size)
        # Mutable state: the spans that would follow the last step, what was laid out for them,
        # and where this step's keys and values go.
        self._following: list[tuple[Sequence[int], int]] = []
        self._groups: list[_Group] = []
        self._slots_B: Place = 0

    def begin(self, spans: Sequence[Span]) -> None:
        """Take the next token of each sequence; then call it for each layer."""
        size = self._block_size
        clear_fresh_blocks(self._cache, spans, size)
        if not self._follow(spans):
            self._lay_out(spans)
        self._following = [(span.blocks, span.stop) for span in spans]
        self._slots_B = _place([s.blocks[s.start // size] * size + s.start % size for s in spans])

    def __call__(self, layer: int) -> None:
        """Write the layer's keys and values to the cache, and attend."""
        _write(self._layers_2GSd[layer], self._slots_B, self._kv_2GBd)
        for group in self._groups:
            group.attend(layer)

    def _follow(self, spans: Sequence[Span]) -> bool:
        """Whether these go on where the last ones ended, and what was laid out has room."""
        if len(spans) != len(self._following):
            return False
        for span, (blocks, start) in zip(spans, self._following, strict=True):
            # A sequence that starts over has a new list of blocks.
            if blocks is not span.blocks or start != span.start:
                return False
        return all(group.take(spans[group.rows]) for group in self._groups)

    def _lay_out(self, spans: Sequence[Span]) -> None:
        self._groups = []
        start = 0
        for _, run in groupby(spans, key=_shape):
            members = list(run)
            rows = slice(start, start + len(members))
            q_BGMd = self._q_BGMd[rows]
            o_BGMd = self.o_RX.numpy()[rows].reshape(q_BGMd.shape)
            heads = q_BGMd, self._kv_2GBd[:, :, rows], o_BGMd
            group = _Group(self._cache, members, rows, heads, self._block_size)
            group.take(members)
            self._groups.append(group)
            start = rows.stop


class _Group:
    """Neighbouring `rows` with contexts of about the same length."""

    def __init__(
        self,
        cache: Tensor,
        spans: Sequence[Span],
        rows: slice,
        heads: tuple[Floats, Floats, Floats],
        block_size: int,
    ) -> None:
        self.rows = rows
        self._q_BGMd, self._kv_2GBd, self._o_BGMd = heads
        count, kv_heads, shared, dim = self._q_BGMd.shape
        self._contexts = _Contexts(cache, spans, block_size)
        self._room = self._contexts.keys
        self._scale = np.float32(dim**-0.5)
        padded = round_up(shared, ROW_STEP)
        self._q_nPd = cache.new_zeros(kv_heads * count, padded, dim)
        self._mixed_nPd = torch.empty_like(self._q_nPd)
        self._queries_BGMd, self._outputs_BGMd = (
            x.numpy().reshape(kv_heads, count, padded, dim)[:, :, :shared].swapaxes(0, 1)
            for x in (self._q_nPd, self._mixed_nPd)
        )
        self._hidden_BS = np.zeros((count, self._room), np.float32)
        """Minus infinity where a key comes after the query."""
        starts_B1 = np.array([[span.start] for span in spans])
        self._hidden_BS[np.arange(self._room) >= starts_B1] = -np.inf
        # Mutable state: how many keys are read and through what, and where this step's own are.
        self._read = 0
        self._places_B: Place = 0

    def take(self, spans: Sequence[Span]) -> bool:
        """Take the next tokens; False where there is no room for one."""
        needed = round_up(max(span.stop for span in spans), KEY_STEP)
        if needed > self._room or not self._contexts.follow(spans):
            return False
        if needed > self._read:
            self._widen(needed)
        self._places_B = _place([row * self._room + s.start for row, s in enumerate(spans)])
        self._hidden_BS.reshape(-1)[self._places_B] = 0.0
        return True

    def _widen(self, keys: int) -> None:
        """Read so many keys of each sequence."""
        self._read = keys
        self._seen_B1S = self._hidden_BS[:, None, :keys]
        self._s_nPS = self._q_nPd.new_empty(*self._q_nPd.shape[:2], keys)
        self._p_nPS = torch.empty_like(self._s_nPS)
        self._s_GBPS = self._s_nPS.numpy().reshape(-1, len(self._hidden_BS), *self._s_nPS.shape[1:])
        self._keys, values = self._contexts.read(keys)
        self._values = [value_blocks(self._p_nPS, v_nSd) for v_nSd in values]

    def attend(self, layer: int) -> None:
        """Attend, when the layer's new keys and values are in the cache."""
        number = self._contexts.bring(layer, self._places_B, self._kv_2GBd)
        np.multiply(self._q_BGMd, self._scale, self._queries_BGMd)
        torch.bmm(self._q_nPd, self._keys[number], out=self._s_nPS)
        np.add(self._s_GBPS, self._seen_B1S, self._s_GBPS)
        torch.softmax(self._s_nPS, -1, out=self._p_nPS)
        mix_blocks(self._values[number], self._mixed_nPd)
        np.copyto(self._o_BGMd, self._outputs_BGMd)


class _Contexts:
    """The keys and values of some sequences, those of each together: of all layers, or of one."""

    def __init__(self, cache: Tensor, spans: Sequence[Span], block_size: int) -> None:
        sides, layers, heads, slots, dim = cache.shape
        keys = len(spans) * (_SPARE + block_size * max(len(span.blocks) for span in spans))
        self._whole = keys * cache.numel() // slots <= _KEPT
        spare = -(-_SPARE // block_size) if self._whole else 0
        table_BC = block_table(spans, block_size, spare=spare)
        self.keys = int(table_BC.shape[1]) * block_size
        first = np.arange(sides * layers * heads).reshape(sides, layers, heads, 1, 1)
        table = (first * (slots // block_size) + table_BC).swapaxes(0, 1)
        self._tables_L2GBC = np.ascontiguousarray(table)
        tables = torch.from_numpy(self._tables_L2GBC).view(layers, -1)  # pyright: ignore[reportUnknownMemberType] -- torch's own stub
        self._tables = tables.unbind(0)
        self._by_block = cache.view(-1, block_size * dim)
        chosen = tables.view(-1) if self._whole else self._tables[0]
        self._gathered = self._by_block.index_select(0, chosen)
        self._kept_L2nSd = self._gathered.view(-1, sides, heads * len(spans), self.keys, dim)
        self._into = list(
            self._kept_L2nSd.numpy().reshape(-1, sides, heads, len(spans) * self.keys, dim)
        )
        # Mutable state besides: how many blocks of each sequence the tables have.
        self._known = [len(span.blocks) for span in spans]

    def read(self, keys: int) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """The first keys of each sequence as k_ndS and v_nSd, for each number of `bring`."""
        seen = self._kept_L2nSd[:, :, :, :keys]
        return seen[:, 0].mT.unbind(0), seen[:, 1].unbind(0)

    def follow(self, spans: Sequence[Span]) -> bool:
        """Note blocks that sequences took since; False where there is no room for one."""
        for row, span in enumerate(spans):
            count, known = len(span.blocks), self._known[row]
            if count > self._tables_L2GBC.shape[4]:
                return False
            if count > known and not self._whole:
                # What is not used yet is filled up with the first block.
                moved = np.array(span.blocks[known:]) - span.blocks[0]
                self._tables_L2GBC[:, :, :, row, known:count] += moved
            self._known[row] = count
        return True

    def bring(self, layer: int, places_B: Place, kv_2GBd: Floats) -> int:
        """Have the keys and values of a layer, the new ones too; which of `read` has them."""
        if self._whole:
            _write(self._into[layer], places_B, kv_2GBd)
            return layer
        torch.index_select(self._by_block, 0, self._tables[layer], out=self._gathered)
        return 0


def _split(qkv_BY: Floats, kv_heads: int, dim: int) -> tuple[Floats, Floats]:
    """See rows as their queries q_BGMd and their keys and values kv_2GBd."""
    rows, width = qkv_BY.shape
    queries = width - 2 * kv_heads * dim
    q_BGMd = qkv_BY[:, :queries].reshape(rows, kv_heads, -1, dim)
    return q_BGMd, qkv_BY[:, queries:].reshape(rows, 2, kv_heads, dim).transpose(1, 2, 0, 3)


def _place(places: list[int]) -> Place:
    """Where one or more rows go; a plain number is quicker to write to."""
    return places[0] if len(places) == 1 else np.array(places)


def _write(into_2GSd: Floats, places_B: Place, kv_2GBd: Floats) -> None:
    """Write one row of each sequence."""
    into_2GSd[:, :, places_B] = kv_2GBd[:, :, 0] if isinstance(places_B, int) else kv_2GBd

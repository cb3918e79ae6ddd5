"""Attention for decoding on a CPU: one new token of each sequence over the paged cache.

Gives the bits of `paged`. With so few numbers every call of a library takes longer than its
arithmetic, and so does every view of a tensor. Hence memory and views are kept from step to step,
and with them a copy of all keys and values in which those of a sequence lie together: it is made
when a sequence joins or leaves, and grows by what is written to the cache. What rounds the same
way everywhere is left to numpy, whose calls take half as long as torch's.

Shapes: B sequences, R >= B rows, H heads, G key/value heads, d head size, Y = (H + 2*G)*d, M query
heads per key head, filled up to P; L layers, C blocks that there is room for, S keys that are read,
n = G*B.
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

    Place = int | NDArray[np.int64]

_shape = attrgetter("shape")
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
        return all(group.take([s.start for s in spans[group.rows]]) for group in self._groups)

    def _lay_out(self, spans: Sequence[Span]) -> None:
        self._groups = []
        start = 0
        for _, run in groupby(spans, key=_shape):
            members = list(run)
            rows = slice(start, start + len(members))
            q_BGMd = self._q_BGMd[rows]
            o_BGMd = self.o_RX.numpy()[rows].reshape(q_BGMd.shape)
            group = _Group(
                _gathered(self._cache, members, self._block_size),
                rows,
                (q_BGMd, self._kv_2GBd[:, :, rows], o_BGMd),
            )
            group.take([span.start for span in members])
            self._groups.append(group)
            start = rows.stop


class _Group:
    """Neighbouring `rows` with contexts of about the same length, and a copy of their keys."""

    def __init__(
        self,
        kept_L2nSd: Tensor,
        rows: slice,
        heads: tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.float32]],
    ) -> None:
        self.rows = rows
        self._q_BGMd, self._kv_2GBd, self._o_BGMd = heads
        count, kv_heads, shared, dim = self._q_BGMd.shape
        layers, _, problems, room, _ = kept_L2nSd.shape
        self._keys_LndS, self._values_LnSd = kept_L2nSd[:, 0].mT, kept_L2nSd[:, 1]
        self._into = list(kept_L2nSd.numpy().reshape(layers, 2, kv_heads, count * room, dim))
        self._scale = np.float32(dim**-0.5)
        padded = round_up(shared, ROW_STEP)
        self._q_nPd = kept_L2nSd.new_zeros(problems, padded, dim)
        self._mixed_nPd = torch.empty_like(self._q_nPd)
        self._queries_BGMd, self._outputs_BGMd = (
            x.numpy().reshape(kv_heads, count, padded, dim)[:, :, :shared].swapaxes(0, 1)
            for x in (self._q_nPd, self._mixed_nPd)
        )
        self._hidden_BS = np.full((count, room), -np.inf, np.float32)
        """Minus infinity where a key comes after the query."""
        # Mutable state: how many keys are read, what they are read through, and where this
        # step's own go.
        self._read = 0
        self._places_B: Place = 0

    def take(self, starts: list[int]) -> bool:
        """Take the next positions; False where there is no room for one."""
        room = self._hidden_BS.shape[1]
        needed = round_up(max(starts) + 1, KEY_STEP)
        if needed > room:
            return False
        if not self._read:
            self._hidden_BS[np.arange(room) < np.array(starts)[:, None]] = 0.0
        if needed > self._read:
            self._widen(needed)
        self._places_B = _place([row * room + start for row, start in enumerate(starts)])
        self._hidden_BS.reshape(-1)[self._places_B] = 0.0
        return True

    def _widen(self, keys: int) -> None:
        """Read so many keys of each sequence."""
        self._read = keys
        self._seen_B1S = self._hidden_BS[:, None, :keys]
        self._s_nPS = self._q_nPd.new_empty(*self._q_nPd.shape[:2], keys)
        self._p_nPS = torch.empty_like(self._s_nPS)
        self._s_GBPS = self._s_nPS.numpy().reshape(-1, len(self._hidden_BS), *self._s_nPS.shape[1:])
        self._keys = self._keys_LndS[..., :keys].unbind(0)
        values_LnSd = self._values_LnSd[:, :, :keys].unbind(0)
        self._values = [value_blocks(self._p_nPS, v_nSd) for v_nSd in values_LnSd]

    def attend(self, layer: int) -> None:
        """Write the layer's keys and values to the copy, too, and attend."""
        _write(self._into[layer], self._places_B, self._kv_2GBd)
        np.multiply(self._q_BGMd, self._scale, self._queries_BGMd)
        torch.bmm(self._q_nPd, self._keys[layer], out=self._s_nPS)
        np.add(self._s_GBPS, self._seen_B1S, self._s_GBPS)
        torch.softmax(self._s_nPS, -1, out=self._p_nPS)
        mix_blocks(self._values[layer], self._mixed_nPd)
        np.copyto(self._o_BGMd, self._outputs_BGMd)


def _gathered(cache: Tensor, spans: Sequence[Span], block_size: int) -> Tensor:
    """kept_L2nSd: for each layer all keys, then all values, with some room at the end."""
    sides, layers, heads, slots, dim = cache.shape
    table_BC = block_table(spans, block_size, spare=-(-_SPARE // block_size))
    first = np.arange(sides * layers * heads).reshape(sides, layers, heads, 1, 1)
    table = first * (slots // block_size) + table_BC
    by_layer = torch.from_numpy(table.swapaxes(0, 1).ravel())  # pyright: ignore[reportUnknownMemberType] -- torch's own stub
    kept = cache.view(-1, block_size * dim).index_select(0, by_layer)
    return kept.view(layers, sides, heads * len(spans), -1, dim)


def _split(
    qkv_BY: NDArray[np.float32], kv_heads: int, dim: int
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """See rows as their queries q_BGMd and their keys and values kv_2GBd."""
    rows, width = qkv_BY.shape
    queries = width - 2 * kv_heads * dim
    q_BGMd = qkv_BY[:, :queries].reshape(rows, kv_heads, -1, dim)
    return q_BGMd, qkv_BY[:, queries:].reshape(rows, 2, kv_heads, dim).transpose(1, 2, 0, 3)


def _place(places: list[int]) -> Place:
    """Where one or more rows go; a plain number is quicker to write to."""
    return places[0] if len(places) == 1 else np.array(places)


def _write(into_2GSd: NDArray[np.float32], places_B: Place, kv_2GBd: NDArray[np.float32]) -> None:
    """Write one row of each sequence."""
    into_2GSd[:, :, places_B] = kv_2GBd[:, :, 0] if isinstance(places_B, int) else kv_2GBd

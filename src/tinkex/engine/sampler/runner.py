"""The forward pass: packed tokens through the decoder, attention over the paged cache.

Owns the cache tensors. Pieces of prompts and decoding rows share one pass; the batcher has
already said which tokens run and which blocks they write.

Shapes: T tokens, D hidden, H heads, G key/value heads, d head size, X = H*d, V vocabulary,
B pieces of one group, Q tokens of each of them, S cache slots that a group reads, R rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch.nn import functional as F

from tinkex.engine.models.base import base_projections

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from tinkex.engine.models.base import Decoder, DecoderConfig, Project
    from tinkex.engine.sampler.batcher import Piece


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows `start` to `stop` of a packed pass use one version of the weights."""

    version: str
    start: int
    stop: int


class Adapters(Protocol):
    """The versions of the weights that sequences name. Segments tile the rows in order."""

    def project(self, segments: Sequence[Segment]) -> Project:
        """The linear layers for tokens that lie in these segments."""
        ...

    def logits(self, h_RD: Tensor, segments: Sequence[Segment]) -> Tensor:
        """The logits [R, V] of rows in these segments, each with its own unembedding."""
        ...


class NoAdapters:
    """The base model alone, whatever the version is called."""

    def __init__(self, decoder: Decoder) -> None:
        self._project = base_projections(decoder)
        self._unembed_VD = decoder.unembed_VD

    def project(self, segments: Sequence[Segment]) -> Project:
        return self._project

    def logits(self, h_RD: Tensor, segments: Sequence[Segment]) -> Tensor:
        return F.linear(h_RD, self._unembed_VD)


@dataclass(frozen=True, slots=True)
class Pass:
    """A finished pass: its pieces in packed order, where each begins, and the hidden rows."""

    pieces: list[Piece]
    starts: list[int]
    h_TD: Tensor


@dataclass(frozen=True, slots=True)
class _Group:
    """Pieces of equal length whose contexts have about the same size, attended together."""

    size: int
    length: int
    slots_BS: Tensor
    mask_B1QS: Tensor


def cache_bytes_per_token(config: DecoderConfig, dtype: torch.dtype) -> int:
    """What one token takes in the cache."""
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * dtype.itemsize


class Runner:
    """Runs pieces of sequences on one device."""

    def __init__(
        self, decoder: Decoder, adapters: Adapters, *, num_blocks: int, block_size: int
    ) -> None:
        config = decoder.config
        self._decoder = decoder
        self._adapters = adapters
        self._block_size = block_size
        self._device = decoder.unembed_VD.device
        # The only mutable state: keys and values, [2, layer, slot, G, d].
        self._cache = torch.zeros(
            (2, config.num_layers, num_blocks * block_size, config.num_kv_heads, config.head_dim),
            dtype=decoder.unembed_VD.dtype,
            device=self._device,
        )

    @torch.no_grad()
    def run(self, pieces: Sequence[Piece]) -> Pass:
        """Compute the hidden rows of `pieces` and leave their keys and values in the cache."""
        # Groups are runs in the packed order, so that their outputs need only be joined, and
        # rows of one version lie together where groups allow.
        ordered = sorted(pieces, key=lambda p: (*self._shape(p), p.sequence.version))
        starts = [0, *accumulate(len(piece) for piece in ordered)][:-1]
        tokens: list[int] = []
        for piece in ordered:
            tokens += piece.sequence.tokens[piece.start : piece.stop]
        positions = np.concatenate([np.arange(p.start, p.stop) for p in ordered])
        self._clear_fresh_blocks(ordered)
        attend = _PagedAttention(
            self._cache,
            self._tensor(np.concatenate([self._written(piece) for piece in ordered])),
            [self._group(list(run)) for _, run in groupby(ordered, key=self._shape)],
        )
        h_TD = self._decoder.hidden(
            torch.tensor(tokens, device=self._device),
            self._tensor(positions),
            attend,
            self._adapters.project(_segments([(p.sequence.version, len(p)) for p in ordered])),
        )
        return Pass(ordered, starts, h_TD)

    @torch.no_grad()
    def logits(self, h_TD: Tensor, rows: Sequence[int], versions: Sequence[str]) -> Tensor:
        """float32 logits [R, V] of some rows of a pass; the caller keeps R small."""
        h_RD = h_TD[torch.tensor(rows, device=self._device)]
        segments = _segments([(version, 1) for version in versions])
        return self._adapters.logits(h_RD, segments).float()

    def _shape(self, piece: Piece) -> tuple[int, int]:
        """What pieces of one group share: their length, and their context to a power of two."""
        return len(piece), (len(piece.sequence.blocks) - 1).bit_length()

    def _tensor(self, array: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(array).to(self._device)  # pyright: ignore[reportUnknownMemberType] -- torch's own stub

    def _written(self, piece: Piece) -> NDArray[np.int64]:
        """The cache slots of a piece's own tokens."""
        size = self._block_size
        first = piece.start // size
        blocks = np.array(piece.sequence.blocks[first : -(-piece.stop // size)], np.int64)
        positions = np.arange(piece.start, piece.stop)
        return blocks[positions // size - first] * size + positions % size

    def _group(self, pieces: list[Piece]) -> _Group:
        size = self._block_size
        tables = [piece.sequence.blocks for piece in pieces]
        width = max(len(table) for table in tables)
        # Short rows are filled up with their own first block: masked numbers still take part
        # in the arithmetic, and a NaN of another tenant must not.
        blocks = np.array([t + t[:1] * (width - len(t)) for t in tables], np.int64)
        slots = (blocks[:, :, None] * size + np.arange(size)).reshape(len(pieces), -1)
        first_B = np.array([piece.start for piece in pieces])
        length = len(pieces[0])
        positions_BQ = first_B[:, None] + np.arange(length)
        hidden = np.arange(slots.shape[1]) > positions_BQ[:, :, None]
        mask_BQS = torch.zeros(hidden.shape, dtype=self._cache.dtype, device=self._device)
        mask_BQS.masked_fill_(torch.from_numpy(hidden).to(self._device), -torch.inf)  # pyright: ignore[reportUnknownMemberType] -- torch's own stub
        return _Group(len(pieces), length, self._tensor(slots), mask_BQS[:, None])

    def _clear_fresh_blocks(self, pieces: Sequence[Piece]) -> None:
        """Wipe blocks that this pass begins and does not fill: see `_group` for why."""
        size = self._block_size
        fresh = [
            piece.sequence.blocks[piece.stop // size]
            for piece in pieces
            if piece.stop % size and piece.start <= piece.stop - piece.stop % size
        ]
        if fresh:
            slots = (np.array(fresh, np.int64)[:, None] * size + np.arange(size)).reshape(-1)
            self._cache.index_fill_(2, self._tensor(slots), 0.0)


class _PagedAttention:
    """`Attend` for one pass: writes the new keys and values, then attends group by group."""

    def __init__(self, cache: Tensor, slots_T: Tensor, groups: list[_Group]) -> None:
        self._cache = cache
        self._slots_T = slots_T
        self._groups = groups

    def __call__(self, layer: int, q_THd: Tensor, k_TGd: Tensor, v_TGd: Tensor) -> Tensor:
        keys_SGd, values_SGd = self._cache[0, layer], self._cache[1, layer]
        keys_SGd.index_copy_(0, self._slots_T, k_TGd)
        values_SGd.index_copy_(0, self._slots_T, v_TGd)
        start, outputs = 0, list[torch.Tensor]()
        for group in self._groups:
            stop = start + group.size * group.length
            outputs.append(_attend(q_THd[start:stop], keys_SGd, values_SGd, group))
            start = stop
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _attend(q_THd: Tensor, keys_SGd: Tensor, values_SGd: Tensor, group: _Group) -> Tensor:
    kv_heads, dim = keys_SGd.shape[1:]
    shape = (*group.slots_BS.shape, kv_heads, dim)
    flat_S = group.slots_BS.reshape(-1)
    k_BGSd = keys_SGd.index_select(0, flat_S).view(shape).transpose(1, 2)
    v_BGSd = values_SGd.index_select(0, flat_S).view(shape).transpose(1, 2)
    if group.length == 1:
        # The query heads that share a key head become its queries: no key is read twice, and
        # one mask serves them all.
        q_BGMd = q_THd.reshape(group.size, kv_heads, -1, dim)
        o_BGMd = F.scaled_dot_product_attention(q_BGMd, k_BGSd, v_BGSd, attn_mask=group.mask_B1QS)
        return o_BGMd.reshape(group.size, -1)
    q_BHQd = q_THd.reshape(group.size, group.length, -1, dim).transpose(1, 2)
    o_BHQd = F.scaled_dot_product_attention(
        q_BHQd, k_BGSd, v_BGSd, attn_mask=group.mask_B1QS, enable_gqa=True
    )
    return o_BHQd.transpose(1, 2).reshape(group.size * group.length, -1)


def _segments(runs: Sequence[tuple[str, int]]) -> list[Segment]:
    """Neighbouring rows of one version, joined."""
    segments: list[Segment] = []
    start = 0
    for version, run in groupby(runs, key=lambda pair: pair[0]):
        stop = start + sum(count for _, count in run)
        segments.append(Segment(version, start, stop))
        start = stop
    return segments

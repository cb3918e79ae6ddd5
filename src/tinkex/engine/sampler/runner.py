"""The forward pass: packed tokens through the decoder, attention over the paged cache.

Owns the cache tensors. Pieces of prompts and decoding rows share one pass; the batcher has
already said which tokens run and which blocks they write.

Shapes: T tokens, D hidden, V vocabulary, R rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from tinkex.engine.attention.paged import TokenSpan

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from tinkex.engine.decoder import Decoder, DecoderConfig, Project
    from tinkex.engine.sampler.batcher import Piece


@dataclass(frozen=True, slots=True)
class VersionRows:
    """Rows `start` to `stop` of a packed pass use one version of the weights."""

    version: str
    start: int
    stop: int


class Adapters(Protocol):
    """The versions of the weights that sequences name. Segments tile the rows in order."""

    def project(self, segments: Sequence[VersionRows]) -> Project:
        """The linear layers for tokens that lie in these segments."""
        ...

    def logits(self, h_RD: Tensor, segments: Sequence[VersionRows]) -> Tensor:
        """The logits [R, V] of rows in these segments, each with its own unembedding."""
        ...


@dataclass(frozen=True, slots=True)
class Pass:
    """A finished pass: its pieces in packed order, where each begins, and the hidden rows."""

    pieces: list[Piece]
    starts: list[int]
    h_TD: Tensor


def cache_bytes_per_token(config: DecoderConfig, dtype: torch.dtype) -> int:
    """What one token takes in the cache."""
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * dtype.itemsize


class Runner:
    """Runs pieces of sequences on one device."""

    def __init__(
        self,
        decoder: Decoder,
        adapters: Adapters,
        *,
        num_blocks: int,
        block_size: int,
        strict: bool = False,
    ) -> None:
        self._decoder = decoder
        self._adapters = adapters
        self._block_size = block_size
        self._strict = strict
        self._device = decoder.unembed_VD.device
        # The only mutable state: keys and values.
        self.cache = decoder.backend.new_cache(
            decoder.config, num_blocks * block_size, decoder.unembed_VD
        )

    def run(self, pieces: Sequence[Piece]) -> Pass:
        """Compute the hidden rows of `pieces` and leave their keys and values in the cache.

        The caller sees to it that nothing is kept for gradients.
        """
        # Rows of one version lie together: each further run of them costs products of its own.
        # Within a version, spans that are attended together do.
        spans = {p: TokenSpan(p.start, p.stop, p.sequence.blocks) for p in pieces}
        ordered = sorted(pieces, key=lambda p: (p.sequence.version, *spans[p].shape))
        starts = [0, *accumulate(len(piece) for piece in ordered)][:-1]
        tokens: list[int] = []
        for piece in ordered:
            tokens += piece.sequence.tokens[piece.start : piece.stop]
        segments = _segments([(p.sequence.version, len(p)) for p in ordered])
        laid = [spans[p] for p in ordered]
        positions = np.concatenate([np.arange(p.start, p.stop) for p in ordered])
        attend = self._decoder.backend.paged_attention(
            self.cache, laid, block_size=self._block_size, strict=self._strict
        )
        h_TD = self._decoder.hidden(
            torch.tensor(tokens, device=self._device),
            torch.from_numpy(positions).to(self._device),  # pyright: ignore[reportUnknownMemberType] -- torch's own stub
            attend,
            self._adapters.project(segments),
        )
        return Pass(ordered, starts, h_TD)

    def logits(self, h_TD: Tensor, rows: Sequence[int], versions: Sequence[str]) -> Tensor:
        """float32 logits [R, V] of some rows of a pass; the caller keeps R small."""
        count = len(rows)
        if list(rows) == list(range(count)):
            h_RD = h_TD[:count]
        else:
            h_RD = h_TD[torch.tensor(rows, device=self._device)]
        segments = _segments([(version, 1) for version in versions])
        logits_RV = self._adapters.logits(h_RD, segments)
        if logits_RV.dtype != torch.float32:
            logits_RV = logits_RV.float()
        return logits_RV


def _segments(runs: Sequence[tuple[str, int]]) -> list[VersionRows]:
    """Neighbouring rows of one version, joined."""
    if len(runs) == 1:
        return [VersionRows(runs[0][0], 0, runs[0][1])]
    segments: list[VersionRows] = []
    start = 0
    for version, run in groupby(runs, key=lambda pair: pair[0]):
        stop = start + sum(count for _, count in run)
        segments.append(VersionRows(version, start, stop))
        start = stop
    return segments

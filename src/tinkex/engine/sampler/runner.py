"""The forward pass: packed tokens through the decoder, attention over the paged cache.

Owns the cache tensors. Pieces of prompts and decoding rows share one pass; the batcher has already
chosen the tokens and the blocks they write.

Shapes: T tokens, D hidden, V vocabulary, R rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from tinkex.engine.attention.paged import TokenSpan
from tinkex.engine.lora import Segment, adapt_, adapted_projections, logits

if TYPE_CHECKING:
    from collections.abc import Callable, MutableMapping, Sequence

    from torch import Tensor

    from tinkex.engine.decoder import Decoder, DecoderConfig, Project
    from tinkex.engine.lora import LoraWeights
    from tinkex.engine.sampler.batcher import Piece


@dataclass(frozen=True, slots=True)
class VersionRows:
    """Rows `start` to `stop` of a packed pass use one version of the weights."""

    version: str
    start: int
    stop: int


class Adapters(Protocol):
    """The linear layers for sequences of several versions. Segments cover the rows in order."""

    def project(self, segments: Sequence[VersionRows]) -> Project:
        """The linear layers for the tokens of these segments."""
        ...

    def logits(self, h_RD: Tensor, segments: Sequence[VersionRows]) -> Tensor:
        """The logits [R, V] of rows in these segments, each with its own unembedding."""
        ...


class LoraAdapters:
    """`Adapters` over the trainer's own LoRA layers, so that both compute the same.

    `find` gives the weights of a version, None for the base model; they never change. If it raises,
    the requests for the version fail. For a backend that samples from copies, `peek` gives the
    weights on any device, and `copies` holds the copies.
    """

    def __init__(
        self,
        decoder: Decoder,
        find: Callable[[str], LoraWeights | None],
        *,
        peek: Callable[[str], LoraWeights | None] | None = None,
        copies: MutableMapping[str, LoraWeights] | None = None,
    ) -> None:
        self._decoder = decoder
        self.find = find
        self.peek = peek or find
        self.copies = copies

    def project(self, segments: Sequence[VersionRows]) -> Project:
        """The base layers with each segment's adapter on top."""
        return adapted_projections(self._decoder, self.segments(segments), batch_invariant=True)

    def segments(self, segments: Sequence[VersionRows]) -> list[Segment]:
        """The rows with the weights of their versions."""
        return [Segment(s.start, s.stop, self.find(s.version)) for s in segments]

    def logits(self, h_RD: Tensor, segments: Sequence[VersionRows]) -> Tensor:
        """The head, with the unembedding's low-rank product where an adapter has one."""
        logits_RV = logits(h_RD, self._decoder.head)
        for segment in segments:
            weights = self.find(segment.version)
            if weights is not None:
                rows = slice(segment.start, segment.stop)
                adapt_(logits_RV[rows], h_RD[rows], weights, self._decoder.backend)
        return logits_RV


@dataclass(frozen=True, slots=True)
class Pass:
    """A finished pass: its pieces in packed order, where each begins, and the hidden rows."""

    pieces: list[Piece]
    starts: list[int]
    h_TD: Tensor


def cache_bytes_per_token(config: DecoderConfig, dtype: torch.dtype) -> int:
    """Bytes of one token in the cache."""
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

        The caller disables gradients.
        """
        # Rows of one version are adjacent: every separate run of them takes products of its own.
        # Within a version, spans that are attended together are adjacent.
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
    """Adjacent rows of one version, joined."""
    if len(runs) == 1:
        return [VersionRows(runs[0][0], 0, runs[0][1])]
    segments: list[VersionRows] = []
    start = 0
    for version, run in groupby(runs, key=lambda pair: pair[0]):
        stop = start + sum(count for _, count in run)
        segments.append(VersionRows(version, start, stop))
        start = stop
    return segments

"""Log-probabilities of chosen tokens, and their gradient, in chunks of logits.

The unembedding and its adapters are applied to a few rows at a time, and the logits of a chunk are
freed with it. Memory grows with tokens x hidden, never with tokens x vocabulary.

One sweep gives the log-probabilities; given the gradient of the loss by each log-probability, it
gives the gradient by the hidden states as well. Where that gradient is known beforehand
(cross-entropy) one sweep does both; otherwise a second one recomputes the logits.

Shapes: T tokens, C rows of a chunk, S rows of a piece, B rows of a rectangle of targets, D hidden,
V vocabulary, R rank, K targets of a row, M targets of all rows, one after the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

import torch
from torch.nn import functional as F

from tinkex.engine.backends.torch.linear import MIN_ROWS
from tinkex.engine.backends.torch.rectangles import rectangles
from tinkex.engine.lora.layers import product_into

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from tinkex.engine.backends.table import Backend
    from tinkex.engine.backends.torch.linear import Linear
    from tinkex.engine.backends.torch.rectangles import Rectangle
    from tinkex.engine.decoder import Decoder
    from tinkex.engine.lora.layers import Segment
    from tinkex.engine.lora.weights import LoraWeights

LOGITS_BYTES: Final = 64 * 2**20
"""How large a chunk of logits may be."""
_MANY_ROWS: Final = 256
_CPU_BYTES: Final = 16 * 2**20
"""The same on a CPU, so that every step of the softmax finds its input in the cache."""


@dataclass(frozen=True, slots=True)
class Targets:
    """The tokens to score: `counts[t]` of `ids_M` belong to row t."""

    ids_M: Tensor
    counts: Sequence[int]


@dataclass(frozen=True, slots=True)
class Swept:
    """The result of a sweep; `dh_TD` is there if the sweep was given a gradient."""

    logprobs_M: Tensor
    dh_TD: Tensor | None


class HeadProducts(Protocol):
    """Strict products: how logits are computed, adapters included."""

    def logits(self, h_CD: Tensor, start: int, stop: int) -> Tensor:
        """The fp32 logits of the pass's tokens from `start` to `stop`."""
        ...


@dataclass(frozen=True, slots=True)
class _Piece:
    """Rows of one segment."""

    segment: int
    start: int
    stop: int


def sweep(
    h_TD: Tensor,
    decoder: Decoder,
    segments: Sequence[Segment],
    targets: Targets,
    gradient_M: Tensor | None = None,
    *,
    logits_bytes: int = LOGITS_BYTES,
    products: HeadProducts | None = None,
) -> Swept:
    """Log-probabilities of the targets and, given the gradient by them, that by the hidden states.

    Runs outside autograd: the caller continues with `dh_TD`. The gradients of the
    unembedding's factors are written to the segments that have a gradient. Rows beyond the last
    segment are ignored.
    """
    if h_TD.device.type == "cpu":
        logits_bytes = min(logits_bytes, _CPU_BYTES)
    with torch.no_grad():
        state = _Sweep(h_TD.detach(), decoder, segments, targets, gradient_M, products)
        for chunk in _chunks(segments, chunk_rows(decoder.config.vocab_size, logits_bytes)):
            state.run(chunk)
        return Swept(torch.cat(state.found), state.dh_TD)


def chunk_rows(vocabulary: int, logits_bytes: int = LOGITS_BYTES) -> int:
    """How many rows of fp32 logits fit, at least `MIN_ROWS` and a multiple of it.

    A large number is rounded to a power of two, which is fastest on a device.
    """
    rows = logits_bytes // (4 * vocabulary)
    if rows >= _MANY_ROWS:
        return 1 << (rows.bit_length() - 1)
    return max(rows // MIN_ROWS, 1) * MIN_ROWS


def _chunks(segments: Sequence[Segment], limit: int) -> list[list[_Piece]]:
    """Adjacent pieces, up to `limit` rows together.

    Pieces are cut from the start of their segment, so that a segment's sums over rows are grouped
    in the same way in every batch.
    """
    chunks: list[list[_Piece]] = []
    room = 0
    for index, segment in enumerate(segments):
        for start in range(segment.start, segment.stop, limit):
            piece = _Piece(index, start, min(start + limit, segment.stop))
            if piece.stop - piece.start > room:
                chunks.append([])
                room = limit
            chunks[-1].append(piece)
            room -= piece.stop - piece.start
    return chunks


def logits(h_CD: Tensor, head: Linear) -> Tensor:
    """The base model's logits in fp32 or better."""
    if h_CD.device.type == "cuda" and h_CD.dtype not in (torch.float32, torch.float64):
        return torch.mm(h_CD, head.weight_OI.T, out_dtype=torch.float32)
    logits_CV = head.multiply(h_CD, batch_invariant=True)
    return logits_CV if logits_CV.dtype == torch.float64 else logits_CV.float()


def adapt_(
    logits_SV: Tensor, h_SD: Tensor, weights: LoraWeights | None, backend: Backend
) -> Tensor | None:
    """Add an adapter's low-rank product to logits of its rows; return the inner activations."""
    pair = None if weights is None else weights.pair(None, "unembed")
    if weights is None or pair is None:
        return None
    z_SR = backend.shrink(h_SD, pair.a_RI.to(h_SD.dtype)).to(logits_SV.dtype)
    backend.expand_add_(logits_SV, z_SR, pair.b_OR.to(z_SR.dtype), weights.scale)
    return z_SR


class _Sweep:
    """One sweep over the chunks."""

    def __init__(
        self,
        h_TD: Tensor,
        decoder: Decoder,
        segments: Sequence[Segment],
        targets: Targets,
        gradient_M: Tensor | None,
        products: HeadProducts | None,
    ) -> None:
        self._products = products
        self._h_TD = h_TD
        self._head = decoder.head
        self._backend = decoder.backend
        self._segments = segments
        self._targets = targets
        self._gradient_M = gradient_M
        # Mutable state: results so far, and the index of the next target.
        self.found: list[Tensor] = [h_TD.new_zeros(0, dtype=torch.float32)]
        self.dh_TD = None if gradient_M is None else torch.zeros_like(h_TD)
        self._next = 0

    def run(self, chunk: list[_Piece]) -> None:
        start, stop = chunk[0].start, chunk[-1].stop
        rows = stop - start
        h_CD = self._h_TD[start:stop]
        if rows < MIN_ROWS:
            h_CD = F.pad(h_CD, (0, 0, 0, MIN_ROWS - rows))
        if self._products is None:
            logits_CV = logits(h_CD, self._head)
        else:
            logits_CV = self._products.logits(h_CD, start, stop)
        inner = {piece: self._adapt(piece, logits_CV, start) for piece in chunk}
        parts = self._rectangles(chunk)
        ids_M, gradient_M = self._targets.ids_M, self._gradient_M
        found, dlogits_CV = self._backend.cross_entropy(
            logits_CV, parts, ids_M, gradient_M, h_CD.dtype
        )
        self.found += [each.float() for each in found]
        if dlogits_CV is None or self.dh_TD is None:
            return
        self._head.input_gradient(dlogits_CV[:rows], out=self.dh_TD[start:stop])
        for piece, z_SR in inner.items():
            if z_SR is not None:
                self._gradient(piece, dlogits_CV[piece.start - start : piece.stop - start], z_SR)

    def _rectangles(self, chunk: list[_Piece]) -> list[Rectangle]:
        start, stop = chunk[0].start, chunk[-1].stop
        pieces = [(piece.start - start, piece.stop - start) for piece in chunk]
        found = list(rectangles(pieces, self._targets.counts[start:stop], self._next))
        self._next = found[-1].last
        return found

    def _adapt(self, piece: _Piece, logits_CV: Tensor, start: int) -> Tensor | None:
        """Add the segment's low-rank product to its rows; return the inner activations."""
        weights = self._segments[piece.segment].weights
        h_SD = self._h_TD[piece.start : piece.stop]
        if self._products is not None:  # the product is in the logits already
            pair = None if weights is None else weights.pair(None, "unembed")
            return None if pair is None else F.linear(h_SD, pair.a_RI.to(h_SD.dtype))
        rows = slice(piece.start - start, piece.stop - start)
        return adapt_(logits_CV[rows], h_SD, weights, self._backend)

    def _gradient(self, piece: _Piece, dlogits_SV: Tensor, z_SR: Tensor) -> None:
        segment = self._segments[piece.segment]
        pair = None if segment.weights is None else segment.weights.pair(None, "unembed")
        assert segment.weights is not None
        assert pair is not None
        assert self.dh_TD is not None
        scale = segment.weights.scale
        kind = self._h_TD.dtype
        h_SD = self._h_TD[piece.start : piece.stop]
        dz_SR = (dlogits_SV @ pair.b_OR.to(kind)).mul_(scale)
        self.dh_TD[piece.start : piece.stop].addmm_(dz_SR, pair.a_RI.to(kind))
        into = None if segment.gradient is None else segment.gradient.pair(None, "unembed")
        if into is not None:
            later = piece.start > segment.start
            product_into(into.a_RI, dz_SR.T, h_SD, add=later)
            product_into(into.b_OR, dlogits_SV.T, z_SR.to(kind), scale=scale, add=later)

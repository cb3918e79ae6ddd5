"""Which weights a sample asks for: published snapshots and saved adapters, by version name.

A version never changes: a snapshot shares the memory of the adapter it was taken from, which
training replaces and never writes to; a saved file is read once and kept.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.nn import functional as F

from tinkex.engine.lora import Segment, adapted_projections
from tinkex.engine.lora import logits as base_logits

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from tinkex.engine.lora import LoraWeights
    from tinkex.engine.models.base import Decoder, Project
    from tinkex.engine.sampler.runner import Segment as Rows


class Versions:
    """The versions of one base model; a name that is not here is the base model itself."""

    def __init__(self, decoder: Decoder) -> None:
        # Mutable state: weights by version name.
        self._decoder = decoder
        self._weights: dict[str, LoraWeights] = {}

    def __contains__(self, version: str) -> bool:
        return version in self._weights

    def add(self, version: str, weights: LoraWeights) -> None:
        """Make `version` known; it keeps these weights for good."""
        self._weights[version] = weights

    def drop(self, version: str) -> None:
        """Forget a version; unknown names are fine."""
        self._weights.pop(version, None)

    def project(self, segments: Sequence[Rows]) -> Project:
        """The linear layers for tokens that lie in these segments."""
        return adapted_projections(
            self._decoder,
            [Segment(s.start, s.stop, self._weights.get(s.version)) for s in segments],
        )

    def logits(self, h_RD: Tensor, segments: Sequence[Rows]) -> Tensor:
        """The logits [R, V] of rows in these segments, each with its own unembedding."""
        logits_RV = base_logits(h_RD, self._decoder.unembed_VD)
        for segment in segments:
            weights = self._weights.get(segment.version)
            pair = None if weights is None else weights.pair(None, "unembed")
            if weights is None or pair is None:
                continue
            rows = slice(segment.start, segment.stop)
            z_SR = F.linear(h_RD[rows], pair.a_RI.to(h_RD.dtype)).to(logits_RV.dtype)
            logits_RV[rows].addmm_(z_SR, pair.b_OR.to(z_SR.dtype).T, alpha=weights.scale)
        return logits_RV

"""LoRA in the sampler: versions by name, many of them in one pass.

Shapes: R rows, D hidden, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.nn import functional as F

from tinkex.engine.lora import Segment as LoraSegment
from tinkex.engine.lora import adapted_projections, logits

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from tinkex.engine.lora import LoraWeights
    from tinkex.engine.models.base import Decoder, Project
    from tinkex.engine.sampler.runner import Segment


class LoraAdapters:
    """`Adapters` over the trainer's own LoRA layers, so that both compute the same.

    `find` gives the weights of a version, None for the base model; they must not change while
    a sequence uses them. What it raises fails the requests that named the version.
    """

    def __init__(self, decoder: Decoder, find: Callable[[str], LoraWeights | None]) -> None:
        self._decoder = decoder
        self._find = find

    def project(self, segments: Sequence[Segment]) -> Project:
        """The base layers with each segment's adapter on top."""
        return adapted_projections(
            self._decoder,
            [LoraSegment(s.start, s.stop, self._find(s.version)) for s in segments],
        )

    def logits(self, h_RD: Tensor, segments: Sequence[Segment]) -> Tensor:
        """The head, with the unembedding's low-rank product where an adapter has one."""
        logits_RV = logits(h_RD, self._decoder.unembed_VD)
        for segment in segments:
            weights = self._find(segment.version)
            pair = None if weights is None else weights.pair(None, "unembed")
            if weights is None or pair is None:
                continue
            rows = slice(segment.start, segment.stop)
            z_SR = F.linear(h_RD[rows], pair.a_RI.to(h_RD.dtype)).to(logits_RV.dtype)
            logits_RV[rows].addmm_(z_SR, pair.b_OR.to(z_SR.dtype).T, alpha=weights.scale)
        return logits_RV

"""LoRA in the sampler: versions by name, many of them in one pass.

Shapes: R rows, D hidden, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tinkex.engine.lora import Segment, adapt_, adapted_projections, logits

if TYPE_CHECKING:
    from collections.abc import Callable, MutableMapping, Sequence

    from torch import Tensor

    from tinkex.engine.decoder import Decoder, Project
    from tinkex.engine.lora import LoraWeights
    from tinkex.engine.sampler.runner import VersionRows


class LoraAdapters:
    """`Adapters` over the trainer's own LoRA layers, so that both compute the same.

    `find` gives the weights of a version, None for the base model; a version never changes its
    weights. What it raises fails the requests that named the version. On a device that samples
    from copies, `peek` gives them wherever they lie, and `copies` is where the copies are kept.
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
        """The same rows with the weights of their versions."""
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

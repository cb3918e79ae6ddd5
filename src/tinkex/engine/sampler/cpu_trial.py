"""Tries whether steps that are written out give the bits of a family's own definition.

A family can declare what it does not compute, or change after it has declared it. So a small model
of the family, with random weights, is run both ways before the steps are used. It has all layers of
the real one, for a family may treat them differently, and all of its configuration but the sizes.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Final, Protocol

import torch

from tinkex.engine.attention import Span, new_cache, paged_attention
from tinkex.engine.models.row_trial import random_rows, same_bits
from tinkex.engine.sampler.adapters import LoraAdapters
from tinkex.engine.threads import on_threads

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from tinkex.engine.models.base import DecoderConfig
    from tinkex.engine.models.weights import StoredDecoder
    from tinkex.engine.sampler.runner import Segment

_log = logging.getLogger(__name__)

_BLOCK: Final = 4
_WIDTH: Final = 64
_PASSES: Final = (
    (Span(0, 6, [3, 0]), Span(0, 2, [2])),  # prompts
    (Span(6, 7, [3, 0]), Span(2, 3, [2])),  # decoding
)


class Steps(Protocol):
    """See `CpuSteps`."""

    def __init__(
        self, decoder: StoredDecoder, adapters: LoraAdapters, cache: Tensor, *, block_size: int
    ) -> None: ...

    def hidden(
        self, tokens: list[int], spans: Sequence[Span], segments: Sequence[Segment]
    ) -> Tensor:
        """The rows of the tokens, and maybe more."""
        ...


def gives_the_same_bits(
    family: type[StoredDecoder], config: DecoderConfig, steps: type[Steps]
) -> bool:
    """Whether steps compute what a family with this configuration does."""
    heads = min(config.num_heads // config.num_kv_heads, 2)
    # The head size stays: rotary factors belong to it.
    small = replace(
        config,
        vocab_size=_WIDTH,
        hidden_size=_WIDTH,
        intermediate_size=_WIDTH,
        num_heads=heads,
        num_kv_heads=1,
        eos_token_ids=(),
        name="",
    )
    return _tried(family, small, steps)


@cache
def _tried(family: type[StoredDecoder], config: DecoderConfig, steps: type[Steps]) -> bool:
    decoder = _random_decoder(family, config)
    # So little work is quickest on one thread.
    with on_threads(1), torch.inference_mode():
        same = _agree(decoder, steps)
    if not same:
        _log.info(
            "%s is sampled by its plain definition: steps written out for a CPU give other bits",
            config.arch,
        )
    return same


def _agree(decoder: StoredDecoder, steps: type[Steps]) -> bool:
    adapters = LoraAdapters(decoder, lambda _: None)
    mine, plain = (new_cache(decoder.config, 4 * _BLOCK, decoder.unembed_VD) for _ in range(2))
    tried = steps(decoder, adapters, mine, block_size=_BLOCK)
    for number, spans in enumerate(_PASSES):
        places = [place for span in spans for place in range(span.start, span.stop)]
        tokens = [number + 7 * place for place in places]
        expected_TD = decoder.hidden(
            torch.tensor(tokens),
            torch.tensor(places),
            paged_attention(plain, spans, block_size=_BLOCK, strict=True),
            adapters.project([]),
        )
        found_TD = tried.hidden(tokens, spans, [])[: len(tokens)]
        if not (same_bits(found_TD, expected_TD) and same_bits(mine, plain)):
            return False
    return True


def _random_decoder(family: type[StoredDecoder], config: DecoderConfig) -> StoredDecoder:
    decoder = family(config, dtype=torch.float32, device=torch.device("cpu"))
    for number, (_, tensor) in enumerate(decoder.stored.named()):
        noise = random_rows(tensor.numel(), 1, seed=number).view(tensor.shape)
        # Those of one dimension are norms and biases.
        tensor.copy_(1 + noise / 8 if tensor.ndim == 1 else noise / 8)
    return decoder

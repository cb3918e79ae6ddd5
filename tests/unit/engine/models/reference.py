"""What our models are compared with: random `transformers` models, and plain attention."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers
from torch.nn import functional as F

from tests.unit.engine.projections import base_projections

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from tinkex.engine.decoder import Attend, Decoder

transformers.utils.logging.disable_progress_bar()

SMALL: dict[str, Any] = {
    "vocab_size": 67,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def random_model(family: str, seed: int = 0, **settings: Any) -> Any:
    """A `transformers` model whose weights are far from the harmless ones it starts with."""
    config = getattr(transformers, f"{family}Config")(**(SMALL | settings))
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.normal_(1.0 if "norm" in name else 0.0, 0.25, generator=generator)
    return model


def plain_attention(lengths: Sequence[int]) -> Attend:
    """Causal attention over packed sequences, one after the other."""

    def attend(layer: int, q_THd: Tensor, k_TGd: Tensor, v_TGd: Tensor) -> Tensor:
        outputs: list[Tensor] = []
        for parts in zip(*(x.split(list(lengths)) for x in (q_THd, k_TGd, v_TGd)), strict=True):
            q, k, v = (part.transpose(0, 1)[None] for part in parts)
            o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            outputs.append(o[0].transpose(0, 1).flatten(1))
        return torch.cat(outputs)

    return attend


def logits(decoder: Decoder, sequences: Sequence[Tensor]) -> Tensor:
    """Our logits for sequences packed into one pass."""
    lengths = [len(tokens) for tokens in sequences]
    positions = torch.cat([torch.arange(length) for length in lengths])
    hidden = decoder.hidden(
        torch.cat(list(sequences)), positions, plain_attention(lengths), base_projections(decoder)
    )
    return hidden @ decoder.unembed_VD.T


@torch.no_grad()
def reference_logits(model: Any, sequences: Sequence[Tensor]) -> Tensor:
    """The logits of `transformers`, one sequence at a time."""
    return torch.cat([model(tokens[None]).logits[0] for tokens in sequences])


def random_tokens(vocab_size: int, *lengths: int) -> list[Tensor]:
    """Sequences of the given lengths."""
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(vocab_size, (length,), generator=generator) for length in lengths]


def assert_same_logits(decoder: Decoder, model: Any, *lengths: int) -> None:
    """Both models give the same logits, and these are not all alike."""
    sequences = random_tokens(decoder.config.vocab_size, *lengths)
    ours, theirs = logits(decoder, sequences), reference_logits(model, sequences)
    assert theirs.std() > 0.5
    # float32 sums in another order; a wrong formula is off by far more.
    assert (ours - theirs).abs().max().item() == pytest.approx(0.0, abs=1e-4)

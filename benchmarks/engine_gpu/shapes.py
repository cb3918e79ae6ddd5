"""The two model shapes, filled with random weights on the GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tinkex.engine.decoder import DecoderConfig
from tinkex.engine.models.families import family

if TYPE_CHECKING:
    from tinkex.engine.models.families import StoredDecoder

SMALL = DecoderConfig(
    name="Qwen3-0.6B shape",
    arch="Qwen3ForCausalLM",
    vocab_size=151_936,
    hidden_size=1024,
    intermediate_size=3072,
    num_layers=28,
    num_heads=16,
    num_kv_heads=8,
    head_dim=128,
    rms_eps=1e-6,
    rope_theta=1e6,
    rope_scaling=None,
    max_context=40_960,
    tied_embeddings=True,
    attention_bias=False,
    qk_norm=True,
    eos_token_ids=(151_645,),
)
LARGE = DecoderConfig(
    name="Llama-8B shape",
    arch="LlamaForCausalLM",
    vocab_size=128_256,
    hidden_size=4096,
    intermediate_size=14_336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    rms_eps=1e-5,
    rope_theta=5e5,
    rope_scaling=None,
    max_context=8192,
    tied_embeddings=False,
    attention_bias=False,
    qk_norm=False,
    eos_token_ids=(128_001,),
)
SHAPES = {"0.6b": SMALL, "8b": LARGE}


def random_decoder(config: DecoderConfig, device: str = "cuda") -> StoredDecoder:
    """A decoder of this shape with normal weights; norms are ones."""
    decoder = family(config.arch, "benchmark")(
        config, dtype=torch.bfloat16, device=torch.device(device)
    )
    generator = torch.Generator(device).manual_seed(0)
    for _, slot in decoder.stored.named():
        if slot.ndim == 1:
            slot.fill_(1.0)
        else:
            slot.normal_(0.0, 0.02, generator=generator)
    return decoder


def random_tokens(config: DecoderConfig, rows: int, length: int, seed: int) -> list[list[int]]:
    """Sequences of ordinary tokens."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 100_000, (rows, length), generator=generator)
    return tokens.remainder(config.vocab_size).tolist()

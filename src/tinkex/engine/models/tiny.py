"""`tinkex/tiny`: a small Llama over bytes, made from a fixed seed, the same bits everywhere.

Weights come from a counter-based generator and integer sums; torch's own normal numbers
differ in their last bits between processors.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import torch

from tinkex.engine.decoder import DecoderConfig
from tinkex.engine.models.byte_text import BYTE_EOS, BYTE_VOCAB_SIZE
from tinkex.engine.models.families import Llama

if TYPE_CHECKING:
    from torch import Tensor

TINY = "tinkex/tiny"
TINY_CONFIG = DecoderConfig(
    name=TINY,
    arch=Llama.arch,
    vocab_size=BYTE_VOCAB_SIZE,
    hidden_size=128,
    intermediate_size=256,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    rms_eps=1e-5,
    rope_theta=10_000.0,
    rope_scaling=None,
    max_context=8192,
    tied_embeddings=True,
    attention_bias=False,
    qk_norm=False,
    eos_token_ids=(BYTE_EOS,),
)
_SEED = 20_260_101


def tiny_decoder(
    *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> Llama:
    """Make the model; about 330,000 parameters, a few milliseconds."""
    decoder = Llama(TINY_CONFIG, dtype=dtype, device=torch.device(device))
    for number, (_, slot) in enumerate(decoder.stored.named()):
        slot.copy_(torch.ones(slot.shape) if slot.ndim == 1 else _noise(tuple(slot.shape), number))
    return decoder


def _noise(shape: tuple[int, ...], stream: int) -> Tensor:
    """Nearly normal float32 numbers of variance 1 / columns.

    The sum of four 16-bit numbers is exact in float32, so rounding happens once, in the
    final product.
    """
    count = math.prod(shape)
    raw = np.random.Philox(key=[_SEED, stream]).random_raw(count)
    parts = raw.astype("<u8").view("<u2").reshape(count, 4).astype(np.int32)
    centred = 2 * parts.sum(axis=1) - 4 * 65535
    deviation = math.sqrt(4 * (65536**2 - 1) / 3)
    scale = np.float32(1 / (deviation * math.sqrt(shape[-1])))
    return torch.as_tensor((centred.astype(np.float32) * scale).reshape(shape))

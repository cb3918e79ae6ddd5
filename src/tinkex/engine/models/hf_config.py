"""A Hugging Face `config.json` as a `DecoderConfig`; what we cannot run is refused by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import msgspec

from tinkex.engine.models.base import DecoderConfig, RopeScaling
from tinkex.engine.models.families import family
from tinkex.errors import ModelError

if TYPE_CHECKING:
    from pathlib import Path

CONFIG = "config.json"
_GENERATION_CONFIG = "generation_config.json"


class _Rope(msgspec.Struct, kw_only=True):
    rope_type: str | None = None
    type: str | None = None  # the name of rope_type in older files
    rope_theta: float | None = None
    partial_rotary_factor: float = 1.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int | None = None


class _Generation(msgspec.Struct, kw_only=True):
    eos_token_id: int | list[int] | None = None


class _Config(msgspec.Struct, kw_only=True):
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    architectures: list[str] | None = None
    model_type: str | None = None
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    rms_norm_eps: float = 1e-6
    hidden_act: str = "silu"
    max_position_embeddings: int = 2048
    rope_theta: float | None = None
    rope_scaling: _Rope | None = None
    rope_parameters: _Rope | None = None  # both of the above in files of transformers 5
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    use_sliding_window: bool = False
    quantization_config: msgspec.Raw | None = None
    eos_token_id: int | list[int] | None = None


class _Kind(msgspec.Struct, kw_only=True):
    # Read before the rest, so that a foreign model is refused by its name, not for its fields.
    architectures: list[str] | None = None
    model_type: str | None = None


_S = TypeVar("_S", bound=msgspec.Struct)


def read_config(folder: Path, name: str) -> DecoderConfig:
    """Read the configuration of the model in a Hugging Face folder."""
    file = folder / CONFIG
    kind = _decode(file, _Kind)
    made = family((kind.architectures or [kind.model_type or ""])[0], str(file))
    config = _decode(file, _Config)
    _refuse_unsupported(config, file)
    generation = _Generation()
    if (folder / _GENERATION_CONFIG).is_file():
        generation = _decode(folder / _GENERATION_CONFIG, _Generation)
    eos = config.eos_token_id if generation.eos_token_id is None else generation.eos_token_id
    rope = config.rope_parameters or config.rope_scaling or _Rope()
    return check_config(
        DecoderConfig(
            name=name,
            arch=made.arch,
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_layers=config.num_hidden_layers,
            num_heads=config.num_attention_heads,
            num_kv_heads=_given(config.num_key_value_heads, config.num_attention_heads),
            head_dim=_given(config.head_dim, config.hidden_size // config.num_attention_heads),
            rms_eps=config.rms_norm_eps,
            rope_theta=_given(rope.rope_theta, _given(config.rope_theta, 10_000.0)),
            rope_scaling=_scaling(rope, config.max_position_embeddings, file),
            max_context=config.max_position_embeddings,
            tied_embeddings=config.tie_word_embeddings,
            attention_bias=made.always_biased or config.attention_bias,
            qk_norm=made.qk_norm,
            eos_token_ids=_ids(eos),
        ),
        str(file),
    )
